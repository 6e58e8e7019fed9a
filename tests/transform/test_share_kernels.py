"""Kernels that differ in sizes only become one, and compute what they did."""

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from relax_disc.pipeline import PipelineOptions, alias_passes, legalize_passes, pipeline
from relax_disc.tir_kernels import cpu_target
from relax_disc.transform.fusion.share_kernels import ShareKernels
from relax_disc.transform.schedule_kernels import ScheduleKernels

TARGET = cpu_target()
N, H, W = (tirx.Var(name, "int64") for name in "nhw")


def program(write, *shapes):
    """A function of tensors `x0`, `x1`, ... that returns what `write(emit, *xs)` does."""
    params = [
        relax.Var(f"x{index}", relax.TensorType(list(shape), "float32"))
        for index, shape in enumerate(shapes)
    ]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            outs = [builder.emit_output(out) for out in write(builder.emit, *params)]
        builder.emit_func_output(relax.Tuple(outs))
    return builder.get()


def fused(mod):
    with TARGET:
        passes = [*legalize_passes(TARGET, PipelineOptions()), *alias_passes()]
        return tvm.transform.Sequential(passes)(mod)


def kernels(mod):
    return {v.name_hint: f for v, f in mod.functions.items() if isinstance(f, tirx.PrimFunc)}


def shared(mod):
    result = ShareKernels()(mod)
    relax.analysis.well_formed(result)  # raises if not
    return kernels(result)


def half(size):
    return (size - 1) // 2 + 1


def normalized(emit, x):
    """Deviations from the mean of each channel, scaled."""
    mean = emit(relax.op.mean(x, [0, 2, 3], keepdims=True))
    return relax.op.tanh(emit(relax.op.subtract(x, mean)))


STAGES = ((N, 32, H, W), (N, 32, half(H), half(W)), (N, 64, half(H), half(W)), (N, 20, H, W))


def stages(emit, *xs):
    return [emit(normalized(emit, x)) for x in xs]


def test_resolutions_and_channels_share_kernels():
    before = fused(program(stages, *STAGES))
    after = shared(before)
    assert len(kernels(before)) == 4 and len(after) == 1
    for kernel in after.values():
        sizes = kernel.params[0].shape
        assert all(isinstance(size, tirx.Var) for size in sizes) and len(set(sizes)) == 4


def test_multiples_of_dims_share_kernels():
    def last(emit, *xs):
        return [emit(relax.op.mean(x, [0, 1, 2])) for x in xs]

    sides = ((H * 8, W * 8), (H * 2, W * 2), (H, W))
    after = shared(fused(program(last, *((N, *side, 64) for side in sides))))
    (kernel,) = after.values()
    sizes = kernel.params[0].shape
    assert all(isinstance(size, tirx.Var) for size in sizes[:3]) and int(sizes[3]) == 64


def test_a_multiple_of_what_is_a_size_too_stays_one():
    def joined(emit, *xs):
        return [emit(relax.op.concat(list(xs), 1))]

    (kernel,) = shared(fused(program(joined, (N, H, 64), (N, H * 3, 64)))).values()
    assert isinstance(kernel.params[0].shape[1], tirx.Var)
    assert not isinstance(kernel.params[1].shape[1], tirx.Var)


@pytest.mark.parametrize("n, h, w", [(1, 1, 1), (3, 7, 10), (2, 33, 16)])
def test_results_are_what_numpy_computes(machine, n, h, w):
    generator = np.random.default_rng(n * h * w)
    sides = [(h, w), ((h - 1) // 2 + 1, (w - 1) // 2 + 1)]
    shapes = [(n, 32, *sides[0]), (n, 32, *sides[1]), (n, 64, *sides[1]), (n, 20, *sides[0])]
    arrays = [generator.standard_normal(shape).astype("float32") for shape in shapes]
    results = machine["main"](*map(tvm.runtime.tensor, arrays))
    for array, result in zip(arrays, results, strict=True):
        wide = array.astype("float64")
        expected = np.tanh(wide - wide.mean((0, 2, 3), keepdims=True))
        np.testing.assert_allclose(result.numpy(), expected, atol=2e-6)


@pytest.fixture(scope="module", params=[True, False], ids=["planned", "stock memory"])
def machine(request):
    options = PipelineOptions(plan_arena=request.param)
    built = relax.build(program(stages, *STAGES), TARGET, relax_pipeline=pipeline(options))
    return relax.VirtualMachine(built, tvm.cpu())


def test_what_vectors_run_along_stays_a_number():
    def rows(emit, *xs):
        return [emit(relax.op.nn.softmax(x)) for x in xs]

    after = shared(fused(program(rows, (N, 64, 256), (N, 32, 256), (N, 64, 512))))
    assert sorted(int(kernel.params[0].shape[2]) for kernel in after.values()) == [256, 512]


def test_small_sizes_and_sizes_in_which_all_agree_stay_numbers():
    def doubled(emit, *xs):
        return [emit(relax.op.sum(emit(relax.op.exp(x)), [2])) for x in xs]

    after = shared(fused(program(doubled, (N, 64, H), (N, 8, H), (N, 64, half(H)))))
    assert sorted(int(kernel.params[0].shape[1]) for kernel in after.values()) == [8, 64]


def test_few_elements_are_computed_on_one_thread():
    def exponents(emit, *xs):
        return [emit(relax.op.exp(x)) for x in xs]

    few, many = [(64,), (96,)], [(20_000,), (30_000,)]
    for shapes, is_parallel in ((few, False), (many, True)):
        mod = ScheduleKernels(TARGET)(ShareKernels()(fused(program(exponents, *shapes))))
        (kernel,) = kernels(mod).values()
        assert isinstance(kernel.params[0].shape[0], tirx.Var)
        assert ("T.parallel" in kernel.script()) == is_parallel


def called(*attributes):
    """A program that calls one kernel under several names, each with its attributes."""
    (kernel,) = kernels(fused(program(lambda e, x: [e(relax.op.exp(x))], (N, 40)))).values()
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([N, 40], "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = x
            for number, attrs in enumerate(attributes):
                different = kernel.with_attr({"number": number, **attrs})
                variable = builder.add_func(different, f"kernel{number}")
                y = builder.emit(relax.call_tir(variable, relax.Tuple([y]), x.ty))
            out = builder.emit_output(y)
        builder.emit_func_output(out)
    mod = builder.get()
    for variable, function in kernels(mod).items():
        mod.update_func(mod.get_global_var(variable), function.without_attr("number"))
    return mod


def test_equal_kernels_become_one():
    mod = called({}, {})
    assert len(kernels(mod)) == 2 and len(shared(mod)) == 1


def test_public_and_scheduled_kernels_stay():
    mod = called({"global_symbol": "known"}, {}, {"tirx.is_scheduled": True})
    assert set(shared(mod)) == set(kernels(mod))


def test_kernels_that_nothing_calls_go():
    mod = called({})
    (kernel,) = kernels(mod).values()
    mod["unused"] = kernel
    mod["known"] = kernel.with_attr("global_symbol", "known")
    assert set(shared(mod)) == {"kernel0", "known"}


def test_input_module_stays():
    mod = fused(program(stages, *STAGES))
    text = mod.script()
    ShareKernels()(mod)
    assert mod.script() == text
