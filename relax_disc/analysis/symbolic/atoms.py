"""Canonical forms of floor division, remainder, minimum and maximum.

Whatever divides exactly leaves the atom: ``(8*s + 17) // 8`` becomes ``s + 2 + (1 // 8)``, that is
``s + 2``.  What is left in an atom has coefficients between 0 and the divisor, so that equal
functions mostly get equal texts.  Rules that depend on ranges (``min(s, 4096)`` is ``s`` where
``s <= 4096`` is declared) use term-wise bounds alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd

from relax_disc.analysis.symbolic.dim import SymbolicDim
from relax_disc.analysis.symbolic.expr import (
    Atom,
    Monomial,
    SymbolicExpr,
    as_expr,
    content,
    merge_symbols,
)
from relax_disc.errors import GraphError


def floordiv(left: SymbolicExpr, right: SymbolicExpr) -> SymbolicExpr:
    """Return ``left // right``, rounded down.

    Raises `GraphError`: the divisor is 0.
    """
    left, right = _positive_divisor(left, right, "//")
    quotient, rest = _take_multiples(left, right)
    if not rest:
        return quotient
    rest, right = _without_common_factor(*_without_idle_constant(rest, right)[:2])
    if right == 1:
        return quotient + rest
    if (inner := _inner_floordiv(rest, right)) is not None:
        return quotient + floordiv(*inner)
    lower, upper = rest.bounds()
    divisor_lower, _ = right.bounds()
    small = upper is not None and divisor_lower is not None and upper < divisor_lower
    if lower is not None and lower >= 0 and small:
        return quotient
    return quotient + _atom("floordiv", (rest, right))


def mod(left: SymbolicExpr, right: SymbolicExpr) -> SymbolicExpr:
    """Return ``left % right``, with the sign of the divisor.

    Raises `GraphError`: the divisor is 0.
    """
    if right.is_constant and right.as_int() < 0:
        return -mod(-left, -right)
    left, right = _positive_divisor(left, right, "%")
    _, rest = _take_multiples(left, right)
    if right.is_constant and rest:
        known = gcd(*(_known_multiple(rest, monomial) for monomial in rest.terms))
        if known % right.as_int() == 0:
            return SymbolicExpr.constant(0)
    lower, upper = rest.bounds()
    divisor_lower, _ = right.bounds()
    small = upper is not None and divisor_lower is not None and upper < divisor_lower
    if not rest or (lower is not None and lower >= 0 and small):
        return rest
    rest, right, idle = _without_idle_constant(rest, right)
    if idle:
        return mod(rest, right) + idle
    if right.is_constant and (common := gcd(content(rest), right.as_int())) > 1:
        return mod(_divide_by_integer(rest, common), as_expr(right.as_int() // common)) * common
    return _atom("mod", (rest, right))


def extremum(kind: str, args: Sequence[SymbolicExpr]) -> SymbolicExpr:
    """Return the minimum (``kind="min"``) or maximum (``"max"``) of the arguments."""
    flat: list[SymbolicExpr] = []
    for arg in args:
        symbol = _lone_atom(arg)
        flat.extend(symbol.args if symbol is not None and symbol.kind == kind else (arg,))
    kept: list[SymbolicExpr] = []
    for arg in flat:
        if any(_dominates(kind, other, arg) for other in kept):
            continue
        kept = [other for other in kept if not _dominates(kind, arg, other)]
        kept.append(arg)
    if len(kept) == 1:
        return kept[0]
    common = gcd(*(content(arg) for arg in kept))
    if common > 1:
        return extremum(kind, [_divide_by_integer(arg, common) for arg in kept]) * common
    return _atom(kind, tuple(sorted(kept, key=str)))


def substitute(expr: SymbolicExpr, values: Mapping[str, SymbolicExpr]) -> SymbolicExpr:
    """Replace dims by expressions, inside atoms as well; all at once."""
    factors = {factor for monomial in expr.terms for factor in monomial}
    replaced: dict[str, SymbolicExpr] = {}
    for factor in sorted(factors):
        symbol = expr.symbols[factor]
        if isinstance(symbol, SymbolicDim):
            if factor in values:
                replaced[factor] = values[factor]
            continue
        args = [substitute(arg, values) for arg in symbol.args]
        if any(new is not old for new, old in zip(args, symbol.args, strict=True)):
            replaced[factor] = _rebuild(symbol.kind, args)
    if not replaced:
        return expr
    result = SymbolicExpr.constant(0)
    for monomial, coefficient in expr.terms.items():
        kept = tuple(factor for factor in monomial if factor not in replaced)
        term = SymbolicExpr._make({kept: coefficient}, {f: expr.symbols[f] for f in kept})
        for factor in monomial:
            if factor in replaced:
                term = term * replaced[factor]
        result = result + term
    return result


def _rebuild(kind: str, args: Sequence[SymbolicExpr]) -> SymbolicExpr:
    if kind == "floordiv":
        return floordiv(args[0], args[1])
    if kind == "mod":
        return mod(args[0], args[1])
    return extremum(kind, args)


def _atom(kind: str, args: tuple[SymbolicExpr, ...]) -> SymbolicExpr:
    atom = Atom(kind, args)
    text = str(atom)
    return SymbolicExpr._make({(text,): 1}, {text: atom})


def _lone_atom(expr: SymbolicExpr) -> Atom | None:
    if len(expr.terms) != 1:
        return None
    ((monomial, coefficient),) = expr.terms.items()
    if coefficient != 1 or len(monomial) != 1:
        return None
    symbol = expr.symbols[monomial[0]]
    return symbol if isinstance(symbol, Atom) else None


def _dominates(kind: str, winner: SymbolicExpr, loser: SymbolicExpr) -> bool:
    lower, upper = (winner - loser).bounds()
    return (
        (upper is not None and upper <= 0) if kind == "min" else (lower is not None and lower >= 0)
    )


def _positive_divisor(
    left: SymbolicExpr, right: SymbolicExpr, sign: str
) -> tuple[SymbolicExpr, SymbolicExpr]:
    if not right:
        raise GraphError(f"({left}) {sign} 0: division by zero.")
    if right.is_constant and right.as_int() < 0:
        return -left, -right
    return left, right


def _take_multiples(left: SymbolicExpr, right: SymbolicExpr) -> tuple[SymbolicExpr, SymbolicExpr]:
    """Split ``left = quotient*right + rest`` by division with the leading monomial."""
    if right.is_constant:
        divisor = right.as_int()
        quotient = {m: c // divisor for m, c in left.terms.items() if c // divisor}
        rest = {m: c % divisor for m, c in left.terms.items() if c % divisor}
        symbols = dict(left.symbols)
        return SymbolicExpr._make(quotient, symbols), SymbolicExpr._make(rest, symbols)
    symbols = merge_symbols(dict(left.symbols), dict(right.symbols))
    lead, lead_coefficient = max(right.terms.items(), key=lambda term: _rank(term[0]))
    found: dict[Monomial, int] = {}
    rest_expr = left
    pending = sorted(left.terms, key=_rank, reverse=True)
    while pending:
        monomial = pending.pop(0)
        coefficient = rest_expr.terms.get(monomial, 0)
        factor = _monomial_quotient(monomial, lead)
        if factor is None or coefficient % lead_coefficient:
            continue
        step = SymbolicExpr._make({factor: coefficient // lead_coefficient}, symbols)
        if not step.terms[factor]:
            continue
        found[factor] = found.get(factor, 0) + step.terms[factor]
        rest_expr = rest_expr - step * right
        below = (m for m in rest_expr.terms if _rank(m) < _rank(monomial))
        pending = sorted(below, key=_rank, reverse=True)
    if len(right.terms) > 1 and rest_expr:
        # Half a long division is valid but not canonical: keep all or nothing.
        return SymbolicExpr.constant(0), left
    return SymbolicExpr._make({m: c for m, c in found.items() if c}, symbols), rest_expr


def _rank(monomial: Monomial) -> tuple[int, Monomial]:
    return len(monomial), monomial


def _monomial_quotient(monomial: Monomial, divisor: Monomial) -> Monomial | None:
    rest = list(monomial)
    for factor in divisor:
        if factor not in rest:
            return None
        rest.remove(factor)
    return tuple(rest)


def _without_common_factor(
    left: SymbolicExpr, right: SymbolicExpr
) -> tuple[SymbolicExpr, SymbolicExpr]:
    """Cancel a number and a monomial of dims that divide both."""
    common = gcd(content(left), content(right))
    if common > 1:
        left, right = _divide_by_integer(left, common), _divide_by_integer(right, common)
    shared: Monomial = ()
    if not right.is_constant:
        monomials = [*left.terms, *right.terms]
        for factor in sorted(set(monomials[0])):
            power = min(monomial.count(factor) for monomial in monomials)
            shared += (factor,) * power
    if not shared:
        return left, right
    return _divide_by_monomial(left, shared), _divide_by_monomial(right, shared)


def _without_idle_constant(
    left: SymbolicExpr, right: SymbolicExpr
) -> tuple[SymbolicExpr, SymbolicExpr, int]:
    """Drop what a constant term adds below the common step of the other terms and the divisor.

    ``(4*s + 3) // 8`` is ``(4*s) // 8``, and ``(4*s + 3) % 8`` is ``(4*s) % 8 + 3``.
    """
    if not right.is_constant or () not in left.terms or len(left.terms) == 1:
        return left, right, 0
    step = gcd(right.as_int(), *(c for monomial, c in left.terms.items() if monomial))
    idle = left.terms[()] % step
    return left - idle, right, idle


def _inner_floordiv(
    left: SymbolicExpr, right: SymbolicExpr
) -> tuple[SymbolicExpr, SymbolicExpr] | None:
    """Rewrite ``(n//a + c) // b`` as the arguments of ``(n + a*c) // (a*b)``."""
    shift = left.terms.get((), 0)
    atom = _lone_atom(left - shift)
    if atom is None or atom.kind != "floordiv" or not right.is_constant:
        return None
    numerator, divisor = atom.args
    if not divisor.is_constant:
        return None
    return numerator + divisor * shift, divisor * right


def _divide_by_monomial(expr: SymbolicExpr, divisor: Monomial) -> SymbolicExpr:
    terms: dict[Monomial, int] = {}
    for monomial, coefficient in expr.terms.items():
        quotient = _monomial_quotient(monomial, divisor)
        assert quotient is not None
        terms[quotient] = coefficient
    return SymbolicExpr._make(terms, dict(expr.symbols))


def _divide_by_integer(expr: SymbolicExpr, divisor: int) -> SymbolicExpr:
    terms = {m: c // divisor for m, c in expr.terms.items()}
    return SymbolicExpr._make(terms, dict(expr.symbols))


def _known_multiple(expr: SymbolicExpr, monomial: Monomial) -> int:
    product = expr.terms[monomial]
    for factor in monomial:
        symbol = expr.symbols[factor]
        product *= symbol.divisor if isinstance(symbol, SymbolicDim) else 1
    return product
