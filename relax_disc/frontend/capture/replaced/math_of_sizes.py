"""Python's own functions of one number, of sizes that differ between batches.

`math.sqrt`, ``round`` and the like make a plain number of what they are given, which would be the
example's; so do ``int`` and ``float``.  While a model runs in an export, its files see functions
that answer with PyTorch's symbolic numbers: roots and powers by PyTorch's own, and what is rounded
by a division of integers, which is exact at every size; of ``int(0.7 * length)`` where that can be.

Limits: PyTorch exports no logarithms of sizes, which are refused.  ``int`` and ``float`` are
classes: they are replaced in files that do nothing but call them and ask ``isinstance(x, int)``.  A
number that is no fraction of sizes, or may be negative where it is cut off, is made plain as ever,
and the export refuses it.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import sympy
import torch
from torch.utils._sympy import functions as torch_sympy

from relax_disc.errors import UnsupportedOperatorError
from relax_disc.frontend.capture.sizes.branches import decided
from relax_disc.frontend.capture.sizes.exact import fraction_of, rounded_multiple, size_of
from relax_disc.frontend.capture.source_lines import calling_line
from relax_disc.frontend.capture.state.sources import codes_of, function_of

_SYMBOLIC = torch.SymInt | torch.SymFloat
_FUNCTIONS = types.FunctionType | type(functools.cache(len))
_INSIDE_TUPLES = ("LOAD_GLOBAL", "LOAD_ATTR", "BUILD_TUPLE", "PRECALL", "CACHE")


def replacements(
    space: Mapping[str, Any], functions: Sequence[types.FunctionType] = ()
) -> dict[str, Any]:
    """Return what a file sees in place of its names.

    ``space``: its global variables; ``functions``: of the file, which need not be among these.
    """
    found = {
        name: _MATH if value is math else _OF_MATH[value]
        for name, value in space.items()
        if value is math or (isinstance(value, types.BuiltinFunctionType) and value in _OF_MATH)
    }
    codes = codes_of([*_functions(space), *functions])
    wanted = {"divmod": _DIVMOD, "round": _ROUND}
    wanted |= {name: made for name, made in _CLASSES.items() if _is_only_called(codes, name)}
    return found | {name: made for name, made in wanted.items() if name not in space}


def _is_only_called(codes: Sequence[types.CodeType], name: str) -> bool:
    """Say whether the code of a file calls a class, and else asks only what is of it."""
    uses = []
    for code in codes:
        if name in code.co_names:
            steps = list(dis.get_instructions(code))
            uses += [
                _is_called(step) or _is_asked_of(steps, where)
                for where, step in enumerate(steps)
                if step.argval == name and step.opname == "LOAD_GLOBAL"  # not `x.float`
            ]
    return bool(uses) and all(uses)


def _is_called(step: dis.Instruction) -> bool:
    return "NULL" in step.argrepr  # which Python 3.11 and later tell


def _is_asked_of(steps: Sequence[dis.Instruction], where: int) -> bool:
    """Say whether a name is loaded as a class of ``isinstance(x, name)``, in a tuple or alone."""
    after = (step for step in steps[where + 1 :] if step.opname not in _INSIDE_TUPLES)
    end = next(after, None)
    if end is None or (end.opname, end.arg) != ("CALL", 2):
        return False
    for step in reversed(steps[:where]):
        if step.opname == "CALL":
            return False
        if _is_called(step):
            return step.argval in ("isinstance", "issubclass")
    return False


def _functions(space: Mapping[str, Any]) -> Iterator[types.FunctionType]:
    """List the functions that a file defines, methods and what decorators wrap included."""
    for value in list(space.values()):
        members = [value]
        if isinstance(value, type) and value.__module__ == space.get("__name__"):
            members = list(vars(value).values())
        for member in members:
            function = function_of(member)
            if isinstance(function, _FUNCTIONS):
                function = inspect.unwrap(function)
            if isinstance(function, types.FunctionType) and function.__globals__ is space:
                yield function


def _replaced(plain: Callable[..., Any], symbolic: Callable[..., Any]) -> Callable[..., Any]:
    """Answer otherwise where an argument is symbolic, and there is an answer.

    Of a condition of sizes the number is that of the way that the model takes.
    """

    def function(*args: Any, **kwargs: Any) -> Any:
        args = tuple(map(decided, args))
        if any(isinstance(each, _SYMBOLIC) for each in args):
            found = symbolic(*args, **kwargs)
            if found is not None:
                return found
        return plain(*args, **kwargs)

    return function


def _sqrt(value: Any) -> Any:
    return torch.sym_sqrt(torch.sym_float(value))


def _refused(name: str) -> Callable[..., Any]:
    """Refuse a function that torch.export has no node for."""

    def refuse(*_: Any) -> Any:
        line = calling_line()
        raise UnsupportedOperatorError(
            f"{line}: math.{name} of a size that differs between batches cannot be compiled: write "
            f"torch.{name}(torch.tensor(size, dtype=torch.float32)).",
            ((f"math.{name}", str(line)),),
        )

    return refuse


def _exp(value: Any) -> Any:
    return math.e ** torch.sym_float(value)


def _pow(base: Any, exponent: Any) -> Any:
    return torch.sym_float(base) ** torch.sym_float(exponent)


def _floor(value: Any) -> Any:
    return _divided(value, lambda above, below: torch_sympy.FloorDiv(above, below), np.floor)


def _ceil(value: Any) -> Any:
    def rounded(above: Any, below: int) -> Any:
        return torch_sympy.FloorDiv(above + below - 1, below)

    return _divided(value, rounded, np.ceil)


def _trunc(value: Any) -> Any:
    is_positive = isinstance(value, torch.SymInt) or bool(
        value.node.shape_env.bound_sympy(value.node.expr).lower >= 0
    )
    return _floor(value) if is_positive else None


def _round(value: Any, digits: Any = None) -> Any:
    """Round to the nearest integer, ties to the even one."""
    return None if digits is not None else _divided(value, _nearest, np.rint)


def _nearest(above: Any, below: int) -> Any:
    upper = torch_sympy.FloorDiv(2 * above + below, 2 * below)
    if below % 2:
        return upper  # there are no ties
    # One less at ties of which the upper integer is odd.
    twice = 2 * above + 3 * below
    return (
        upper + torch_sympy.FloorDiv(twice - 1, 4 * below) - torch_sympy.FloorDiv(twice, 4 * below)
    )


def _divided(value: Any, rounded: Callable[[Any, int], Any], of_floats: Any) -> Any:
    """Round a fraction of sizes by a division of integers; None where that is not exact.

    ``rounded``: the division; ``of_floats``: what it does to floats.
    """
    if isinstance(value, torch.SymInt):
        return value
    environment = value.node.shape_env
    found = fraction_of(value.node.expr)
    if found is not None:
        above, below = found
        expr = sympy.expand(above if below == 1 else rounded(above, below))
    else:
        most = environment.bound_sympy(value.node.expr).upper
        expr = rounded_multiple(value.node.expr, most, rounded, of_floats)
        if expr is None:
            return None
    return size_of(expr, environment)


_WHOLE_TYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _whole(value: Any = 0, *rest: Any) -> Any:
    """``int``; of a tensor of whole numbers the number that `Tensor.item` takes out of it."""
    if isinstance(value, torch.Tensor) and value.dtype in _WHOLE_TYPES and not rest:
        return value.item()
    return _INT(value, *rest)


def _real(value: Any = 0.0) -> Any:
    """``float``; of a tensor the number that `Tensor.item` takes out of it."""
    if isinstance(value, torch.Tensor):
        value = value.item()
    return _FLOAT(value)


_FLOAT = _replaced(float, torch.sym_float)
_INT = _replaced(int, lambda value, *rest: None if rest else _trunc(value))
_SYMBOLIC_OF: dict[str, Callable[..., Any]] = {
    **{name: _refused(name) for name in ("cos", "log", "log10", "log2", "sin", "tan", "tanh")},
    "ceil": _ceil,
    "exp": _exp,
    "floor": _floor,
    "pow": _pow,
    "sqrt": _sqrt,
    "trunc": _trunc,
}
_OF_MATH: dict[Any, Callable[..., Any]] = {
    getattr(math, name): _replaced(getattr(math, name), symbolic)
    for name, symbolic in _SYMBOLIC_OF.items()
}
_MATH = types.SimpleNamespace(
    **{**vars(math), **{name: _OF_MATH[getattr(math, name)] for name in _SYMBOLIC_OF}}
)
_DIVMOD = _replaced(builtins.divmod, lambda above, below: (above // below, above % below))
_ROUND = _replaced(builtins.round, _round)


class _Number(type):
    """The class of a stand-in for ``int`` or ``float``, which is called and asked like that."""

    plain: type
    made: Callable[..., Any]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.made(*args, **kwargs)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.plain)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, cls.plain)


_CLASSES = {
    kind.__name__: _Number(
        kind.__name__, (), {"__module__": "builtins", "plain": kind, "made": staticmethod(made)}
    )
    for kind, made in ((float, _real), (int, _whole))
}
METHODS: dict[str, Callable[[Any], Any]] = {
    name: _SYMBOLIC_OF[name] for name in ("cos", "exp", "log", "log10", "log2", "sin", "sqrt")
}
"""What NumPy calls of objects that it does not know, by the names of its functions."""
