"""Indices out of range: refused before anything is written, whatever operator uses them."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import relax_disc
from relax_disc.errors import IndexRangeError, NonFiniteLossError, ShapeRangeError
from tests.tiers import every

BATCH = torch.export.Dim("batch", min=1, max=64)
ROWS = 5


def _pick(h, i):
    return h[torch.arange(h.shape[0]), i]


# Each takes (table [5, 4] that is trained, h [batch, 5], x [batch, 4], i [batch]).
OPERATORS = {
    "gather": lambda w, h, x, i: h.gather(1, i[:, None]),
    "index": lambda w, h, x, i: _pick(h, i),
    "table": lambda w, h, x, i: w[i] * x,
    "index_select": lambda w, h, x, i: w.index_select(0, i) * x,
    "embedding": lambda w, h, x, i: F.embedding(i, w) * x,
    "scatter": lambda w, h, x, i: torch.zeros_like(h).scatter(1, i[:, None], 1.0) * h,
    "scatter_add": lambda w, h, x, i: torch.zeros(ROWS, 4).scatter_add(
        0, i[:, None].expand(-1, 4), x * w.sum()
    ),
    "scatter_reduce": lambda w, h, x, i: h.scatter_reduce(1, i[:, None], x[:, :1], "amax"),
    "index_add": lambda w, h, x, i: torch.zeros(ROWS, 4).index_add(0, i, x * w.sum()),
    "index_copy": lambda w, h, x, i: torch.zeros(ROWS, 4).index_copy(0, i * 0 + i, x * w.sum()),
    "index_put": lambda w, h, x, i: torch.zeros(ROWS, 4).index_put((i,), x * w.sum(), True),
    "one_hot": lambda w, h, x, i: F.one_hot(i, ROWS) * h,
    "take": lambda w, h, x, i: w.detach().take(i * 4) * x[:, 0],
    "cross_entropy": lambda w, h, x, i: F.cross_entropy(h, i),
    "nll_loss": lambda w, h, x, i: F.nll_loss(h.log_softmax(1), i),
}
WRAPPING = {"index", "table", "index_put", "take"}


class _Net(nn.Module):
    def __init__(self, computed):
        super().__init__()
        self.table = nn.Parameter(torch.randn(ROWS, 4))
        self.head = nn.Linear(4, ROWS)
        self.norm = nn.BatchNorm1d(ROWS)
        self.computed = computed

    def forward(self, x, ids):
        h = self.norm(self.head(x))
        found = h.detach().argmax(1) * 0 if self.computed else 0
        total = h.pow(2).mean()
        for k, use in enumerate(OPERATORS.values()):
            i = ids[:, k] + found
            total = total + (k + 1) * use(self.table, h, x, i).pow(2).mean()
        return total


def _state(step):
    tensors = list(step.model.state_dict().values())
    for state in step.optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return [tensor.clone() for tensor in tensors]


def _batch(size):
    ids = torch.randint(0, ROWS, (size, len(OPERATORS)))
    ids[:, list(OPERATORS).index("index_copy")] = torch.arange(size) % ROWS
    return torch.randn(size, 4), ids


@functools.cache
def _compiled(computed):
    torch.manual_seed(0)
    model = _Net(computed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    shapes = ({0: BATCH}, {0: BATCH})
    return relax_disc.compile(model, optimizer, _batch(4), dynamic_shapes=shapes)


def _check_next(step, batch):
    """The next call equals eager's."""
    twin = copy.deepcopy(step.model)
    loss = twin(*batch)
    loss.backward()
    found = step(*batch)
    torch.testing.assert_close(found, loss.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        step.model.norm.running_var, twin.norm.running_var, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("computed", [False, True], ids=["batch", "computed"])
@pytest.mark.parametrize("name", every(2, OPERATORS))
def test_index_out_of_range_is_refused_before_anything_is_written(name, computed):
    step, place = _compiled(computed), list(OPERATORS).index(name)
    for size in (5, 3):
        for bad in (7, -1, -7, 100_000_000, -(2**62), 2**62):
            if name == "take" and abs(bad) > 2**60:
                continue  # the test's own product overflows
            batch = _batch(size)
            ids = batch[1]
            ids[size - 2, place] = bad
            if bad == -1 and name in WRAPPING:
                if name == "take":
                    ids[size - 2, place] = -1
                _check_next(step, batch)
                continue
            with pytest.raises((IndexError, RuntimeError)):  # as eager
                copy.deepcopy(step.model)(*batch)
            before = _state(step)
            with pytest.raises(IndexRangeError, match=r"test_index_ranges\.py:\d+") as caught:
                step(*batch)
            assert all(map(torch.equal, before, _state(step)))
            if abs(bad) < 2**40 and name != "take":
                assert f" {bad};" in str(caught.value), caught.value
        _check_next(step, _batch(size))


def test_ignored_targets_stay_allowed():
    for computed in (False, True):
        step = _compiled(computed)
        for name in ("cross_entropy", "nll_loss"):
            batch = _batch(4)
            batch[1][1, list(OPERATORS).index(name)] = -100
            _check_next(step, batch)


class _Positions(nn.Module):
    def __init__(self, frozen):
        super().__init__()
        self.tokens = nn.Embedding(50, 16)
        self.positions = nn.Embedding(32, 16)
        self.positions.weight.requires_grad_(not frozen)
        self.head = nn.Linear(16, 50)

    def forward(self, ids):
        hidden = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("frozen", [False, True])
def test_length_past_a_position_table_is_refused_by_name(frozen):
    model = _Positions(frozen)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    length = torch.export.Dim("length", min=3, max=64)
    step = relax_disc.compile(
        model,
        optimizer,
        (torch.zeros(4, 9, dtype=torch.int64),),
        dynamic_shapes=({0: BATCH, 1: length},),
    )
    before = _state(step)
    with pytest.raises(
        ShapeRangeError, match=r"length=40.*length = 40 rows of positions.weight, which has 32"
    ) as caught:
        step(torch.randint(0, 50, (4, 40)))
    assert "test_index_ranges.py" in str(caught.value)
    assert all(map(torch.equal, before, _state(step)))
    for count in (32, 9):
        ids = torch.randint(0, 50, (4, count))
        loss = copy.deepcopy(model)(ids).detach()
        torch.testing.assert_close(step(ids), loss, rtol=1e-5, atol=1e-6)


def test_nothing_is_checked_where_sizes_prove_it():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(64, 4)
            self.buckets = nn.Embedding(9, 4)

        def forward(self, x):
            place = torch.arange(x.shape[0])
            near = (place[:, None] - place[None, :]).clamp(-4, 4) + 4
            best = x.argmax(1).remainder(9) + (x > 0).long().sum(1) * 0
            pairs = self.buckets(near).mean((0, 2))
            return (self.table(place) * x * pairs[:, None] + self.buckets(best % 9)).pow(2).mean()

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = relax_disc.compile(model, optimizer, (torch.randn(6, 4),), dynamic_shapes=({0: BATCH},))
    assert not step._captured.index_checks and not step._captured.size_checks
    assert not any("index_outside" in name for name in step.session.kernel_names)
    x = torch.randn(64, 4)
    torch.testing.assert_close(step(x), copy.deepcopy(model)(x).detach(), rtol=1, atol=10)


def test_columns_of_a_batch_tensor_have_ranges_of_their_own():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.small, self.large = nn.Embedding(3, 4), nn.Embedding(900, 4)

        def forward(self, ids):
            first, *_ = ids.unbind(1)
            return (self.small(first) * self.large(ids[:, 1:3] // 2 - 1).sum(1)).pow(2).mean()

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    good = torch.tensor([[2, 1801, 2, -5], [0, 2, 1801, 10**9]])
    step = relax_disc.compile(model, optimizer, (good,), dynamic_shapes=({0: BATCH},))
    assert not any("index_outside" in name for name in step.session.kernel_names)
    loss = copy.deepcopy(model)(good).detach()
    torch.testing.assert_close(step(good), loss, rtol=1e-5, atol=1e-6)
    for row, column, bad in ((1, 0, 3), (0, 1, 1802), (0, 2, 1)):
        ids = good.clone()
        ids[row, column] = bad
        with pytest.raises(IndexRangeError, match=rf"is {bad}; ids must be in"):
            step(ids)


def test_computed_index_of_a_forward_pass_alone():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(5, 4))
            self.register_buffer("count", torch.zeros(4))

        def forward(self, x, offset):
            found = self.table[x.argmax(1) + offset.cumsum(0)]
            self.count.add_(found.detach().sum(0))
            return {"rows": found, "twice": found * 2}

    model = Model()
    x, offset = torch.randn(6, 4), torch.zeros(6, dtype=torch.int64)
    shapes = ({0: BATCH}, {0: BATCH})
    function = relax_disc.compile_forward(model, (x, offset), dynamic_shapes=shapes)
    eager = copy.deepcopy(model)(x, offset)
    found = function(x, offset)
    assert found.keys() == eager.keys()
    torch.testing.assert_close(found["twice"], eager["twice"])
    before = model.count.clone()
    offset[2] = 10
    with pytest.raises(IndexRangeError, match=r"indices must be in -5 \.\. 4"):
        function(x, offset)
    assert torch.equal(before, model.count)


@pytest.mark.slow
def test_computed_index_while_gradients_are_summed():
    step = _compiled(True)
    good = _batch(4)
    step(*good, update=False)
    sums = [p.grad.clone() for p in step.model.parameters()]
    bad = _batch(4)
    bad[1][0, 0] = 9
    before = _state(step)
    for update in (False, True):
        with pytest.raises(IndexRangeError, match=r"aten\.gather"):
            step(*bad, update=update)
        assert all(map(torch.equal, before, _state(step)))
        assert all(map(torch.equal, sums, [p.grad for p in step.model.parameters()]))
    step(*good)


NORMS = {
    "batch": (nn.BatchNorm1d(4), (1, 4)),
    "batch2d": (nn.BatchNorm2d(4), (1, 4, 1, 1)),
    "instance": (nn.InstanceNorm1d(4), (3, 4, 1)),
    "group": (nn.GroupNorm(4, 4), (1, 4, 1)),
}


@pytest.mark.parametrize("name", NORMS)
def test_normalization_of_one_value_is_refused_as_in_eager(name):
    norm, bad = copy.deepcopy(NORMS[name][0]), NORMS[name][1]
    model = nn.Sequential(nn.Conv1d(4, 4, 1) if len(bad) == 3 else nn.Identity(), norm)
    if len(bad) != 3:
        model[0] = nn.Linear(4, 4) if len(bad) == 2 else nn.Conv2d(4, 4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    length = torch.export.Dim("length", min=1, max=9)
    dims = {0: BATCH} if len(bad) == 2 else {0: BATCH, len(bad) - 1: length}
    good = torch.randn(6, *bad[1:-1], 5 if len(bad) > 2 else 4)
    step = relax_disc.compile(
        model, optimizer, (good,), dynamic_shapes=(dims,), loss_fn=lambda m, x: m(x).pow(2).mean()
    )
    step.check_finite = True
    with pytest.raises(ValueError, match="Expected more than 1") as eager:
        model(torch.randn(bad))
    before = _state(step)
    with pytest.raises(ShapeRangeError) as caught:
        step(torch.randn(bad))
    assert str(eager.value) in str(caught.value)
    assert all(map(torch.equal, before, _state(step)))
    step(good)


@pytest.mark.parametrize("update", [True, False])
def test_check_finite_looks_at_buffers_and_stops_before_they_are_written(update):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.norm = nn.BatchNorm1d(4)
            self.register_buffer("queue", torch.zeros(7, 4))
            self.register_buffer("worst", torch.zeros(()))

        def forward(self, x, y):
            h = self.norm(self.inner(x))
            self.queue.copy_(torch.cat([h[:1].detach(), self.queue[:-1]]))
            self.worst.copy_(y.log().mean())
            return h.pow(2).mean()

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    good = torch.randn(6, 4), torch.rand(6) + 1
    step = relax_disc.compile(model, optimizer, good, dynamic_shapes=({0: BATCH}, {0: BATCH}))
    step(*good, update=update)
    step.check_finite = True
    before = _state(step)
    with pytest.raises(NonFiniteLossError, match="buffer worst is nan"):
        step(good[0], -good[1], update=update)
    assert all(map(torch.equal, before, _state(step)))
    with pytest.raises(NonFiniteLossError, match="loss of this batch is nan"):
        step(good[0] * float("nan"), good[1], update=update)
    assert all(map(torch.equal, before, _state(step)))
    twin = copy.deepcopy(model)
    loss = twin(*good).detach()
    torch.testing.assert_close(step(*good, update=update), loss, rtol=1e-5, atol=1e-6)
    for name, buffer in twin.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer, rtol=1e-5, atol=1e-6)


def test_position_of_an_extremum_is_inside_the_axis_whatever_the_data():
    model = nn.Linear(4, 3)

    def loss_fn(model, x):
        rows = model.weight.T
        return (rows[x.argmax(1)] + rows[x.max(1).indices] + rows[x.argmin(1)]).pow(2).mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = relax_disc.compile(
        model, optimizer, (torch.randn(3, 4),), dynamic_shapes=({0: BATCH},), loss_fn=loss_fn
    )
    for bad in (float("inf"), float("-inf"), float("nan")):
        x = torch.randn(4, 4)
        x[2] = bad
        if bad == bad:  # of NaN another position is taken than in eager, of the same axis
            torch.testing.assert_close(step(x), loss_fn(model, x).detach())
        assert step(x) < 4 * 3**2 * model.weight.detach().abs().max() ** 2


class _Messages(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 64)

    def forward(self, x, edges):
        sent = self.inner(x)[edges[0]]
        rows = edges[1] + sent.detach().argmax(1) * 0
        target = rows[:, None].expand(-1, 64)
        return torch.zeros(x.shape[0], 64).scatter_add(0, target, sent).pow(2).mean()


def test_an_index_of_rows_is_not_copied_for_each_of_their_columns():
    torch.manual_seed(0)
    model = _Messages()
    other = copy.deepcopy(model)
    nodes, edges = torch.export.Dim("nodes", max=64), torch.export.Dim("edges", max=4096)
    x, pairs = torch.randn(10, 3), torch.randint(0, 10, (2, 1000))
    step = relax_disc.compile(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        (x, pairs),
        dynamic_shapes=({0: nodes}, {1: edges}),
    )
    loss = other(x, pairs)
    loss.backward()
    torch.testing.assert_close(step(x, pairs), loss.detach())
    expected = other.inner.weight - 0.1 * other.inner.weight.grad
    torch.testing.assert_close(model.inner.weight, expected)
    assert step.memory_report().activation_peak_bytes < 2 * 1000 * 64 * 4  # of indices as many
    with pytest.raises(IndexRangeError, match=r"aten\.scatter_add"):
        step(x, pairs + torch.tensor([[0], [1]]))
