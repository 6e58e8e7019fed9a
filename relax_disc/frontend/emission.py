"""Emit what was traced as functions of Relax: parameters, graph, outputs and updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import tvm
from torch import fx
from torch.utils import _pytree as pytree
from tvm import relax, tirx

from relax_disc.errors import InputMismatchError
from relax_disc.frontend.capture.arguments import outer_of
from relax_disc.frontend.capture.exported.export import Exported
from relax_disc.frontend.capture.sizes.counted import reaches_results
from relax_disc.frontend.capture.traced.trace import Traced
from relax_disc.frontend.emitter import Emitter
from relax_disc.frontend.importer import Parameters, declare, translate
from relax_disc.frontend.index_checks import Guards, IndexChecks
from relax_disc.frontend.optimizer.gradients import declare_gradients, emit_sums
from relax_disc.frontend.optimizer.updates import emit_updates, plan_updates
from relax_disc.frontend.size_checks import (
    branch_checks,
    count_checks,
    emptiness_checks,
    extent_checks,
    normalization_checks,
)
from relax_disc.frontend.spec import (
    CapturedStep,
    CountedDim,
    DimSpec,
    InputSpec,
    OutputSpec,
    SizeOutput,
    UpdateGroup,
)
from relax_disc.frontend.symbols import SymbolTranslator


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What one function shall do with what was traced."""

    function: str = "main"
    optimizer: Any = None
    max_grad_norm: float | None = None
    forward: bool = False
    accumulate: bool = False
    update: bool = True
    groups: Sequence[UpdateGroup] | None = None


def emit_functions(
    exported: Exported, traced: Traced, wanted: Sequence[Wanted]
) -> list[CapturedStep]:
    """Emit functions of one trace into one module, in which they share kernels."""
    builder = relax.BlockBuilder()
    made = [_emit(builder, exported, traced, each) for each in wanted]
    attrs = {step.function: _attributes(step) for step in made}
    if traced.late:
        (step,) = made
        gradients = sum(out.kind == "gradient" for out in step.outputs)
        attrs[step.function]["relax_disc.second_half"] = [traced.late, gradients]
    module = builder.get()
    module = tvm.IRModule(
        {
            where: f.with_attrs(attrs[where.name_hint]) if where.name_hint in attrs else f
            for where, f in module.functions.items()
        }
    )
    return [replace(step, module=module) for step in made]


def _emit(
    builder: relax.BlockBuilder, exported: Exported, traced: Traced, wanted: Wanted
) -> CapturedStep:
    """Emit one function; the module of the result is yet to come."""
    symbols = SymbolTranslator(exported.dims.with_counted(traced.counted))
    emitter = Emitter(builder, symbols)
    parameters = Parameters()
    env = declare(traced, emitter, parameters)
    given = symbols.used
    counted, conditions = _declare_counted(traced, symbols), count_checks(traced.counted, symbols)
    _add_shape_parameter(parameters, symbols.used)
    sums = declare_gradients(traced, parameters) if wanted.accumulate else ()
    updates = plan_updates(
        traced, wanted.optimizer, wanted.max_grad_norm, parameters, wanted.groups
    )
    with builder.function(wanted.function, parameters.variables):
        with builder.dataflow():
            checks = IndexChecks(emitter, traced.graph, traced.arguments)
            flat = translate(traced, emitter, env, checks)
            outputs, values = _outputs(traced, flat, parameters.specs, wanted.forward)
            plain = _plain_extras(traced, flat, symbols, wanted.forward)
            buffers = [
                (out.name, value)
                for out, value in zip(outputs, values, strict=True)
                if out.kind == "buffer"
            ]
            # A number alone would not keep the operator that counts it.
            for size in traced.counted:
                if not reaches_results(size.node):
                    outputs.append(OutputSpec(size.name, "guard"))
                    values.append(_first_of(env[size.node]))
            guards = Guards(emitter, values[0], buffers, checks.flags)
            grads = flat[len(flat) - len(traced.gradients) :] if traced.gradients else []
            if wanted.accumulate:
                added, grads = emit_sums(emitter, parameters, sums, grads, guards)
                outputs += added
                values += grads
            if checks.flags and not (wanted.accumulate or updates.items):
                outputs.append(OutputSpec("guarded", "guard"))
                values.append(guards.token())
            if wanted.update:
                emit_updates(emitter, updates, grads, outputs, values, guards)
            bound: list[Any] = [_bound(emitter, value) for value in values]
            result = builder.emit_output(relax.Tuple(bound))
        builder.emit_func_output(result)
    return CapturedStep(
        module=tvm.IRModule({}),
        inputs=tuple(parameters.specs),
        outputs=tuple(outputs),
        dims=tuple(spec for spec, _ in given),
        batch=exported.batch,
        update_groups=updates.groups,
        extras=_extras_structure(traced, wanted.forward),
        plain_extras=plain,
        function=wanted.function,
        index_checks=tuple(checks.at_entry),
        size_checks=(
            *checks.sizes,
            *normalization_checks(exported.program, symbols),
            *emptiness_checks(exported.program, exported.dims, symbols),
            *branch_checks(exported.size_branches, symbols),
            *extent_checks(traced.graph.graph, exported.dims, symbols),
        ),
        outer=outer_of(traced.arguments, exported),
        counted=counted,
        count_checks=tuple(conditions),
    )


def _bound(emitter: Emitter, value: Any) -> relax.Var:
    return value if isinstance(value, relax.Var) else emitter.emit(value)


def _outputs(
    traced: Traced, flat: Sequence[Any], specs: Sequence[InputSpec], forward: bool
) -> tuple[list[OutputSpec], list[Any]]:
    """List the outputs that the graph itself computes, but for gradients."""
    outputs = [OutputSpec("output_0", "extra") if forward else OutputSpec("loss", "loss")]
    values = [flat[0]]
    for k, value in enumerate(flat[1 : 1 + traced.extra_count]):
        if _is_tensor(value):
            outputs.append(OutputSpec(f"output_{k + 1}", "extra"))
            values.append(value)
    kinds = ("buffer", "constant", "parameter", "batch")
    position = {spec.target: k for k, spec in enumerate(specs) if spec.kind in kinds}
    first = 1 + traced.extra_count
    for k, index in enumerate(traced.buffers):
        target = traced.arguments[index].target
        outputs.append(OutputSpec(str(target), "buffer", position[target]))
        values.append(flat[first + k])
    return outputs, values


def _is_tensor(value: Any) -> bool:
    return isinstance(value, relax.Expr) and isinstance(value.ty, relax.TensorType)


def _plain_extras(
    traced: Traced, flat: Sequence[Any], symbols: SymbolTranslator, forward: bool
) -> dict[int, Any]:
    """Find the extra outputs that are numbers, text or None."""
    nodes: Any = traced.graph.graph.output_node().args[0]
    found: dict[int, Any] = {}
    for k in range(1, 1 + traced.extra_count):
        if _is_tensor(flat[k]):
            continue
        value = nodes[k].meta["val"] if isinstance(nodes[k], fx.Node) else nodes[k]
        if isinstance(value, torch.SymFloat | torch.SymBool):
            raise InputMismatchError(
                f"Output {k} is {value}, computed from sizes; return the sizes themselves, or a "
                "tensor."
            )
        if isinstance(value, torch.SymInt):
            text = symbols.text(value)
            value = SizeOutput(text) if isinstance(text, str) else text
        found[k if forward else k - 1] = value
    return found


def _extras_structure(traced: Traced, forward: bool) -> pytree.TreeSpec | None:
    if traced.extras is None:
        return None
    if forward:
        return traced.extras.children()[0] if traced.nested else traced.extras
    return traced.extras.children()[1]


def _add_shape_parameter(parameters: Parameters, dims: Sequence[tuple[DimSpec, tirx.Var]]) -> None:
    """Prepend a shape parameter when a dim is no extent of its own of any input."""
    bare = {n for spec in parameters.specs for n in spec.shape}
    hidden = [(spec, var) for spec, var in dims if spec.name not in bare]
    if not hidden:
        return
    names = tuple(spec.name for spec, _ in hidden)
    var = relax.Var("dims", relax.ShapeType([v for _, v in hidden]))
    parameters.specs.insert(0, InputSpec("dims", "shape", "", "", -1, names, "int64"))
    parameters.variables.insert(0, var)


def _declare_counted(traced: Traced, symbols: SymbolTranslator) -> tuple[CountedDim, ...]:
    """Declare the dims that the function counts, each of which is entered with its bound."""
    for size in traced.counted:
        symbols.variable(min(size.symbols, key=str))
    return tuple(
        CountedDim(size.name, symbols.text(size.bound), size.least) for size in traced.counted
    )


def _attributes(step: CapturedStep) -> dict[str, Any]:
    pairs = [[k, out.replaces] for k, out in enumerate(step.outputs) if out.replaces is not None]
    counted = [DimSpec(dim.name, dim.least, _number(dim.bound)) for dim in step.counted]
    dims = [*step.dims, *counted]
    attrs: dict[str, Any] = {
        "relax_disc.dims": {d.name: [d.lower, -1 if d.upper is None else d.upper, 1] for d in dims},
        "relax_disc.inplace_pairs": pairs,
        "relax_disc.param_kinds": [spec.kind for spec in step.inputs],
    }
    if counted:
        attrs["relax_disc.counted"] = {dim.name: dim.least for dim in step.counted}
    if step.count_checks:
        checks = [[str(x.size), x.relation, str(x.limit), x.message] for x in step.count_checks]
        attrs["relax_disc.count_checks"] = checks
    if dims:
        attrs["tir_var_lower_bound"] = {d.name: d.lower for d in dims}
    if upper := {d.name: d.upper for d in dims if d.upper is not None}:
        attrs["tir_var_upper_bound"] = upper
    return attrs


def _first_of(value: Any) -> relax.Var:
    """Return an operator's result, the first if there are several."""
    return value[0] if isinstance(value, tuple | list) else value


def _number(bound: int | str) -> int | None:
    return bound if isinstance(bound, int) else None
