"""What another read finds changed: iterators, queues, generators, clocks, the system's numbers."""

import collections
import datetime
import functools
import importlib
import itertools
import os
import queue
import random
import secrets
import threading
import time
import types
import uuid

import numpy as np
import pytest
from torch import nn

from relax_disc.errors import RelaxDiscWarning, UnsupportedOperatorError
from tests.training.state.outer_batch import Holder, X, agree, captured, compiled, distance


class Reads(nn.Module):
    def __init__(self, held, read):
        super().__init__()
        self.linear, self.held, self.read = nn.Linear(4, 4), held, read

    def forward(self, x):
        return (self.linear(x) * self.read(self.held)).pow(2).mean()


def by_variable(held, read):
    return nn.Linear(4, 4), lambda m, x: distance(m, x) * read(held)


def by_attribute(held, read):
    holder = Holder(held)
    return nn.Linear(4, 4), lambda m, x: distance(m, x) * read(holder.held)


def by_class(held, read):
    holder = type("Counting", (Holder,), {"held": held})
    del (instance := holder(None)).held
    return nn.Linear(4, 4), lambda m, x: distance(m, x) * read(instance.held)


def by_item(held, read):
    holder = {"held": held}
    return nn.Linear(4, 4), lambda m, x: distance(m, x) * read(holder["held"])


def by_default(held, read):
    def part(held=held):
        return read(held)

    return nn.Linear(4, 4), lambda m, x: distance(m, x) * part()


def by_model(held, read):
    return Reads(held, read), None


def by_submodule(held, read):
    return nn.Sequential(nn.Linear(4, 4), Reads(held, read)), None


def by_tuple(held, read):
    holder = ({"held": (1, held, 2)}, held)
    return nn.Linear(4, 4), lambda m, x: distance(m, x) * read(holder[0]["held"][1])


def by_named_tuple(held, read):
    holder = collections.namedtuple("Held", "first second")(0, held)
    return nn.Linear(4, 4), lambda m, x: distance(m, x) * read(holder.second)


def by_partial(held, read):
    def part(holder, model, x):
        return distance(model, x) * read(holder)

    loss_holder = functools.partial(part, held)
    return nn.Linear(4, 4), lambda m, x: loss_holder(m, x)


WAYS = [value for name, value in list(globals().items()) if name.startswith("by_")]


def numbers():
    yield from (1.0, 2.0, 3.0)


def filled():
    found = queue.SimpleQueue()
    for number in (1.0, 2.0):
        found.put(number)
    return found


TAKEN = {
    "iterator": (lambda: iter([1.0, 2.0]), next),
    "loop": (
        lambda: iter([1.0, 2.0]),
        lambda held: next(w for w, _ in zip(held, "a", strict=False)),
    ),
    "zip": (lambda: zip([1.0], [2.0], strict=True), lambda held: sum(next(held))),
    "cycle": (lambda: itertools.cycle([1.0, 2.0]), next),
    "count": (itertools.count, next),
    "method of a count": (lambda: itertools.count().__next__, lambda held: held()),
    "generator": (numbers, next),
    "generator by send": (numbers, lambda held: held.send(None)),
    "queue": (filled, lambda held: held.get()),
}

DRAWN = {
    "Generator": (lambda: np.random.default_rng(0), lambda held: float(held.random())),
    "RandomState": (lambda: np.random.RandomState(0), lambda held: float(held.rand())),
    "Random": (lambda: random.Random(0), lambda held: held.random()),
    "method of a Random": (lambda: random.Random(0).uniform, lambda held: held(1.0, 2.0)),
}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("kind", TAKEN)
def test_what_moves_on_when_it_is_read_is_refused_with_its_line(kind, way):
    make, read = TAKEN[kind]
    held = make()
    model, loss_fn = way(held, read)
    with pytest.raises(
        UnsupportedOperatorError, match=r"the next value of .*(held|holder)"
    ) as caught:
        captured(model, loss_fn)
    assert caught.value.operators[0][1].startswith(__file__)
    assert "argument" in str(caught.value)
    before = next(iter(make()), None) if kind in ("iterator", "count", "generator") else None
    assert before is None or next(held) == before  # nothing was taken


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("kind", DRAWN)
def test_random_numbers_of_an_object_are_refused(kind, way):
    make, read = DRAWN[kind]
    with pytest.raises(UnsupportedOperatorError, match=r"draws numbers from .*(held|holder)"):
        captured(*way(make(), read))


def test_tuples_and_partial_functions_are_as_they_were():
    held = itertools.count(), [1.0], itertools.count()
    part = functools.partial(lambda first, h: h * first[1][0], held)
    loss_fn = lambda m, x: part(distance(m, x)) * len(held)  # noqa: E731
    captured(nn.Linear(4, 4), loss_fn)
    assert part.args[0] is held and [next(held[0]), next(held[2])] == [0, 0]
    assert type(held[0]) is itertools.count


def test_an_event_of_a_thread_is_refused_with_its_line():
    event = threading.Event()
    with pytest.raises(UnsupportedOperatorError, match="asks event") as caught:
        captured(nn.Linear(4, 4), lambda m, x: distance(m, x) * (2 if event.is_set() else 1))
    assert caught.value.operators[0][1].startswith(__file__) and type(event) is threading.Event


SYSTEM = {
    "os": lambda: os.urandom(1)[0],
    "secrets": lambda: secrets.randbelow(9),
    "uuid": lambda: uuid.uuid4().int % 9,
    "SystemRandom": lambda: random.SystemRandom().random(),
    "Random without a seed": lambda: random.Random().random(),
    "Generator without a seed": lambda: float(np.random.default_rng().random()),
}


@pytest.mark.parametrize("kind", SYSTEM)
def test_random_numbers_of_the_system_are_refused(kind):
    with pytest.raises(UnsupportedOperatorError, match="asks the system for random numbers"):
        captured(nn.Linear(4, 4), lambda m, x: distance(m, x) * SYSTEM[kind]())


def test_what_a_step_makes_itself_may_be_read():
    weights, unread = [1.0, 2.0], [itertools.count(), numbers(), random.Random(0), filled()]

    def loss_fn(model, x):
        total = sum(a * b for a, b in zip(weights, weights, strict=True)) + sum(numbers())
        total += next(iter(weights)) + next(itertools.count(1)) + random.Random(0).random()
        total += float(np.random.default_rng(0).random()) + next(reversed(weights))
        return distance(model, x) * total if unread else x.sum()

    model = nn.Linear(4, 4)
    step = compiled(model, X, loss_fn=loss_fn)
    agree(step, loss_fn, model)
    assert [next(unread[0]), next(unread[1]), unread[3].get()] == [0, 1.0, 1.0]
    agree(step, loss_fn, model)


def test_what_the_code_keeps_is_the_object_afterwards():
    held, keeper = itertools.count(), functools.partial(int)

    def loss_fn(model, x):
        keeper.kept = held
        return distance(model, x)

    captured(nn.Linear(4, 4), loss_fn)
    assert next(keeper.kept) == 0 and next(held) == 1


def test_another_thread_takes_values_meanwhile():
    held, found = itertools.count(), []

    def loss_fn(model, x):
        thread = threading.Thread(target=lambda: found.append(next(held)))
        thread.start()
        thread.join()
        return distance(model, x)

    with pytest.warns(RelaxDiscWarning, match="found is changed"):
        captured(nn.Linear(4, 4), loss_fn).outer.warn(())
    assert next(held) == 2  # the second export looks what the list makes of the next call


clock = time.perf_counter
CLOCKS = {
    "time": lambda: time.time(),
    "imported": lambda: clock(),
    "integer": lambda: time.monotonic_ns(),
    "date": lambda: datetime.datetime.now().microsecond,
}


@pytest.mark.parametrize("kind", CLOCKS)
def test_a_clock_is_told_with_its_line(kind):
    with pytest.warns(RelaxDiscWarning, match=rf"{__file__}:\d+: .*\(\) .*runs once.*of the batch"):
        captured(nn.Linear(4, 4), lambda m, x: distance(m, x) * (CLOCKS[kind]() % 7 + 1))
    assert time.time is not None and type(time.time) is types.BuiltinFunctionType
    assert clock is time.perf_counter


def test_what_a_library_does_inside_is_its_own_affair(tmp_path, monkeypatch, recwarn):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "counting_library.py").write_text(
        "import itertools, os, time\n"
        "from torch import nn\n"
        "class Layer(nn.Linear):\n"
        "    names = itertools.count()\n"
        "    def forward(self, x):\n"
        "        next(self.names), next(self.calls), time.time(), os.environ.get('HOME')\n"
        "        return super().forward(x) if x.is_contiguous() else super().forward(x) * 1\n"
    )
    monkeypatch.syspath_prepend(folder)
    model = importlib.import_module("counting_library").Layer(4, 4)
    model.calls = itertools.count()
    step = compiled(model, X, loss_fn=distance)
    monkeypatch.setenv("HOME", "/elsewhere")
    agree(step, distance, model, X.t().contiguous().t())
    assert not [w for w in recwarn if w.category is RelaxDiscWarning]
