"""Kernels that lay packed rows out in the padded batch, among zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder

from relax_disc.analysis.padding.grid import Rows

T: Any = builder


def numbers(places: te.Tensor, starts: te.Tensor, shape: Any) -> te.Tensor:
    """Number the rows of ``[batch, length]``: which packed row each is, -1 where it is none.

    Rows that fill up are at the place of the first; where no row is needed, that is none either.
    """
    none = tirx.IntImm("int64", -1)

    def body(inputs: Any, outputs: Any) -> Any:
        places, starts = inputs
        end = starts[starts.shape[0] - 1]
        with IRBuilder() as made:
            with T.seq_scope():
                with T.grid(*shape) as (sequence, position):
                    T.buffer_store(outputs[0], none, [sequence, position])
                with T.serial(places.shape[1]) as row:
                    first = tirx.Select(end > 0, tirx.IntImm("int64", 0), none)
                    number = tirx.Select(row < end, row, first)
                    T.buffer_store(outputs[0], number, [places[1, row], places[2, row]])
        return made.get()

    out = tirx.decl_buffer(list(shape), "int64", "out")
    return te.extern(
        *([list(shape)], [places, starts], body),
        dtype="int64",
        out_buffers=[out],
        name="row_numbers",
    )


def laid_out(rows: Rows) -> Callable[[te.Tensor, te.Tensor, Any], te.Tensor]:
    """Return what lays packed rows out; ``rows``: their axes in the padded batch."""

    def compute(x: te.Tensor, numbers: te.Tensor, shape: Any) -> te.Tensor:
        def element(*i: Any) -> Any:
            number, found = numbers(i[rows.batch], i[rows.length]), list(i)
            found[rows.batch], found[rows.length] = tirx.IntImm("int64", 0), number
            zero = tirx.const(0, x.dtype)
            return tirx.if_then_else(number >= 0, x(*found), zero)

        return te.compute(shape, element, name="laid_out")

    return compute
