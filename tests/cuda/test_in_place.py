"""Results written over operands are right, and no thread reads what another has written."""

from __future__ import annotations

import shutil
from importlib.util import find_spec

import pytest
from tvm import te, tirx

from relax_disc.analysis.kernels.inplace import inplace_pairs
from relax_disc.tir_kernels import cuda_target, rules_for
from relax_disc.tir_kernels.tuning import search
from relax_disc.transform.schedule_kernels import schedule_kernel
from tests.cuda.tuning import Emulated

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed"),
    pytest.mark.skipif(
        any(find_spec(name) is None for name in search.NEEDED["random"]),
        reason="TVM's MetaSchedule needs cloudpickle and psutil",
    ),
]

N, M = tirx.Var("n", "int64"), tirx.Var("m", "int64")
SIZES = [{N: 1, M: 1}, {N: 3, M: 70}, {N: 530, M: 9}]


def sums(*shape, axis):
    """Sum over an axis of ``x``, with ``v``, of a number for each sum; what is made of both."""
    x = te.placeholder(shape, name="x")
    kept = [extent for at, extent in enumerate(shape) if at != axis]
    v = te.placeholder(kept, name="v")
    k = te.reduce_axis((0, shape[axis]), "k")
    total = te.compute(kept, lambda *i: te.sum(x[(*i[:axis], k, *i[axis:])], axis=k), name="total")
    return x, v, te.compute(kept, lambda *i: v[i] + total[i], name="out")


def columns():
    return sums(M, N, axis=0)


def short_columns():
    return sums(20, N, axis=0)


def rows_that_use_what_was_written():
    x, v, out = sums(N, M, axis=1)
    return x, v, out, te.compute((N, M), lambda i, j: x[i, j] * out[i], name="scaled")


def rows_read_in_another_order():
    x = te.placeholder((N, 5, 7), name="x")
    a, b = te.reduce_axis((0, 5), "a"), te.reduce_axis((0, 7), "b")
    total = te.compute((N,), lambda i: te.sum(x[i, a, b], axis=[b, a]), name="total")
    return x, te.compute((N, 5, 7), lambda i, j, k: x[i, j, k] - total[i], name="out")


def long_rows():
    x, v, out = sums(N, 4096, axis=1)
    del v, out
    k = te.reduce_axis((0, 4096), "k")
    top = te.compute((N,), lambda i: te.max(x[i, k], axis=k), name="top")
    return x, te.compute((N, 4096), lambda i, j: tirx.exp(x[i, j] - top[i]), name="out")


@pytest.mark.parametrize(
    "make",
    [columns, short_columns, rows_that_use_what_was_written, rows_read_in_another_order, long_rows],
)
def test_a_result_may_be_an_operand(make):
    kernel = te.create_prim_func([*make()]).with_attr("tirx.noalias", True)
    assert inplace_pairs(kernel)
    target = cuda_target("sm_90")
    with target:
        made = schedule_kernel(kernel, target, rules_for(target))
        assert Emulated.differences(kernel, made, made, target, SIZES) is None
