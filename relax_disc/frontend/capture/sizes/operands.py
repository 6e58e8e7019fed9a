"""Sizes as operands where PyTorch takes numbers and fixes them: they go there as tensors.

``x ** x.shape[1]`` compares the exponent with a few numbers whose powers are cheap, and arithmetic
of complex numbers has no form for a size.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

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
                 "true_divide", "multiply", "subtract", "divide", "where", "clamp", "masked_fill")
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
    fixes = func in _POWERS or (func in _OF_COMPLEX and any(map(_is_complex, args)))
    if not fixes:
        return args, kwargs
    return tuple(map(as_operand, args)), {name: as_operand(x) for name, x in kwargs.items()}


def as_operand(value: Any) -> Any:
    """Make a tensor without axes of a symbolic number; anything else stays."""
    kinds = {torch.SymInt: torch.int64, torch.SymFloat: torch.float64}
    dtype = kinds.get(type(value))
    return value if dtype is None else torch.scalar_tensor(value, dtype=dtype)


def _is_complex(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_complex()
