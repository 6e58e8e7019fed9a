"""Whether numbers that are added to the scores of attention can hide all keys of a row.

Beside a number such as the least of float32 scores vanish, and a row of nothing else is computed
apart.  It is proved that there is none, from what computes the mask: no element is such a number,
or each row has one that is neither such nor ``-inf``, at its own key or at the first.

Bounds are those of the finite values of an expression of :mod:`relax_disc.analysis.padding.values`.
Limits: what a caller gives and what is gathered may be any number; whole numbers do not overflow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx

from relax_disc.analysis.kernels.stages import constant
from relax_disc.analysis.padding.grid import Grid
from relax_disc.analysis.padding.values import (
    BATCH,
    KEY,
    QUERY,
    ROW,
    Elements,
    Value,
    is_readable,
    is_truth,
)

_HIDES = -1e29  # a tenth, for rounding, of what `cuda_attention_kernels.py` takes to hide a row

_MOST = 2.0**63  # indices and sizes
_EXACT = 6e4  # what no type rounds to an infinity
_MARGIN = 1.25  # of rounding


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Of what a value may be besides infinite; ``least > most``: it is nothing else."""

    least: float
    most: float
    may_be_infinite: bool = False

    @property
    def hides(self) -> bool:
        return self.least < _HIDES


_ANY = _Bounds(-math.inf, math.inf, True)
_INFINITE = _Bounds(math.inf, -math.inf, True)
_TRUTH = _Bounds(0.0, 1.0)
_NATURAL = _Bounds(0.0, _MOST)


def may_hide_rows(
    mask: Any,
    definitions: Mapping[Any, Any],
    module: tvm.IRModule,
    *,
    is_own_key_seen: bool,
    is_first_key_seen: bool,
) -> bool:
    """Whether finite numbers of a mask ``[B|1, H|1, Tq|1, Tk|1]`` may hide all keys of a row.

    Parameters
    ----------
    mask : relax.Expr
        Of numbers.
    definitions : mapping
        What each variable is bound to.
    module : tvm.IRModule
        Holds the kernels.
    is_own_key_seen, is_first_key_seen : bool
        Whether each row is sure to have the key of its own index, and the first, but for the mask.

    Returns
    -------
    bool
        False: it is proved that they do not.
    """
    if str(mask.ty.dtype) == "float16":  # of which no finite number hides
        return False
    # Merged rows are read nowhere here.
    grid = Grid(tirx.Var("batch", "int64"), [tirx.Var("length", "int64")])
    elements = Elements(definitions, (), module, grid)
    shape = list(mask.ty.shape.values)

    def bounds(key: Value) -> _Bounds:
        at = zip(shape, (BATCH, ROW, QUERY, key), strict=True)
        return _bounds(elements.value(mask, [0 if constant(n) == 1 else i for n, i in at]))

    if not bounds(KEY).hides:
        return False
    keys = [*([QUERY] if is_own_key_seen else []), *([0] if is_first_key_seen else [])]
    found = [bounds(key) for key in keys]
    return all(each.hides or each.may_be_infinite for each in found)


def _bounds(value: Value) -> _Bounds:
    if not isinstance(value, tuple):
        number = float(value)
        if number == -math.inf:
            return _INFINITE
        return _Bounds(number, number) if math.isfinite(number) else _ANY
    if is_truth(value):
        known = decided(value)
        return _TRUTH if known is None else _Bounds(float(known), float(known))
    kind, *parts = value
    if kind in ("index", "size"):
        return _NATURAL
    if kind == "choose":
        condition, *branches = parts
        known = decided(condition)
        if known is None:
            return _either(*map(_bounds, branches))
        return _bounds(branches[0 if known else 1])
    if kind == "rounded":
        return _rounded(_bounds(parts[0]))
    if kind in ("add", "sub", "mul", "min", "max"):
        return _of_two(kind, *map(_bounds, parts))
    return _ANY


def _either(a: _Bounds, b: _Bounds) -> _Bounds:
    may = a.may_be_infinite or b.may_be_infinite
    return _Bounds(min(a.least, b.least), max(a.most, b.most), may)


def _rounded(a: _Bounds) -> _Bounds:
    """Of a value in another type, which may have fewer digits or end earlier."""
    if a.least > a.most:
        return a
    may = a.may_be_infinite or a.least < -_EXACT or a.most > _EXACT
    return _Bounds(min(a.least * _MARGIN, 0.0), max(a.most * _MARGIN, 0.0), may)


def _of_two(kind: str, a: _Bounds, b: _Bounds) -> _Bounds:
    may = a.may_be_infinite or b.may_be_infinite
    if kind in ("min", "max"):
        choose = min if kind == "min" else max
        found = _Bounds(choose(a.least, b.least), choose(a.most, b.most))
        return _either(a, b) if may else found
    if a.least > a.most or b.least > b.most:
        return _INFINITE
    if kind == "add":
        return _Bounds(a.least + b.least, a.most + b.most, may)
    if kind == "sub":
        return _Bounds(a.least - b.most, a.most - b.least, may)
    if not all(map(math.isfinite, (a.least, a.most, b.least, b.most))):
        return _ANY
    corners = [x * y for x in (a.least, a.most) for y in (b.least, b.most)]
    return _Bounds(min(corners), max(corners), may)


def decided(condition: Value) -> bool | None:
    """Whether a condition holds, whatever the indices; None: not known."""
    if not isinstance(condition, tuple):
        return bool(condition)
    kind, *parts = condition
    if kind in ("and", "or"):
        found = [decided(part) for part in parts]
        decisive = kind == "or"
        if decisive in found:
            return decisive
        return None if None in found else not decisive
    if kind == "not":
        found = decided(parts[0])
        return None if found is None else not found
    if kind not in ("lt", "le", "gt", "ge", "eq", "ne"):
        return None
    if kind == "eq" and parts[0] == parts[1] and _is_cumsum(parts[0]):
        return True  # of whole numbers
    distance = _distance(*parts)
    if distance is None:
        return None
    low, high = distance
    match kind:
        case "lt":
            return _sign(high < 0, low >= 0)
        case "le":
            return _sign(high <= 0, low > 0)
        case "gt":
            return _sign(low > 0, high <= 0)
        case "ge":
            return _sign(low >= 0, high < 0)
        case "eq":
            return _sign(low == high == 0, low > 0 or high < 0)
    return _sign(low > 0 or high < 0, low == high == 0)


def _is_cumsum(value: Value) -> bool:
    return isinstance(value, tuple) and value[0] == "cumsum" and is_readable(value)


def _sign(holds: bool, fails: bool) -> bool | None:
    return True if holds else False if fails else None


def _distance(a: Value, b: Value) -> tuple[float, float] | None:
    """Bounds of ``a - b``, where these are sums of indices, sizes and numbers; None: of others."""
    terms = summed(("sub", a, b))
    if terms is None:
        return None
    low = high = terms.pop(None, 0)
    for factor in terms.values():
        if factor > 0:
            high = math.inf
        elif factor < 0:
            low = -math.inf
    return low, high


def summed(value: Value) -> dict[Any, float] | None:
    """Write a sum as factors of indices and sizes, and of one under None; None: it is no such."""
    terms: dict[Any, float] = {}
    return terms if _collect(value, 1, terms) else None


def _collect(value: Value, factor: float, terms: dict[Any, float]) -> bool:
    """Add up the factors of indices and sizes, and of one under None; False: it is no such sum."""
    if not isinstance(value, tuple):
        terms[None] = terms.get(None, 0) + factor * value
        return isinstance(value, int) or float(value).is_integer()
    kind, *parts = value
    if kind in ("index", "size"):
        terms[value] = terms.get(value, 0) + factor
        return True
    if kind in ("add", "sub"):
        sign = factor if kind == "add" else -factor
        return _collect(parts[0], factor, terms) and _collect(parts[1], sign, terms)
    if kind == "mul":
        numbers = [part for part in parts if not isinstance(part, tuple)]
        if numbers and math.isfinite(numbers[0]):
            other = parts[1] if parts[0] is numbers[0] else parts[0]
            return _collect(other, factor * numbers[0], terms)
    return False
