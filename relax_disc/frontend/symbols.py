"""Translate PyTorch's symbolic sizes (sympy) into TVM's integer expressions."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch.utils._sympy import functions as torch_sympy
from tvm import tirx
from tvm.sym.analyzer import Analyzer

from relax_disc.errors import UnsupportedOperatorError
from relax_disc.frontend.capture.sizes.dims import DimTable
from relax_disc.frontend.capture.sizes.exact import fraction_of
from relax_disc.frontend.spec import DimSpec

# Where a class exists in several versions of sympy and torch, all of them are listed.
_FLOOR_DIVISIONS = (torch_sympy.FloorDiv, torch_sympy.CleanDiv)
_MODULI = (torch_sympy.Mod, torch_sympy.PythonMod, sympy.Mod)
_TRUE_DIVISIONS = (torch_sympy.IntTrueDiv, torch_sympy.FloatTrueDiv)
_POWERS = (sympy.Pow, torch_sympy.PowByNatural, torch_sympy.FloatPow)


class SymbolTranslator:
    """Gives each free dim one TVM variable, named as the user named it."""

    def __init__(self, dims: DimTable) -> None:
        self._dims = dims
        self._variables: dict[str, tirx.Var] = {}
        self._cache: dict[Any, Any] = {}
        self.analyzer = Analyzer()

    @property
    def dims(self) -> list[DimSpec]:
        """All dims that the user declared, met or not."""
        return list(self._dims.specs.values())

    @property
    def counted(self) -> frozenset[str]:
        """Names of the dims that the function counts."""
        return self._dims.counted

    @property
    def used(self) -> list[tuple[DimSpec, tirx.Var]]:
        """Dims met so far, in the order in which they were met."""
        return [(self._dims.specs[name], var) for name, var in self._variables.items()]

    def variable(self, symbol: sympy.Symbol) -> tirx.Var:
        """Return the variable of a free symbol."""
        spec = self._dims[symbol]
        if spec.name not in self._variables:
            var = tirx.Var(spec.name, "int64")
            self._variables[spec.name] = var
            upper = 2**31 if spec.upper is None else spec.upper
            self.analyzer.update(var, _interval(spec.lower, upper))
        return self._variables[spec.name]

    def size_in_range(self, symbol: sympy.Symbol, size: int) -> int:
        """Return the size of a dim that is nearest to another one."""
        spec = self._dims[symbol]
        return max(spec.lower, size if spec.upper is None else min(size, spec.upper))

    def size(self, value: int | torch.SymInt | sympy.Expr) -> Any:
        """Translate a size, a ``SymInt`` or a sympy expression, into an int64 expression."""
        if isinstance(value, int):
            return tirx.IntImm("int64", value)
        expr = value.node.expr if isinstance(value, torch.SymInt) else value
        if expr not in self._cache:
            # `4 * (n // 2 + 1)**2` is written the same multiplied out: TVM proves little of both.
            expanded = sympy.expand(expr)
            if expanded not in self._cache:
                # In TVM's own order of terms: FuseTIR tells `1 + s` and `s + 1` apart.
                self._cache[expanded] = self.analyzer.simplify(self._translate(expr, "int64"))
            self._cache[expr] = self._cache[expanded]
        return self._cache[expr]

    def text(self, value: int | torch.SymInt) -> int | str:
        """Write a size with the dims' own names, such as ``"8*k"``; a constant stays a number."""
        if isinstance(value, int) or value.node.expr.is_Integer:
            return int(value)
        return self.arithmetic(value.node.expr)

    def arithmetic(self, expr: sympy.Basic) -> str:
        """Write an expression, or a condition, with the dims' own names and Python's operators."""
        renamed = {s: sympy.Symbol(self._dims[s].name, integer=True) for s in expr.free_symbols}
        for kind in _MODULI:
            expr = expr.replace(kind, lambda x, by: x - by * torch_sympy.FloorDiv(x, by))
        if isinstance(expr, sympy.Eq | sympy.Ne):
            sign = "==" if isinstance(expr, sympy.Eq) else "!="
            return f"{self.arithmetic(expr.lhs)} {sign} {self.arithmetic(expr.rhs)}"
        return str(expr.xreplace(renamed))

    def shape(self, sizes: Any) -> list[Any]:
        """Translate the sizes of a tensor."""
        return [self.size(size) for size in sizes]

    def number(self, value: torch.SymFloat) -> Any:
        """Translate a ``SymFloat`` into a float64 expression."""
        return self._translate(value.node.expr, "float64")

    def equal(self, left: Any, right: Any) -> bool:
        """Say whether two integer expressions are proved equal over the dims' ranges."""
        if isinstance(left, tirx.IntImm) and isinstance(right, tirx.IntImm):
            return int(left) == int(right)
        return left.same_as(right) or bool(self.analyzer.can_prove_equal(left, right))

    def _translate(self, expr: Any, kind: str) -> Any:
        if expr.is_Integer or expr.is_number:
            return _constant(expr, kind)
        if expr.is_Symbol:
            return _as(self.variable(expr), kind)
        if isinstance(expr, torch_sympy.ToFloat):
            return _as(self._translate(expr.args[0], "int64"), kind)
        if isinstance(expr, (*_FLOOR_DIVISIONS, *_MODULI, torch_sympy.TruncToInt)):
            return _as(self._integer(expr), kind)
        if isinstance(expr, _TRUE_DIVISIONS):
            return self._quotient(*expr.args)
        if kind == "float64" and expr.is_integer:
            return _as(
                self._translate(expr, "int64"), kind
            )  # as the same size is written elsewhere
        if isinstance(expr, _POWERS):
            return self._power(expr, kind)
        if type(expr).__name__ == "OpaqueUnaryFn_sqrt":
            return tirx.sqrt(self._translate(expr.args[0], "float64"))
        return self._fold(expr, kind)

    def _quotient(self, above: Any, below: Any) -> Any:
        """Divide as floats, by no number that is a factor of the other side as well."""
        if below.is_Integer and above.is_integer:
            factor, rest = above.as_coeff_Mul()
            common = sympy.igcd(factor, below)
            above, below = factor / common * rest, below / common
        left, right = (self._translate(side, "float64") for side in (above, below))
        return left if below == 1 else left / right

    def _integer(self, expr: Any) -> Any:
        if isinstance(expr, torch_sympy.TruncToInt):
            return self._truncated(expr.args[0])
        if isinstance(expr, _MODULI) and (missing := _missing(*expr.args)) is not None:
            return self._translate(missing, "int64")
        args = [self._translate(arg, "int64") for arg in expr.args]
        return (tirx.floordiv if isinstance(expr, _FLOOR_DIVISIONS) else tirx.floormod)(*args)

    def _truncated(self, expr: Any) -> Any:
        """Translate a float cut to an integer, exactly: a size times 2.0, 0.5 or 1.5."""
        found = fraction_of(expr)
        if found is None:
            raise _unknown(expr)
        above, below = found
        above = self._translate(above, "int64")
        return above if below == 1 else tirx.floordiv(above, below)

    def _power(self, expr: Any, kind: str) -> Any:
        base, exponent = expr.args
        if exponent.is_Integer and int(exponent) > 0:
            return functools.reduce(operator.mul, [self._translate(base, kind)] * int(exponent))
        if kind == "float64":
            return tirx.pow(self._translate(base, kind), self._translate(exponent, kind))
        raise _unknown(expr)

    def _fold(self, expr: Any, kind: str) -> Any:
        folds: list[tuple[Any, Callable[[Any, Any], Any]]] = [
            (sympy.Add, operator.add),
            (sympy.Mul, operator.mul),
            ((sympy.Max, torch_sympy.Max), tirx.max),
            ((sympy.Min, torch_sympy.Min), tirx.min),
        ]
        for classes, combine in folds:
            if isinstance(expr, classes):
                return functools.reduce(combine, [self._translate(a, kind) for a in expr.args])
        raise _unknown(expr)


def _missing(value: Any, divisor: Any) -> Any:
    """Write ``(-x) % n``, what padding adds to x, as ``n * ((x + n - 1) // n) - x``; else None.

    The sum of both is then a multiple of n to TVM.
    """
    if not divisor.is_Integer or divisor < 2:
        return None
    total = sympy.Integer(0)
    for term in sympy.Add.make_args(value):
        factor, rest = term.as_coeff_Mul()
        if isinstance(rest, _MODULI) and rest.args[1] == divisor and factor.is_Integer:
            rest = rest.args[0]  # ((n - x % n) % n) is (-x) % n
        total += factor % divisor if term.is_Integer else factor * rest
    if total.is_Integer or not total.could_extract_minus_sign():
        return None
    return divisor * torch_sympy.FloorDiv(divisor - 1 - total, divisor) + total


def _interval(lower: int, upper: int) -> Any:
    from tvm.sym import ConstIntBound

    return ConstIntBound(lower, upper)


def _constant(expr: Any, kind: str) -> Any:
    if kind == "int64":
        if not expr.is_Integer:
            raise _unknown(expr)
        return tirx.IntImm("int64", int(expr))
    return tirx.const(float(expr), "float64")


def _as(value: Any, kind: str) -> Any:
    return value if kind == "int64" else value.astype("float64")


def _unknown(expr: Any) -> UnsupportedOperatorError:
    return UnsupportedOperatorError(
        f"The size {expr} ({type(expr).__name__}) cannot be written as an expression over the dims."
    )
