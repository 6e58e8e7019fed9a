"""Solve equalities between sizes: free dims, what the others are in terms of them, ranges.

A lone dim is eliminated (``S0 == 12*S1`` makes S0 a name for ``12*S1``); two multiples of lone dims
share a new dim (``2*a == 3*b``); any other equality becomes a rule that rewrites its leading
monomial, which always makes an expression smaller in one fixed order, so rewriting ends.  What is
known of the range and divisor of a dim carries over to the dims that replace it.

Limits: the rules are not completed to a Gröbner basis, so two expressions that are equal by several
nonlinear equalities together may keep two forms; that can only leave a comparison undecided.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from relax_disc.analysis.symbolic.atoms import substitute
from relax_disc.analysis.symbolic.comparison.compare import Order, compare
from relax_disc.analysis.symbolic.dim import SymbolicDim
from relax_disc.analysis.symbolic.expr import Atom, Monomial, SymbolicExpr, content
from relax_disc.errors import GraphError

PASSES = 16  # range propagation repeats at most so often; ranges stay valid if it stops early


@dataclass(frozen=True, slots=True)
class Rule:
    """``coefficient * monomial`` equals ``value``, whose monomials are all smaller."""

    coefficient: int
    monomial: Monomial
    value: SymbolicExpr
    origin: str

    def __str__(self) -> str:
        left = "*".join(self.monomial)
        return f"{'' if self.coefficient == 1 else f'{self.coefficient}*'}{left} == {self.value}"


@dataclass(frozen=True, slots=True)
class _RangeFact:
    """The value of `expr` is a size that `dim` allows."""

    expr: SymbolicExpr
    dim: SymbolicDim
    origin: str


class ShapeConstraints:
    """A growing system of equalities and ranges; `canonical` answers at any time."""

    def __init__(self) -> None:
        self.dims: dict[str, SymbolicDim] = {}
        self.solved: dict[str, SymbolicExpr] = {}
        self.origins: dict[str, str] = {}
        self.rules: list[Rule] = []
        self._facts: list[_RangeFact] = []
        self._keep: dict[str, int] = {}

    @property
    def free(self) -> tuple[SymbolicDim, ...]:
        """Dims in which everything else is expressed."""
        return tuple(dim for name, dim in self.dims.items() if name not in self.solved)

    def declare(self, dim: SymbolicDim, keep: int = 0) -> SymbolicExpr:
        """Add a dim; of two equal dims the one with the greater `keep` stays, else the older."""
        self.dims[dim.name] = dim
        self._keep[dim.name] = keep
        return SymbolicExpr.dim(dim)

    def canonical(self, expr: SymbolicExpr) -> SymbolicExpr:
        """Return `expr` in the free dims, with their present ranges."""
        factors = {factor for monomial in expr.terms for factor in monomial}
        known: dict[str, SymbolicExpr] = {}
        for dim in expr.free_dims:
            name = dim.name
            if name in self.solved:
                known[name] = self.solved[name]
            elif name in self.dims and (self.dims[name] is not dim or name not in factors):
                known[name] = SymbolicExpr.dim(self.dims[name])
        if known:
            expr = substitute(expr, known)
        return self._rewrite(expr) if self.rules else expr

    def require_equal(self, left: SymbolicExpr, right: SymbolicExpr, origin: str) -> None:
        """Learn that two sizes are equal.

        Raises `GraphError`: they cannot be, given what is known already.
        """
        pending = [(left, right, origin)]
        while pending:
            first, second, source = pending.pop()
            pending += self._learn(self.canonical(first), self.canonical(second), source)

    def require_size(self, expr: SymbolicExpr, origin: str) -> None:
        """Learn that an expression is the size of a dim, and so not negative."""
        lower, _ = self.canonical(expr).bounds()
        if lower is None or lower < 0:
            self._facts.append(_RangeFact(expr, SymbolicDim("size", 0), origin))

    def close(self) -> None:
        """Carry ranges over until nothing changes, and check that nothing contradicts.

        Raises `GraphError`: a range or divisor leaves no size, or an equality can hold at no shape.
        """
        for _ in range(PASSES):
            before = dict(self.dims)
            for fact in self._facts:
                self._narrow(self.canonical(fact.expr), fact.dim, fact.origin)
            if self.dims == before:
                break
        for rule in self.rules:
            left = SymbolicExpr._make({rule.monomial: rule.coefficient}, dict(self.dims))
            self._check(left, rule.value, rule.origin)
        for name, value in self.solved.items():
            self.solved[name] = self._rewrite(substitute(value, self._as_expressions(value)))

    def _as_expressions(self, expr: SymbolicExpr) -> dict[str, SymbolicExpr]:
        return {dim.name: SymbolicExpr.dim(self.dims[dim.name]) for dim in expr.free_dims}

    def _learn(
        self, left: SymbolicExpr, right: SymbolicExpr, origin: str
    ) -> list[tuple[SymbolicExpr, SymbolicExpr, str]]:
        """Use one equality; returns older ones that have to be looked at again."""
        equation = _primitive(left - right)
        if not equation:
            return []
        self._check(left, right, origin)
        constant = equation.terms.get((), 0)
        step = content(equation - constant)
        if step and constant % step:
            raise GraphError(
                f"{origin}: {left} and {right} have to be equal, but {equation - constant} is a "
                f"multiple of {step} and never {-constant}; correct the shapes."
            )
        self._learn_divisor(equation, origin)
        if (pair := _lone_pair(equation)) is not None:
            (first, first_factor), (second, second_factor) = pair
            base = self._fresh(f"{first}_over_{second_factor}", min(first, second))
            return [
                *self._eliminate(first, base * second_factor, origin),
                *self._eliminate(second, base * first_factor, origin),
            ]
        candidates = _lone_dims(equation)
        if candidates:
            name = min(candidates, key=lambda name: (self._keep[name], self._age(name)))
            coefficient = equation.terms[(name,)]
            rest = SymbolicExpr.dim(self.dims[name]) * coefficient - equation
            terms = {m: c // coefficient for m, c in rest.terms.items()}
            return self._eliminate(name, SymbolicExpr._make(terms, dict(rest.symbols)), origin)
        return self._add_rule(equation, origin)

    def _age(self, name: str) -> int:
        return len(self.dims) - list(self.dims).index(name)

    def _fresh(self, name: str, beside: str) -> SymbolicExpr:
        while name in self.dims:
            name += "_"
        return self.declare(SymbolicDim(name, 0), self._keep[beside])

    def _eliminate(
        self, name: str, value: SymbolicExpr, origin: str
    ) -> list[tuple[SymbolicExpr, SymbolicExpr, str]]:
        self._facts.append(_RangeFact(value, self.dims[name], origin))
        replacement = {name: value}
        for other, known in self.solved.items():
            self.solved[other] = substitute(known, replacement)
        self.solved[name] = value
        self.origins[name] = origin
        self._narrow(value, self.dims[name], origin)
        again = [rule for rule in self.rules if name in _names_of(rule)]
        self.rules = [rule for rule in self.rules if name not in _names_of(rule)]
        return [self._equality(rule) for rule in again]

    def _equality(self, rule: Rule) -> tuple[SymbolicExpr, SymbolicExpr, str]:
        left = SymbolicExpr._make({rule.monomial: rule.coefficient}, dict(rule.value.symbols))
        return left, rule.value, rule.origin

    def _add_rule(
        self, equation: SymbolicExpr, origin: str
    ) -> list[tuple[SymbolicExpr, SymbolicExpr, str]]:
        lead = max(equation.terms, key=_rank)
        coefficient = equation.terms[lead]
        if coefficient < 0:
            equation, coefficient = -equation, -coefficient
        rest = {m: -c for m, c in equation.terms.items() if m != lead}
        # The table keeps the factors of the leading monomial as well.
        value = SymbolicExpr._make(rest, dict(equation.symbols))
        again = [rule for rule in self.rules if _contains(rule.monomial, lead)]
        self.rules = [rule for rule in self.rules if not _contains(rule.monomial, lead)]
        self.rules.append(Rule(coefficient, lead, value, origin))
        return [self._equality(rule) for rule in again]

    def _rewrite(self, expr: SymbolicExpr) -> SymbolicExpr:
        changed = bool(self.rules)
        while changed:
            changed = False
            for rule in self.rules:
                for monomial, coefficient in expr.terms.items():
                    times = coefficient // rule.coefficient
                    if times and _contains(monomial, rule.monomial):
                        kept = _without(monomial, rule.monomial)
                        old = SymbolicExpr._make(
                            {monomial: times * rule.coefficient}, dict(expr.symbols)
                        )
                        factor = SymbolicExpr._make({kept: times}, dict(expr.symbols))
                        expr = expr - old + factor * rule.value
                        changed = True
                        break
        return expr

    def _check(self, left: SymbolicExpr, right: SymbolicExpr, origin: str) -> None:
        order = compare(left, right, self.dims).order
        if order in (Order.LESS, Order.GREATER):
            ranges = "; ".join(str(self.dims[dim.name]) for dim in (left - right).free_dims)
            raise GraphError(
                f"{origin}: {left} and {right} have to be equal, but the first is always "
                f"{'less' if order is Order.LESS else 'greater'}"
                f"{f' ({ranges})' if ranges else ''}; correct the shapes or the declared ranges."
            )

    def _learn_divisor(self, equation: SymbolicExpr, origin: str) -> None:
        """Note that x is a multiple of d where ``x == d*(x // d)`` is learnt."""
        for monomial in equation.terms:
            symbol = equation.symbols[monomial[0]] if len(monomial) == 1 else None
            if not isinstance(symbol, Atom) or symbol.kind != "floordiv":
                continue
            numerator, divisor = symbol.args
            if not divisor.is_constant or len(numerator.terms) != 1:
                continue
            multiple = (
                numerator - SymbolicExpr._make({monomial: 1}, dict(equation.symbols)) * divisor
            )
            if equation in (multiple, -multiple):
                dim = SymbolicDim("multiple", 0, None, divisor.as_int())
                self._facts.append(_RangeFact(numerator, dim, origin))
                self._narrow(numerator, dim, origin)

    def _narrow(self, expr: SymbolicExpr, dim: SymbolicDim, origin: str) -> None:
        """Narrow the dims of `expr` to where its value is a size that `dim` allows."""
        lower, upper = expr.bounds(self.dims)
        if (dim.last is not None and lower is not None and lower > dim.last) or (
            upper is not None and upper < dim.first
        ):
            what = "a size" if dim.name == "size" else str(dim)
            raise GraphError(
                f"{origin}: {expr} lies in {_span(lower)} .. {_span(upper)}, which contradicts "
                f"{what}{' (sizes are not negative)' if dim.name == 'size' else ''}; "
                "correct the shapes or the declared ranges."
            )
        if not expr.is_polynomial:
            return
        dims = expr.free_dims
        constant = expr.terms.get((), 0)
        if (
            len(dims) == 1
            and len(expr.terms) == 1 + (constant != 0)
            and (dims[0].name,) in expr.terms
        ):
            self._narrow_linear(dims[0].name, expr.terms[(dims[0].name,)], constant, dim, origin)
        elif dim.last is not None and min(expr.terms.values()) > 0:
            for each in dims:
                self._narrow_upper(expr, each.name, dim.last, origin)

    def _narrow_linear(
        self, name: str, factor: int, constant: int, dim: SymbolicDim, origin: str
    ) -> None:
        """Narrow a dim of which ``factor*size + constant`` is allowed by `dim`."""
        low: int | None = dim.first - constant
        high = None if dim.last is None else dim.last - constant
        if factor < 0:
            low, high = (None if high is None else -high), -(dim.first - constant)
        size = abs(factor)
        lower = 0 if low is None else max(0, -(-low // size))
        upper = None if high is None else high // size
        step = 1
        if constant % dim.divisor == 0:
            step = dim.divisor // gcd(dim.divisor, size)
        elif constant % gcd(dim.divisor, size):
            raise GraphError(
                f"{origin}: {factor}*{name} + {constant} is never a multiple of {dim.divisor}, "
                f"which {dim} asks for."
            )
        self._restrict(name, lower, upper, step, origin)

    def _narrow_upper(self, expr: SymbolicExpr, name: str, limit: int, origin: str) -> None:
        """Lower the upper end of a dim in a polynomial that grows with it."""
        sizes = {dim.name: self.dims[dim.name].first for dim in expr.free_dims}
        if expr.evaluate({**sizes, name: sizes[name] + 1}) == expr.evaluate(sizes):
            return  # another factor may be 0: nothing follows
        low, high = sizes[name], sizes[name] + 1
        while expr.evaluate({**sizes, name: high}) <= limit:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            fits = expr.evaluate({**sizes, name: middle}) <= limit
            low, high = (middle, high) if fits else (low, middle)
        self._restrict(name, 0, low, 1, origin)

    def _restrict(self, name: str, lower: int, upper: int | None, step: int, origin: str) -> None:
        if upper is not None and upper < lower:
            upper = lower - 1
        try:
            if upper is not None and upper < 0:
                raise GraphError(f"no size of {name} is left.")
            self.dims[name] = self.dims[name].intersect(SymbolicDim(name, lower, upper, step))
        except GraphError as error:
            raise GraphError(f"{origin}: {error}") from error


def _primitive(equation: SymbolicExpr) -> SymbolicExpr:
    """Divide by a common number, and by common dims that are never 0."""
    if not equation:
        return equation
    common = content(equation)
    terms = {monomial: c // common for monomial, c in equation.terms.items()}
    shared = [
        factor
        for factor in sorted(set(next(iter(terms))))
        if isinstance(symbol := equation.symbols[factor], SymbolicDim) and symbol.first > 0
    ]
    for factor in shared:
        times = min(monomial.count(factor) for monomial in terms)
        terms = {_without(monomial, (factor,) * times): c for monomial, c in terms.items()}
    return SymbolicExpr._make(terms, dict(equation.symbols))


def _lone_dims(equation: SymbolicExpr) -> list[str]:
    """Return dims that occur in one term only, alone, with a number that divides all others."""
    result = []
    for monomial, coefficient in equation.terms.items():
        if len(monomial) != 1 or not isinstance(equation.symbols[monomial[0]], SymbolicDim):
            continue
        name = monomial[0]
        rest = SymbolicExpr._make(
            {m: c for m, c in equation.terms.items() if m != monomial}, dict(equation.symbols)
        )
        if content(rest) % coefficient == 0 and all(dim.name != name for dim in rest.free_dims):
            result.append(name)
    return result


def _lone_pair(equation: SymbolicExpr) -> tuple[tuple[str, int], tuple[str, int]] | None:
    """Return ``(x, a), (y, b)`` of an equation ``a*x == b*y`` with a and b above 1."""
    if len(equation.terms) != 2:
        return None
    (first, a), (second, b) = sorted(equation.terms.items())
    lone = all(
        len(monomial) == 1 and isinstance(equation.symbols[monomial[0]], SymbolicDim)
        for monomial in (first, second)
    )
    if not lone or a * b > 0 or abs(a) == 1 or abs(b) == 1:
        return None
    return (first[0], abs(a)), (second[0], abs(b))


def _rank(monomial: Monomial) -> tuple[int, Monomial]:
    """Order monomials; an atom comes after the dims that it is made of."""
    return len(monomial), tuple(sorted(f if f.isidentifier() else f"~{f}" for f in monomial))


def _contains(monomial: Monomial, part: Monomial) -> bool:
    return all(monomial.count(factor) >= part.count(factor) for factor in part)


def _without(monomial: Monomial, part: Monomial) -> Monomial:
    rest = list(monomial)
    for factor in part:
        rest.remove(factor)
    return tuple(rest)


def _names_of(rule: Rule) -> set[str]:
    left = SymbolicExpr._make({rule.monomial: 1}, dict(rule.value.symbols))
    return {dim.name for dim in (*left.free_dims, *rule.value.free_dims)}


def _span(bound: int | None) -> str:
    return "..." if bound is None else str(bound)
