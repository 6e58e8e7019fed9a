"""Each CPU rule on kernels as the pipeline makes them: one build, many sizes, against numpy."""

import numpy as np
import pytest
from scipy import special
from tvm import relax, te, tirx
from tvm.ir import prim

from relax_disc.analysis.kernels.stages import nodes_of
from tests.tir_kernels.kernel_runs import (
    Library,
    fused_kernel,
    rule_of,
    scheduled,
    set_threads,
    tensor,
)

op = relax.op
N, M = tirx.Var("n", "int64"), tirx.Var("m", "int64")
RNG = np.random.default_rng(0)


def const(value, dtype="float32"):
    return relax.const(value, dtype)


def rms_norm(emit, x, w):
    mean = emit(op.mean(emit(op.multiply(x, x)), [2], keepdims=True))
    return op.rsqrt(emit(op.add(mean, const(1e-5))))


def silu_gradient(emit, g, x):
    s = emit(op.sigmoid(x))
    slope = emit(
        op.multiply(
            s, emit(op.add(emit(op.multiply(x, emit(op.subtract(const(1.0), s)))), const(1.0)))
        )
    )
    return op.multiply(g, slope)


def rotate(emit, x, c, s):
    x = emit(op.permute_dims(x, [0, 2, 1, 3]))
    halves = emit(op.split(x, 2, 3))
    a, b = emit(relax.TupleGetItem(halves, 0)), emit(relax.TupleGetItem(halves, 1))
    turned = emit(op.concat(emit(relax.Tuple([emit(op.negative(b)), a])), 3))
    return op.add(emit(op.multiply(x, c)), emit(op.multiply(turned, s)))


def rotate_numpy(x, c, s):
    x = x.transpose(0, 2, 1, 3)
    a, b = np.split(x, 2, -1)
    return x * c + np.concatenate([-b, a], -1) * s


def silu_gradient_numpy(g, x):
    s = special.expit(x)
    return g * s * (1 + x * (1 - s))


def joined_conditions(emit, x, y):
    """Choose by six conditions that are joined as the frontend does it: as bits."""

    def bits(value):
        return emit(op.astype(value, "int8"))

    joined = bits(emit(op.less(x, y)))
    for k, join in enumerate([op.bitwise_and, op.bitwise_or, op.bitwise_xor] * 2):
        other = bits(emit(op.greater(x, const(0.3 * k - 0.7))))
        joined = bits(emit(op.astype(emit(join(joined, other)), "bool")))
    fails = emit(op.astype(emit(op.bitwise_xor(joined, const(1, "int8"))), "bool"))
    return op.where(fails, x, y)


def joined_conditions_numpy(x, y):
    joined = x < y
    for k, join in enumerate([np.logical_and, np.logical_or, np.logical_xor] * 2):
        joined = join(joined, x > np.float32(0.3 * k - 0.7))
    return np.where(joined, y, x)


def floats(*shape):
    return RNG.standard_normal(shape).astype("float32")


# name: (rule, parameters, kernel, numpy, inputs for (n, m))
CASES = {
    "add": (
        "Elementwise",
        [tensor("x", [N, M, 7]), tensor("y", [N, M, 7])],
        lambda emit, x, y: op.add(x, y),
        lambda x, y: x + y,
        lambda n, m: [floats(n, m, 7), floats(n, m, 7)],
    ),
    "silu_gradient": (
        "Elementwise",
        [tensor("g", [N, M]), tensor("x", [N, M])],
        silu_gradient,
        silu_gradient_numpy,
        lambda n, m: [floats(n, m), floats(n, m)],
    ),
    "rows_and_columns_broadcast": (
        "Elementwise",
        [tensor("x", [N, M, 24]), tensor("r", [N, M, 1]), tensor("w", [24])],
        lambda emit, x, r, w: op.multiply(emit(op.multiply(x, r)), w),
        lambda x, r, w: x * r * w,
        lambda n, m: [floats(n, m, 24), floats(n, m, 1), floats(24)],
    ),
    "three_channels": (
        "Elementwise",
        [tensor("x", [N, M, 3]), tensor("w", [3])],
        lambda emit, x, w: op.sigmoid(emit(op.add(x, w))),
        lambda x, w: special.expit(x + w),
        lambda n, m: [floats(n, m, 3), floats(3)],
    ),
    "rotary": (
        "Elementwise",
        [tensor("x", [N, M, 2, 24]), tensor("c", [M, 24]), tensor("s", [M, 24])],
        rotate,
        rotate_numpy,
        lambda n, m: [floats(n, m, 2, 24), floats(m, 24), floats(m, 24)],
    ),
    "gradients_of_gate_and_up": (
        "Elementwise",
        [tensor(name, [N, 40]) for name in "gxu"],
        lambda emit, g, x, u: op.concat(
            emit(relax.Tuple([emit(silu_gradient(emit, g, x)), emit(op.multiply(g, u))])), 1
        ),
        lambda g, x, u: np.concatenate([silu_gradient_numpy(g, x), g * u], 1),
        lambda n, m: [floats(n, 40) for _ in range(3)],
    ),
    "transpose": (
        "Transpose",
        [tensor("x", [N, M])],
        lambda emit, x: op.permute_dims(x, [1, 0]),
        lambda x: x.T,
        lambda n, m: [floats(n, m)],
    ),
    "transpose_of_a_batch": (
        "Transpose",
        [tensor("x", [N, 12, M]), tensor("y", [N, M, 12])],
        lambda emit, x, y: op.multiply(emit(op.permute_dims(x, [0, 2, 1])), y),
        lambda x, y: x.transpose(0, 2, 1) * y,
        lambda n, m: [floats(n, 12, m), floats(n, m, 12)],
    ),
    "gather": (
        "Elementwise",
        [tensor("w", [11, 20]), tensor("i", [N, M], "int64")],
        lambda emit, w, i: op.take(w, i, axis=0),
        lambda w, i: w[i],
        lambda n, m: [floats(11, 20), RNG.integers(0, 11, (n, m))],
    ),
    "concat_of_many_parts": (
        "Elementwise",
        [tensor("x", [N, 32]), tensor("y", [N, 16]), tensor("m", [176])],
        lambda emit, x, y, m: op.subtract(emit(op.concat([x, *9 * [y]], 1)), m),
        lambda x, y, m: np.concatenate([x, *9 * [y]], 1) - m,
        lambda n, m: [floats(n, 32), floats(n, 16), floats(176)],
    ),
    "concat_of_symbolic_parts": (
        "Elementwise",
        [tensor("x", [3, N]), tensor("y", [3, M])],
        lambda emit, x, y: op.concat([x, y], 1),
        lambda x, y: np.concatenate([x, y], 1),
        lambda n, m: [floats(3, n), floats(3, m)],
    ),
    "mask": (
        "Elementwise",
        [tensor("x", [N, M]), tensor("b", [N, M], "bool"), tensor("v", [])],
        lambda emit, x, b, v: op.where(b, x, v),
        lambda x, b, v: np.where(b, x, v),
        lambda n, m: [floats(n, m), RNG.random((n, m)) < 0.5, np.array(-np.inf, "float32")],
    ),
    "transposed_mask": (
        "Transpose",
        [tensor("x", [N, 12, M]), tensor("b", [12, M], "bool"), tensor("v", [])],
        lambda emit, x, b, v: op.permute_dims(emit(op.where(b, emit(op.exp(x)), v)), [0, 2, 1]),
        lambda x, b, v: np.where(b, np.exp(x), v).transpose(0, 2, 1),
        lambda n, m: [floats(n, 12, m), RNG.random((12, m)) < 0.5, np.array(0.5, "float32")],
    ),
    "truths_of_truths": (
        "Elementwise",
        [tensor("x", [N, M]), tensor("b", [N, M], "bool"), tensor("r", [N, 1], "bool")],
        lambda emit, x, b, r: op.logical_or(
            emit(op.logical_and(emit(op.greater(x, const(0.0))), b)), emit(op.logical_not(r))
        ),
        lambda x, b, r: (x > 0) & b | ~r,
        lambda n, m: [floats(n, m), RNG.random((n, m)) < 0.5, RNG.random((n, 1)) < 0.5],
    ),
    "mask_of_rows": (
        "Elementwise",
        [tensor("x", [N, M, 24]), tensor("b", [N, M, 1], "bool"), tensor("v", [])],
        lambda emit, x, b, v: op.where(b, x, v),
        lambda x, b, v: np.where(b, x, v),
        lambda n, m: [floats(n, m, 24), RNG.random((n, m, 1)) < 0.5, np.array(-np.inf, "float32")],
    ),
    "compare_and_cast": (
        "Elementwise",
        [tensor("x", [N, M])],
        lambda emit, x: op.astype(emit(op.greater(x, const(0.0))), "float32"),
        lambda x: (x > 0).astype("float32"),
        lambda n, m: [floats(n, m)],
    ),
    "greater": (
        "Elementwise",
        [tensor("x", [N, M])],
        lambda emit, x: op.greater(x, const(0.0)),
        lambda x: x > 0,
        lambda n, m: [floats(n, m)],
    ),
    "softmax": (
        "Rows",
        [tensor("x", [N, 3, M])],
        lambda emit, x: op.nn.softmax(x, -1),
        lambda x: special.softmax(x.astype("float64"), -1),
        lambda n, m: [floats(n, 3, m)],
    ),
    "log_softmax": (
        "Rows",
        [tensor("x", [N, M])],
        lambda emit, x: op.nn.log_softmax(x, -1),
        lambda x: special.log_softmax(x.astype("float64"), -1),
        lambda n, m: [floats(n, m)],
    ),
    "rms_norm": (
        "Rows",
        [tensor("x", [N, M, 48]), tensor("w", [48])],
        lambda emit, x, w: op.nn.rms_norm(x, w, [-1], 1e-5),
        lambda x, w: x / np.sqrt((x.astype("float64") ** 2).mean(-1, keepdims=True) + 1e-5) * w,
        lambda n, m: [floats(n, m, 48), floats(48)],
    ),
    "layer_norm": (
        "Rows",
        [tensor("x", [N, M]), tensor("g", [M]), tensor("b", [M])],
        lambda emit, x, g, b: op.nn.layer_norm(x, g, b, [-1]),
        lambda x, g, b: (
            (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * g + b
        ),
        lambda n, m: [floats(n, m), floats(m), floats(m)],
    ),
    "row_max": (
        "Rows",
        [tensor("x", [N, M, 5])],
        lambda emit, x: op.max(x, [-2, -1]),
        lambda x: x.max((1, 2)),
        lambda n, m: [floats(n, m, 5)],
    ),
    "row_dot": (
        "Rows",
        [tensor("x", [N, M]), tensor("y", [N, M])],
        lambda emit, x, y: op.sum(emit(op.multiply(x, y)), [1], keepdims=True),
        lambda x, y: (x.astype("float64") * y).sum(1, keepdims=True),
        lambda n, m: [floats(n, m), floats(n, m)],
    ),
    "few_columns": (
        "Columns",
        [tensor("x", [N, M, 72]), tensor("y", [N, M, 72])],
        lambda emit, x, y: op.sum(emit(op.multiply(x, y)), [0, 1], keepdims=True),
        lambda x, y: (x.astype("float64") * y).sum((0, 1), keepdims=True),
        lambda n, m: [floats(n, m, 72), floats(n, m, 72)],
    ),
    "columns_of_no_whole_vectors": (
        "Columns",
        [tensor("x", [N, M, 55]), tensor("w", [55])],
        lambda emit, x, w: op.sum(emit(op.multiply(x, w)), [0, 1]),
        lambda x, w: (x.astype("float64") * w).sum((0, 1)),
        lambda n, m: [floats(n, m, 55), floats(55)],
    ),
    "symbolic_columns": (
        "Columns",
        [tensor("x", [N, M])],
        lambda emit, x: op.sum(x, [0]),
        lambda x: x.astype("float64").sum(0),
        lambda n, m: [floats(n, m)],
    ),
    "column_mean": (
        "Columns",
        [tensor("x", [N, M])],
        lambda emit, x: op.mean(x, [0]),
        lambda x: x.astype("float64").mean(0),
        lambda n, m: [floats(n, m)],
    ),
    "columns_under_a_mask_of_rows": (
        "Columns",
        [tensor("x", [N, M, 40]), tensor("b", [M, 1], "bool"), tensor("v", [])],
        lambda emit, x, b, v: op.sum(emit(op.where(b, emit(op.exp(x)), v)), [1]),
        lambda x, b, v: np.where(b, np.exp(x.astype("float64")), v).sum(1),
        lambda n, m: [floats(n, m, 40), RNG.random((m, 1)) < 0.5, np.array(0.5, "float32")],
    ),
    "middle_axis": (
        "Columns",
        [tensor("x", [N, M, 40])],
        lambda emit, x: op.sum(x, [1]),
        lambda x: x.astype("float64").sum(1),
        lambda n, m: [floats(n, m, 40)],
    ),
    "matrix_product": (
        "Columns",
        [tensor("x", [N, M]), tensor("y", [M, 24])],
        lambda emit, x, y: op.matmul(x, y),
        lambda x, y: x.astype("float64") @ y,
        lambda n, m: [floats(n, m), floats(m, 24)],
    ),
    "total": (
        "Totals",
        [tensor("x", [N, M])],
        lambda emit, x: op.sum(emit(op.multiply(x, x))),
        lambda x: (x.astype("float64") ** 2).sum(),
        lambda n, m: [floats(n, m)],
    ),
    "total_mean": (
        "Totals",
        [tensor("x", [N, M])],
        lambda emit, x: op.mean(x),
        lambda x: x.astype("float64").mean(),
        lambda n, m: [floats(n, m)],
    ),
    "per_channel": (
        "Totals",
        [tensor("x", [N, 5, M])],
        lambda emit, x: op.sum(x, [0, 2]),
        lambda x: x.astype("float64").sum((0, 2)),
        lambda n, m: [floats(n, 5, m)],
    ),
    "joined_conditions": (
        "Elementwise",
        [tensor("x", [N, M, 7]), tensor("y", [N, M, 7])],
        joined_conditions,
        joined_conditions_numpy,
        lambda n, m: [floats(n, m, 7), np.where(floats(n, m, 7) > 1, np.nan, floats(n, m, 7))],
    ),
    "softmax_down_columns": (
        "ParallelBlocks",
        [tensor("x", [N, M, 6])],
        lambda emit, x: op.nn.softmax(x, 1),
        lambda x: special.softmax(x.astype("float64"), 1),
        lambda n, m: [floats(n, m, 6)],
    ),
    "arg_max": (
        "ParallelBlocks",
        [tensor("x", [N, M])],
        lambda emit, x: op.argmax(x, -1),
        lambda x: x.argmax(-1),
        lambda n, m: [floats(n, m)],
    ),
}
SIZES = [(1, 1), (2, 3), (5, 67), (33, 131), (1, 513), (301, 2)]


@pytest.fixture(scope="module")
def kernels():
    return {name: fused_kernel(params, build) for name, (_, params, build, *_) in CASES.items()}


@pytest.fixture(scope="module")
def library(kernels):
    return Library({name: scheduled(func) for name, func in kernels.items()})


def run(library, kernel, name, arrays, result):
    """Call a kernel: arrays by the names of the parameters, sizes from the arrays' shapes."""
    named = {param.name: array for param, array in zip(CASES[name][1], arrays, strict=True)}
    args = {}
    sizes = {}
    for param in kernel.params:
        if isinstance(param.ty, tirx.BufferType):
            args[param] = named.get(param.name, result)
            sizes.update(zip(param.ty.shape, args[param].shape, strict=True))
    library(name, *(args[param] if param in args else sizes[param] for param in kernel.params))
    return result


def result_type(kernel):
    return np.dtype(
        "bool" if str(kernel.params[-1].dtype) == "bool" else str(kernel.params[-1].dtype)
    )


@pytest.mark.parametrize("name", CASES)
def test_rule_takes_the_kernel(kernels, name):
    assert rule_of(kernels[name]) == CASES[name][0]


@pytest.mark.parametrize("name", CASES)
def test_result_at_all_sizes(kernels, library, name):
    *_, expected_of, inputs = CASES[name]
    for n, m in SIZES:
        arrays = inputs(n, m)
        expected = np.asarray(expected_of(*arrays))
        result = np.full(expected.shape, 7, result_type(kernels[name]))
        run(library, kernels[name], name, arrays, result)
        scale = max(1.0, float(np.abs(expected[np.isfinite(expected)]).max(initial=0)))
        np.testing.assert_allclose(result, expected, rtol=2e-5, atol=2e-6 * scale * (n * m) ** 0.5)


@pytest.mark.parametrize("name", CASES)
def test_threads_do_not_change_a_bit(kernels, library, name):
    *_, expected_of, inputs = CASES[name]
    arrays = inputs(37, 1030)
    shape = np.asarray(expected_of(*arrays)).shape
    results = []
    try:
        for threads in (1, 2):
            set_threads(threads)
            result = np.zeros(shape, result_type(kernels[name]))
            results.append(run(library, kernels[name], name, arrays, result).tobytes())
    finally:
        set_threads(2)
    assert results[0] == results[1]


@pytest.mark.parametrize("name", ["row_dot", "few_columns", "symbolic_columns", "total"])
def test_long_sums_are_rounded_once(kernels, library, name):
    """A running total in float32 loses several units in the last place over 400 000 terms."""
    *_, expected_of, inputs = CASES[name]
    n, m = (3, 400_003) if name == "row_dot" else (400_003, 3)
    arrays = [1 + np.abs(array) for array in inputs(n, m)]
    expected = np.asarray(expected_of(*arrays))
    result = np.zeros(expected.shape, "float32")
    run(library, kernels[name], name, arrays, result)
    np.testing.assert_allclose(result, expected, rtol=1.3e-7)


@pytest.mark.parametrize("name", ["gradients_of_gate_and_up", "concat_of_many_parts"])
def test_no_condition_is_left_beside_a_seam(kernels, name):
    """Inside one, each lane would call the C library's exp."""
    text = scheduled(kernels[name]).script()
    assert "if_then_else" not in text
    assert "sigmoid" not in text


@pytest.mark.parametrize("name", CASES)
def test_no_vector_is_filled_up_with_what_lies_in_memory(kernels, name):
    """LLVM fills three lanes with a fourth, and arithmetic with subnormal garbage is slow."""
    loops = nodes_of(tirx.For, scheduled(kernels[name]).body)
    lanes = [int(loop.extent) for loop in loops if loop.kind == tirx.ForKind.VECTORIZED]
    assert [count for count in lanes if count & count - 1] == []


@pytest.mark.parametrize(
    "name",
    ["mask", "mask_of_rows", "transposed_mask", "truths_of_truths", "columns_under_a_mask_of_rows"],
)
def test_truth_values_are_read_and_written_in_vectors(kernels, name):
    """One lane at a time took sixteen times as long."""
    loops = nodes_of(tirx.For, scheduled(kernels[name]).body)
    assert any(loop.kind == tirx.ForKind.VECTORIZED for loop in loops)


def test_no_choice_is_made_within_the_condition_of_another(kernels):
    """TVM's passes take five times as long for each that is within the last."""
    selects = nodes_of(prim.Select, scheduled(kernels["joined_conditions"]).body)
    within = [nested for each in selects for nested in nodes_of(prim.Select, each.condition)]
    assert selects
    assert not any(nodes_of(prim.Select, nested.condition) for nested in within)


def test_optimizer_is_one_pass():
    """Several outputs over one domain are one loop, with all reads before the writes."""
    x, y = te.placeholder((N, 40), name="x"), te.placeholder((N, 40), name="y")
    mean = te.compute((N, 40), lambda i, j: x[i, j] * 0.9 + y[i, j] * 0.1, name="mean")
    new = te.compute((N, 40), lambda i, j: x[i, j] - mean[i, j] * 0.5, name="new")
    func = te.create_prim_func([x, y, mean, new]).with_attr("tirx.noalias", True)
    made = scheduled(func)
    text = made.script()
    assert text.count("T.parallel") == 1
    library = Library({"update": made})
    for n in (1, 5, 1000):
        a, b = floats(n, 40), floats(n, 40)
        first, second = np.zeros_like(a), np.zeros_like(a)
        library("update", a, b, first, second)
        np.testing.assert_allclose(first, a * 0.9 + b * 0.1, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(second, a - (a * 0.9 + b * 0.1) * 0.5, rtol=1e-5, atol=1e-6)
