"""Numbers that an optimizer's ``step`` computes beside its tensors, recorded as expressions.

While a step is traced, hyper-parameters and counts of steps are `Number` objects.  Arithmetic on
them writes expressions, which are evaluated in Python's own float64 before each call; a number that
meets a tensor becomes an entry of the vector that the kernel reads.  A number made of a tensor's
value (``norm.item()``) is a traced scalar instead.  What cannot be recorded, a branch on a tensor's
value say, raises `Untraceable`.
"""

from __future__ import annotations

import builtins
import contextlib
import contextvars
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

import torch

Expr = str
"""Python text over the settings of a group by name, and the states ``s_['step']``."""

FRESH: Expr = "fresh_"
"""The condition that a parameter has no state yet."""


class Untraceable(Exception):
    """The step does something that cannot be recorded; the text completes "its step ..."."""


class Recorder(Protocol):
    """What the numbers of one trace report to."""

    def decide(self, expr: Expr, value: bool | None) -> bool:
        """Choose how a condition turns out; ``value`` is None where counts of steps decide."""
        ...

    def freeze(self, expr: Expr, value: Any) -> None:
        """Remember that a hyper-parameter was turned into a plain number."""
        ...

    def entry(self, expr: Expr) -> torch.Tensor:
        """Return the traced scalar for an expression."""
        ...


RECORDER: contextvars.ContextVar[Recorder] = contextvars.ContextVar("recorder")

OPERATIONS: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(operator, name)
        for name in (
            *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "abs"),
            *("lt", "le", "gt", "ge", "eq", "ne"),
        )
    },
    **{name: getattr(math, name) for name in ("sqrt", "exp", "log", "cos", "sin", "tanh")},
    **{name: getattr(math, name) for name in ("floor", "ceil", "trunc", "log2", "log10")},
    "max": max,
    "min": min,
    "round": round,
    "float32": lambda x: float(torch.tensor(x, dtype=torch.float32)),
}
"""What an expression may compute, in Python's own arithmetic."""

_TENSOR_OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "neg", "abs")},
    **{name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")},
    **{name: getattr(torch, name) for name in ("sqrt", "exp", "log", "pow", "floor", "ceil")},
    "max": torch.maximum,
    "min": torch.minimum,
}
_SIGNS = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%"}
_SIGNS |= {"pow": "**", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_CONDITIONS = ("lt", "le", "gt", "ge", "eq", "ne")
_PLAIN = (int, float)
_COUNT = re.compile(r"\(s_\['\w+'\] \+ [\d.]+\)")
_SCOPE: dict[str, Any] = {f"{name}_": function for name, function in OPERATIONS.items()}
_SCOPE |= {"inf": math.inf, "nan": math.nan}


def evaluate(text: Any, group: Mapping[str, Any], **known: Any) -> Any:
    """Compute an expression, or compiled code, for the settings of a group."""
    return evaluate_plain(text, plain_settings(group), **known)


def evaluate_plain(text: Any, settings: Mapping[str, Any], **known: Any) -> Any:
    """Compute the same for settings that are Python's numbers already."""
    return eval(text, _SCOPE, {**settings, **known})


def plain_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group as Python's numbers, as far as they are numbers."""
    return {key: plain_number(value) for key, value in group.items() if key != "params"}


def plain_number(value: Any) -> Any:
    """Return a hyper-parameter, or several, as Python's numbers."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list | tuple):
        return type(value)(map(plain_number, value))
    return value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value


def depends_on_state(expr: Expr) -> bool:
    """Say whether an expression reads a count of steps."""
    return "s_[" in expr or FRESH in expr


def settings_read(settings: Iterable[str], expr: Expr) -> list[str]:
    """List those of a group's settings that an expression reads; states are written in quotes."""
    return [key for key in settings if re.search(rf"(?<!')\b{re.escape(key)}\b", expr)]


def constant(expr: Expr) -> float | None:
    """Return the value of an expression that is a number, None for any other."""
    try:
        return float(expr)
    except ValueError:
        return None


class Number:
    """A number of the traced step: an expression, or a traced scalar (``data``)."""

    __slots__ = ("data", "expr", "is_condition", "value")
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __init__(self, expr: Expr, value: Any = None, data: torch.Tensor | None = None) -> None:
        self.expr, self.value, self.data = expr, value, data
        self.is_condition = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Untraceable(f"passes a number to {func} where it cannot be followed")

    def tensor(self) -> torch.Tensor:
        """Return the number as a traced scalar, float64."""
        return RECORDER.get().entry(self.expr) if self.data is None else self.data

    def __bool__(self) -> bool:
        if self.data is not None:
            raise Untraceable("branches on a value that it computes from gradients or parameters")
        condition = self if self.is_condition else apply("ne", self, 0)
        return RECORDER.get().decide(condition.expr, condition.value)

    def _plain(self) -> Any:
        if self.data is not None:
            raise Untraceable("turns a tensor's value into a plain number")
        if self.value is None:
            raise Untraceable("turns the count of steps into a plain number")
        if constant(self.expr) is None:
            RECORDER.get().freeze(self.expr, self.value)
        return self.value

    def __float__(self) -> float:
        return float(self._plain())

    def __int__(self) -> int:
        return int(self._plain())

    def __index__(self) -> int:
        return operator.index(self._plain())

    def __round__(self, digits: int | None = None) -> Number:
        return apply("round", self) if digits is None else apply("round", self, digits)

    def item(self) -> Number:
        """Return the number itself, as it is now."""
        return Number(self.expr, self.value, self.data)

    def __repr__(self) -> str:
        return f"Number({self.expr if self.data is None else self.data})"


def _binary(name: str, swapped: bool = False) -> Callable[[Number, Any], Any]:
    def method(self: Number, other: Any) -> Any:
        if is_tensor(other) or not isinstance(other, (Number, *_PLAIN)):
            return NotImplemented
        return apply(name, other, self) if swapped else apply(name, self, other)

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Number, f"__{_name}__", _binary(_name))
    setattr(Number, f"__r{_name}__", _binary(_name, swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Number, f"__{_name}__", _binary(_name))
for _name in ("neg", "abs", "floor", "ceil", "trunc"):
    setattr(Number, f"__{_name}__", lambda self, _name=_name: apply(_name, self))


def is_tensor(value: Any) -> bool:
    """Say whether a value is a tensor, and no cell."""
    return isinstance(value, torch.Tensor) and not issubclass(type(value), Number)


def expression(value: Any) -> Expr:
    """Return the expression of a number."""
    if isinstance(value, Number):
        return value.expr
    return repr(value if type(value) in (bool, int, float) else float(value))


def apply(name: str, *operands: Any) -> Any:
    """Apply an operation to numbers, of which at least one is a `Number`."""
    if any(isinstance(x, Number) and x.data is not None for x in operands):
        if name not in _TENSOR_OPERATIONS:
            raise Untraceable(f"applies {name}() to a tensor's value")
        tensors = [
            x.tensor() if isinstance(x, Number) else RECORDER.get().entry(expression(x))
            for x in operands
        ]
        return Number("", None, _TENSOR_OPERATIONS[name](*tensors))
    known = [x.value if isinstance(x, Number) else x for x in operands]
    parts = [expression(x) for x in operands]
    value = None
    if all(x is not None for x in known):
        value = OPERATIONS[name](*known)
        if all(constant(part) is not None for part in parts):
            return Number(expression(value), value)
    sign = _SIGNS.get(name)
    text = f"({parts[0]} {sign} {parts[1]})" if sign else f"{name}_({', '.join(parts)})"
    result = Number(text, value)
    result.is_condition = name in _CONDITIONS
    return result


class Cell(Number):
    """A state of one element that PyTorch keeps as a tensor: the count of steps, say.

    It is computed with numbers alone, so it stays outside the kernel; ``dtype`` is the tensor's.
    Steps may ask whether it is a tensor, and are told so.
    """

    __slots__ = ("dtype",)
    __class__ = property(lambda _: torch.Tensor)  # pyright: ignore[reportAssignmentType]

    def __init__(self, expr: Expr, value: Any, dtype: torch.dtype) -> None:
        super().__init__(expr, value)
        self.dtype = dtype

    device, is_sparse, requires_grad = torch.device("cpu"), False, False
    is_cuda, is_cpu, shape, ndim, layout = False, True, torch.Size(()), 0, torch.strided

    def copy_(self, other: Any, non_blocking: bool = False) -> Cell:
        """Take another number's value."""
        del non_blocking
        if is_tensor(other) or (isinstance(other, Number) and other.data is not None):
            raise Untraceable("keeps a value made of tensors in a state of one element")
        self.expr, self.value = expression(other), getattr(other, "value", other)
        if self.dtype is torch.float32 and not _COUNT.fullmatch(self.expr):  # a count is exact
            self.expr = f"float32_({self.expr})"
        return self

    fill_ = copy_

    def clone(self, **_: Any) -> Cell:
        """Copy."""
        return Cell(self.expr, self.value, self.dtype)

    detach = cpu = contiguous = clone

    def to(self, *_: Any, **__: Any) -> Cell:
        """Copy; numbers are computed in float64 whatever the type."""
        return self.clone()

    float = double = to

    def numel(self) -> int:
        """One."""
        return 1

    def dim(self) -> int:
        """None."""
        return 0


def _inplace(name: str) -> Callable[..., Cell]:
    def method(self: Cell, other: Any, alpha: Any = 1) -> Cell:
        return self.copy_(apply(name, self, other if alpha == 1 else other * alpha))

    return method


for _name, _symbol in (("add", "add"), ("sub", "sub"), ("mul", "mul"), ("truediv", "div")):
    setattr(Cell, f"__i{_name}__", _inplace(_name))
    setattr(Cell, f"{_symbol}_", _inplace(_name))
    setattr(Cell, _symbol, _binary(_name))
for _name in ("sqrt", "exp", "log", "neg", "abs"):
    setattr(Cell, _name, lambda self, _name=_name: apply(_name, self))
setattr(Cell, "pow", _binary("pow"))  # noqa: B010 - the class body uses the name for nothing else


def _lifted(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    def function(*operands: Any, **named: Any) -> Any:
        flat = operands[0] if len(operands) == 1 and name in ("max", "min") else operands
        if isinstance(flat, Sequence) and any(isinstance(x, Number) for x in flat) and not named:
            if name not in ("max", "min"):
                return apply(name, *flat)
            result = flat[0]
            for other in flat[1:]:
                result = apply(name, result, other)
            return result
        return plain(*operands, **named)

    return function


@contextlib.contextmanager
def recording_functions(scopes: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Let ``max``, ``min`` and the functions of ``math`` take numbers in some modules."""
    names = [n for n in OPERATIONS if hasattr(math, n) and n != "pow"]
    mathematics = ModuleType("math")
    vars(mathematics).update(vars(math))
    for name in names:
        setattr(mathematics, name, _lifted(name, getattr(math, name)))
    mathematics.pow = lambda x, y: x**y  # pyright: ignore[reportAttributeAccessIssue]
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    missing = object()
    try:
        for scope in scopes:
            wanted: dict[str, Any] = {
                name: _lifted(name, getattr(builtins, name)) for name in ("max", "min")
            }
            for name, value in list(scope.items()):
                if value is math:
                    wanted[name] = mathematics
                elif getattr(value, "__module__", "") == "math":
                    wanted[name] = getattr(mathematics, value.__name__)
            for name, value in wanted.items():
                replaced.append((scope, name, scope.get(name, missing)))
                scope[name] = value
        yield
    finally:
        for scope, name, value in reversed(replaced):
            if value is missing:
                scope.pop(name, None)
            else:
                scope[name] = value
