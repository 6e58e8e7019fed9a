"""Reductions of slices and of picked elements that are empty at some sizes or for some batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import relax_disc
from relax_disc.errors import ShapeRangeError
from tests.training.beside_eager import assert_gradients_as_eager

Loss = Callable[[Any, Tensor], Tensor]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))


def step_of(loss_fn: Loss) -> Any:
    axes = {0: Dim("rows", min=1, max=8), 1: Dim("length", min=1, max=16)}
    return relax_disc.compile(
        Scaled(), None, (torch.rand(3, 5),), dynamic_shapes=(axes,), loss_fn=loss_fn
    )


OF_NONE: dict[str, Loss] = {
    "any": lambda m, x: m.scale * (x[:, 1:] > 0.5).any(1).sum(),
    "all": lambda m, x: m.scale * (x[:, 1:] > 0.5).all(1).sum(),
    "any of all": lambda m, x: m.scale * (x[1:] > 0.5).any(),
    "any of picked": lambda m, x: m.scale * (x[x > 0.9] < 0.95).any(),
    "all of picked": lambda m, x: m.scale * (x[x > 0.9] < 0.95).all(),
    "prod": lambda m, x: (m.scale * x[:, 1:]).prod(1).sum(),
    "prod of all": lambda m, x: (m.scale * x[1:]).prod(),
    "logsumexp": lambda m, x: (m.scale * x[:, 1:]).logsumexp(1).exp().sum() + m.scale,
    "sum": lambda m, x: (m.scale * x[1:]).sum() + m.scale,
}


@pytest.mark.parametrize("loss_fn", OF_NONE.values(), ids=OF_NONE)
def test_of_no_elements_they_are_what_they_are_in_eager(loss_fn: Loss) -> None:
    batches = [(torch.rand(*shape) * 0.92,) for shape in ((3, 5), (1, 1), (2, 1), (1, 16), (8, 2))]
    assert_gradients_as_eager(step_of(loss_fn), batches, loss_fn)


REFUSED: dict[str, Loss] = {
    "amax": lambda m, x: (m.scale * x[:, 1:]).amax(1).sum(),
    "min": lambda m, x: (m.scale * x[:, 1:]).min(),
    "max along": lambda m, x: (m.scale * x[:, 1:]).max(-1).values.sum(),
    "argmax": lambda m, x: m.scale * x[:, 1:].argmax(1).sum(),
}


@pytest.mark.parametrize("loss_fn", REFUSED.values(), ids=REFUSED)
def test_extrema_of_none_are_refused_as_in_eager(loss_fn: Loss) -> None:
    step = step_of(loss_fn)
    assert_gradients_as_eager(step, [(torch.rand(2, 2),)], loss_fn)
    with pytest.raises((IndexError, RuntimeError)):
        loss_fn(step.model, torch.rand(2, 1))
    with pytest.raises(ShapeRangeError, match=r"length=1: .* got none at .*test_empty_reductions"):
        step(torch.rand(2, 1), update=False)
