"""Gradients that are added to those of earlier batches, as ``loss.backward()`` does.

Each gradient becomes an input of kind ``"gradient"``, the caller's own tensor (``p.grad``), and an
output paired with it: the sum, written in place.  What the adding kernels read beside them passes a
guard first, so nothing is added before the loss has been checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax

from relax_disc.frontend.capture.source_lines import SourceLine
from relax_disc.frontend.capture.trace import Traced
from relax_disc.frontend.emitter import Emitter, dtype_name
from relax_disc.frontend.guarding import Guards
from relax_disc.frontend.importer import Parameters, variable_name
from relax_disc.frontend.optimizer.kernels import SUM_HYPER, hyper_dtype, sum_kernel
from relax_disc.frontend.spec import InputSpec, OutputSpec


def declare_gradients(traced: Traced, parameters: Parameters) -> tuple[int, ...]:
    """Declare the sums so far, and what guards them, as parameters of the function.

    Returned: positions of the sums.
    """
    first = len(parameters.specs)
    kinds = set()
    for index in traced.gradients:
        target, tensor = str(traced.arguments[index].target), traced.arguments[index].tensor
        assert tensor is not None
        shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
        name = f"{variable_name(target)}_grad"
        parameters.add(InputSpec(name, "gradient", target, "", -1, shape, dtype), shape)
        kinds.add(hyper_dtype(dtype))
    positions = tuple(range(first, len(parameters.specs)))
    for dtype in sorted(kinds):
        shape = (len(SUM_HYPER),)
        parameters.add(InputSpec(f"adding_{dtype}", "adding", dtype, "", -1, shape, dtype), shape)
    return positions


def emit_sums(
    emitter: Emitter,
    parameters: Parameters,
    positions: Sequence[int],
    grads: Sequence[Any],
    guards: Guards,
) -> tuple[list[OutputSpec], list[Any]]:
    """Add the new gradients to the sums so far.

    ``outputs``, ``values``: the sums, paired with the inputs that they are written over.
    """
    guarded: dict[str, Any] = {}
    for spec, variable in zip(parameters.specs, parameters.variables, strict=True):
        if spec.kind == "adding":
            guarded[spec.dtype] = guards.behind(variable)
    outputs, values = [], []
    for position, grad in zip(positions, grads, strict=True):
        spec = parameters.specs[position]
        extents: Any = list(spec.shape)
        kernel = sum_kernel(tuple(extents), spec.dtype)
        emitter.locate(f"{spec.name}_sum", SourceLine("", 0))
        args = [parameters.variables[position], grad, guarded[hyper_dtype(spec.dtype)]]
        kind = relax.TensorType(extents, spec.dtype)
        values.append(emitter.kernel(kernel, "update_sum", args, kind))
        outputs.append(OutputSpec(str(spec.target), "gradient", position))
    return outputs, values
