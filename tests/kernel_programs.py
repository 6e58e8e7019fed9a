"""Programs of Relax operators, made kernels as the pipeline makes them."""

import tvm
from tvm import relax

from relax_disc.pipeline import legalize_passes


def tensor(name, shape, dtype="float32"):
    return relax.Var(name, relax.TensorType(list(shape), dtype))


def kernels_before(stage, options, params, write):
    """Return what `write(emit, *params)` computes, as the pipeline has it before a pass."""
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            results = [builder.emit_output(x) for x in write(builder.emit, *params)]
        builder.emit_func_output(relax.Tuple(results))
    with tvm.target.Target("llvm") as target:
        passes = legalize_passes(target, options)
        place = next(k for k, each in enumerate(passes) if each.info.name == stage)
        unused = relax.transform.DeadCodeElimination()
        return tvm.transform.Sequential([unused, *passes[:place]])(builder.get())
