"""Which kernels go row by row, and keep zero rows zero: read from their TIR."""

import pytest
from tvm import te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from relax_disc.analysis.padding.grid import Rows
from relax_disc.analysis.padding.kernel_rows import kernel_rows
from relax_disc.analysis.padding.support import AT_NEEDED


def kernel(value, *numbers):
    """Write a kernel over `[batch, length, 4]` by the value of an element."""
    x = te.placeholder((tirx.Var("batch", "int64"), tirx.Var("length", "int64"), 4), name="x")
    y = te.compute(x.shape, lambda *i: value(x, *i), name="y")
    return te.create_prim_func([x, *numbers, y])


@pytest.mark.parametrize(
    ("value", "goes_by_row", "keeps_zero"),
    [
        (lambda x, b, t, i: x[b, t, 3 - i] * 2.0, True, True),
        (lambda x, b, t, i: tirx.if_then_else(i < 2, x[b, t, i], 0.0), True, True),
        (lambda x, b, t, i: x[b, t, i] + 1.0, True, False),
        (lambda x, b, t, i: x[b, x.shape[1] - 1 - t, i], False, None),
        (lambda x, b, t, i: x[b, 0, i], False, None),
        (lambda x, b, t, i: x[b, t, i] * t.astype("float32"), False, None),
        (lambda x, b, t, i: x[b, t, i] / x.shape[1].astype("float32"), False, None),
        (lambda x, b, t, i: tirx.if_then_else(t < 3, x[b, t, i], 0.0), False, None),
    ],
)
def test_kernels_are_read(value, goes_by_row, keeps_zero):
    rows = [Rows("both", 0, 1)]
    found = kernel_rows(kernel(value), rows, rows, [AT_NEEDED])
    assert (found is not None) == goes_by_row
    assert found is None or found == (AT_NEEDED if keeps_zero else None,)


def loops(start, place, value, extents=None):
    """Write a kernel that fills `[batch, length, 4]` and then writes where numbers say."""
    x = te.placeholder((tirx.Var("batch", "int64"), tirx.Var("length", "int64"), 4), name="x")
    numbers = te.placeholder((4,), "int64", name="numbers")

    def body(inputs, outputs):
        x, numbers = inputs
        with IRBuilder() as made:
            with T.seq_scope():
                with T.grid(*x.shape) as (b, t, i):
                    T.buffer_store(outputs[0], start(x, b, t, i), [b, t, i])
                with T.grid(*(x.shape if extents is None else extents(x))) as (b, t, i):
                    at = place(numbers, b, t, i)
                    T.buffer_store(outputs[0], value(x, outputs[0], at, b, t, i), at)
        return made.get()

    made = te.extern([x.shape], [x, numbers], body, name="put", dtype="float32")
    return te.create_prim_func([x, numbers, made])


def zero(*_):
    return tirx.const(0, "float32")


def at_number(numbers, b, t, i):
    return [b, t, numbers[i]]


@pytest.mark.parametrize(
    ("start", "place", "value", "goes_by_row", "keeps_zero"),
    [
        (zero, at_number, lambda x, out, at, b, t, i: x[b, t, i], True, True),
        (zero, at_number, lambda x, out, at, *i: out[tuple(at)] + x[i], True, True),
        (lambda x, *i: x[i], at_number, lambda x, out, at, *i: x[i] + 1.0, True, False),
        (lambda *_: tirx.const(1, "float32"), at_number, lambda x, out, at, *i: x[i], True, False),
        (zero, lambda n, b, t, i: [b, n[t], i], lambda x, out, at, *i: x[i], False, None),
        (zero, lambda n, b, t, i: [b, 0, i], lambda x, out, at, *i: x[i], False, None),
        (zero, at_number, lambda x, out, at, b, t, i: x[b, 0, i], False, None),
        (zero, at_number, lambda x, out, at, b, t, i: out[b, 0, i] + x[b, t, i], False, None),
        (
            zero,
            at_number,
            lambda x, out, at, b, t, i: x[b, t, i] * t.astype("float32"),
            False,
            None,
        ),
        (zero, lambda n, b, t, i: [b, t, t % 4], lambda x, out, at, *i: x[i], False, None),
    ],
)
def test_loops_are_read(start, place, value, goes_by_row, keeps_zero):
    rows, numbers = Rows("both", 0, 1), Rows("none")
    found = kernel_rows(loops(start, place, value), [rows, numbers], [rows], [AT_NEEDED, None])
    assert (found is not None) == goes_by_row
    assert found is None or found == (AT_NEEDED if keeps_zero else None,)


def test_loops_over_a_part_of_the_rows_do_not_go_by_row():
    part = loops(zero, at_number, lambda x, out, at, *i: x[i], lambda x: [x.shape[0], 1, 4])
    rows = Rows("both", 0, 1)
    assert kernel_rows(part, [rows, Rows("none")], [rows], [AT_NEEDED, None]) is None


def test_a_number_that_a_kernel_is_given_may_be_a_size():
    number = tirx.Var("number", "int64")
    scaled = kernel(lambda x, b, t, i: x[b, t, i] * number.astype("float32"), number)
    assert kernel_rows(scaled, [Rows("both", 0, 1)], [Rows("both", 0, 1)], [None]) is None
