"""Gradient accumulation when something fails or does not fit."""

import pytest
import torch

from relax_disc.errors import InputMismatchError, OutOfMemoryError, StepTornError
from tests.training.accumulating import batches, make


def test_what_failed_half_way_must_be_cleared(monkeypatch):
    step = make()
    (x,) = batches(1, 5)
    step(x, update=False)
    adding = step.accumulation.known()[0]

    def fail(*_):
        raise RuntimeError("a kernel failed")

    with monkeypatch.context() as patch:
        patch.setattr(type(adding._variants), "torn", True)
        patch.setattr(adding, "_call", fail)
        with pytest.raises(StepTornError, match="zero_grad"):
            step(x, update=False)
    for update in (True, False):
        with pytest.raises(StepTornError, match="first_weight_grad"):
            step(x, update=update)
    step.model.zero_grad(set_to_none=False)
    step(x)


def test_a_failure_before_anything_was_written_leaves_no_gradient(monkeypatch):
    step = make()
    (x,) = batches(1, 5)
    step.plan(update=False, rows=5)

    def fail(*_):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(step.accumulation.known()[0], "_call", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            step(x, update=False)
    assert all(p.grad is None for p in step.model.parameters())
    step(x)


def test_sums_that_find_no_memory_leave_nothing_behind(monkeypatch):
    step = make()
    (x,) = batches(1, 5)
    step.plan(update=False, rows=5)
    made = []

    def refuse(*args, **options):
        made.append(1)
        if len(made) > 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return original(*args, **options)

    original = torch.zeros_like
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros_like", refuse)
        with pytest.raises(OutOfMemoryError, match="sums of gradients"):
            step(x, update=False)
    assert all(p.grad is None for p in step.model.parameters())
    step(x)


def test_gradients_that_are_not_dense_are_refused():
    step = make()
    weight = step.model.first.weight
    weight.grad = weight.detach().to_sparse()
    with pytest.raises(InputMismatchError, match="clear it"):
        step(torch.ones(3, 6), update=False)
