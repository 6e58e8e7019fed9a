"""Modelled times of PyTorch's kernels, by figures that are counted by hand."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks.dry_pytorch import CompiledStep
from benchmarks.dry_time import Machine, ModelledTime
from tutorials._llama import Llama, LlamaSizes

BYTES = Machine(flops_per_ns=float("inf"), bytes_per_ns=1.0, launch_ns=0.0)
FLOPS = Machine(flops_per_ns=1.0, bytes_per_ns=float("inf"), launch_ns=0.0)
LAUNCHES = Machine(flops_per_ns=float("inf"), bytes_per_ns=float("inf"), launch_ns=1.0)


def counted(machine, function, *tensors):
    with ModelledTime(machine) as time:
        function(*tensors)
    return time.nanoseconds


@pytest.mark.parametrize(
    ("function", "moved", "launches"),
    [
        (lambda x: x + 1, 2 * 4 * 60, 1),
        (lambda x: x.mul_(2), 2 * 4 * 60, 1),
        (lambda x: x + x, 2 * 4 * 60, 1),  # one tensor, though it is read twice
        (lambda x: torch.add(x, 1, out=torch.empty(6, 10)), 2 * 4 * 60, 1),
        (lambda x: x.view(10, 6).t()[1:].unsqueeze(0), 0, 0),
        (lambda x: x[:, :1].expand(6, 10).sum(), 4 * (60 + 1), 1),  # no more than its storage
        (lambda x: torch.empty_like(x), 0, 0),
    ],
)
def test_what_is_read_and_written_counts(function, moved, launches):
    x = torch.ones(6, 10)
    assert counted(BYTES, function, x) == moved
    assert counted(LAUNCHES, function, x.clone()) == launches


def test_products_count_their_operations():
    a, b = torch.ones(3, 5), torch.ones(5, 7)
    assert counted(FLOPS, torch.mm, a, b) == 2 * 3 * 5 * 7
    assert counted(FLOPS, lambda x, w: F.linear(x, w).sum(), a, b.t().contiguous()) == 210


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_counts_half_under_a_causal_mask(is_causal):
    q, k, v = (torch.ones(2, 3, n, 8, requires_grad=True) for n in (10, 10, 10))

    def step():
        F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).sum().backward()

    product = 2 * 2 * 3 * 10 * 10 * 8 // (2 if is_causal else 1)
    assert counted(FLOPS, step) == (2 + 5) * product


def test_a_fused_update_reads_and_writes_all_but_gradients():
    parameter = torch.ones(1000, requires_grad=True)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    parameter.grad = torch.ones(1000)
    optimizer.step()
    # Parameter, gradient and two moments read, all but the gradient written; the count of steps.
    counts = 2 * 4 + 2 * 4
    assert counted(BYTES, optimizer.step) == pytest.approx(7 * 4000, abs=counts)


def test_programs_of_inductor_count_what_eager_computes():
    sizes = LlamaSizes(vocabulary=97, layers=2, hidden=32, heads=2, feed_forward=64, longest=32)
    torch.manual_seed(0)
    model, shape = Llama(sizes), (3, 16)
    ids = torch.ones(shape, dtype=torch.long)
    eager = counted(FLOPS, lambda: model(ids, ids).backward())
    assert CompiledStep(lambda: Llama(sizes), FLOPS, *shape).count(*shape).nanoseconds == eager
    fused = CompiledStep(lambda: Llama(sizes), LAUNCHES, *shape).count(*shape).nanoseconds
    assert 20 < fused < counted(LAUNCHES, lambda: model(ids, ids).backward())
