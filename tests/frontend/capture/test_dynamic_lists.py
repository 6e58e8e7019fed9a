"""Lists that a range over a dynamic length makes: one build trains as eager PyTorch."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional

import relax_disc
from relax_disc.errors import UnsupportedOperatorError
from relax_disc.frontend.capture.loops.sequences import DynamicList, Rows
from relax_disc.frontend.capture.replaced.chances import Chances
from relax_disc.frontend.capture.replaced.export_mode import ExportMode
from relax_disc.frontend.capture.sizes.squeezes import Squeezes
from tests.frontend.capture.squares import assert_trains_as_eager, compiled

_SHAPES = ((3, 12), (1, 4), (2, 5), (1, 31), (4, 16))


class Pooled(nn.Module):
    """Attention of each second position to all, with embeddings of distances from lists."""

    def __init__(self) -> None:
        super().__init__()
        self.distances = nn.Embedding(128, 1)

    def pooled(self, positions: list[int]) -> list[int]:
        return [-1] + positions[1:-1][::2]  # noqa: RUF005

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        positions = list(range(length))
        pooled = self.pooled(positions)
        first = pooled[0] - positions[0] + 2 * len(pooled)
        last = pooled[0] - positions[-1]
        table = self.distances(torch.arange(first, last - 1, -1) + 64)[:, 0]
        scores = table.expand(len(pooled), table.shape[0])
        scores = scores.reshape(table.shape[0], len(pooled))[2:].reshape(len(pooled), -1)
        weights = scores[:, :length] + torch.tensor(pooled)[:, None] / 64
        return weights.softmax(1) @ x


def test_positions_from_lists_train_at_every_length() -> None:
    torch.manual_seed(0)
    assert_trains_as_eager(Pooled(), 5, _SHAPES, min=4, max=31)


class Everywhere(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x * self.scale * list(range(x.shape[1]))[9])


def test_an_element_that_is_not_always_there_is_refused() -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"test_dynamic_lists.py:\d+: .*\[9\]"):
        compiled(Everywhere(), 5, min=4, max=31)


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_a_list_is_sliced_as_pythons(count: int) -> None:
    plain = [7, *range(3, 3 + count), 8]
    runs: list[Any] = [(1, lambda _: 7), (count, lambda k: 3 + k), (1, lambda _: 8)]
    bounds = (None, 0, 1, 2, 3, -1, -2, -3)
    for start, stop, step in itertools.product(bounds, bounds, (None, 1, 2, 3)):
        if start is not None and start < 0 and stop is not None and stop >= 0:
            continue  # refused: whether such a slice is empty depends on the length
        found = DynamicList(runs)[start:stop:step]
        assert list(found) == plain[start:stop:step]
        assert list([1] + found) == [1, *plain[start:stop:step]]  # noqa: RUF005
    for place in (0, 1, -1, -2):
        assert DynamicList(runs)[place] == plain[place]
    grown = DynamicList(runs)
    grown.append(9)
    assert grown == [*plain, 9]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_rows_of_a_tensor_are_sliced_and_joined_as_pythons(count: int) -> None:
    x = torch.arange(2.0 * count).reshape(2, count)
    plain = [torch.full((2,), 9.0), *x.unbind(1)]
    rows = DynamicList([(1, lambda _: plain[0]), (count, Rows(x, 1))])
    turned = DynamicList.of(rows)
    turned.reverse()
    for found, expected in (
        (rows, plain),
        (rows[1:], plain[1:]),
        (rows[:-1], plain[:-1]),
        (rows[::2], plain[::2]),
        (rows[1:][::-1], plain[1:][::-1]),
        (turned[:-1][::2], plain[::-1][:-1][::2]),
        ([plain[0], *rows[-1:]] + rows, [plain[0], plain[-1], *plain]),  # noqa: RUF005
    ):
        parts = DynamicList.of(found).stacked()
        assert parts is not None
        assert torch.equal(torch.cat(parts) if parts else torch.zeros(0), _stacked(expected))
    taken = DynamicList.of(rows)
    assert torch.equal(taken.pop(), plain[-1])
    assert torch.equal(taken.pop(0), plain[0])
    assert len(taken) == len(plain) - 2


def _stacked(rows: list[Tensor]) -> Tensor:
    return torch.stack(rows) if rows else torch.zeros(0)


_JOINS = (torch.stack, torch.vstack, torch.hstack, torch.cat)
_ROWS = ((), (3,), (3, 2), (3, 2, 2))
_JOINED = [x for x in itertools.product(_JOINS, _ROWS) if x != (torch.cat, ())]  # of no axis


@pytest.mark.parametrize(("join", "shape"), _JOINED)
def test_a_list_of_symbolic_length_is_joined_as_pytorch_does(join: Any, shape: Any) -> None:
    x = torch.randn(4, *shape)
    with ExportMode(Squeezes(), Chances()):
        for rows in (DynamicList([(4, Rows(x))]), DynamicList([(1, lambda _: x[0]), (3, Rows(x))])):
            assert torch.equal(join(rows), join(list(rows)))
            if join in (torch.stack, torch.cat) and shape:
                assert torch.equal(join(rows, dim=-1), join(list(rows), dim=-1))


@pytest.mark.parametrize(
    "use",
    [
        lambda rows: rows.sort(),
        lambda rows: rows.__setitem__(0, 1),
        lambda rows: 2 in rows,
        lambda rows: rows * 2,
        lambda rows: rows.insert(1, 3),
        lambda rows: rows.pop(1),
        lambda rows: rows[::-2],
        lambda rows: torch.dstack(rows),
    ],
)
def test_what_a_list_of_symbolic_length_cannot_do_is_refused(use: Any) -> None:
    rows = DynamicList([(3, Rows(torch.ones(3, 2)))])
    with pytest.raises(UnsupportedOperatorError, match=r"test_dynamic_lists.py:\d+: a list whose"):
        use(rows)


class Windows(nn.Module):
    """A layer of each window of 16 positions, in a list; all lengths in range have one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        length, windows = x.shape[1], []
        for start in range(0, length, 16):
            windows.append((start, min(length, start + 16)))
        found = [self.layer(x[:, start:end]).cumsum(1) for start, end in windows]
        return torch.cat(found, 1).square().mean()


class Pieces(nn.Module):
    """A layer of each piece, which is as long as the whole unless a number is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.piece: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        piece = length if self.piece is None else self.piece
        found = [self.layer(x[:, k : k + piece]).cumsum(1) for k in range(0, length, piece)]
        for start in range(0, length, piece):
            found.append(self.layer(x[:, start : start + piece] + start))
        return torch.cat(found, 1).square().mean()


@pytest.mark.parametrize("kind", [Windows, Pieces])
def test_a_range_of_as_many_steps_at_every_length_is_a_plain_one(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind()
    eager, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.1)
    shape = ({0: Dim("batch", min=1, max=8), 1: Dim("length", min=1, max=16)},)
    step = relax_disc.compile(model, optimizer, (torch.randn(3, 12, 4),), dynamic_shapes=shape)
    for rows, length in ((3, 12), (1, 1), (8, 16)):
        x = torch.randn(rows, length, 4)
        loss = eager(x)
        expected = torch.autograd.grad(loss, list(eager.parameters()))
        torch.testing.assert_close(step(x, update=False), loss.detach())
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        model.zero_grad()


def test_a_range_that_lengths_of_1_cut_short() -> None:
    """PyTorch takes sizes of dims to be 2 or more, and so would a range of them."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        rows, total = model(x), torch.zeros(())
        for k in range(min(x.shape[1], 2)):
            total = total + rows[:, k].square().sum() * (k + 1)
        for k in range(1, x.shape[1]):
            total = total + rows[:, k].sum() * 0.5
        return total

    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    for longest in (2, 9):
        dims = ({0: Dim("rows", min=1, max=4), 1: Dim("length", min=1, max=longest)},)
        options: Any = {"dynamic_shapes": dims, "loss_fn": loss}
        step = relax_disc.compile(model, None, (torch.randn(2, 2, 3),), **options)
        for size in ((2, 2), (1, 1), (4, longest)):
            x = torch.randn(*size, 3)
            torch.testing.assert_close(step(x, update=False), loss(model, x).detach())
