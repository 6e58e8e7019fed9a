"""Operators written in smaller ones give what PyTorch's own give."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from relax_disc.frontend.capture.traced.rewrites import as_strided, cosine_similarity

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(SIZES, st.randoms(use_true_random=False), st.integers(0, 2))
def test_views_by_strides_are_read_at_positions(shape, random, first):
    order = random.sample(range(len(shape)), len(shape))
    x = torch.arange(torch.Size(shape).numel()).reshape(shape).permute(order)
    size, stride = list(x.shape), list(x.stride())
    axis = random.randrange(len(size))
    if stride[axis] % 2 == 0 and size[axis] > 1:  # chunks that overlap by half
        size[axis], stride[axis] = 2 * size[axis] - 1, stride[axis] // 2
    elif random.random() < 0.5:
        size, stride = [*size, 2], [*stride, random.choice(stride)]
    result = as_strided(x, size, stride, first)
    reach = first + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    assert (result is None) == (reach >= x.numel())
    if result is not None:
        assert torch.equal(result, x.as_strided(size, stride, first))


def test_gaps_are_not_read():
    assert as_strided(torch.arange(12.0).reshape(3, 4)[:, :2], (2, 2), (4, 1)) is None


@pytest.mark.parametrize("eps", [1e-8, 1.0, 4.0])
@pytest.mark.parametrize(
    ("first", "second", "dim"),
    [
        ((3, 4), (3, 4), 1),
        ((3, 4), (4,), 0),
        ((3, 4), (4,), 1),
        ((1, 4), (3, 4), 0),
        ((4,), (4,), 0),
    ],
)
def test_similarities_and_gradients(first, second, dim, eps):
    torch.manual_seed(0)
    x, y = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in (first, second)
    )
    found, expected = (f(x, y, dim=dim, eps=eps) for f in (cosine_similarity, F.cosine_similarity))
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    pairs = zip(*(torch.autograd.grad(z, (x, y), weights) for z in (found, expected)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs)


def test_similarities_of_vectors_whose_norms_overflow_are_zero():
    x = (torch.randn(3, 4) * 1e30).requires_grad_()
    found, expected = (f(x, x.detach()) for f in (cosine_similarity, F.cosine_similarity))
    assert torch.equal(found, expected) and torch.equal(found, torch.zeros(3))
    (gradient,) = torch.autograd.grad(found.sum(), x)
    assert torch.equal(gradient, torch.zeros(3, 4))
