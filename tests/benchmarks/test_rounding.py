"""Batch norms that are written out are PyTorch's but for rounding."""

import pytest
import torch
from torch.nn import functional

from benchmarks.models.rounding import THREADS, Normalized


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("shape", [(2, 3, 1, 1), (5, 4, 9, 7), (70, 3)])
def test_values_and_gradients(shape, threads):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    weight, bias = torch.randn(2, shape[1], dtype=torch.float64)
    grad = torch.randn(shape, dtype=torch.float64)
    results = []
    for is_ours in (True, False):
        leaves = [each.clone().requires_grad_() for each in (x, weight, bias)]
        if is_ours:
            out = Normalized.apply(*leaves, 1e-3, threads)
        else:
            out = functional.batch_norm(leaves[0], None, None, *leaves[1:], True, 0.1, 1e-3)
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
    torch.testing.assert_close(*results)
