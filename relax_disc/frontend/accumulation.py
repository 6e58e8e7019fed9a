"""Gradients that are added to those of earlier batches, as ``loss.backward()`` does.

Each gradient becomes an input of kind ``"gradient"``, the caller's own tensor (``p.grad``), and an
output paired with it: the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax

from relax_disc.frontend.emitter import Emitter, dtype_name
from relax_disc.frontend.importer import Parameters, variable_name
from relax_disc.frontend.source_lines import SourceLine
from relax_disc.frontend.spec import InputSpec, OutputSpec
from relax_disc.frontend.trace import Traced

op: Any = relax.op


def declare_gradients(traced: Traced, parameters: Parameters) -> tuple[int, ...]:
    """Declare the sums so far as parameters of the function; return their positions."""
    first = len(parameters.specs)
    for index in traced.gradients:
        target, tensor = str(traced.arguments[index].target), traced.arguments[index].tensor
        assert tensor is not None
        shape = tuple(tensor.shape)
        name = f"{variable_name(target)}_grad"
        spec = InputSpec(name, "gradient", target, "", -1, shape, dtype_name(tensor.dtype))
        parameters.add(spec, shape)
    return tuple(range(first, len(parameters.specs)))


def emit_sums(
    emitter: Emitter,
    parameters: Parameters,
    positions: Sequence[int],
    grads: Sequence[Any],
    outputs: list[OutputSpec],
    values: list[Any],
) -> None:
    """Add the new gradients to the sums so far; list the sums as outputs paired with the old."""
    for position, grad in zip(positions, grads, strict=True):
        spec = parameters.specs[position]
        emitter.locate(f"{spec.name}_sum", SourceLine("", 0))
        values.append(emitter.emit(op.add(parameters.variables[position], grad)))
        outputs.append(OutputSpec(str(spec.target), "gradient", position))
