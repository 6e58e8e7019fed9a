"""A reshape runs no kernel, whatever its extents."""

import tvm
from tvm import relax

from relax_disc.analysis.program.extraction import extract
from relax_disc.pipeline import alias_passes


def lowered(build):
    n, h, w = (tvm.tirx.Var(name, "int64") for name in "nhw")
    x = relax.Var("x", relax.TensorType([n, h, w, 8], "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(build(builder.emit(relax.op.exp(x)), n, h, w))
            out = builder.emit_output(relax.op.negative(y))
        builder.emit_func_output(out)
    passes = [relax.transform.LegalizeOps(), *alias_passes()]
    return tvm.transform.Sequential(passes)(builder.finalize())


def kernels(mod):
    return [kernel.name for kernel in extract(mod, "main").kernels]


def test_rows_and_columns_become_one_axis_without_a_kernel():
    joined = lowered(lambda y, n, h, w: relax.op.reshape(y, [n, h * w, 4, 2]))
    split = lowered(lambda y, n, h, w: relax.op.reshape(y, [h * n, w * 8]))
    assert kernels(joined) == kernels(split) == ["tir_exp", "tir_negative"]


def test_a_kernel_that_moves_elements_runs():
    moved = lowered(lambda y, n, h, w: relax.op.permute_dims(y, [0, 2, 1, 3]))
    assert kernels(moved) == ["tir_exp", "transpose", "tir_negative"]
