"""How much memory one of PyTorch's operators takes while it runs, as a function of the dims.

Nothing tells that of an operator but running it: it is called at a few small sizes with an
allocator that counts.  Allocations are copies and intermediate tensors, so that they grow no faster
than the operands and results do; the steepest growth seen, and what remains at no size, bound the
others.  Where one dim is long and the others are short, or the reverse, the largest tensor of the
call bears what that leaves over: `torch.cdist` takes more for a result than for points.  A call
that needs more takes it from PyTorch's allocator, and the step's report counts it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import tvm
import tvm_ffi
from torch import Tensor
from tvm import tirx

from relax_disc.frontend.symbols import SymbolTranslator
from relax_disc.ops import aten
from relax_disc.vm_builtins.libraries import install

_logger = logging.getLogger(__name__)

_LEAST_BYTES, _MOST_BYTES = 1 << 16, 1 << 21
"""Of operands and results together, at the sizes that are tried, if the dims allow."""

_STRETCHED_BYTES, _LONGEST = 1 << 14, 1 << 12
"""The same where one dim is long, or short; and how long at most, since it may be an operand."""

_PIECE_BYTES = 64
"""An allocation is rounded up to so many, in other ways at other sizes."""

_LENT_BYTES = 1 << 26
_LARGER = 32  # times as much, of what a loop's step makes
_MANY_STEPS = 4  # what one carries lives in the next
_UNKNOWN = 2.0, 16 * _PIECE_BYTES
"""Growth and rest that are assumed of an operator that raises on every operand that is tried."""


def scratch_bytes(
    symbols: SymbolTranslator,
    recipe: str,
    operands: Sequence[Any],
    results: Sequence[Tensor],
    *,
    function: str = aten.CALL,
    growing: Sequence[Tensor] | None = None,
    held: Mapping[Any, int] = MappingProxyType({}),
    steps: Any = 1,
) -> Any:
    """Bound the memory of a call.

    ``symbols``: of the function that the call is in. ``recipe``: of the call. ``operands``: fake
    values; complex tensors as such. ``results``: fake values. ``function``: that is called.
    ``growing``: what the memory grows with, if not with operands and results. ``held``: symbols
    that it does not grow with, and the sizes at which it is measured. ``steps``: of a loop; sizes
    at which there are few of them tell little. Returned: bytes, in the dims.
    """
    install.install("llvm")
    tensors = [x for x in (*operands, *results) if isinstance(x, Tensor)]
    numbers = [x for x in operands if not isinstance(x, Tensor)]
    sizes = [*numbers, *(n for x in tensors for n in x.shape)]
    free = sorted({s for n in sizes for s in _free(n)}, key=str)
    most = _MOST_BYTES
    if growing is not None:
        tensors = [x for x in growing if any(map(_free, x.shape))]  # others are as large ever
        most *= _LARGER  # until what grows with a square outweighs the rest
    points = _points(symbols, tensors, free, held, steps, most)
    seen = [
        (sum(_bytes(x, sizes) for x in tensors), found[0])
        for sizes in points
        if (found := _measured(function, recipe, operands, results, sizes)) is not None
    ]
    growth, base = _bound(seen)
    growths, pieces = [growth] * len(tensors), 0
    checked = _stretched(symbols, tensors, free, held) + _few_steps(symbols, free, held, steps)
    for sizes in _once(checked):
        found = _measured(function, recipe, operands, results, sizes)
        if found is None:
            continue
        needed, count = found
        pieces = max(pieces, count)
        each = [_bytes(x, sizes) for x in tensors]
        lacking = needed - base - sum(g * n for g, n in zip(growths, each, strict=True))
        if lacking <= 0:
            continue
        largest = max(range(len(each)), key=each.__getitem__, default=None)
        is_below = growing is not None and sum(each) < min((n for n, _ in seen), default=0)
        if largest is None or each[largest] < pieces * _PIECE_BYTES or is_below:
            base += math.ceil(lacking)
        else:
            growths[largest] += lacking / each[largest]
    total: Any = tirx.IntImm("int64", base + pieces * _PIECE_BYTES)
    by_shape: dict[str, tuple[Tensor, float]] = {}
    for x, growth in zip(tensors, growths, strict=True):
        key = str(x.shape)
        first, known = by_shape.get(key, (x, 0.0))
        by_shape[key] = first, known + growth * x.element_size()
    for x, growth in by_shape.values():
        count: Any = tirx.IntImm("int64", math.ceil(growth))
        for n in symbols.shape(x.shape):
            count = count * n
        total = total + count
    return symbols.analyzer.simplify(total)


def _bound(seen: Sequence[tuple[int, int]]) -> tuple[float, int]:
    """Growth with the bytes of operands and results, and bytes that do not grow."""
    if not seen:
        return _UNKNOWN
    ordered = sorted(seen)
    growth = max(
        [0.0]
        + [
            (most - least) / (large - small)
            for k, (small, least) in enumerate(ordered)
            for large, most in ordered[k + 1 :]
            if large > small
        ]
    )
    if len(ordered) == 1:
        return 0.0, ordered[0][1]
    return growth, max(0, *(math.ceil(most - growth * size) for size, most in ordered))


def _points(
    symbols: SymbolTranslator,
    tensors: Sequence[Tensor],
    free: Sequence[Any],
    held: Mapping[Any, int],
    steps: Any,
    most: int,
) -> list[dict[Any, int]]:
    """Sizes to try: all dims small, then those that are not held larger and larger.

    A single point without dims.
    """
    if not free:
        return [{}]
    points: list[dict[Any, int]] = []
    long = _sizes(symbols, free, held, _LONGEST)
    many = min(_value(steps, long), _MANY_STEPS)
    for length in (1, 2, 4, 6, 10, 16, 32, 64, 128, 256, 512, 1024, 2048):
        sizes = _sizes(symbols, free, held, length)
        if _value(steps, sizes) < many or (length == 1 and not isinstance(steps, torch.SymInt)):
            continue
        if points and sizes == points[-1]:  # below the ranges, or above
            continue
        total = sum(_bytes(x, sizes) for x in tensors)
        if points and total > most:
            break
        points.append(sizes)
        if total >= most // (_MOST_BYTES // _LEAST_BYTES) and len(points) >= 4:
            break
    return points or [long]


def _few_steps(
    symbols: SymbolTranslator, free: Sequence[Any], held: Mapping[Any, int], steps: Any
) -> list[dict[Any, int]]:
    """All dims at their least, and those that make the number of steps a little longer."""
    least = _sizes(symbols, free, held, 1)
    own = [symbol for symbol in _free(steps) if symbol not in held]
    return [least | _sizes(symbols, own, held, length) for length in range(2, 14) if own]


def _once(points: Sequence[dict[Any, int]]) -> list[dict[Any, int]]:
    """Leave out sizes that were there before: ranges make several lengths one."""
    return [sizes for k, sizes in enumerate(points) if sizes not in points[:k]]


def _stretched(
    symbols: SymbolTranslator,
    tensors: Sequence[Tensor],
    free: Sequence[Any],
    held: Mapping[Any, int],
) -> list[dict[Any, int]]:
    """All dims at their least, each dim long beside the others at their least, and the reverse."""
    moving = [s for s in free if s not in held]
    least = _sizes(symbols, free, held, 1)
    points = [least] if free else []
    for each in moving:
        for long in ([each], [s for s in moving if s is not each]):
            length, total = 1, 0
            sizes = least
            while length < _LONGEST and total < _STRETCHED_BYTES:
                length *= 2
                sizes = least | _sizes(symbols, long, held, length)
                total = sum(_bytes(x, sizes) for x in tensors)
            points.append(sizes)
    return points


def _sizes(
    symbols: SymbolTranslator, free: Sequence[Any], held: Mapping[Any, int], length: int
) -> dict[Any, int]:
    """Sizes as near to a length, or to what they are held at, as their ranges allow."""
    return {s: symbols.size_in_range(s, held.get(s, length)) for s in free}


def _free(size: Any) -> set[Any]:
    return size.node.expr.free_symbols if isinstance(size, torch.SymInt) else set()


def _value(size: Any, sizes: dict[Any, int]) -> int:
    return int(size.node.expr.xreplace(sizes)) if isinstance(size, torch.SymInt) else int(size)


def _bytes(x: Tensor, sizes: dict[Any, int]) -> int:
    return math.prod(_value(n, sizes) for n in x.shape) * x.element_size()


def _measured(
    name: str,
    recipe: str,
    operands: Sequence[Any],
    results: Sequence[Tensor],
    sizes: dict[Any, int],
) -> tuple[int, int] | None:
    """Bytes that a call takes at some sizes, and in how many pieces; None where it raises.

    None as well where a tensor is empty: it takes little, and some of PyTorch's kernels divide by
    such a size.
    """
    tensors = [x for x in (*operands, *results) if isinstance(x, Tensor)]
    if any(_value(n, sizes) < 1 for x in tensors for n in x.shape):
        return None
    call = tvm_ffi.get_global_func("relax_disc.cpu.call_with_workspace")
    function = tvm_ffi.get_global_func(name)
    for index in (0, 1):  # rows are counted from 0, pivots from 1
        given = [
            _example(x, sizes, index) if isinstance(x, Tensor) else _value(x, sizes)
            for x in (*operands, *results)
        ]
        try:
            call(_LENT_BYTES, function, recipe, _LENT_BYTES, *given)
        except Exception as error:  # whatever the operator raises on numbers that are made up
            _logger.debug("%s at %s: %s", recipe, sizes, error)
        else:
            return (
                int(tvm_ffi.get_global_func("relax_disc.cpu.aten_last_bytes")()),
                int(tvm_ffi.get_global_func("relax_disc.cpu.aten_last_pieces")()),
            )
    return None


def _example(x: Tensor, sizes: dict[Any, int], index: int) -> tvm.runtime.Tensor:
    """Numbers between 0 and 1, integers as given, and matrices that can be inverted."""
    shape = [_value(n, sizes) for n in x.shape]
    if not x.is_floating_point() and not x.is_complex():
        return tvm.runtime.from_dlpack(torch.full(shape, index, dtype=x.dtype))
    kind = x.dtype.to_real() if x.is_complex() else x.dtype
    made = torch.linspace(0.1, 0.9, math.prod(shape), dtype=torch.float64).reshape(shape)
    if len(shape) > 1 and shape[-1] == shape[-2]:
        made = (made + made.mT) / 2 + shape[-1] * torch.eye(shape[-1], dtype=torch.float64)
    made = made.to(kind)
    if x.is_complex():
        made = torch.stack([made, torch.zeros_like(made)], -1)
    return tvm.runtime.from_dlpack(made.contiguous())
