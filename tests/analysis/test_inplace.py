"""Which outputs may overlay which inputs: cases of each kind, yes and no."""

import pytest
from tvm import te, tirx

from relax_disc.analysis.kernels.inplace import inplace_pairs

N, M = tirx.Var("n", "int64"), tirx.Var("m", "int64")


def kernel(build):
    """Make a kernel of ``x, y [n, m]``; ``build`` returns the outputs."""
    x, y = te.placeholder((N, M), name="x"), te.placeholder((N, M), name="y")
    return te.create_prim_func([x, y, *build(x, y)]).with_attr("tirx.noalias", True)


def elementwise(compute, name="out"):
    return te.compute((N, M), compute, name=name)


def add(x, y):
    return [elementwise(lambda i, j: x[i, j] + y[i, j])]


def add_through_an_intermediate(x, y):
    half = elementwise(lambda i, j: x[i, j] * 0.5, "half")
    return [elementwise(lambda i, j: half[i, j] + y[i, j])]


def shifted(x, y):
    return [elementwise(lambda i, j: x[i, tirx.max(j - 1, 0)] + y[i, j])]


def shifted_through_an_intermediate(x, y):
    half = elementwise(lambda i, j: x[i, j] * 0.5, "half")
    return [elementwise(lambda i, j: half[i, tirx.max(j - 1, 0)] + y[i, j])]


def read_at_two_places(x, y):
    return [elementwise(lambda i, j: x[i, j] + x[0, j] + y[i, j])]


def looked_up(x, y):
    return [elementwise(lambda i, j: x[y[i, j].astype("int64"), j])]


def softmax(x, y):
    k, k2 = te.reduce_axis((0, M), "k"), te.reduce_axis((0, M), "k2")
    top = te.compute((N,), lambda i: te.max(x[i, k], axis=k), name="top")
    total = te.compute((N,), lambda i: te.sum(tirx.exp(x[i, k2] - top[i]), axis=k2), name="total")
    return [elementwise(lambda i, j: tirx.exp(x[i, j] - top[i]) / total[i] + y[i, j])]


def other_row(x, y):
    k = te.reduce_axis((0, M), "k")
    total = te.compute((N,), lambda i: te.sum(x[i, k], axis=k), name="total")
    return [elementwise(lambda i, j: total[N - 1 - i] + y[i, j])]


def column_sums_added(x, y):
    k = te.reduce_axis((0, N), "k")
    total = te.compute((M,), lambda j: te.sum(x[k, j], axis=k), name="total")
    return [elementwise(lambda i, j: total[j] + y[i, j])]


def two_outputs(x, y):
    first = elementwise(lambda i, j: x[i, j] + 1.0, "first")
    return [first, elementwise(lambda i, j: first[i, j] * y[i, j], "second")]


def read_after_the_first_output(x, y):
    first = elementwise(lambda i, j: y[i, j] + 1.0, "first")
    return [first, elementwise(lambda i, j: x[i, j] + y[i, j], "second")]


# name of the builder: pairs of parameters (x is 0, y is 1, outputs from 2)
CASES = {
    add: ((0, 2), (1, 2)),
    add_through_an_intermediate: ((0, 2), (1, 2)),
    shifted: ((1, 2),),
    shifted_through_an_intermediate: ((1, 2),),
    read_at_two_places: ((1, 2),),
    looked_up: ((1, 2),),
    softmax: ((0, 2), (1, 2)),
    # All sums are complete before a row is written: no schedule may mix rows that need each other.
    other_row: ((0, 2), (1, 2)),
    column_sums_added: ((1, 2),),
    two_outputs: ((0, 2), (0, 3), (1, 3)),
    read_after_the_first_output: ((0, 3), (1, 3)),
}


@pytest.mark.parametrize("build", CASES, ids=lambda build: build.__name__)
def test_pairs(build):
    func = kernel(build)
    # Sizes may be parameters, between the buffers.
    buffers = [at for at, p in enumerate(func.params) if isinstance(p.ty, tirx.BufferType)]
    assert inplace_pairs(func) == tuple((buffers[i], buffers[o]) for i, o in CASES[build])


def test_shapes_and_types_must_agree():
    x = te.placeholder((N, M), name="x")
    half = te.compute((N, M), lambda i, j: x[i, j].astype("float16"), name="half")
    row = te.compute((1, M), lambda i, j: x[i, j] + 1.0, name="row")
    assert inplace_pairs(te.create_prim_func([x, half])) == ()
    assert inplace_pairs(te.create_prim_func([x, row])) == ()


def test_a_scheduled_kernel_says_what_was_proved_before():
    func = kernel(add).with_attr("relax_disc.inplace", [[1, 2]])
    assert inplace_pairs(func) == ((1, 2),)
