"""Signs of expressions with floor division, remainder, minimum and maximum.

Exact where it is cheap: a dim under divisions by numbers splits into residue classes, in which
the division is a polynomial; a minimum is compared through its arguments; a small box is evaluated
point by point.  Anything else is relaxed: a remainder, or an atom between its bounds, becomes a
dim of its own, which can prove an order but never a witness.  Witnesses are always evaluated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, product
from math import gcd, lcm, prod
from typing import Any

import numpy as np

from relax_disc.analysis.symbolic.atoms import substitute
from relax_disc.analysis.symbolic.comparison.polynomial import (
    BOTH,
    NEGATIVE,
    POSITIVE,
    ZERO,
    Signs,
    polynomial_signs,
    sign_of,
)
from relax_disc.analysis.symbolic.dim import SymbolicDim
from relax_disc.analysis.symbolic.expr import Atom, ExprLike, SymbolicExpr, as_expr

SMALL_BOX = 4096  # points that are evaluated at once, before anything cleverer
LARGE_BOX = 300_000  # the same as the last resort
FEW_SAMPLES, MANY_SAMPLES = 1000, 20_000  # shapes to try before and after proofs
RESIDUE_CLASSES = 64
HELPER = "__"  # begins the names of the dims that are made here
WORK = 960  # boxes for all polynomials that an expression gives rise to
LEAST_WORK = 30  # boxes for one of them; 32 branches at most


def expression_signs(expr: SymbolicExpr) -> Signs:
    """Return the signs that an expression takes over the declared ranges of its dims.

    The result may be shared: it is not to be changed.
    """
    names = sorted(set(chain.from_iterable(expr.terms)))
    symbols = expr.symbols
    for name in names:
        if not isinstance(symbols[name], SymbolicDim):
            break
    else:
        return polynomial_signs(expr.terms, symbols, names)
    divisor = gcd(*expr.terms.values())
    if divisor > 1:  # tensors of a layer differ by multiples of one size
        terms = {monomial: factor // divisor for monomial, factor in expr.terms.items()}
        expr = SymbolicExpr._make(terms, dict(symbols))
    return _signs_with_atoms(expr, expr.free_dims)


@lru_cache(maxsize=4096)  # the same few sizes are compared again and again: a tenth of compiling
def _signs_with_atoms(expr: SymbolicExpr, dims: tuple[SymbolicDim, ...]) -> Signs:
    signs = Signs()
    if any(dim.name.startswith(HELPER) for dim in dims):
        return signs  # such a dim could be taken for one of ours
    if not all(map(_divides_safely, _atoms(expr))):
        return signs  # at some shapes it has no value
    points = _count(dims)
    if points is not None and points <= SMALL_BOX and _evaluate_all(expr, dims, signs):
        return signs
    _sample(expr, dims, signs, FEW_SAMPLES)
    if signs.settled:
        return signs
    # The relaxation is cheaper, the residue classes are exact.
    for attempt in (lambda: _relaxed_signs(expr, WORK), lambda: _residue_signs(expr, dims)):
        proof = attempt()
        if proof is None:
            continue
        signs.possible &= proof.possible
        for point in proof.points.values():
            _note(expr, dims, point, signs)
        if signs.settled:
            return signs
    _sample(expr, dims, signs, MANY_SAMPLES)
    if not signs.settled and points is not None and points <= LARGE_BOX:
        _evaluate_all(expr, dims, signs)
    return signs


def _count(dims: Sequence[SymbolicDim]) -> int | None:
    """Return the number of shapes, None where it has no limit."""
    count = 1
    for dim in dims:
        if dim.last is None:
            return None
        count *= (dim.last - dim.first) // dim.divisor + 1
    return count


def _note(
    expr: SymbolicExpr, dims: Sequence[SymbolicDim], point: Mapping[str, int], signs: Signs
) -> None:
    """Evaluate at a point, completed by first sizes, and note the sign."""
    whole = {dim.name: point.get(dim.name, dim.first) for dim in dims}
    if all(whole[dim.name] in dim for dim in dims):
        signs.add(sign_of(expr.evaluate(whole)), whole)


def _evaluate_all(expr: SymbolicExpr, dims: Sequence[SymbolicDim], signs: Signs) -> bool:
    """Settle the signs by evaluating every shape; False where a value exceeds 64 bits."""
    axes = [np.arange(dim.first, (dim.last or 0) + 1, dim.divisor) for dim in dims]
    if not _note_grid(expr, dims, axes, signs):
        return False
    signs.possible = signs.found
    return True


def _note_grid(
    expr: SymbolicExpr, dims: Sequence[SymbolicDim], axes: Sequence[Any], signs: Signs
) -> bool:
    mesh = np.meshgrid(*axes, indexing="ij", sparse=True)
    names = [dim.name for dim in dims]
    try:
        values = np.asarray(expr.evaluate(dict(zip(names, mesh, strict=True))))
    except OverflowError:
        return False
    values = np.broadcast_to(values, tuple(len(axis) for axis in axes))
    for hits in (values < 0, values == 0, values > 0):
        position = int(hits.argmax())
        indices = np.unravel_index(position, values.shape)
        if hits[indices]:
            point = {n: int(axis[i]) for n, axis, i in zip(names, axes, indices, strict=True)}
            signs.add(sign_of(int(values[indices])), point)
    return True


def _sample(expr: SymbolicExpr, dims: Sequence[SymbolicDim], signs: Signs, samples: int) -> None:
    """Look for witnesses on a grid that is fine near the ends."""
    axes = []
    per_dim = max(3, int(samples ** (1 / len(dims))))
    reach = 2**20 if samples <= FEW_SAMPLES else 2**14  # beyond 64 bits each value costs 10 us
    for dim in dims:
        last = dim.first + dim.divisor * reach if dim.last is None else dim.last
        steps = (last - dim.first) // dim.divisor
        near = np.arange(min(steps, per_dim // 3) + 1)
        spread = np.unique(np.geomspace(1, max(steps, 1), per_dim // 3 + 2).astype(np.int64))
        chosen = np.unique(np.concatenate([near, steps - near, spread[spread <= steps]]))
        axes.append(dim.first + dim.divisor * chosen)
    _note_grid(expr, dims, axes, signs)


def _atoms(expr: SymbolicExpr) -> Iterator[Atom]:
    """Yield all atoms, inner ones too."""
    for factor in sorted({factor for monomial in expr.terms for factor in monomial}):
        symbol = expr.symbols[factor]
        if isinstance(symbol, Atom):
            yield symbol
            for arg in symbol.args:
                yield from _atoms(arg)


def _divides_safely(atom: Atom) -> bool:
    """Whether a divisor is certainly positive."""
    if atom.kind in ("min", "max"):
        return True
    lowest = atom.args[1].bounds()[0]
    return lowest is not None and lowest > 0


def _periods(expr: SymbolicExpr) -> dict[str, int]:
    """Return for each dim under a division by a number a period of all these divisions."""
    periods: dict[str, int] = {}
    for atom in _atoms(expr):
        if atom.kind not in ("floordiv", "mod") or not atom.args[1].is_constant:
            continue
        inner = _periods(atom.args[0])
        for dim in atom.args[0].free_dims:
            period = atom.args[1].as_int() * inner.get(dim.name, 1)
            periods[dim.name] = lcm(periods.get(dim.name, 1), period)
    return periods


def _residue_signs(expr: SymbolicExpr, dims: Sequence[SymbolicDim]) -> Signs | None:
    """Join the signs over the residue classes of the dims under divisions."""
    periods = _periods(expr)
    split = [dim for dim in dims if dim.name in periods]
    steps = [lcm(periods[dim.name], dim.divisor) for dim in split]
    classes = prod(step // dim.divisor for step, dim in zip(steps, split, strict=True))
    if not split or classes > RESIDUE_CLASSES:
        return None
    joined = Signs(possible=0)
    for residues in product(
        *(range(0, step, dim.divisor) for dim, step in zip(split, steps, strict=True))
    ):
        values: dict[str, SymbolicExpr] = {}
        for dim, step, residue in zip(split, steps, residues, strict=True):
            lower = -((residue - dim.first) // step)
            upper = None if dim.last is None else (dim.last - residue) // step
            if upper is not None and upper < lower:
                break
            quotient = SymbolicDim(f"{HELPER}quotient_of_{dim.name}", lower, upper)
            values[dim.name] = SymbolicExpr.dim(quotient) * step + residue
        else:
            part = _relaxed_signs(substitute(expr, values), max(LEAST_WORK, WORK // classes))
            joined.possible |= part.possible
            for sign, point in part.points.items():
                joined.add(sign, _whole_point(dims, values, point))
            if joined.found & BOTH == BOTH or joined.possible == NEGATIVE | ZERO | POSITIVE:
                joined.possible = NEGATIVE | ZERO | POSITIVE  # the other classes were not seen
                break
    return joined


def _whole_point(
    dims: Sequence[SymbolicDim], values: Mapping[str, SymbolicExpr], point: Mapping[str, int]
) -> dict[str, int]:
    """Translate a point over quotients into one over the dims themselves."""
    whole = {dim.name: point[dim.name] for dim in dims if dim.name in point}
    for name, value in values.items():
        sizes = {free.name: point.get(free.name, free.first) for free in value.free_dims}
        whole[name] = value.evaluate(sizes)
    return whole


def _relaxed_signs(expr: SymbolicExpr, work: int) -> Signs:
    """Return a superset of the signs, and points worth trying, by removing one atom at a time."""
    if expr.is_polynomial:
        names = sorted(set(chain.from_iterable(expr.terms)))
        return polynomial_signs(expr.terms, expr.symbols, names, work)
    factors = sorted({factor for monomial in expr.terms for factor in monomial})
    text, atom = next(
        (factor, symbol)
        for factor in factors
        for symbol in (expr.symbols[factor],)
        if isinstance(symbol, Atom)
    )
    if atom.kind == "max" and len(atom.args) == 2:
        # One spelling for both, so that min(a, b) + max(a, b) is a + b.
        least = atom.args[0].minimum(atom.args[1])
        value = atom.args[0] + atom.args[1] - least
        return _relaxed_signs(_replace(expr, text, value), work)
    if atom.kind in ("min", "max"):
        if work >= LEAST_WORK * len(atom.args):
            return _branch_signs(expr, text, atom, work // len(atom.args))
    elif _divides_safely(atom):
        return _division_signs(expr, text, atom, work)
    lower, upper = SymbolicExpr._make({(text,): 1}, {text: atom}).bounds()
    if lower is None and upper is None:
        return Signs()
    width = None if lower is None or upper is None else upper - lower
    free = SymbolicExpr.dim(SymbolicDim(f"{HELPER}value_of_{_label(text)}", 0, width))
    value = free + lower if lower is not None else (upper or 0) - free
    return _relaxed_signs(_replace(expr, text, value), work)


def _division_signs(expr: SymbolicExpr, text: str, atom: Atom, work: int) -> Signs:
    """Replace ``n // d`` by ``(n - r) / d`` and ``n % d`` by ``r``, with a new dim r below d."""
    numerator, divisor = atom.args
    # One name for // and %, which have the same remainder.
    name = f"{HELPER}remainder_of_{_label(str(numerator))}_by_{_label(str(divisor))}"
    highest = divisor.bounds()[1]
    below = None if highest is None else highest - 1
    remainder = SymbolicExpr.dim(SymbolicDim(name, 0, below))
    if atom.kind == "mod":
        rewritten = _replace(expr, text, remainder)
    else:
        rewritten = _replace(expr, text, numerator - remainder, divisor)
    symbol = divisor.symbols[str(divisor)] if str(divisor) in divisor.symbols else None
    if isinstance(symbol, SymbolicDim):
        # The divisor is greater than the remainder.
        excess = SymbolicExpr.dim(SymbolicDim(f"{HELPER}excess_of_{symbol.name}", 0, below))
        rewritten = substitute(rewritten, {symbol.name: remainder + excess + 1})
    return _relaxed_signs(rewritten, work)


def _label(text: str) -> str:
    return "".join(letter if letter.isalnum() else f"_{ord(letter)}_" for letter in text)


def _replace(
    expr: SymbolicExpr, text: str, value: SymbolicExpr, divisor: ExprLike = 1
) -> SymbolicExpr:
    """Return `expr`, times a power of `divisor`, with an atom replaced by ``value / divisor``."""
    power = max(monomial.count(text) for monomial in expr.terms)
    result = SymbolicExpr.constant(0)
    for monomial, coefficient in expr.terms.items():
        times = monomial.count(text)
        kept = tuple(factor for factor in monomial if factor != text)
        symbols = {factor: expr.symbols[factor] for factor in kept}
        term = SymbolicExpr._make({kept: coefficient}, symbols)
        result = result + term * value**times * as_expr(divisor) ** (power - times)
    return result


def _branch_signs(expr: SymbolicExpr, text: str, atom: Atom, work: int) -> Signs:
    """Join the signs with a minimum or maximum replaced by each argument."""
    parts = [_relaxed_signs(_replace(expr, text, arg), work) for arg in atom.args]
    joined = Signs(possible=0)
    for part in parts:
        joined.possible |= part.possible
        for sign, point in part.points.items():
            joined.add(sign, point)
    slope = _slope_signs(expr, text)
    if slope in (POSITIVE, NEGATIVE):
        # The expression is the least (or greatest) of its branches at every shape.
        least = (slope == POSITIVE) == (atom.kind == "min")
        far, near = (POSITIVE, NEGATIVE) if least else (NEGATIVE, POSITIVE)
        if not all(part.possible & far for part in parts):
            joined.possible &= ~far
        if any(part.possible == near for part in parts):
            joined.possible = near
    joined.found = 0  # points are to be tried on the expression itself
    return joined


def _slope_signs(expr: SymbolicExpr, text: str) -> int:
    """Return the possible signs of the factor of an atom that occurs linearly, else all."""
    if any(monomial.count(text) > 1 for monomial in expr.terms):
        return NEGATIVE | ZERO | POSITIVE
    terms = {
        tuple(factor for factor in monomial if factor != text): coefficient
        for monomial, coefficient in expr.terms.items()
        if text in monomial
    }
    lower, upper = SymbolicExpr._make(terms, dict(expr.symbols)).bounds()
    if lower is not None and lower > 0:
        return POSITIVE
    return NEGATIVE if upper is not None and upper < 0 else NEGATIVE | ZERO | POSITIVE
