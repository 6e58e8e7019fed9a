"""Optimizers of one class trace their update once in a process, and not where it may differ."""

import copy
import sys

import pytest
import torch
from torch import nn, optim

from relax_disc.frontend import programs_of
from relax_disc.frontend.optimizer import shared
from tests.training.state.optimizing import CASES, Small


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    monkeypatch.setattr(shared, "_SHARED", copy.copy(shared._SHARED))
    shared._SHARED.clear()


def program(make, *shape, group=0):
    parameters = [nn.Parameter(torch.ones(shape or (3, 2)))]
    optimizer = make(parameters)
    return programs_of(optimizer).of(optimizer.param_groups[group], parameters[0])


def adam(**settings):
    return lambda p: optim.Adam(p, **{"lr": 0.1, **settings})


@pytest.mark.parametrize("case", CASES)
def test_a_shared_program_is_the_one_that_would_be_traced(case):
    def digests():
        parameters = [p for p in Small().double().parameters() if case != "muon" or p.dim() == 2]
        optimizer = CASES[case](parameters)
        programs = programs_of(optimizer)
        found = [programs.of(optimizer.param_groups[0], p) for p in parameters]
        return found, [each.digest for each in found]

    traced, first = digests()
    reused, second = digests()
    assert first == second
    # Adagrad has made its state already, which may have been changed since.
    assert all((a is b) != (case == "adagrad") for a, b in zip(traced, reused, strict=True))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (adam(lr=0.2, betas=(0.5, 0.7), eps=1e-3), (3, 2)),
        (adam(), (7, 5)),
    ],
    ids=["numbers", "sizes"],
)
def test_what_makes_no_difference(make, shape):
    assert program(adam()) is program(make, *shape)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (adam(amsgrad=True), (3, 2)),
        (adam(weight_decay=0.1), (3, 2)),
        (adam(lr=torch.tensor(0.1)), (3, 2)),
        (adam(), (3,)),
        (adam(), (3, 1)),
        (lambda p: type("Adam", (optim.Adam,), {"__module__": "torch.optim.adam"})(p, 0.1), (3, 2)),
        (lambda p: optim.AdamW(p, lr=0.1, weight_decay=0.0), (3, 2)),
    ],
    ids=["flag", "zero", "tensor", "rank", "size of one", "subclass", "class"],
)
def test_what_may_make_a_difference(make, shape):
    assert program(adam()) is not program(make, *shape)


def test_a_function_that_is_replaced(monkeypatch):
    known = program(adam())

    def twice(params, grads, *rest, **settings):
        plain(params, [grad * 2 for grad in grads], *rest, **settings)

    module = sys.modules[optim.Adam.__module__]
    plain = module._single_tensor_adam
    monkeypatch.setattr(module, "_single_tensor_adam", twice)
    assert program(adam()).digest != known.digest


@pytest.mark.parametrize("is_first", [False, True])
def test_state_of_another_type_is_traced_by_itself(is_first):
    known = None if is_first else program(adam())
    parameter = nn.Parameter(torch.ones(3, 2))
    optimizer = optim.Adam([parameter], lr=0.1)
    moments = {name: torch.zeros(3, 2, dtype=torch.float64) for name in ("exp_avg", "exp_avg_sq")}
    optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    other = programs_of(optimizer).of(optimizer.param_groups[0], parameter)
    assert [state.dtype for state in other.tensors] == [torch.float64] * 2
    assert [state.dtype for state in (known or program(adam())).tensors] == [torch.float32] * 2


def test_settings_of_pytorch():
    known = program(adam())
    with torch.autocast("cpu", torch.bfloat16):
        assert program(adam()) is not known
    with torch.device("cpu"):
        assert program(adam()) is not known
    torch.set_default_dtype(torch.float64)
    try:
        parameter = nn.Parameter(torch.ones(3, 2, dtype=torch.float32))
        optimizer = optim.Adam([parameter], lr=0.1)
        assert programs_of(optimizer).of(optimizer.param_groups[0], parameter) is not known
    finally:
        torch.set_default_dtype(torch.float32)
    assert program(adam()) is known


def test_the_oldest_goes_first(monkeypatch):
    monkeypatch.setattr(shared, "_MOST", 2)
    makes = [adam(), adam(amsgrad=True), adam(maximize=True)]
    known = [program(make) for make in makes]
    assert len(shared._SHARED) == 2
    assert program(makes[1]) is known[1] and program(makes[2]) is known[2]
    assert program(makes[0]) is not known[0]
