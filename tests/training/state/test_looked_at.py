"""What a loss asks of tensors but their values, and what it reads of files: fixed, or refused."""

import os
from typing import Any

import numpy as np
import pytest
from torch import nn

from relax_disc.errors import InputMismatchError, RelaxDiscWarning, UnsupportedOperatorError
from relax_disc.training.call.value_guards import ValueGuards
from tests.training.state.outer_batch import X, agree, captured, compiled, distance


@pytest.mark.parametrize("name", ["grad", "_version"])
def test_what_eager_tensors_alone_tell_is_refused_with_its_line(name):
    with pytest.raises(UnsupportedOperatorError, match=rf"\.{name}") as caught:
        captured(
            nn.Linear(4, 4), lambda m, x: distance(m, x) * (getattr(m.weight, name) is not None)
        )
    assert caught.value.operators[0][1].startswith(__file__)


def test_attributes_of_parameters_and_buffers_are_the_users():
    model: Any = nn.BatchNorm1d(4)
    model.weight.power, model.running_mean.power = 2, 3

    def loss_fn(model, x):
        power = model.weight.power + model.running_mean.power + getattr(model.bias, "power", 1)
        return model(x).pow(power).mean()

    guards = ValueGuards(captured(model, loss_fn).outer.guards)
    guards.check()
    for tensor in (model.weight, model.running_mean, model.bias):
        before = vars(tensor).copy()
        tensor.power = 7
        with pytest.raises(InputMismatchError, match=r"model\.\w+\.power"):
            guards.check()
        del tensor.power
        vars(tensor).update(before)
    guards.check()


def number_in(path):
    with open(path) as file:  # noqa: PTH123
        return float(file.read())


@pytest.mark.parametrize(
    "read",
    [
        number_in,
        lambda path: float(path.read_text()),
        lambda path: float(np.fromfile(path, dtype=np.uint8)[0]),
        lambda path: len(os.listdir(path.parent)),  # noqa: PTH208
    ],
)
def test_a_file_that_the_code_reads_must_stay_as_it_is(read, tmp_path):
    path = tmp_path / "weight"
    path.write_text("1")
    found = captured(nn.Linear(4, 4), lambda m, x: distance(m, x) * read(path)).outer.guards
    guards = ValueGuards(found)
    guards.check()
    path.write_text("10")
    (tmp_path / "another").write_text("")
    with pytest.raises(InputMismatchError, match=f"{tmp_path}.* was .* bytes"):
        guards.check()


def test_files_that_are_written_are_not_compared(tmp_path):
    def loss_fn(model, x):
        with (tmp_path / "log").open("a") as log:
            log.write("one step")
        return distance(model, x)

    found = captured(nn.Linear(4, 4), loss_fn).outer.guards
    assert not [guard for guard in found if str(tmp_path) in guard.what]


def test_a_count_that_a_function_keeps_is_told():
    def loss_fn(model, x):
        loss_fn.calls += 1
        return distance(model, x)

    loss_fn.calls = 0
    with pytest.warns(RelaxDiscWarning, match=r"loss_fn\.calls is changed"):
        captured(nn.Linear(4, 4), loss_fn)
    assert loss_fn.calls == 0


def test_a_count_that_a_function_keeps_and_uses_is_refused():
    def loss_fn(model, x):
        loss_fn.calls += 1
        return distance(model, x) * loss_fn.calls

    loss_fn.calls = 0
    with pytest.raises(UnsupportedOperatorError, match=r"loss_fn\.calls is a number"):
        captured(nn.Linear(4, 4), loss_fn)
    assert loss_fn.calls == 0


ASKED = {
    "is_contiguous": lambda x: 2 if x.is_contiguous() else 1,
    "stride": lambda x: x.stride(0),
    "a view's": lambda x: 2 if x.t().is_contiguous() else 1,
    "as_strided": lambda x: x.as_strided((2, 2), (1, 2)).sum(),
}


@pytest.mark.parametrize("kind", ASKED)
def test_strides_that_the_loss_asks_for_are_fixed(kind):
    def loss_fn(model, x):
        return distance(model, x) * ASKED[kind](x)

    model, other = nn.Linear(4, 4), X.t().contiguous().t()
    step = compiled(model, X, loss_fn=loss_fn)
    agree(step, loss_fn, model)
    agree(step, loss_fn, model, X[2:5])
    with pytest.raises(InputMismatchError, match=rf"contiguous in .* and {__file__}:\d+ asks"):
        step(other)


def test_strides_of_an_example_that_is_not_contiguous():
    def loss_fn(model, x):
        return distance(model, x) * (2 if x.is_contiguous() else 1)

    model, example = nn.Linear(4, 4), X.t().contiguous().t()
    step = compiled(model, example, loss_fn=loss_fn)
    agree(step, loss_fn, model, example)
    with pytest.raises(InputMismatchError, match=r"of strides \(1, 8\) in the example"):
        step(X)


def test_a_place_in_storage_is_refused():
    with pytest.raises(UnsupportedOperatorError, match="storage_offset"):
        captured(nn.Linear(4, 4), lambda m, x: distance(m, x) * x.storage_offset())
