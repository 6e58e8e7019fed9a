"""Steps that are called next to eager PyTorch, batch by batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def assert_trains_as_eager(
    step: Any,
    make: MakeOptimizer,
    batches: Iterable[tuple[tuple[int, int], tuple[Tensor, ...]]],
    loss_of: Callable[..., Tensor] | None = None,
    atol: float = 1e-6,
) -> None:
    """Check losses, parameters and planned peaks of one step at each batch, in turn.

    ``batches``: batch size and length, and the tensors. ``loss_of``: None calls the model.
    ``atol``: of losses; of parameters ten times as much.
    """
    eager = copy.deepcopy(step.model)
    optimizer = make(eager.parameters())
    for (size, length), batch in batches:
        loss = step(*batch)
        optimizer.zero_grad()
        expected = eager(*batch) if loss_of is None else loss_of(eager, *batch)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=atol)
        for ours, theirs in zip(step.model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=10 * atol)
        planned = step.plan(batch=size, length=length).peak_bytes
        assert step.memory_report().peak_bytes == planned


def assert_gradients_as_eager(
    step: Any, batches: Iterable[tuple[Tensor, ...]], loss_of: Callable[..., Tensor] | None = None
) -> None:
    """Check losses and gradients, which frozen parameters have none of, without an update.

    ``loss_of``: None calls the model.
    """
    model = step.model
    trained = [p for p in model.parameters() if p.requires_grad]
    for batch in batches:
        model.zero_grad()
        loss = step(*batch, update=False)
        expected = model(*batch) if loss_of is None else loss_of(model, *batch)
        gradients = torch.autograd.grad(expected, trained)
        torch.testing.assert_close(loss, expected.detach())
        for parameter, gradient in zip(trained, gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
