"""Mixtures of experts: products of row groups whose borders are data.

Rows are sorted by expert; ``offsets[e]`` is where the rows of expert ``e`` end.  Rows behind the
last border belong to none and give zero.  A row's product has the shape that it always has, only
the matrix that it reads depends on data: nothing here has a size that depends on data.
"""

from __future__ import annotations

from typing import Any

from tvm import te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder

from relax_disc.frontend.converters.registry import WIDE, converts
from relax_disc.frontend.emitter import Emitter

T: Any = builder


def _groups(emitter: Emitter, rows: Any, offsets: Any) -> Any:
    """Which expert each row belongs to; the number of experts where it belongs to none."""

    def compute(x: Any, ends: Any) -> Any:
        e = te.reduce_axis((0, ends.shape[0]), "e")
        return te.compute(
            (x.shape[0],),
            lambda s: te.sum(tirx.Select(ends(e).astype("int64") <= s, _one(), _one() - 1), axis=e),
            name="expert_of_row",
        )

    return emitter.te("expert_of_row", compute, rows, offsets)


def _one() -> Any:
    return tirx.const(1, "int64")


def _product(emitter: Emitter, rows: Any, weights: Any, groups: Any, transposed: bool) -> Any:
    """``rows[s] @ weights[groups[s]]``, or with the transposed weights; sums are wide."""
    dtype = emitter.dtype(rows)
    wide = WIDE.get(dtype, dtype)

    def compute(x: Any, w: Any, group: Any) -> Any:
        experts, inner, outer = w.shape
        if transposed:
            inner, outer = outer, inner
        k = te.reduce_axis((0, inner), "k")

        def element(s: Any, n: Any) -> Any:
            expert = te.min(group(s), experts.astype("int64") - 1)
            place = (expert, n, k) if transposed else (expert, k, n)
            return te.sum(x(s, k).astype(wide) * w(*place).astype(wide), axis=k)

        sums = te.compute((x.shape[0], outer), element, name="grouped_sums")
        return te.compute(
            sums.shape,
            lambda s, n: tirx.Select(
                group(s) < experts.astype("int64"), sums(s, n), tirx.const(0, wide)
            ).astype(dtype),
            name="grouped_product",
        )

    return emitter.te("grouped_product", compute, rows, weights, groups)


def _outer_sums(emitter: Emitter, left: Any, right: Any, groups: Any, experts: Any) -> Any:
    """For each expert the sum of ``outer(left[s], right[s])`` over its rows, in their order."""
    dtype = emitter.dtype(left)
    wide = WIDE.get(dtype, dtype)

    def compute(left: Any, right: Any, group: Any) -> Any:
        shape = [experts, left.shape[1], right.shape[1]]

        def body(inputs: Any, outputs: Any) -> Any:
            left, right, group = inputs
            out = outputs[0]
            with IRBuilder() as made:
                with T.parallel(shape[1]) as k:  # an expert's row k is written by one thread alone
                    with T.seq_scope():
                        with T.grid(shape[0], shape[2]) as loops:
                            e, n = loops
                            T.buffer_store(out, tirx.const(0, wide), [e, k, n])
                        with T.serial(left.shape[0]) as s:
                            with T.If(group[s] < experts.astype("int64")):
                                with T.Then():
                                    with T.serial(shape[2]) as n:
                                        place = (group[s], k, n)
                                        product = left[s, k].astype(wide) * right[s, n].astype(wide)
                                        T.buffer_store(out, out[place] + product, list(place))
            return made.get()

        buffer = tirx.decl_buffer(shape, wide, "out")
        return te.extern(
            [shape], [left, right, group], body, dtype=wide, out_buffers=[buffer], name="outer_sums"
        )

    return emitter.cast(emitter.te("outer_sums", compute, left, right, groups), dtype)


@converts("transformers.grouped_mm_fallback.default")
def grouped_mm(emitter: Emitter, rows: Any, weights: Any, offsets: Any) -> Any:
    """Product of each row with its expert's matrix, as Hugging Face writes it."""
    groups = _groups(emitter, rows, offsets)
    return _product(emitter, rows, weights, groups, transposed=False)


@converts("transformers.grouped_mm_fallback_backward.default")
def grouped_mm_backward(
    emitter: Emitter, rows: Any, weights: Any, offsets: Any, grad: Any
) -> tuple[Any, Any]:
    """Gradients of `grouped_mm` by the rows and the matrices."""
    groups = _groups(emitter, rows, offsets)
    experts = emitter.shape(weights)[0]
    return (
        _product(emitter, grad, weights, groups, transposed=True),
        _outer_sums(emitter, rows, grad, groups, experts),
    )
