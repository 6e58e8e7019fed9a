"""Python numbers that a step reads anew at each call, found out by tracing with stand-ins.

While a model is exported, a number such as ``model.beta`` is a `LiveNumber`: where it meets a
tensor in arithmetic, an input of the program takes its place; whatever else asks for its value
(a comparison, ``math.exp``, an argument such as dropout's ``p``) fixes it.
"""

from __future__ import annotations

import contextlib
import math
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_BINARY = ("add", "sub", "mul", "truediv")
_INPLACE = ("add_", "sub_", "mul_", "div_", "true_divide_")
_COMPARE = ("lt", "le", "gt", "ge", "eq", "ne")
ARITHMETIC = frozenset(
    getattr(home, name)
    for home, names in (
        (Tensor, [f"__{p}{n}__" for p in ("", "r", "i") for n in _BINARY]),
        (Tensor, ["add", "sub", "mul", "div", "true_divide", "subtract", "multiply", *_INPLACE]),
        (torch, ["add", "sub", "mul", "div", "true_divide", "subtract", "multiply", "rsub"]),
        (Tensor, [*_COMPARE, *(f"__{name}__" for name in _COMPARE)]),
        (torch, _COMPARE),
    )
    for name in names
    if hasattr(home, name)
)
"""Calls in which a tensor of no axes means what a number does."""


_BOUNDING = frozenset(
    getattr(home, name)
    for home in (torch, Tensor)
    for name in ("clamp", "clip", "clamp_min", "clamp_max", "clamp_", "clip_")
    if hasattr(home, name)
)
"""Calls whose other arguments are bounds, all numbers or all tensors."""


_EVERYWHERE = threading.local()


@contextlib.contextmanager
def live_everywhere() -> Iterator[None]:
    """Let numbers become tensors by themselves, where PyTorch leaves a trace's modes aside.

    That is in a backward pass, and inside an operator.
    """
    before = getattr(_EVERYWHERE, "is_live", False)
    _EVERYWHERE.is_live = True
    try:
        with torch._C._EnableTorchFunction(), _Converting():
            yield
    finally:
        _EVERYWHERE.is_live = before


class _Converting(TorchFunctionMode):
    """Converts live numbers before PyTorch looks at arguments: its axes may be no objects."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = with_tensors(func, args, kwargs or {})
        return func(*args, **kwargs)


class LiveNumber:
    """A number that says how it is used.

    ``value``: as it is now. ``leaves``: places that it was computed from. ``pin``: gets a place
    whose number must not change, or, for None, the type of whose number. ``make``: returns the
    number as a tensor of the trace, float64 without axes; None where that cannot be had, and every
    use fixes it.
    """

    __slots__ = ("leaves", "make", "pin", "value")

    def __init__(
        self,
        value: float,
        leaves: Sequence[Any],
        pin: Callable[[Any, bool | None], None],
        make: Callable[[], Tensor] | None,
    ) -> None:
        self.value, self.leaves, self.pin, self.make = value, tuple(leaves), pin, make

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What ``isinstance`` sees."""
        return type(self.value)

    def fixed(self, decides: bool = True) -> float:
        """Return the value, which the program will rely on.

        ``decides``: not where it goes into a text, or another number beside a size.
        """
        for leaf in self.leaves:
            self.pin(leaf, decides)
        return self.value

    def kind(self) -> type:
        """Return the type of the value, which the program will rely on."""
        for leaf in self.leaves:
            self.pin(leaf, None)
        return type(self.value)

    def like(self, tensor: Tensor) -> Tensor | float:
        """Return a tensor that means the same beside another one."""
        if self.make is None:
            return self.fixed()
        whole = not tensor.is_floating_point()
        dtype = torch.get_default_dtype() if whole else tensor.dtype
        if (whole and isinstance(self.value, int)) or dtype not in (torch.float32, torch.float64):
            return self.fixed()
        return self.make().to(dtype)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Elsewhere than in a trace, be the number."""
        convert = with_tensors if getattr(_EVERYWHERE, "is_live", False) else fixed_arguments
        args, kwargs = convert(func, args, kwargs or {})
        return func(*args, **kwargs)

    def __float__(self) -> float:
        return float(self.fixed())  # Python takes no int there

    def __int__(self) -> int:
        return int(self.fixed())

    def __index__(self) -> int:
        return operator.index(self.fixed())  # pyright: ignore[reportArgumentType]

    def __bool__(self) -> bool:
        return bool(self.fixed())

    def __hash__(self) -> int:
        return hash(self.fixed())

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.fixed(), digits)

    def __repr__(self) -> str:
        return repr(self.value)

    def __str__(self) -> str:
        return format(self)

    def __format__(self, spec: str) -> str:
        # The text of an integer may be a name; that of a float is for people.
        return format(
            self.fixed(decides=False) if isinstance(self.value, int) else self.value, spec
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.fixed(), name)

    def _with(self, function: Callable[..., Any], *others: Any, swap: bool = False) -> Any:
        """Compute with numbers; a tensor among them decides."""
        if others and isinstance(others[0], Tensor):
            return NotImplemented
        strange = any(type(other) not in (int, float, LiveNumber) for other in others)
        if strange or (function is operator.pow and isinstance(self.value, int)):
            values = [self.fixed(decides=False), *_numbers(others)]
            return function(*(reversed(values) if swap else values))
        order = [*others, self] if swap else [self, *others]
        leaves = [leaf for n in order if type(n) is LiveNumber for leaf in n.leaves]
        value = function(*(n.value if type(n) is LiveNumber else n for n in order))

        parts = [n.make if type(n) is LiveNumber else lambda n=n: n for n in order]
        known = [part for part in parts if part is not None]

        def make() -> Tensor:
            return function(*(part() for part in known))

        return LiveNumber(value, leaves, self.pin, make if len(known) == len(parts) else None)


def _numbers(values: Sequence[Any]) -> list[Any]:
    """Put the values of live numbers in their places, also inside lists and tuples."""
    return [
        v.fixed()
        if type(v) is LiveNumber
        else type(v)(_numbers(v))
        if type(v) in (list, tuple)
        else v
        for v in values
    ]


def with_tensors(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Put tensors into the places of live numbers in arithmetic; fix their values elsewhere."""
    given = [arg for arg in args if type(arg) is LiveNumber]
    if given and func in ARITHMETIC and len(args) == 2 and not kwargs:
        others = [arg for arg in args if isinstance(arg, Tensor)]
        if len(others) == 1:
            args = [a.like(others[0]) if type(a) is LiveNumber else a for a in args]
    elif func in _BOUNDING and isinstance(args[0], Tensor):
        args, kwargs = _bounds(args[0], args[1:], kwargs)
    return fixed_arguments(func, args, kwargs)


def _bounds(
    x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Make tensors of all bounds if one is live, and may be."""
    given = [bound for bound in (*args, *kwargs.values()) if bound is not None]
    live = [bound.like(x) for bound in given if type(bound) is LiveNumber]
    plain = all(type(bound) in (int, float, LiveNumber) for bound in given)
    if not live or not plain or not all(isinstance(bound, Tensor) for bound in live):
        return [x, *args], kwargs

    def bound(value: Any) -> Any:
        if type(value) is LiveNumber:
            return value.like(x)
        return value if value is None else torch.full((), value, dtype=x.dtype, device=x.device)

    return [x, *map(bound, args)], {key: bound(value) for key, value in kwargs.items()}


def fixed_arguments(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Put the values of live numbers in their places, which fixes them."""
    return _numbers(args), {key: _numbers([value])[0] for key, value in kwargs.items()}


def _binary(name: str, swap: bool) -> Callable[..., Any]:
    function = getattr(operator, name)

    def method(self: LiveNumber, other: Any) -> Any:
        if isinstance(other, Tensor):
            return getattr(other, f"__{'' if swap else 'r'}{name}__")(self)
        return self._with(function, other, swap=swap)

    return method


def _fixing(function: Callable[..., Any], swap: bool = False) -> Callable[..., Any]:
    def method(self: LiveNumber, *others: Any) -> Any:
        numbers = _numbers([self, *others])
        return function(*(reversed(numbers) if swap else numbers))

    return method


def _unary(name: str) -> Callable[..., Any]:
    function = getattr(operator, name)
    return lambda self: self._with(function)


for _name in (*_BINARY, "pow"):
    setattr(LiveNumber, f"__{_name}__", _binary(_name, swap=False))
    setattr(LiveNumber, f"__r{_name}__", _binary(_name, swap=True))


def _comparing(name: str) -> Callable[..., Any]:
    """A comparison; one with a tensor is the tensor's own, turned round."""
    fixed, turned = _fixing(getattr(operator, name)), f"__{_TURNED.get(name, name)}__"

    def method(self: LiveNumber, other: Any) -> Any:
        return getattr(other, turned)(self) if isinstance(other, Tensor) else fixed(self, other)

    return method


_TURNED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
for _name in _COMPARE:
    setattr(LiveNumber, f"__{_name}__", _comparing(_name))
for _name in ("floordiv", "mod"):
    setattr(LiveNumber, f"__{_name}__", _fixing(getattr(operator, _name)))
for _name in ("floordiv", "mod"):
    setattr(LiveNumber, f"__r{_name}__", _fixing(getattr(operator, _name), swap=True))
for _name in ("neg", "pos", "abs"):
    setattr(LiveNumber, f"__{_name}__", _unary(_name))
for _name in ("__trunc__", "__floor__", "__ceil__"):
    setattr(LiveNumber, _name, _fixing(getattr(math, _name[2:-2])))
