"""Vector formulas against float64, over dense sweeps and at the odd values."""

import numpy as np
import pytest
from scipy import special
from tvm import te, tirx

from tests.tir_kernels.kernel_runs import Library, scheduled

# name: (TVM function, reference, sweep, largest error in ulp)
FUNCTIONS = {
    "exp": (tirx.exp, np.exp, (-103.0, 88.7), 1.1),
    "log": (tirx.log, np.log, (1e-3, 100.0), 1.0),
    "log1p": (tirx.log1p, np.log1p, (-0.9999, 100.0), 2.5),
    "sigmoid": (tirx.sigmoid, special.expit, (-87.0, 100.0), 2.6),
    "tanh": (tirx.tanh, np.tanh, (-12.0, 12.0), 1.5),
    "erf": (tirx.erf, special.erf, (-6.0, 6.0), 6.0),
}
SPECIAL = [-np.inf, np.inf, np.nan, 0.0, -1e30, 1e30, -150.0, 88.8, 1e-30, -1e-30, -1.0, 1e-40]


def elementwise(function, dtype="float32"):
    n = tirx.Var("n", "int64")
    x = te.placeholder((n,), dtype, name="x")
    y = te.compute((n,), lambda i: function(x[i]), name="y")
    return scheduled(te.create_prim_func([x, y]).with_attr("tirx.noalias", True))


@pytest.fixture(scope="module")
def library():
    functions = {name: elementwise(function) for name, (function, *_) in FUNCTIONS.items()}
    return Library(functions | {"half": elementwise(tirx.exp, "float16")})


def run(library, name, x):
    y = np.zeros_like(x)
    library(name, x, y)
    return y


@pytest.mark.parametrize("name", FUNCTIONS)
def test_error_over_a_dense_sweep(library, name):
    _, reference, (low, high), bound = FUNCTIONS[name]
    sweep = np.linspace(low, high, 400_003).astype("float32")
    if low > -50:
        sweep = np.concatenate([sweep, np.logspace(-30, -1, 2000).astype("float32")])
    expected = reference(sweep.astype("float64"))
    ulp = np.spacing(np.abs(expected).astype("float32")).astype("float64")
    assert (np.abs(run(library, name, sweep) - expected) / ulp).max() <= bound


@pytest.mark.parametrize("name", FUNCTIONS)
def test_odd_values_in_vectors_and_in_the_rest(library, name):
    _, reference, *_ = FUNCTIONS[name]
    values = np.array(SPECIAL * 3, "float32")
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        expected = reference(values.astype("float64")).astype("float32")
    np.testing.assert_allclose(run(library, name, values), expected, rtol=1e-6, atol=1e-37)


def test_half_precision_is_computed_in_float32(library):
    x = np.linspace(-8, 8, 100).astype("float16")
    expected = np.exp(x.astype("float32")).astype("float16")
    np.testing.assert_array_equal(run(library, "half", x), expected)


def test_calls_under_a_condition_are_left_alone():
    def guarded(value):
        return tirx.if_then_else(value > 0.0, tirx.exp(value), 0.0)

    assert "T.exp" in elementwise(guarded).script()
    assert "T.exp" not in elementwise(tirx.exp).script()
