"""State that `forward` or the user's loop assigns anew, in containers too, beside eager PyTorch."""

import collections
import copy
import types
import weakref
from collections import Counter
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

import relax_disc
from relax_disc.errors import InputMismatchError, UnsupportedOperatorError
from tests.tiers import every
from tests.training.state.state_programs import run

SIZES = (3, 5, 1, 7, 2)


class State(NamedTuple):
    h: torch.Tensor
    c: torch.Tensor


def _one():
    return torch.ones(1, 4)


def _zero():
    return torch.zeros(1, 4)


class Stateful(nn.Module):
    """`begin` makes the state; `step_of` reads it and puts the next in its place."""

    def __init__(self):
        super().__init__()
        self.linear, self.out = nn.Linear(4, 4), nn.Linear(4, 1)
        self.kept = []
        self.begin()

    def begin(self):
        self.state = (_zero(), _one())

    def core(self, x, h, c):
        h = torch.tanh(self.linear(x) + h + c * 0.5)
        return h, h.mean(0, keepdim=True).detach()

    def forward(self, x, y):
        return ((self.out(self.step_of(x)) - y) ** 2).mean()

    def step_of(self, x):
        h, _ = self.core(x, *self.state)
        return h

    def between(self, index):
        pass


class AssignedPair(Stateful):
    def step_of(self, x):
        h, n = self.core(x, *self.state)
        self.state = (n, n + 1)
        return h


class AssignedDict(Stateful):
    def begin(self):
        self.state = {"h": _zero(), "layers": 3, "c": _one()}

    def step_of(self, x):
        h, n = self.core(x, self.state["h"], self.state["c"])
        self.state = {**self.state, "h": n}
        return h


class AssignedInObject(Stateful):
    def begin(self):
        self.state = types.SimpleNamespace(held=([_zero()], {"c": _one()}))

    def step_of(self, x):
        (h,), table = self.state.held
        h, n = self.core(x, h, table["c"])
        self.state.held = ([n], {"c": n + 1})
        return h


class AssignedLayers(Stateful):
    def begin(self):
        self.state = [(_zero(), _one()) for _ in range(2)]

    def step_of(self, x):
        new = []
        for h, c in self.state:
            x, n = self.core(x, h, c)
            new.append((n, n * 2))
        self.state = new
        return x


class AssignedElements(AssignedLayers):
    def begin(self):
        super().begin()
        self.kept.append(self.state)  # the same list: its elements are set

    def step_of(self, x):
        for index, (h, c) in enumerate(self.state):
            x, n = self.core(x, h, c)
            self.state[index] = (n, n * 2)
        return x


class WrittenAndAssigned(Stateful):
    def step_of(self, x):
        self.state[0].mul_(0.9)
        h, n = self.core(x, *self.state)
        self.state = (self.state[0] + n, n + 1)
        return h


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class AssignedBesideAFunction(AssignedElements):
    """Its gradient is traced a second time."""

    def step_of(self, x):
        return Doubled.apply(super().step_of(x))


class AssignedNamed(Stateful):
    def begin(self):
        self.state = State(_zero(), _one())

    def step_of(self, x):
        h, n = self.core(x, self.state.h, self.state.c)
        self.state = State(n, self.state.c)
        return h


class AssignedItems(Stateful):
    """Running means by class; each second batch starts them anew."""

    def begin(self):
        self.state = {k: torch.full((1, 4), float(k)) for k in range(2)}

    def step_of(self, x):
        for k, mean in self.state.items():
            x, n = self.core(x, mean, mean)
            self.state[k] = 0.9 * mean + 0.1 * n
        return x

    def between(self, index):
        if index % 2:
            self.begin()


class SetThenReplaced(AssignedLayers):
    """A loop over time sets elements of a list, in the place of which a detached one is put."""

    def step_of(self, x):
        for _ in range(2):
            for index, (h, c) in enumerate(self.state):
                x, n = self.core(x, h, c)
                self.state[index] = (x.mean(0, keepdim=True), n * 2)
        self.state = [(h.detach(), c.detach()) for h, c in self.state]
        return x


class Swapped(Stateful):
    def step_of(self, x):
        h, _ = self.core(x, *self.state)
        self.state = self.state[1], self.state[0]
        return h


class SwappedNames(Stateful):
    def begin(self):
        self.state, self.other = _zero(), _one()

    def step_of(self, x):
        h, _ = self.core(x, self.state, self.other)
        self.state, self.other = self.other, self.state
        return h


class Shifted(Stateful):
    def step_of(self, x):
        h, n = self.core(x, *self.state)
        self.state = (self.state[1], n)
        return h


class ShiftedList(Stateful):
    def begin(self):
        self.state = [_zero(), _one()]

    def step_of(self, x):
        h, n = self.core(x, *self.state)
        self.state.pop(0)
        self.state.append(n)
        return h


class ShiftedDeque(Stateful):
    def begin(self):
        self.state = collections.deque([_zero(), _one()], maxlen=2)

    def step_of(self, x):
        h, n = self.core(x, *self.state)
        self.state.append(n)
        return h


class Twice(Stateful):
    def step_of(self, x):
        h, n = self.core(x, *self.state)
        self.state = (n, n + 1)
        h, n = self.core(x + h, *self.state)
        self.state = (n, n + 1)
        return h


class StartedAgain(AssignedPair):
    """Each second batch starts from what was there at first."""

    def begin(self):
        super().begin()
        self.kept.append(self.state)

    def between(self, index):
        if index % 2:
            self.state = self.kept[0]


class StartedAgainFromBuffer(Stateful):
    def begin(self):
        self.register_buffer("state", _one())
        self.kept.append(self.state)

    def step_of(self, x):
        h, n = self.core(x, self.state, self.state)
        self.state = n
        return h

    def between(self, index):
        if index % 2:
            self.state = self.kept[0]


class Collected(AssignedPair):
    def between(self, index):
        self.kept.append(self.state)


class CollectedViews(AssignedPair):
    def between(self, index):
        self.kept += [self.state[0][0], self.state[1].detach()]


class CollectedBuffer(StartedAgainFromBuffer):
    def between(self, index):
        self.kept.append(self.state_dict()["state"])


class PutByTheLoop(Stateful):
    def between(self, index):
        self.state = (torch.full((1, 4), float(index)), _zero())


class FisherWeights(Stateful):
    """Elastic weight consolidation."""

    def begin(self):
        self.between(0)

    def forward(self, x, y):
        own = self.named_parameters()
        penalty = sum((self.state[k] * (p - self.old[k]) ** 2).sum() for k, p in own)
        h, _ = self.core(x, _zero(), _zero())
        return ((self.out(h) - y) ** 2).mean() + penalty

    def between(self, index):
        own = dict(self.named_parameters())
        self.old = {name: p.detach().clone() for name, p in own.items()}
        self.state = {name: torch.full_like(p, index + 1.0) for name, p in own.items()}


class FirstNameUnread(Stateful):
    """The walk finds `first` before `state`; only that is read."""

    def __init__(self):
        super().__init__()

    def begin(self):
        self.first = (_zero(), _one())
        self.state = self.first

    def between(self, index):
        self.state = (torch.full((1, 4), float(index)), _zero())


def _batch(size, generator):
    return torch.randn(size, 4, generator=generator), torch.randn(size, 1, generator=generator)


def _compiled(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shapes = tuple({0: Dim("batch", min=1, max=64)} for _ in range(2))
    batch = _batch(3, torch.Generator().manual_seed(1))
    return relax_disc.compile(model, optimizer, batch, dynamic_shapes=shapes)


def _states(model):
    held = [model.kept, getattr(model.state, "__dict__", model.state)]
    held = [model.kept, model.state.held] if isinstance(model, AssignedInObject) else held
    return [leaf for leaf in pytree.tree_leaves(held) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize(
    "kind",
    [
        *(AssignedPair, AssignedDict, AssignedInObject, AssignedLayers, AssignedElements),
        *(
            AssignedBesideAFunction,
            WrittenAndAssigned,
            AssignedNamed,
            AssignedItems,
            SetThenReplaced,
        ),
        *(Swapped, SwappedNames, Shifted, ShiftedList, ShiftedDeque, Twice),
        *(StartedAgain, StartedAgainFromBuffer, Collected, CollectedViews, CollectedBuffer),
        *(PutByTheLoop, FisherWeights, FirstNameUnread),
    ],
)
def test_trains_as_eager(kind):
    torch.manual_seed(0)
    model = kind()
    eager = copy.deepcopy(model)
    step, optimizer = _compiled(model), torch.optim.SGD(eager.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(2)
    for index, size in enumerate(SIZES):
        batch = _batch(size, generator)
        optimizer.zero_grad()
        loss = eager(*batch)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(step(*batch), loss.detach(), rtol=1e-5, atol=1e-6)
        model.between(index)
        eager.between(index)
    for one, other in zip(_states(model), _states(eager), strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-4, atol=1e-5)


def test_measuring_leaves_the_state():
    """`calibrate` and `restored` run steps, and put back what was there: the object itself."""
    model = AssignedPair()
    step, before = _compiled(model), model.state
    with step.restored():
        step(*_batch(3, torch.Generator().manual_seed(2)))
        assert model.state is not before
    assert model.state is before
    assert torch.equal(before[0], _zero()) and torch.equal(before[1], _one())


def test_saved(tmp_path):
    torch.manual_seed(0)
    model = StartedAgain()
    other = copy.deepcopy(model)
    _compiled(model).save(tmp_path / "step")
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    step, again = (
        relax_disc.TrainingStep.load(tmp_path / "step", other, optimizer),
        _compiled(model),
    )
    start = other.state
    for size in SIZES:
        batch = _batch(size, torch.Generator().manual_seed(size))
        assert torch.equal(step(*batch), again(*batch))
        assert torch.equal(other.state[1], model.state[1])
    assert torch.equal(start[0], _zero())


class OneForTwo(AssignedPair):
    def begin(self):
        self.state = (_zero(),) * 2


class OneLeft(Stateful):
    def begin(self):
        self.state = self.other = _zero()

    def step_of(self, x):
        h, n = self.core(x, self.state, self.other)
        self.state = n
        return h


class Counted(Stateful):
    def begin(self):
        self.state = {"h": _zero(), "count": 0}

    def step_of(self, x):
        h, n = self.core(x, self.state["h"], _zero())
        self.state = {"h": n, "count": self.state["count"] + 1}
        return h


class InAnObject(Stateful):
    def begin(self):
        self.state = types.SimpleNamespace(h=_zero())

    def step_of(self, x):
        h, n = self.core(x, self.state.h, _zero())
        self.state = types.SimpleNamespace(h=n)
        return h


class WrittenTwin(Stateful):
    def begin(self):
        self.state, self.other = _zero(), _one()

    def step_of(self, x):
        h, n = self.core(x, self.state, self.other)
        self.other.copy_(n)
        self.state = self.other
        return h


class Longer(Stateful):
    def step_of(self, x):
        h, n = self.core(x, *self.state[:2])
        self.state = (*self.state, n)
        return h


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (OneForTwo, r"model\.state\[0\] and model\.state\[1\] are one tensor.*\.clone\(\)"),
        (OneLeft, r"one tensor.* gives model\.state another and goes on to read model\.other"),
        (Counted, r"model\.state holds a tensor.*other numbers or texts beside"),
        (InAnObject, r"model\.state holds a tensor.*in another object"),
        (WrittenTwin, r"makes model\.state one tensor with model\.other, and writes in place"),
        (Longer, r"model\.state holds a tensor of shape \(1, 4\)"),
    ],
)
def test_refused(kind, named):
    with pytest.raises(UnsupportedOperatorError, match=named):
        _compiled(kind())


class OneTensor(Stateful):
    def begin(self):
        self.state = (_zero(),) * 2

    def between(self, index):
        self.state = (self.state[0], _one())


class OneContainer(Stateful):
    def begin(self):
        self.state = self.other = (_zero(), _one())

    def step_of(self, x):
        return self.core(x, self.state[0], self.other[1])[0]

    def between(self, index):
        self.other = (_zero(), _zero())


class OneObject(OneContainer):
    def begin(self):
        self.state = self.other = types.SimpleNamespace(h=_zero())

    def step_of(self, x):
        return self.core(x, self.state.h, self.other.h)[0]

    def between(self, index):
        self.other = types.SimpleNamespace(h=_one())


class OneModule(OneContainer):
    def begin(self):
        self.state = self.other = nn.Linear(4, 4)

    def step_of(self, x):
        return self.state(self.other(self.linear(x)))

    def between(self, index):
        self.other = nn.Linear(4, 4)


class OwnWeight(OneContainer):
    def begin(self):
        self.other = [self.linear.weight]
        self.state = ()

    def step_of(self, x):
        return self.linear(x) + self.other[0].square().mean()

    def between(self, index):
        self.other = [torch.randn(4, 4)]


class ShapeAlone(OneContainer):
    def begin(self):
        self.state, self.other = (), (torch.zeros(3),)

    def step_of(self, x):
        return self.linear(x) * self.other[0].shape[0]

    def between(self, index):
        self.other = (torch.zeros(4),)


class TypeAlone(ShapeAlone):
    def step_of(self, x):
        return self.linear(x) * (2 if self.other[0].dtype == torch.float32 else 3)

    def between(self, index):
        self.other = (torch.zeros(3, dtype=torch.float64),)


class PresenceAlone(ShapeAlone):
    def begin(self):
        self.state, self.other = (), _zero()

    def step_of(self, x):
        return self.linear(x) * (1 if self.other is None else 2)

    def between(self, index):
        self.other = None


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (OneTensor, r"model\.state\[1\] was the same object as model\.state\[0\]"),
        (OneContainer, r"model\.other\[0\] was the same object as model\.state\[0\]"),
        (OneObject, r"model\.other was replaced by another object"),
        (OneModule, r"model\.other was replaced by another object"),
        (OwnWeight, r"model\.other\[0\] was the same object as model\.linear\.weight"),
        (ShapeAlone, r"model\.other\[0\] was a tensor of shape \(3,\).*is of shape \(4,\)"),
        (TypeAlone, r"model\.other\[0\] was a tensor .*float32.*float64"),
        (PresenceAlone, r"model\.other was a tensor .* is None now"),
    ],
)
def test_noticed(kind, named):
    model = kind()
    step, batch = _compiled(model), _batch(3, torch.Generator().manual_seed(2))
    step(*batch)
    before = model.linear.weight.detach().clone()
    model.between(0)
    with pytest.raises(InputMismatchError, match=named):
        step(*batch)
    assert torch.equal(model.linear.weight, before)


def test_written_and_kept_is_noticed():
    model = WrittenAndAssigned()
    step, batch = _compiled(model), _batch(3, torch.Generator().manual_seed(2))
    step(*batch)
    step(*batch)
    model.kept.append(model.state[0])
    kept = model.state[0].clone()
    with pytest.raises(InputMismatchError, match=r"model\.state\[0\] is kept elsewhere.*\.clone"):
        step(*batch)
    assert torch.equal(model.state[0], kept)
    model.kept.clear()
    step(*batch)


@pytest.mark.parametrize("first", every(8, range(0, 320, 20)))
def test_random_programs(first, tmp_path):
    """Most train; what is refused has changed nothing."""
    found = Counter(run(seed, tmp_path) for seed in range(first, first + 20))
    assert found["trained"] > 10, found


@pytest.mark.parametrize("kind", [PutByTheLoop, FisherWeights])
def test_what_the_loop_replaces_is_let_go_of(kind):
    """A dict of Fisher weights is as large as the model."""
    model = kind()
    step, batch = _compiled(model), _batch(3, torch.Generator().manual_seed(2))
    for index in range(2):
        states = [weakref.ref(leaf) for leaf in _states(model)]
        step(*batch)
        model.between(index)
        step(*batch)
        assert all(state() is None for state in states)


def test_what_a_copy_replaces_is_let_go_of():
    model = AssignedPair()
    step, batch = _compiled(model), _batch(3, torch.Generator().manual_seed(2))
    states = [weakref.ref(leaf) for leaf in _states(model)]
    step(*batch)
    assert all(state() is None for state in states)
    states = [weakref.ref(leaf) for leaf in _states(model)]
    for _ in range(3):
        step(*batch)
    assert all(state() is not None for state in states), "no copy where nobody else holds them"
