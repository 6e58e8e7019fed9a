"""Calls whose arguments PyTorch's tracing takes otherwise than eager PyTorch does."""

from __future__ import annotations

import copy
import numbers
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional

import relax_disc

_SIZES = (9, 2, 16, 6)
_Loss = Callable[[Any, Tensor], Tensor]


def _pairs(x: Tensor) -> Any:
    """Pick pairs of rows of one sign; of two rows in which they differ there is none."""
    kinds = x[:, 0] > 0
    return torch.where((kinds[:, None] == kinds[None]) & ~torch.eye(len(x), dtype=torch.bool))


def _mined(model: Any, x: Tensor) -> Tensor:
    """Pick of what was picked, without gradients, as miners of metric learning do."""
    rows = model(x)
    with torch.no_grad():
        first, second = _pairs(x)
        near = (rows[first] * rows[second]).sum(1) < 0.8
        first, second = first[near], second[near]
    return (rows[first] * rows[second]).square().sum()


_EMPTY = torch.zeros(0, 1)


def _lovasz(model: Any, x: Tensor) -> Tensor:
    """As Lovasz losses with an ignored label: of what is picked, each less the one before."""
    picked = model(x)[:, 0][x[:, 0] > 0]
    grown = (1 - picked.detach().cumsum(0)).abs()
    grown[1 : len(grown)] = grown[1 : len(grown)] - grown[:-1]
    return (picked * grown).sum()


def _filled(model: Any, x: Tensor) -> Tensor:
    """As DETR's maps of masks: what einsum gives is written in place."""
    rows = model(x).view(len(x), 1, 3, 1)
    scores = torch.einsum("bqnc,bnch->bqnh", rows[..., None, :].flatten(2, 3), rows.transpose(1, 2))
    scores.masked_fill_((x > 0.5)[:, None, :, None], -1.0)
    return scores.flatten(1).softmax(-1).square().sum()


def _overwritten(model: Any, x: Tensor) -> Tensor:
    made = torch.zeros(len(x), 3)
    made[:] = model(x)
    made[...] = made * 2
    return made.clone().square().sum() + made.copy_(model(x)[:, :1]).sum()


def _stripes(x: Tensor, step: int) -> Tensor:
    made = torch.full((len(x), len(x)), 1 / len(x))
    made.view(-1)[::step] = 0.1
    return made


def _is_number(model: Any, x: Tensor) -> Tensor:
    kinds = int | float, (str, (int,)), numbers.Integral, object
    known = [isinstance(x.shape[0], kind) for kind in kinds]
    known += [isinstance(1 / x.shape[0], float), not isinstance(x.shape[0], float | str)]
    return model(x).mean() * sum(known)


def _either(x: Tensor) -> Tensor:
    """As OpenNMT's masks of a decoder: truths are added."""
    both = (x > 0.5) + (x < -0.5)
    both += x > 3
    return both


def _added_rows(model: Any, x: Tensor) -> Tensor:
    """As DINOv2 drops the paths of some rows, and weighs the others by how many there are."""
    rows = len(x) // 2 + 1
    places = torch.arange(len(x))[:rows]
    made = torch.index_add(x, 0, places, model(x[:rows]), alpha=len(x) / rows)
    return made.index_add_(0, places, model(x[:rows]), alpha=rows).square().sum()


def _written_rows(model: Any, x: Tensor) -> Tensor:
    """As yolov5's targets: what was picked is taken apart, and each part written in place."""
    first, second = (x[x[:, 0] > 0] * 3).long()[:, :2].T
    first.clamp_(0, 2)
    second.clamp_(0, 1)
    return model(x[:2]).square()[second, first].sum() + model(x).sum()


def _attended(model: Any, x: Tensor) -> Tensor:
    """Rows without padding, of which each sees those of its group before it."""
    picked = x[:, 0] > 0
    rows, group = model(x)[picked][None, None], (x[:, 1] > 0)[picked]
    whole = functional.scaled_dot_product_attention(rows, rows, rows, is_causal=True)
    mask = (group[:, None] == group[None]).tril()[None, None]
    apart = functional.scaled_dot_product_attention(rows, rows * 2, rows, mask, scale=0.3)
    return whole.square().sum() + apart.sum()


LOSSES: dict[str, _Loss] = {
    "attention of picked rows": _attended,
    "parts of picked rows are written": _written_rows,
    "added truths": lambda m, x: (
        (m(x) * _either(x)).sum()
        + (m(x) * torch.gt(_either(x), 0) * torch.all(_either(x), dim=1, keepdim=True)).sum()
    ),
    "rows times a number of sizes": _added_rows,
    "extremes by Python's own": lambda m, x: max(m(x)[:, 0]) - 2 * min(m(x)[:, 1]),
    "made into another tensor": lambda m, x: (
        m(x) * torch.arange(3, out=torch.empty(3))
        - m.weight @ torch.eye(*m.weight.shape, out=torch.empty_like(m.weight))[0]
    ).sum(),
    "isinstance of sizes": _is_number,
    "where of bytes": lambda m, x: torch.where((x > 0).byte(), m(x), x).square().sum(),
    "a method's where of bytes": lambda m, x: m(x).where((x > 0).byte(), x * 2).sum(),
    "picked by bytes": lambda m, x: m(x)[(x > 0).byte()].square().sum(),
    "compared truths": lambda m, x: (
        m(x) * ((x > 0) == (x.flip(0) > 0)) + m(x) * ((x > 0) != (x > 1)) * ((x > 0) >= (x > 1))
    ).sum(),
    "a number and a tensor as bounds": lambda m, x: (
        torch.clamp(m(x), 0, x[0, 0].abs())  # pyright: ignore
        + m(x).clip(x[0, 0].abs() - 3, 1)
    ).sum(),
    "extremes of truths": lambda m, x: (
        m(x) * torch.max(x < 0, x > 1) + m(x) * torch.minimum(x < 1, x > -1)
    ).sum(),
    "greatest truth of a row": lambda m, x: (m(x) * (x < 0).amax(1, keepdim=True)).sum(),
    "least truth of all": lambda m, x: (m(x) * (x < 3).min()).sum(),
    "every n-th is written": lambda m, x: (m(x) @ m(x).t() * _stripes(x, len(x))).mean(),
    "a diagonal is written": lambda m, x: (m(x) @ m(x).t() * _stripes(x, len(x) + 1)).mean(),
    "a diagonal is read": lambda m, x: (m(x) @ m(x).t()).reshape(-1)[:: len(x) + 1].mean(),
    "logsumexp of picked rows": lambda m, x: torch.logsumexp(m(x)[_pairs(x)[0]], 1).sum(),
    "logsumexp that keeps axes": lambda m, x: (
        (m(x)[_pairs(x)[0]] @ m(x).t()).logsumexp(-1, keepdim=True).sum()
    ),
    "logsumexp of infinite rows": lambda m, x: torch.logsumexp(
        m(x)[_pairs(x)[0]].masked_fill(torch.tensor([True, False, False]), -torch.inf), 1
    ).sum(),
    "mined": _mined,
    "differences of what was picked": _lovasz,
    "a whole tensor is written": lambda m, x: torch.zeros_like(x).copy_(m(x)).square().sum(),
    "a whole tensor is written by an index": _overwritten,
    "a product that is written in place": _filled,
    "rows that are not there": lambda m, x: (
        torch.cat((_EMPTY.expand(-1, 3), m(x))).square().sum()
        + m(_EMPTY[None].expand(len(x), -1, 3)).sum()
        + m(x).square().sum()
    ),
    "the greatest of picked rows and others": lambda m, x: (
        torch.cat([m(x)[_pairs(x)[0]], m(x)]).amax(0).square().sum()
    ),
}


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8", "ignore:where received a")
@pytest.mark.parametrize("what", LOSSES)
def test_the_call_is_as_in_eager_pytorch(what: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    eager = copy.deepcopy(model)
    dims = ({0: Dim("rows", min=2, max=32)},)
    options: Any = {"dynamic_shapes": dims, "loss_fn": LOSSES[what]}
    step = relax_disc.compile(model, None, (torch.randn(5, 3),), **options)
    for rows in _SIZES:
        x = torch.randn(rows, 3)
        x[0, 0], x[1, 0] = 0.5, -0.5
        model.zero_grad()
        loss = step(x, update=False)
        expected = LOSSES[what](eager, x)
        gradients = torch.autograd.grad(expected, list(eager.parameters()))
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
        for ours, theirs in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(ours.grad, theirs, rtol=1e-4, atol=1e-6)


class _Strided(nn.Module):
    """Of 4 x 4 pixels the second layer makes one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.first(x)
        keys = self.second(queries)
        scores = queries.flatten(2).transpose(1, 2) @ keys.flatten(2)
        return scores.softmax(-1).square().mean() + keys.square().mean()


def test_a_size_that_is_1_in_the_example_alone_stays_a_size() -> None:
    torch.manual_seed(0)
    model = _Strided()
    height, width = (2 * Dim(name, min=1, max=8) for name in ("h", "w"))
    dims = ({2: height, 3: width},)
    step = relax_disc.compile(model, None, (torch.randn(2, 3, 4, 4),), dynamic_shapes=dims)
    for size in ((4, 4), (2, 8), (8, 4), (2, 2), (16, 12)):
        x = torch.randn(2, 3, *size)
        torch.testing.assert_close(step(x, update=False), model(x).detach())


def test_a_multiple_of_a_dim_that_is_1_in_the_example() -> None:
    def loss(model: nn.Module, pictures: Tensor, mask: Tensor) -> Tensor:
        rows = model(pictures).flatten(1, 2).mean(-1)
        return rows.masked_fill(~mask, 0).square().mean()

    def batch(rows: int, count: int) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, count, 4, 8), torch.rand(rows, 4 * count) > 0.2

    torch.manual_seed(0)
    model = nn.Linear(8, 5)
    rows, count = Dim("rows", min=1, max=9), Dim("count", min=1, max=5)
    dims = ({0: rows, 1: count}, {0: rows, 1: 4 * count})
    options: Any = {"dynamic_shapes": dims, "loss_fn": loss}
    step = relax_disc.compile(model, None, batch(2, 1), **options)
    for size in ((2, 1), (3, 5), (1, 2), (1, 1)):
        given = batch(*size)
        torch.testing.assert_close(step(*given, update=False), loss(model, *given).detach())
