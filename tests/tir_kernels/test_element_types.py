"""Kernels of every element type: as TVM's own serial code computes them."""

import ml_dtypes
import numpy as np
import pytest
from tvm import relax, tirx

from tests.tir_kernels.kernel_runs import Library, fused_kernel, scheduled, tensor

op = relax.op
N, M = tirx.Var("n", "int64"), tirx.Var("m", "int64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "uint8", "int32", "int64")

ANY = {
    "add": lambda emit, x, y: op.add(x, y),
    "choose": lambda emit, x, y: op.where(emit(op.less(x, y)), x, emit(op.multiply(y, y))),
    "concat": lambda emit, x, y: op.concat(emit(relax.Tuple([x, y])), 1),
    "transpose": lambda emit, x, y: op.permute_dims(x, [1, 0]),
    "sum_rows": lambda emit, x, y: op.sum(x, [1]),
    "sum_columns": lambda emit, x, y: op.sum(x, [0]),
    "total": lambda emit, x, y: op.sum(x),
    "largest": lambda emit, x, y: op.max(x, [1]),
    "to_float": lambda emit, x, y: op.astype(x, "float32"),
    "to_bool": lambda emit, x, y: op.astype(x, "bool"),
    "not_less": lambda emit, x, y: op.logical_not(emit(op.less(x, y))),
}
REAL = {
    "exp": lambda emit, x, y: op.exp(emit(op.minimum(x, y))),
    "gelu": lambda emit, x, y: op.nn.gelu(x),
    "silu": lambda emit, x, y: op.nn.silu(x),
    "log": lambda emit, x, y: op.log(emit(op.add(emit(op.abs(x)), y))),
    "rsqrt": lambda emit, x, y: op.rsqrt(emit(op.multiply(x, x))),
    "trigonometry": lambda emit, x, y: op.cos(emit(op.sin(x))),
    "nearest": lambda emit, x, y: op.round(x),
    "rounding": lambda emit, x, y: op.round(emit(op.floor(x))),
    "softmax": lambda emit, x, y: op.nn.softmax(x, -1),
}
FULL = {"not_a_number": lambda emit, x, y: op.isnan(emit(op.log(x)))}
# Half precision is rounded once here and after each operation in TVM's code; sums differ in order.
TOLERANCE = {"float16": 2e-2, "bfloat16": 1.5e-1, "float32": 1e-5, "float64": 1e-12}


def values(dtype, n, m, seed):
    rng = np.random.default_rng(seed)
    if dtype in INTEGERS:
        return rng.integers(0, 7, (n, m)).astype(dtype)
    return (rng.random((n, m)) + 0.5).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_as_serial_code(dtype):
    operators = ANY | (REAL if dtype in FLOATS else {})
    operators |= FULL if dtype in ("float32", "float64") else {}
    params = [tensor("x", [N, M], dtype), tensor("y", [N, M], dtype)]
    functions = {}
    for name, build in operators.items():
        plain = fused_kernel(params, build)
        functions[f"plain_{name}"] = plain
        functions[f"fast_{name}"] = scheduled(plain)
    library = Library(functions)
    for n, m in ((3, 5), (7, 69)):
        x, y = values(dtype, n, m, 0), values(dtype, n, m, 1)
        for name in operators:
            plain, fast = (
                run(library, functions, f"{way}_{name}", x, y) for way in ("plain", "fast")
            )
            np.testing.assert_allclose(
                fast.astype("float64"),
                plain.astype("float64"),
                rtol=TOLERANCE.get(dtype, 0),
                atol=TOLERANCE.get(dtype, 0),
                err_msg=name,
            )


def run(library, functions, name, x, y):
    func = functions[name]
    sizes = {"n": x.shape[0], "m": x.shape[1]}
    args = []
    for param in func.params:
        if not isinstance(param.ty, tirx.BufferType):
            args.append(sizes[param.name])
        elif param.name in ("x", "y"):
            args.append(x if param.name == "x" else y)
        else:
            shape = [extent_of(extent, sizes) for extent in param.shape]
            dtype = str(param.dtype)
            args.append(np.zeros(shape, getattr(ml_dtypes, dtype, None) or dtype))
    library(name, *args)
    return args[-1]


def extent_of(extent, sizes):
    if isinstance(extent, tirx.IntImm):
        return int(extent)
    if isinstance(extent, tirx.Add | tirx.Mul):
        a, b = extent_of(extent.a, sizes), extent_of(extent.b, sizes)
        return a + b if isinstance(extent, tirx.Add) else a * b
    return sizes[extent.name]


def test_bfloat16_moves_in_vectors_and_is_rounded_to_even():
    """All bit patterns go in; results lie between representable values, ties among them."""

    def build(emit, x, y):
        wide = emit(op.astype(x, "float32"))
        scaled = emit(op.multiply(wide, emit(op.astype(y, "float32"))))
        return op.astype(scaled, "bfloat16")

    params = [tensor("x", [N, M], "bfloat16"), tensor("y", [N, M], "bfloat16")]
    function = scheduled(fused_kernel(params, build))
    assert "T.vectorized" in function.script() or "T.Ramp" in function.script()
    bits = np.arange(1 << 16, dtype="uint16").reshape(16, -1)
    x = bits.view(ml_dtypes.bfloat16)
    y = np.full_like(x, ml_dtypes.bfloat16(1.0078125))
    functions = {"fast": function}
    found = run(Library(functions), functions, "fast", x, y)
    with np.errstate(invalid="ignore", over="ignore"):
        wanted = (x.astype("float32") * y.astype("float32")).astype(ml_dtypes.bfloat16)
    is_nan = np.isnan(wanted.astype("float32"))
    np.testing.assert_array_equal(np.isnan(found.astype("float32")), is_nan)
    np.testing.assert_array_equal(found.view("uint16")[~is_nan], wanted.view("uint16")[~is_nan])
