"""Loops over pieces of a dynamic length, of which the last may be shorter: chunked losses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional

import relax_disc
from relax_disc.errors import ShapeRangeError
from tests.tiers import every
from tests.training.beside_eager import assert_trains_as_eager

LONGEST, WORDS = 41, 23


class Tagger(nn.Module):
    """``[B, T]`` to features ``[B, T, 8]``, and these to scores of words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.mix = nn.Linear(8, 8)
        self.out = nn.Linear(8, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.embedding(x)).tanh()

    def loss(self, hidden: Tensor, y: Tensor) -> Tensor:
        scores = self.out(hidden).reshape(-1, WORDS)
        return functional.cross_entropy(scores, y.reshape(-1), reduction="sum")


def chunks(model: Tagger, x: Tensor, y: Tensor) -> Tensor:
    total = x.new_zeros((), dtype=torch.float32)
    for hidden, label in zip(model(x).chunk(5, dim=1), y.chunk(5, dim=1), strict=True):
        total = total + model.loss(hidden, label)
    return total / y.numel()


def listed_chunks(model: Tagger, x: Tensor, y: Tensor) -> Tensor:
    """As torchtune's CEWithChunkedOutputLoss."""
    scores = [model.out(piece) for piece in model(x).chunk(4, dim=1)]
    labels = [label.reshape(-1) for label in y.chunk(4, dim=1)]
    scores = [piece.reshape(-1, WORDS) for piece in scores]
    total = x.new_zeros((), dtype=torch.float32)
    for piece, label in zip(scores, labels, strict=True):
        total += functional.cross_entropy(piece, label, reduction="sum", ignore_index=3)
    return total / (y != 3).sum().clamp(min=1)


def split_rows(model: Tagger, x: Tensor, y: Tensor) -> Tensor:
    """As litgpt's chunked_cross_entropy: pieces of positions of all rows."""
    scores = model.out(model(x)).reshape(-1, WORDS)
    losses = [
        functional.cross_entropy(piece, label, reduction="none")
        for piece, label in zip(scores.split(16), y.reshape(-1).split(16), strict=True)
    ]
    return torch.cat(losses).sum() / max(1, y.numel())


def ranges(model: Tagger, x: Tensor, y: Tensor) -> Tensor:
    hidden, total = model(x), torch.zeros(())
    for first in range(0, hidden.shape[1], 6):
        total = total + model.loss(hidden[:, first : first + 6], y[:, first : first + 6])
    return total / y.numel()


def ranges_with_ends(model: Tagger, x: Tensor, y: Tensor) -> Tensor:
    hidden, length, total = model(x), x.shape[1], torch.zeros(())
    for first in range(0, length, 6):
        last = min(first + 6, length)
        total = total + model.loss(hidden[:, first:last], y[:, first:last]) / (last - first)
    return total / y.shape[0]


def numbered(model: Tagger, x: Tensor, y: Tensor) -> Tensor:
    hidden, total = model(x), torch.zeros(())
    for k in range((x.shape[1] + 4) // 5):
        part = slice(5 * k, 5 * (k + 1))
        total = total + model.loss(hidden[:, 5 * k : 5 * (k + 1)], y[:, part])
    return total / y.numel()


def joined(model: Tagger, x: Tensor, y: Tensor) -> Tensor:
    hidden, parts = model(x), []
    for first in range(0, hidden.shape[1], 4):
        parts.append(hidden[:, first : first + 4].softmax(1))  # what another piece may not touch
    return model.loss(torch.cat(parts, 1), y) / y.numel()


def carried(model: Tagger, x: Tensor, y: Tensor) -> Tensor:
    """A memory of the pieces before, as a Transformer-XL has."""
    hidden = model(x)
    memory, total = hidden.new_zeros(hidden.shape[0], 8), 0.0
    for k, piece in enumerate(hidden.split(7, dim=1)):
        piece = piece + memory.unsqueeze(1) * 0.5**k
        memory = torch.tanh(model.mix(piece.mean(1)) + memory)
        total = total + piece.square().mean()
    return total + memory.square().sum() + model.out(memory).mean()


def growing(model: Tagger, x: Tensor, y: Tensor) -> Tensor:
    """Weights by a size that is no multiple of the step's number."""
    hidden, total = model(x), torch.zeros(())
    for k in range(x.shape[1]):
        weight = min(k // 2, 3) + max(3 - k * k, 1)
        total = total + model.loss(hidden[:, k], y[:, k]) * weight
    return total / y.numel()


def autocast(model: Tagger, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        total = torch.zeros(())
        for hidden, label in zip(model(x).split(6, dim=1), y.split(6, dim=1), strict=True):
            scores = model.out(hidden).float().flatten(0, 1)
            total = total + functional.cross_entropy(scores, label.flatten(), reduction="sum")
    return total / y.numel()


def apart(model: Tagger, x: Tensor, y: Tensor) -> Tensor:
    """Means of pieces, and the largest of them by name."""
    means = torch.stack([piece.mean(1) for piece in model(x).split(9, 1)], axis=0)  # pyright: ignore
    return functional.cross_entropy(model.out(means.max(0).values), y[:, 0])


LOSSES = (
    chunks,
    split_rows,
    ranges,
    listed_chunks,
    carried,
    ranges_with_ends,
    joined,
    growing,
    apart,
)


def _optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def _batch(batch: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, WORDS, (batch, length)), torch.randint(0, WORDS, (batch, length))


def _compiled(model: Tagger, loss: Callable[..., Tensor], batch: int | None = None) -> Any:
    shape = {1: Dim("length", min=1, max=LONGEST)}
    if batch is None:
        shape[0] = Dim("batch", min=1, max=8)
    return relax_disc.compile(
        model,
        _optimizer(model.parameters()),
        _batch(batch or 3, 13),
        dynamic_shapes=(shape, shape),
        loss_fn=loss,
    )


@pytest.mark.parametrize("loss", every(2, LOSSES))
def test_pieces_train_as_eager_at_every_length(loss: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    step = _compiled(Tagger(), loss)
    sizes = [(2, 13), (8, LONGEST), (1, 1), *((1 + n % 3, n) for n in (*range(1, 22), 36, 40))]
    batches = ((size, _batch(*size)) for size in sizes)
    assert_trains_as_eager(step, _optimizer, batches, loss)


@pytest.mark.parametrize("loss", [chunks, ranges])
def test_pieces_of_one_row(loss: Callable[..., Tensor]) -> None:
    """With a batch that is a number nothing but the length tells how much a step takes."""
    torch.manual_seed(0)
    model = Tagger()
    eager = copy.deepcopy(model)
    step = _compiled(model, loss, batch=1)
    for length in (1, 5, LONGEST):
        x, y = _batch(1, length)
        torch.testing.assert_close(step(x, y), loss(eager, x, y).detach())
        eager.load_state_dict(model.state_dict())
        assert step.memory_report().peak_bytes == step.plan(length=length).peak_bytes


def test_scores_of_one_piece_are_held_at_a_time() -> None:
    """The plan counts the scores of a piece, neither those of all nor the weights many times."""

    class Wide(Tagger):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(8, 4096)

        def loss(self, hidden: Tensor, y: Tensor) -> Tensor:
            scores = self.out(hidden).flatten(0, 1)
            return functional.cross_entropy(scores, y.flatten(), reduction="sum")

    step = _compiled(Wide(), chunks)
    weights = sum(p.nbytes for p in step.model.parameters())
    plan = step.plan(batch=8, length=40)
    piece = 8 * (40 // 5) * 4096 * 4
    assert plan.activation_peak_bytes < 2 * weights + 5 * piece
    x, y = _batch(8, 40)
    step(x, y)
    assert step.memory_report().peak_bytes == plan.peak_bytes


def squares(model: Tagger, x: Tensor, y: Tensor) -> Tensor:
    """What a piece takes grows with the square of the length."""
    total = model.out(model(x)).mean() + 0 * y.sum()
    for piece in model(x).chunk(3, 0):
        total = total + (piece @ piece.transpose(1, 2)).softmax(1).square().mean()
    return total


@pytest.mark.parametrize("loss", [squares, ranges])
def test_no_step_takes_more_than_is_planned(loss: Callable[..., Tensor]) -> None:
    """Lengths begin above those at which most is measured."""
    torch.manual_seed(0)
    shape = {0: Dim("batch", min=1, max=16), 1: Dim("length", min=5, max=256)}
    model = Tagger()
    optimizer, options = _optimizer(model.parameters()), {"dynamic_shapes": (shape, shape)}
    step: Any = relax_disc.compile(model, optimizer, _batch(3, 13), loss_fn=loss, **options)
    for batch, length in ((1, 5), (3, 6), (16, 9), (3, 100), (16, 129), (16, 256), (1, 256)):
        step(*_batch(batch, length))
        planned = step.plan(batch=batch, length=length).peak_bytes
        assert step.memory_report().peak_bytes == planned


def test_a_last_piece_that_may_not_be_there_is_refused_with_the_reason() -> None:
    def loss(model: Tagger, x: Tensor, y: Tensor) -> Tensor:
        hidden, total = model(x), torch.zeros(())
        for first in range(0, x.shape[1] - 1, 4):
            total = total + model.loss(hidden[:, first : first + 4], y[:, first : first + 4])
        return total

    why = "length becomes the number 13.*its last step differs from the others, and may not be th"
    with pytest.raises(ShapeRangeError, match=why):
        _compiled(Tagger(), loss)


def test_pieces_under_autocast() -> None:
    torch.manual_seed(0)
    model = Tagger()
    eager = copy.deepcopy(model)
    step, optimizer = _compiled(model, autocast), _optimizer(eager.parameters())
    for size in ((3, 13), (1, 1), (2, 6), (8, LONGEST)):
        x, y = _batch(*size)
        loss, expected = step(x, y), autocast(eager, x, y)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-2, atol=1e-2)
        for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=2e-3)
        eager.load_state_dict(model.state_dict())
