"""Ways to run one training step: PyTorch as it is, or compiled once by `relax_disc`."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from _corpus import Batch
from _llama import Llama
from torch import Tensor
from torch.export import Dim

import relax_disc

Engine = Literal["relax_disc", "eager"]


class Step(Protocol):
    """A training step: updates model and optimizer, returns the loss before the update."""

    def __call__(self, ids: Tensor, labels: Tensor) -> Tensor: ...


class EagerStep:
    """The step as every PyTorch script writes it."""

    def __init__(self, model: Llama, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer

    def __call__(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss = self._model(ids, labels)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def make_step(
    engine: Engine,
    model: Llama,
    optimizer: torch.optim.Optimizer,
    example: Batch,
    *,
    memory_budget: int | str | None = None,
) -> Step:
    """Prepare the step; `relax_disc` compiles here, once, for every batch size and length."""
    if engine == "eager":
        return EagerStep(model, optimizer)
    batch = Dim("batch", min=1, max=max(64, len(example.ids)))
    length = Dim("length", min=1, max=model.sizes.longest)
    shape = {0: batch, 1: length}
    return relax_disc.compile(
        model,
        optimizer,
        (example.ids, example.labels),
        dynamic_shapes={"ids": shape, "labels": shape},
        memory_budget=memory_budget,
    )


def planned_peak_bytes(step: Step, batch: Batch) -> int | None:
    """All memory that a step needs for a batch, known without running it; None in eager mode."""
    if not isinstance(step, relax_disc.TrainingStep):
        return None
    count, length = batch.ids.shape
    return step.plan(batch=count, length=length).peak_bytes
