"""Properties of schedules over generated kernels: right, and in place where that is proved."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import tirx

from relax_disc.analysis.kernels.inplace import inplace_pairs
from tests.tir_kernels.generated_kernels import generated
from tests.tir_kernels.kernel_runs import Library, scheduled, set_threads

SIZES = [(1, 1), (5, 35), (70, 3)]


def arguments(made, n, m, seed=0):
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(made.sizes(s, n, m)).astype("float32") for s in made.inputs]
    results = [np.full(made.sizes(v.shape, n, m), 7, "float32") for v in made.outputs]
    return arrays, results


def call(library, name, func, buffers, n, m):
    given_buffers = iter(buffers)
    sizes = {"n": n, "m": m}
    library(
        name,
        *(
            next(given_buffers) if isinstance(param.ty, tirx.BufferType) else sizes[param.name]
            for param in func.params
        ),
    )


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Starting threads for such small kernels would take most of the time."""
    set_threads(1)
    yield
    set_threads(2)


# An example is a handful of kernels, since compiling them together costs little more than one.
KERNELS = st.lists(generated(), min_size=10, max_size=10)
EXAMPLES = settings().max_examples // 10


@settings(max_examples=EXAMPLES)
@given(KERNELS)
def test_schedule_keeps_the_result(kernels):
    library = Library({f"kernel{k}": scheduled(made.func) for k, made in enumerate(kernels)})
    for k, made in enumerate(kernels):
        for n, m in SIZES:
            arrays, results = arguments(made, n, m)
            call(library, f"kernel{k}", made.func, arrays + results, n, m)
            wide = [array.astype("float64") for array in arrays]
            for result, value in zip(results, made.outputs, strict=True):
                expected = value.numpy(wide)
                scale = max(1.0, float(np.abs(expected).max()))
                np.testing.assert_allclose(
                    result, expected, rtol=1e-4, atol=3e-5 * scale, err_msg=made.text
                )


@settings(max_examples=EXAMPLES)
@given(KERNELS)
def test_overlaid_output_equals_separate_output(kernels):
    """Where a pair is proved, input and output as one buffer change no bit of any output."""
    functions = {}
    for k, made in enumerate(kernels):
        if inplace_pairs(made.func):
            functions[f"scheduled{k}"] = scheduled(made.func)
            functions[f"plain{k}"] = made.func
            assert inplace_pairs(functions[f"scheduled{k}"]) == inplace_pairs(made.func)
    if not functions:
        return
    library = Library(functions, noalias=False)
    for name in functions:
        made = kernels[int(name[-1])]
        for n, m in ((5, 35), (70, 3)):
            check_overlay(library, name, made, n, m)


def check_overlay(library, name, made, n, m):
    func = made.func
    buffers_at = [
        at for at, param in enumerate(func.params) if isinstance(param.ty, tirx.BufferType)
    ]
    arrays, results = arguments(made, n, m)
    call(library, name, func, arrays + results, n, m)
    for source, target in inplace_pairs(func):
        arrays, _ = arguments(made, n, m)
        overlaid = [np.zeros_like(result) for result in results]
        overlaid[buffers_at.index(target) - len(arrays)] = arrays[buffers_at.index(source)]
        call(library, name, func, arrays + overlaid, n, m)
        for one, other in zip(overlaid, results, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=f"{made.text} {source} {target}")
