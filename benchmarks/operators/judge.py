"""Compile cases, train them for a step at each size, compare with eager PyTorch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

import relax_disc
from benchmarks.operators.cases import Case, weighed
from relax_disc.errors import RelaxDiscError, ShapeRangeError

RIGHT, STATIC, RANDOM, REFUSED, WRONG, CRASH = OUTCOMES = (
    "right",
    "right, fixed size",
    "random",
    "refused",
    "wrong",
    "crash",
)
NO_SAMPLE = "no sample"
_ROOT = Path(__file__).parents[2]
_RELATIVE, _ABSOLUTE = 1e-4, 1e-5
_SAMPLES = 12


def judge(case: Case) -> tuple[str, str]:
    """Compile a case and train it at each of its sizes; return the outcome and its reason."""
    model = Trained(case.module)
    sizes = [
        x.shape[case.axis]
        for x, moving in zip(case.batches[0], case.dynamic, strict=True)
        if moving
    ]
    dim = Dim("n", min=sizes[0], max=4 * sizes[0]) if sizes else None
    shapes = tuple({case.axis: dim} if moving else None for moving in case.dynamic)
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
    return (RANDOM if case.is_random else STATIC if case.is_static else RIGHT), ""


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
        results = [r.detach().clone() for r in results]
    except Exception:
        if dtype == torch.float32:
            raise
        return None
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= p.grad
    return [*results, *_state(model)]


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
        error = float((a - b).abs().max()) if b.numel() else 0.0
        if error > bound:
            return f"result {k} differs by {error:.3g} of {float(b.abs().max()):.3g}"
    return ""


def outcome_of(error: BaseException) -> tuple[str, str]:
    """Tell a refusal, which is an error of ours, from a crash."""
    kind = type(error).__name__
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = f"{kind}: {' '.join(lines[:3])[:300]}".replace(f"{_ROOT}/", "")
    return (REFUSED if isinstance(error, RelaxDiscError) else CRASH), text


def judge_samples(samples: Iterable[Iterator[Case]]) -> tuple[str, str, str]:
    """Judge an entry: (outcome, reason, sample), the worst of its first two samples that vary.

    Where tracing says that an axis cannot vary, another one is tried; a sample with none counts
    only if there is no other.
    """
    varied: list[tuple[str, str, str]] = []
    fixed: list[tuple[str, str, str]] = []
    for cases in itertools.islice(samples, _SAMPLES):
        for case in cases:
            try:
                found = (*judge(case), case.name)
            except ShapeRangeError as error:
                found = (*outcome_of(error), case.name)
                if not case.is_static:
                    continue
            except Exception as error:
                found = (*outcome_of(error), case.name)
            (fixed if case.is_static else varied).append(found)
            break
        if len(varied) == 2 or (len(fixed) >= 6 and not varied):
            break
    found = varied or fixed[:2]
    return max(found, key=lambda each: OUTCOMES.index(each[0])) if found else (NO_SAMPLE, "", "")
