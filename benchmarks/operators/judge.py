"""Compile cases, train them for a step at each size, compare with eager PyTorch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

import relax_disc
from benchmarks.operators.cases import Case, weighed
from relax_disc.errors import RelaxDiscError

RIGHT, STATIC, RANDOM, REFUSED, WRONG, CRASH = OUTCOMES = (
    "right",
    "right, fixed size",
    "random",
    "refused",
    "wrong",
    "crash",
)
NO_SAMPLE = "no sample"
_RELATIVE, _ABSOLUTE = 1e-4, 1e-5


def judge(case: Case) -> tuple[str, str]:
    """Compile a case and train it at each of its sizes; return the outcome and its reason."""
    model = Trained(case.module)
    shapes = tuple(
        {0: Dim("n", min=2, max=64)} if moving and len(case.batches) > 1 else None
        for moving in case.dynamic
    )
    start = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = relax_disc.compile(model, optimizer, case.batches[0], dynamic_shapes={"batch": shapes})
    for batch in case.batches:
        with torch.no_grad():
            for mine, first in zip(_state(model), _state(start), strict=True):
                mine.copy_(first)
        results = pytree.tree_leaves(step(*batch))[1:]
        if case.is_random:
            continue
        plain = _eager(start, batch, torch.float32)
        assert plain is not None
        wide = _eager(start, batch, torch.float64)
        if reason := _difference([*results, *_state(model)], plain, wide):
            return WRONG, reason
    return (RANDOM if case.is_random else RIGHT if len(case.batches) > 1 else STATIC), ""


class Trained(nn.Module):
    """A case's module with a loss of its results."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *batch: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the loss and the results."""
        results = self.module(*batch)
        return weighed(results), results


def _state(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _eager(start: Trained, batch: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor] | None:
    """Results, parameters and buffers after one step; None where float64 fails."""
    model = copy.deepcopy(start)
    try:
        model.to(dtype)
        loss, results = model(*(x.to(dtype) if x.is_floating_point() else x for x in batch))
        loss.backward()
    except Exception:
        if dtype == torch.float32:
            raise
        return None
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= p.grad
    return [*(r.detach() for r in results), *_state(model)]


def _difference(mine: list[Any], plain: list[Tensor], wide: list[Tensor] | None) -> str:
    """Say what differs by more than rounding; eager's own rounding, times 8, is allowed."""
    for k, (x, y) in enumerate(zip(mine, plain, strict=True)):
        x = x.detach()
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"result {k} is {x.dtype}{tuple(x.shape)}, not {y.dtype}{tuple(y.shape)}"
        if not y.numel():
            continue
        if not y.is_floating_point():
            if not torch.equal(x, y):
                return f"result {k} differs at {int((x != y).sum())} of {y.numel()} places"
            continue
        a, b = x.double(), y.detach().double()
        if not torch.equal(a.isfinite(), b.isfinite()) or not torch.equal(a.isnan(), b.isnan()):
            return f"result {k} is not finite where eager's is, or the other way round"
        finite = b.isfinite()
        a, b = a[finite], b[finite]
        bound = _ABSOLUTE + _RELATIVE * b.abs().max() if b.numel() else torch.tensor(0.0)
        if wide is not None and wide[k].shape == y.shape and b.numel():
            rounding = (wide[k].detach().double()[finite] - b).abs().max()
            if rounding.isfinite() and rounding < 0.1 * (1 + b.abs().max()):
                bound = bound + 8 * rounding
        if b.numel() and (a - b).abs().max() > bound:
            return f"result {k} differs by {float((a - b).abs().max()):.3g} of {float(b.abs().max()):.3g}"
    return ""


def outcome_of(error: BaseException) -> tuple[str, str]:
    """Tell a refusal, which is an error of ours, from a crash."""
    kind = type(error).__name__
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = f"{kind}: {' '.join(lines[:3])[:300]}"
    return (REFUSED if isinstance(error, RelaxDiscError) else CRASH), text


def judge_one(case: Case) -> tuple[str, str]:
    """Judge one case; nothing escapes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return judge(case)
        except Exception as error:
            return outcome_of(error)


def worst(found: Sequence[tuple[str, str, str]]) -> tuple[str, str, str]:
    """Return the worst of (outcome, reason, sample)."""
    return max(found, key=lambda each: OUTCOMES.index(each[0]))
