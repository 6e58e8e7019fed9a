"""Take steps that leave no trace: everything that a step changes, put back afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from relax_disc.training.call.counters import StepCounters


@contextlib.contextmanager
def restored(tensors: Sequence[torch.Tensor], counters: Sequence[StepCounters]) -> Iterator[None]:
    """Put values and step counts back when the block ends; takes a copy of them meanwhile."""
    everything = [*tensors, *(tensor for counter in counters for tensor in counter.tensors)]
    saved = [tensor.detach().clone() for tensor in everything]
    marks = [counter.mark() for counter in counters]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(everything, saved, strict=True):
                tensor.copy_(value)
        for counter, mark in zip(counters, marks, strict=True):
            counter.restore(mark)


@contextlib.contextmanager
def without_gradients(model: torch.nn.Module) -> Iterator[None]:
    """Put gradients aside while the block runs; those that it makes are dropped."""
    parameters: list[Any] = list(model.parameters())
    kept = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient
