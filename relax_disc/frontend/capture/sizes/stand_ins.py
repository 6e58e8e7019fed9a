"""Numbers that stand for symbolic sizes in libraries that take nothing but numbers.

einx writes and keeps a function for each set of shapes, with their sizes as literals.  While a
model is exported it sees a large prime for each symbolic size; the calls of PyTorch that it makes
get the sizes back, of which such a number is the product.

Limits: a size that einx makes otherwise, such as the sum of two, is refused.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import traceback
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import sympy
import torch
from torch.utils import _pytree as pytree

from relax_disc.errors import RelaxDiscError, UnsupportedOperatorError
from relax_disc.frontend.capture.loops.rows import same_length
from relax_disc.frontend.capture.source_lines import users_frames

_LEAST, _MOST = 1 << 40, 1 << 62
"""No size, and no number that PyTorch takes for "all", lies between them."""

_READER = "einx._src.frontend.impl.torch"
"""The module that reads the sizes of tensors, by ``int``."""

_SOLVER = "einx._src.namedtensor.stage3.tree"
"""The module that multiplies and adds them, by NumPy and in 32 bits."""

_sizes: dict[int, torch.SymInt] = {}


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Let einx see primes for symbolic sizes while this is active."""
    with contextlib.ExitStack() as stack:
        if _READER in sys.modules and _SOLVER in sys.modules:
            reader, solver = sys.modules[_READER], sys.modules[_SOLVER]
            stack.enter_context(patch.object(reader, "int", _number, create=True))
            stack.enter_context(patch.object(solver, "np", _Exact()))
        stack.callback(_sizes.clear)
        try:
            yield
        except Exception as error:
            if isinstance(error.__cause__, RelaxDiscError):  # einx shows its own code around it
                raise error.__cause__ from None
            raise


class _Exact:
    """NumPy, with products and sums of any size."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def prod(self, values: Any) -> _Wide:
        """Multiply numbers."""
        return _Wide(math.prod(map(int, values)))

    def sum(self, values: Any) -> _Wide:
        """Add numbers."""
        return _Wide(sum(map(int, values)))


class _Wide(int):
    """An integer that NumPy's conversions leave as it is."""

    def astype(self, _dtype: str) -> int:
        """Return the integer."""
        return int(self)


def _number(value: Any = 0) -> int:
    """``int``, but a prime of its own for each symbolic size."""
    if not isinstance(value, torch.SymInt):
        return int(value)
    for prime, size in _sizes.items():
        if same_length(size, value):
            return prime
    prime = int(sympy.nextprime(max(_sizes, default=_LEAST)))
    _sizes[prime] = value
    return prime


def sizes_again(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Put the sizes back into the arguments of a call."""
    if not _sizes:
        return args, kwargs
    return pytree.tree_map_only(int, _size, (args, kwargs))


def _wrapped(number: int) -> Any:
    """Return the size of a product that NumPy has made of several primes, modulo 2^64."""
    for count in range(2, _MOST_FACTORS + 1):
        for factors in itertools.combinations_with_replacement(_sizes.items(), count):
            primes, sizes = zip(*factors, strict=True)
            rest = number * pow(math.prod(primes), -1, _WORDS) % _WORDS
            if rest < _LARGEST_FACTOR:
                return math.prod(sizes) * rest
    return None


_WORDS = 1 << 64
_MOST_FACTORS, _LARGEST_FACTOR = 4, 1 << 24


def _size(number: int) -> Any:
    if abs(number) < _LEAST:
        return number
    size: Any = 1
    rest = number
    for prime, each in _sizes.items():
        while rest % prime == 0:
            rest, size = rest // prime, size * each
    if 0 < rest < _LEAST:
        return size * rest
    if (wrapped := _wrapped(number)) is not None:
        return wrapped
    if abs(number) >= _MOST:
        return number
    frames = users_frames(traceback.extract_stack())
    own = [f for f in frames if not f.filename.startswith("<") and "/einx/" not in f.filename]
    line = f"{own[-1].filename}:{own[-1].lineno}" if own else "the model"
    raise UnsupportedOperatorError(
        f"{line}: einx makes a size of a dim in another way than by a product; write that with "
        "PyTorch's own operators.",
        (("einx", line),),
    )
