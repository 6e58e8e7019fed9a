"""Which sizes have to be equal so that an operator makes sense.

A rule gets the facts of the operands and yields pairs of equal sizes.  An operator without a rule
teaches nothing; its result still has the shape that Relax infers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, zip_longest
from typing import Any

from relax_disc.analysis.symbolic.expr import SymbolicExpr, as_expr
from relax_disc.analysis.symbolic.shape_graph.facts import (
    Fact,
    Shape,
    ShapeFact,
    TensorFact,
    count_elements,
    tensors_of,
)

Pairs = Iterator[tuple[SymbolicExpr, SymbolicExpr]]
NeverOne = Callable[[SymbolicExpr], bool]
Rule = Callable[[Any, Sequence[Fact], Fact, NeverOne], Pairs]

BROADCASTING = (
    "add subtract multiply divide floor_divide power mod floor_mod maximum minimum equal not_equal "
    "greater greater_equal less less_equal logical_and logical_or logical_xor bitwise_and "
    "bitwise_or bitwise_xor left_shift right_shift where ewise_fma log_add_exp atan2"
).split()


def operator_equalities(
    call: Any, operands: Sequence[Fact], result: Fact, never_one: NeverOne
) -> Pairs:
    """Yield pairs of sizes that are equal wherever the call is valid.

    ``call``: of an operator. ``never_one``: whether a size is certainly not 1, so that it cannot
    broadcast.
    """
    rule = _RULES.get(call.op.name)
    if rule is not None:
        yield from rule(call, operands, result, never_one)


def broadcast_equalities(shapes: Sequence[Shape], never_one: NeverOne) -> Pairs:
    """Yield the sizes that meet in a broadcast and cannot be 1."""
    for sizes in zip_longest(*(shape[::-1] for shape in shapes), fillvalue=as_expr(1)):
        fixed = [size for size in sizes if never_one(size)]
        yield from pairwise(fixed)


def _broadcasting(call: Any, operands: Sequence[Fact], result: Fact, never_one: NeverOne) -> Pairs:
    shapes = [fact.shape for fact in operands if isinstance(fact, TensorFact)]
    if None not in shapes:
        yield from broadcast_equalities([shape or () for shape in shapes], never_one)


def _broadcast_to(call: Any, operands: Sequence[Fact], result: Fact, never_one: NeverOne) -> Pairs:
    source, target = operands[0], operands[1]
    if isinstance(source, TensorFact) and isinstance(target, ShapeFact):
        for old, new in zip(
            reversed(source.shape or ()), reversed(target.shape or ()), strict=False
        ):
            if never_one(old):
                yield old, new


def _reshape(call: Any, operands: Sequence[Fact], result: Fact, never_one: NeverOne) -> Pairs:
    source = operands[0]
    if isinstance(source, TensorFact) and isinstance(result, TensorFact):
        if source.shape is not None and result.shape is not None:
            yield count_elements(source.shape), count_elements(result.shape)


def _concat(call: Any, operands: Sequence[Fact], result: Fact, never_one: NeverOne) -> Pairs:
    shapes = [tensor.shape for tensor in tensors_of(operands[0])]
    axis = int(call.attrs.axis) if call.attrs.axis is not None else None
    for first, second in pairwise(shapes):
        if axis is None or first is None or second is None or len(first) != len(second):
            continue
        for index, pair in enumerate(zip(first, second, strict=True)):
            if index != axis % len(first):
                yield pair


def _stack(call: Any, operands: Sequence[Fact], result: Fact, never_one: NeverOne) -> Pairs:
    shapes = [tensor.shape for tensor in tensors_of(operands[0])]
    for first, second in pairwise(shapes):
        yield from _same(first, second)


def _matmul(call: Any, operands: Sequence[Fact], result: Fact, never_one: NeverOne) -> Pairs:
    left, right = (fact.shape if isinstance(fact, TensorFact) else None for fact in operands[:2])
    if not left or not right:
        return
    yield left[-1], right[-2 if len(right) > 1 else -1]
    yield from broadcast_equalities([left[:-2], right[:-2]], never_one)


def _normalization(call: Any, operands: Sequence[Fact], result: Fact, never_one: NeverOne) -> Pairs:
    """Layer and RMS norm: weights have the sizes of the normalised axes."""
    data = operands[0]
    if not isinstance(data, TensorFact) or data.shape is None:
        return
    axes = [int(axis) % len(data.shape) for axis in call.attrs.axes]
    for weight in operands[1:]:
        if isinstance(weight, TensorFact) and weight.shape is not None:
            yield from _same(tuple(data.shape[axis] for axis in axes), weight.shape)


def _convolution(call: Any, operands: Sequence[Fact], result: Fact, never_one: NeverOne) -> Pairs:
    data, weight = (fact.shape if isinstance(fact, TensorFact) else None for fact in operands[:2])
    plain = str(call.attrs.data_layout).startswith("NC")
    if data and weight and plain and str(call.attrs.kernel_layout).startswith("OI"):
        yield data[1], weight[1] * int(call.attrs.groups)


def _same(first: Shape | None, second: Shape | None) -> Pairs:
    if first is not None and second is not None and len(first) == len(second):
        yield from zip(first, second, strict=True)


_RULES: dict[str, Rule] = {
    **{f"relax.{name}": _broadcasting for name in BROADCASTING},
    "relax.broadcast_to": _broadcast_to,
    "relax.reshape": _reshape,
    "relax.flatten": _reshape,
    "relax.concat": _concat,
    "relax.stack": _stack,
    "relax.matmul": _matmul,
    "relax.nn.layer_norm": _normalization,
    "relax.nn.rms_norm": _normalization,
    "relax.nn.conv1d": _convolution,
    "relax.nn.conv2d": _convolution,
    "relax.nn.conv3d": _convolution,
}
