"""Properties of schedules over generated kernels: right, and in place where that is proved."""

import numpy as np
from hypothesis import given, note
from tests.tir_kernels.generated_kernels import generated
from tests.tir_kernels.kernel_runs import Library, scheduled
from tvm import tirx

from relax_disc.analysis.inplace import inplace_pairs

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


@given(generated())
def test_schedule_keeps_the_result(made):
    note(made.text)
    library = Library({"kernel": scheduled(made.func)})
    for n, m in SIZES:
        arrays, results = arguments(made, n, m)
        call(library, "kernel", made.func, arrays + results, n, m)
        wide = [array.astype("float64") for array in arrays]
        for result, value in zip(results, made.outputs, strict=True):
            expected = value.numpy(wide)
            scale = max(1.0, float(np.abs(expected).max()))
            np.testing.assert_allclose(result, expected, rtol=1e-4, atol=3e-5 * scale)


@given(generated())
def test_overlaid_output_equals_separate_output(made):
    """Where a pair is proved, input and output as one buffer change no bit of any output."""
    pairs = inplace_pairs(made.func)
    note(f"{made.text} {pairs}")
    if not pairs:
        return
    functions = {"scheduled": scheduled(made.func), "plain": made.func}
    library = Library(functions, noalias=False)
    assert inplace_pairs(functions["scheduled"]) == pairs
    buffers_at = [
        at for at, param in enumerate(made.func.params) if isinstance(param.ty, tirx.BufferType)
    ]
    for n, m in ((5, 35), (70, 3)):
        for name in functions:
            arrays, results = arguments(made, n, m)
            call(library, name, made.func, arrays + results, n, m)
            for source, target in pairs:
                arrays, _ = arguments(made, n, m)
                overlaid = [np.zeros_like(result) for result in results]
                place = buffers_at.index(target) - len(arrays)
                overlaid[place] = arrays[buffers_at.index(source)]
                call(library, name, made.func, arrays + overlaid, n, m)
                for one, other in zip(overlaid, results, strict=True):
                    np.testing.assert_array_equal(one, other)
