"""Capture a PyTorch training step, or a forward pass, as one symbolic Relax function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
import tvm
from torch import fx, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from tvm import relax, tirx

from relax_disc.errors import InputMismatchError
from relax_disc.frontend.accumulation import declare_gradients, emit_sums
from relax_disc.frontend.emitter import Emitter
from relax_disc.frontend.export import Exported, export, wrap_forward, wrap_step
from relax_disc.frontend.fingerprint import fingerprint
from relax_disc.frontend.importer import Parameters, declare, refuse_unknown, translate
from relax_disc.frontend.refusals import refuse_model
from relax_disc.frontend.spec import (
    CapturedStep,
    DimSpec,
    InputSpec,
    OutputSpec,
    SizeOutput,
    UpdateGroup,
)
from relax_disc.frontend.symbols import SymbolTranslator
from relax_disc.frontend.trace import (
    Argument,
    Traced,
    list_arguments,
    trace_forward,
    trace_step,
)
from relax_disc.frontend.updates import describe_updates, emit_updates, plan_updates

ADDING, UPDATING = "add_gradients", "update_from_sum"
"""Names of the functions of `capture_accumulation`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wanted:
    """What one function shall do with what was traced."""

    function: str = "main"
    optimizer: Optimizer | None = None
    max_grad_norm: float | None = None
    forward: bool = False
    accumulate: bool = False
    update: bool = True
    groups: Sequence[UpdateGroup] | None = None


@dataclass(frozen=True, slots=True)
class ExportedStep:
    """A model and its loss as PyTorch exports them, before their gradients are traced.

    Attributes
    ----------
    exported : Exported
        The forward pass.
    model : torch.nn.Module
        As given.
    optimizer : Optimizer or None
        As given.
    max_grad_norm : float or None
        As given.
    """

    exported: Exported
    model: nn.Module
    optimizer: Optimizer | None
    max_grad_norm: float | None

    def fingerprint(
        self, *, accumulate: bool = False, groups: Sequence[UpdateGroup] | None = None
    ) -> str | None:
        """Hash what decides the result of `capture`, but for versions and sources.

        Values of parameters and of hyper-parameters, which calls read, and sizes of the example
        make no difference.  None where the hash could not be trusted: see
        :func:`.fingerprint.fingerprint`.

        Parameters
        ----------
        accumulate : bool
            Of `capture_accumulation` instead.
        groups : sequence of UpdateGroup, optional
            As given to that.

        Raises
        ------
        UnsupportedOperatorError
            The optimizer or one of its flags cannot be honoured, or parameters overlap.
        """
        arguments, position = list_arguments(self.exported.program, self.model)
        settings = [
            sorted(position.items()),
            describe_updates(self.optimizer, arguments),
            repr(self.max_grad_norm),
            accumulate,
            None if groups is None else [astuple(group) for group in groups],
        ]
        return fingerprint(self.exported, arguments, settings)

    def constants(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the model that are neither parameters nor buffers, by name."""
        arguments, _ = list_arguments(self.exported.program, self.model)
        return _constants(arguments)

    def capture(self) -> CapturedStep:
        """Trace the gradients and make the Relax function: see `capture_step`."""
        wanted = _Wanted(optimizer=self.optimizer, max_grad_norm=self.max_grad_norm)
        return _build(self.exported, _trace(self.exported, self.model), [wanted])[0]

    def capture_accumulation(
        self, groups: Sequence[UpdateGroup] | None = None
    ) -> tuple[CapturedStep, CapturedStep]:
        """Make the functions that sum gradients: see the function of the same name."""
        common: dict[str, Any] = {
            "optimizer": self.optimizer,
            "groups": groups,
            "accumulate": True,
        }
        adding = _Wanted(function=ADDING, update=False, **common)
        updating = _Wanted(function=UPDATING, max_grad_norm=self.max_grad_norm, **common)
        traced = _trace(self.exported, self.model)
        first, second = _build(self.exported, traced, [adding, updating])
        return first, second


def export_step(
    model: nn.Module,
    optimizer: Optimizer | None,
    example_inputs: Any,
    *,
    dynamic_shapes: Any,
    loss_fn: Callable[..., Any] | None = None,
    max_grad_norm: float | None = None,
) -> ExportedStep:
    """Do the first part of `capture_step`, whose parameters and errors it has."""
    refuse_model(model, trained=True)
    exported = export(wrap_step(model, loss_fn), example_inputs, dynamic_shapes)
    return ExportedStep(exported, model, optimizer, max_grad_norm)


def capture_step(
    model: nn.Module,
    optimizer: Optimizer | None,
    example_inputs: Any,
    *,
    dynamic_shapes: Any,
    loss_fn: Callable[..., Any] | None = None,
    max_grad_norm: float | None = None,
) -> CapturedStep:
    """Capture forward, gradients and optimizer update as one Relax function.

    Nothing is changed: neither the model nor the optimizer, which keep their tensors.

    Parameters
    ----------
    model : torch.nn.Module
        In the mode, ``train()`` or ``eval()``, in which it shall run.
    optimizer : Optimizer or None
        SGD, Adam or AdamW; with ``None`` the gradients themselves are returned.
    example_inputs : tuple, mapping or object
        Positional arguments, keyword arguments, or the only argument of the step.  Its tensors
        are only looked at; a dynamic axis of size 1 is traced as if it were longer.
    dynamic_shapes : object
        As ``torch.export.export`` takes it, for the arguments of the step.
    loss_fn : callable, optional
        ``loss_fn(model, *batch)`` returns the loss, or ``(loss, extra outputs)``.  Without it the
        model's output is the loss, has ``.loss``, holds ``"loss"``, or is a tuple that begins with
        it.
    max_grad_norm : float, optional
        Clip the gradients of all trained parameters by their global norm; the norm becomes an
        output.

    Returns
    -------
    CapturedStep
        The function ``main`` returns ``(loss, *extras[, norm], *buffers, *parameters, *states)``,
        with gradients in the place of parameters and states when there is no optimizer.

    Raises
    ------
    UnsupportedOperatorError
        Something in the model or the optimizer cannot be translated.
    ShapeRangeError
        The model contradicts ``dynamic_shapes``.
    InputMismatchError
        The arguments do not fit the model, or there is no loss.
    """
    return export_step(
        model,
        optimizer,
        example_inputs,
        dynamic_shapes=dynamic_shapes,
        loss_fn=loss_fn,
        max_grad_norm=max_grad_norm,
    ).capture()


def capture_accumulation(
    model: nn.Module,
    optimizer: Optimizer,
    example_inputs: Any,
    *,
    dynamic_shapes: Any,
    loss_fn: Callable[..., Any] | None = None,
    max_grad_norm: float | None = None,
    groups: Sequence[UpdateGroup] | None = None,
) -> tuple[CapturedStep, CapturedStep]:
    """Capture the two functions that sum gradients over batches, in one module.

    Both take the optimizer's state, so that it counts as memory of the call, and the sums, which
    they write in place.

    Parameters
    ----------
    groups : sequence of UpdateGroup, optional
        Update groups of the function that `capture_step` made; by default as it would make them.
    model, optimizer, example_inputs, dynamic_shapes, loss_fn, max_grad_norm
        See `capture_step`, as are the errors.

    Returns
    -------
    adding : CapturedStep
        ``(loss, *extras, *buffers, *sums)``; updates nothing else.
    updating : CapturedStep
        ``(loss, *extras[, norm], *buffers, *sums, *parameters, *states)``: the sums include this
        batch's gradients; they are clipped, and the update is made from them.
    """
    return export_step(
        model,
        optimizer,
        example_inputs,
        dynamic_shapes=dynamic_shapes,
        loss_fn=loss_fn,
        max_grad_norm=max_grad_norm,
    ).capture_accumulation(groups)


def _trace(exported: Exported, model: nn.Module) -> Traced:
    traced = trace_step(exported, model)
    refuse_unknown(traced)
    if not traced.gradients:
        raise InputMismatchError(
            "The loss does not depend on any parameter that requires a gradient; "
            "use capture_forward for inference."
        )
    return traced


def capture_forward(model: nn.Module, example_inputs: Any, *, dynamic_shapes: Any) -> CapturedStep:
    """Capture the forward pass alone; every output is of kind ``"extra"``.

    Parameters, errors and the result are as in :func:`capture_step`; buffers that the forward pass
    changes are outputs too.
    """
    refuse_model(model, trained=False)
    exported = export(wrap_forward(model), example_inputs, dynamic_shapes)
    traced = trace_forward(exported, model)
    refuse_unknown(traced)
    return _build(exported, traced, [_Wanted(forward=True)])[0]


def _build(exported: Exported, traced: Traced, wanted: Sequence[_Wanted]) -> list[CapturedStep]:
    """Emit functions of one trace into one module, in which they share kernels."""
    builder = relax.BlockBuilder()
    made = [_emit(builder, exported, traced, each) for each in wanted]
    attrs = {step.function: _attributes(step.inputs, step.outputs, step.dims) for step in made}
    module = builder.get()
    module = tvm.IRModule(
        {
            where: f.with_attrs(attrs[where.name_hint]) if where.name_hint in attrs else f
            for where, f in module.functions.items()
        }
    )
    return [replace(step, module=module) for step in made]


def _emit(
    builder: relax.BlockBuilder, exported: Exported, traced: Traced, wanted: _Wanted
) -> CapturedStep:
    """Emit one function; the module of the result is yet to come."""
    symbols = SymbolTranslator(exported.dims)
    emitter = Emitter(builder, symbols)
    parameters = Parameters()
    env = declare(traced, emitter, parameters)
    _add_shape_parameter(parameters, symbols.used)
    sums = declare_gradients(traced, parameters) if wanted.accumulate else ()
    updates = plan_updates(
        traced, wanted.optimizer, wanted.max_grad_norm, parameters, wanted.groups
    )
    with builder.function(wanted.function, parameters.variables):
        with builder.dataflow():
            flat = translate(traced, emitter, env)
            outputs, values = _outputs(traced, flat, parameters.specs, wanted.forward)
            plain = _plain_extras(traced, flat, symbols, wanted.forward)
            grads = flat[len(flat) - len(traced.gradients) :] if traced.gradients else []
            if wanted.accumulate:
                added, grads = emit_sums(emitter, parameters, sums, grads, values[0])
                outputs += added
                values += grads
            if wanted.update:
                emit_updates(emitter, updates, grads, outputs, values)
            bound: list[Any] = [_bound(emitter, value) for value in values]
            result = builder.emit_output(relax.Tuple(bound))
        builder.emit_func_output(result)
    specs = tuple(parameters.specs)
    return CapturedStep(
        module=tvm.IRModule({}),
        inputs=specs,
        outputs=tuple(outputs),
        dims=tuple(spec for spec, _ in symbols.used),
        batch=exported.batch,
        constants={
            name: tensor
            for name, tensor in _constants(traced.arguments).items()
            if any(spec.kind == "constant" and spec.target == name for spec in specs)
        },
        update_groups=updates.groups,
        extras=_extras_structure(traced, wanted.forward),
        plain_extras=plain,
        function=wanted.function,
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
    position = {spec.target: k for k, spec in enumerate(specs) if spec.kind == "buffer"}
    first = 1 + traced.extra_count
    for k, index in enumerate(traced.buffers):
        target = str(traced.arguments[index].target)
        outputs.append(OutputSpec(target, "buffer", position[target]))
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
    if forward or traced.extras is None:
        return traced.extras
    return traced.extras.children()[1]


def _constants(arguments: Sequence[Argument]) -> dict[str, torch.Tensor]:
    return {
        str(a.target): a.tensor for a in arguments if a.kind == "constant" and a.tensor is not None
    }


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


def _attributes(
    specs: Sequence[InputSpec], outputs: Sequence[OutputSpec], dims: Sequence[DimSpec]
) -> dict[str, Any]:
    pairs = [[k, out.replaces] for k, out in enumerate(outputs) if out.replaces is not None]
    attrs: dict[str, Any] = {
        "relax_disc.dims": {d.name: [d.lower, -1 if d.upper is None else d.upper, 1] for d in dims},
        "relax_disc.inplace_pairs": pairs,
        "relax_disc.param_kinds": [spec.kind for spec in specs],
    }
    if dims:
        attrs["tir_var_lower_bound"] = {d.name: d.lower for d in dims}
    if upper := {d.name: d.upper for d in dims if d.upper is not None}:
        attrs["tir_var_upper_bound"] = upper
    return attrs
