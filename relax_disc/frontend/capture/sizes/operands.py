"""Sizes and data as operands where PyTorch takes numbers and fixes them: they go there as tensors.

``x ** x.shape[1]`` compares the exponent with a few numbers whose powers are cheap, and arithmetic
of complex numbers has no form for a size.  A number that was taken out of a tensor, as in
``loss / mask.sum().item()``, is that tensor again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from relax_disc.frontend.capture import example_values
from relax_disc.frontend.capture.loops.numbers import numbers_as_tensors
from relax_disc.frontend.capture.sizes.branches import decided


def _functions(*names: str) -> frozenset[Any]:
    found = itertools.product((torch, Tensor), names)
    return frozenset(getattr(home, name) for home, name in found if hasattr(home, name))


_POWERS = frozenset((torch.pow, Tensor.pow, Tensor.__pow__, torch.float_power, Tensor.float_power))
_OF_COMPLEX = _functions(
    "add", "sub", "mul", "div", "true_divide", "divide", "multiply", "subtract", "__add__",
    "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__",
)  # fmt: skip
_OF_STEPS = _functions(*(
    form.format(name)
    for form in ("{}", "__{}__", "__r{}__", "__i{}__", "{}_")
    for name in ("lt", "le", "gt", "ge", "eq", "ne", "less", "less_equal", "greater",
                 "greater_equal", "not_equal", "add", "sub", "mul", "div", "pow", "remainder",
                 "maximum", "minimum", "truediv", "floordiv", "mod", "fmod", "floor_divide",
                 "true_divide", "multiply", "subtract", "divide", "where", "clamp", "masked_fill",
                 "fill")
))  # fmt: skip


_MAKE = frozenset((torch.tensor, torch.as_tensor, torch.scalar_tensor, torch.full))


def tensors_for_sizes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Put tensors without axes into a call in the place of sizes that it would fix.

    A condition of sizes becomes a branch of the model on it.
    """
    given = (*args, *kwargs.values())
    of_tensors = func in _MAKE or any(isinstance(x, Tensor) for x in given)
    if of_tensors and any(isinstance(x, torch.SymBool) for x in given):
        args = tuple(map(decided, args))
        kwargs = {name: decided(x) for name, x in kwargs.items()}
    if func in _OF_STEPS:
        args = numbers_as_tensors(args)
        args, kwargs = _data_as_tensors(func, args, kwargs)
    fixes = func in _POWERS or (func in _OF_COMPLEX and any(map(_is_complex, args)))
    if not fixes:
        return args, kwargs
    return tuple(map(as_operand, args)), {name: as_operand(x) for name, x in kwargs.items()}


def number_of_data(value: Any) -> Tensor | None:
    """Return a number that was taken out of tensors as a tensor without axes; None of others."""
    if not isinstance(value, torch.SymInt | torch.SymFloat):
        return None
    example = example_values.active()
    return None if example is None else example.number(value)


def _data_as_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Put tensors without axes in the place of numbers that were taken out of tensors.

    The type of the result is what it would be with the number.
    """
    given = {**dict(enumerate(args)), **kwargs}
    numbers = {
        place: number
        for place, value in given.items()
        if place != "alpha" and (number := number_of_data(value)) is not None
    }
    tensors = [x for x in given.values() if isinstance(x, Tensor)]
    if not tensors or not numbers:
        return args, kwargs
    if func in _CLAMPS:  # which take tensors or numbers, not both
        for place, value in given.items():
            if isinstance(value, int | float):
                dtype = torch.float64 if isinstance(value, float) else torch.int64
                numbers[place] = torch.scalar_tensor(value, dtype=dtype)
    for place, number in numbers.items():
        kind = 1.0 if number.is_floating_point() else 1
        types = (torch.result_type(x, kind) for x in tensors)
        fills = func in _FILLS
        dtype = tensors[0].dtype if fills else functools.reduce(torch.promote_types, types)
        given[place] = number.to(dtype)
    return tuple(given[k] for k in range(len(args))), {name: given[name] for name in kwargs}


def _full_like(x: Tensor, fill_value: Any, **options: Any) -> Tensor | None:
    """A number that was taken out of a tensor fills as one; None: PyTorch's own."""
    number = number_of_data(fill_value)
    return None if number is None else torch.empty_like(x, **options).fill_(number)


def _new_full(x: Tensor, size: Any, fill_value: Any, **options: Any) -> Tensor | None:
    """A number that was taken out of a tensor fills as one; None: PyTorch's own."""
    number = number_of_data(fill_value)
    return None if number is None else x.new_empty(size, **options).fill_(number)


def _full(size: Any, fill_value: Any, *, dtype: Any = None, **options: Any) -> Tensor | None:
    """A number that was taken out of a tensor fills as one; None: PyTorch's own."""
    number = number_of_data(fill_value)
    if number is None:
        return None
    default = torch.get_default_dtype() if number.is_floating_point() else torch.int64
    return torch.empty(size, dtype=dtype or default, **options).fill_(number)


def _scalar_tensor(value: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor | None:
    """A number that was taken out of a tensor is one again; None: PyTorch's own."""
    number = number_of_data(value)
    if number is None:
        return None
    return number.to(device, dtype or torch.get_default_dtype())


REPLACED: dict[Any, Callable[..., Any]] = {
    torch.full: _full,
    torch.full_like: _full_like,
    Tensor.new_full: _new_full,
    torch.scalar_tensor: _scalar_tensor,
}

_CLAMPS = _functions("clamp", "clamp_")
_FILLS = _functions("masked_fill", "masked_fill_", "fill_")


def as_operand(value: Any) -> Any:
    """Make a tensor without axes of a symbolic number; anything else stays."""
    kinds = {torch.SymInt: torch.int64, torch.SymFloat: torch.float64}
    dtype = kinds.get(type(value))
    return value if dtype is None else torch.scalar_tensor(value, dtype=dtype)


def _is_complex(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_complex()
