"""Plan and emit the optimizer's updates: groups, extra parameters of the function, kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from tvm import relax, te

from relax_disc.errors import InputMismatchError
from relax_disc.frontend import fallback
from relax_disc.frontend.capture.arguments import Argument
from relax_disc.frontend.capture.source_lines import SourceLine
from relax_disc.frontend.capture.traced.trace import Traced
from relax_disc.frontend.converters import TABLE
from relax_disc.frontend.emitter import Emitter, dtype_name
from relax_disc.frontend.importer import PLACEMENT, Parameters, convert, variable_name
from relax_disc.frontend.index_checks import Guards
from relax_disc.frontend.optimizer.gradients import (
    emit_clip,
    emit_coefficient,
    emit_inverse,
    emit_overflow,
)
from relax_disc.frontend.optimizer.kernels import (
    hyper_dtype,
    is_elementwise,
    states_read,
    update_kernel,
)
from relax_disc.frontend.optimizer.numbers import constant
from relax_disc.frontend.optimizer.program import UpdateProgram, Value, reachable
from relax_disc.frontend.optimizer.programs import (
    programs_of,
    refuse_operators,
    refuse_told_apart,
)
from relax_disc.frontend.optimizer.several import groups_of, optimizers_of
from relax_disc.frontend.spec import InputSpec, OutputSpec, UpdateGroup

_INPUTS = ("parameter", "gradient", "state", "entry", "filled")


@dataclass(frozen=True, slots=True)
class Update:
    """One parameter to update: indices of inputs, which gradient, and which optimizer's."""

    target: str
    program: UpdateProgram
    parameter: int
    gradient: int
    states: Mapping[str, int]
    hyper: int
    owner: int


@dataclass(frozen=True, slots=True)
class Updates:
    """All updates of a step; ``variables`` are the function's parameters."""

    items: tuple[Update, ...]
    groups: tuple[UpdateGroup, ...]
    specs: Sequence[InputSpec]
    variables: Sequence[relax.Var]
    targets: tuple[str, ...]
    max_grad_norm: float | None


def plan_updates(
    traced: Traced,
    optimizer: Any,
    max_grad_norm: float | None,
    parameters: Parameters,
    like: Sequence[UpdateGroup] | None = None,
) -> Updates:
    """Decide which parameters are updated how; declare states and hyper-parameters.

    ``optimizer`` is one, several or none.

    Parameters of one ``param_group`` whose counts of steps, types or updates differ go into update
    groups of their own, because one vector of hyper-parameters holds one bias correction.
    Parameters that the optimizer does not hold, or that get no gradient, are left alone.  With
    ``like`` the groups are those of another function of the same model and optimizer.

    Raises `UnsupportedOperatorError`: the optimizer or one of its flags cannot be honoured. Raises
    `InputMismatchError`: the optimizer trains nothing of this model, or ``max_grad_norm`` is not
    positive.
    """
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise InputMismatchError(f"max_grad_norm must be positive, got {max_grad_norm}.")
    targets = tuple(str(traced.arguments[i].target) for i in traced.gradients)
    tensors = [traced.arguments[i].tensor for i in traced.gradients]
    gradient_of = {id(tensor): k for k, tensor in enumerate(tensors)}
    position = {s.target: k for k, s in enumerate(parameters.specs) if s.kind == "parameter"}
    items: list[Update] = []
    groups: list[UpdateGroup] = []
    owned = groups_of(optimizer)
    number_of = {owner: k for k, owner in enumerate(optimizers_of(optimizer))}
    for index, grads in _members(owned, gradient_of, targets, like):
        owner, group = owned[index]
        number = len(groups)
        names = tuple(targets[k] for k in grads)
        members = [(name, _tensor(tensors, k), k) for name, k in zip(names, grads, strict=True)]
        programs = [programs_of(owner).of(group, tensor) for _, tensor, _ in members]
        refuse_operators(owner, programs, _untranslated)
        hyper = _declare_hyper(parameters, programs[0], number, names[0], members[0][1])
        for (name, tensor, grad), program in zip(members, programs, strict=True):
            states = _declare_states(parameters, name, number, tensor, program)
            update = Update(name, program, position[name], grad, states, hyper, number_of[owner])
            items.append(update)
        groups.append(UpdateGroup(index, names, hyper))
    if like is None:
        refuse_told_apart(optimizer, lambda parameter: id(parameter) in gradient_of)
    if optimizer is not None and not items:
        raise InputMismatchError(
            "None of the optimizer's parameters gets a gradient from this loss; was the optimizer "
            "made for this model?"
        )
    return Updates(
        tuple(items), tuple(groups), parameters.specs, parameters.variables, targets, max_grad_norm
    )


def _members(
    owned: Sequence[tuple[Optimizer, dict[str, Any]]],
    gradient_of: dict[int, int],
    targets: Sequence[str],
    like: Sequence[UpdateGroup] | None,
) -> Iterator[tuple[int, list[int]]]:
    """List update groups: the index of the ``param_group``, and which gradients."""
    if like is not None:
        gradient = {target: k for k, target in enumerate(targets)}
        for group in like:
            yield group.param_group, [gradient[target] for target in group.targets]
        return
    for index, (owner, group) in enumerate(owned):
        for members in _split(owner, group, gradient_of):
            yield index, [gradient_of[id(tensor)] for tensor in members]


def describe_updates(optimizer: Any, arguments: Sequence[Argument]) -> list[Any]:
    """Describe all of the optimizers that `plan_updates` looks at, whichever gradients there are.

    For each ``param_group`` the names of its parameters and a hash of their updates, listed apart
    where they cannot share one vector of hyper-parameters; JSON can hold it.
    """
    names = {id(argument.tensor): argument.target for argument in arguments}
    place = {known: k for k, known in enumerate(names)}
    refuse_told_apart(optimizer, lambda parameter: id(parameter) in place)
    return [
        [
            [[names[id(p)], programs_of(owner).of(group, p).digest] for p in part]
            for part in _split(owner, group, place)
        ]
        for owner, group in groups_of(optimizer)
    ]


def _tensor(tensors: Sequence[torch.Tensor | None], index: int) -> torch.Tensor:
    tensor = tensors[index]
    assert tensor is not None
    return tensor


def _split(
    optimizer: Optimizer, group: dict[str, Any], gradient_of: dict[int, int]
) -> list[list[torch.Tensor]]:
    """Split the trained parameters of a group by what the host computes for them, and from what."""
    parts: dict[Any, list[torch.Tensor]] = {}
    for tensor in group["params"]:
        if id(tensor) in gradient_of:
            program = programs_of(optimizer).of(group, tensor)
            key = (_vector_dtype(program, tensor), program.host_text)
            state = optimizer.state.get(tensor, {})
            counts = repr((program.scalars_now(state, group), program.is_fresh(state)))
            parts.setdefault((counts, *key), []).append(tensor)
    return list(parts.values())


def _vector_dtype(program: UpdateProgram, tensor: torch.Tensor) -> str:
    return hyper_dtype(dtype_name(tensor.dtype)) if is_elementwise(program) else "float64"


def _untranslated(program: UpdateProgram) -> list[str]:
    """Name the operators of an update that there is no converter for."""
    if is_elementwise(program):
        return []
    values = reachable([v for way in program.ways for v in way.outputs.values()])
    known = (*_INPUTS, "<built-in function getitem>")
    calls = [v for v in values if v.op not in known and v.op not in TABLE]
    return sorted({v.op for v in calls if fallback.why_not(v.node)})


def _declare_hyper(
    parameters: Parameters, program: UpdateProgram, number: int, target: str, tensor: torch.Tensor
) -> int:
    shape, dtype = (program.width,), _vector_dtype(program, tensor)
    spec = InputSpec(f"hyper_{number}", "hyper", target, "", number, shape, dtype)
    parameters.add(spec, shape)
    return len(parameters.specs) - 1


def _declare_states(
    parameters: Parameters, target: str, number: int, tensor: torch.Tensor, program: UpdateProgram
) -> dict[str, int]:
    needed = {state.key for state in (*states_read(program), *program.written)}
    places = {}
    for state in program.tensors:
        if state.key in needed:
            shape, dtype = program.shape_of(state, tensor), dtype_name(state.dtype)
            name = f"{variable_name(target)}_{variable_name(state.key)}"
            parameters.add(InputSpec(name, "state", target, state.key, number, shape, dtype), shape)
            places[state.key] = len(parameters.specs) - 1
    return places


def emit_updates(
    emitter: Emitter,
    updates: Updates,
    grads: Sequence[Any],
    outputs: list[OutputSpec],
    values: list[Any],
    guards: Guards,
) -> None:
    """Emit the updates, and list the new values as outputs paired with the old.

    New parameters come first, then new states, each in the order of the updates.  Without updates
    the gradients themselves become outputs.  A parameter that forward wrote is updated as written.
    """
    written = {o.replaces: v for o, v in zip(outputs, values, strict=True) if o.kind == "buffer"}
    replaced = {item.parameter for item in updates.items}
    kept = [k for k, output in enumerate(outputs) if output.replaces not in replaced]
    outputs[:], values[:] = [outputs[k] for k in kept], [values[k] for k in kept]
    clip, inverse = None, None
    scales = [k for k, spec in enumerate(updates.specs) if spec.kind == "scale"]
    if scales and updates.items:
        inverse = emit_inverse(emitter, updates.variables[scales[0]])
    if updates.max_grad_norm is not None and grads:
        clip, norm = emit_clip(emitter, grads, updates.max_grad_norm, inverse)
        outputs.insert(_extra_end(outputs), OutputSpec("grad_norm", "norm"))
        values.insert(_extra_end(outputs) - 1, norm)
    if not updates.items:
        outputs += [OutputSpec(target, "gradient") for target in updates.targets]
        values += grads
        return
    coefficients = dict.fromkeys((item.owner for item in updates.items), clip)
    if inverse is not None:
        overflows = {}
        for owner in coefficients:
            own = [grads[item.gradient] for item in updates.items if item.owner == owner]
            overflows[owner] = emit_overflow(emitter, own)
            coefficients[owner] = emit_coefficient(emitter, clip, inverse, overflows[owner])
        for owner, value in overflows.items():
            outputs.insert(_extra_end(outputs), OutputSpec(str(owner), "overflow"))
            values.insert(_extra_end(outputs) - 1, value)
    states: list[tuple[OutputSpec, Any]] = []
    hyper = {
        group.hyper_input: guards.behind(updates.variables[group.hyper_input])
        for group in updates.groups
    }
    for item in updates.items:
        grad = grads[item.gradient]
        old = written.get(item.parameter, updates.variables[item.parameter])
        coefficient = coefficients[item.owner]
        results = _emit_update(
            *(emitter, updates, item, old, grad, hyper[item.hyper], coefficient, bool(scales))
        )
        outputs.append(OutputSpec(item.target, "parameter", item.parameter))
        values.append(results[0])
        changed = [item.states[state.key] for state in item.program.written]
        for state, result in zip(changed, results[1:], strict=True):
            states.append((OutputSpec(updates.specs[state].name, "state", state), result))
    outputs += [spec for spec, _ in states]
    values += [value for _, value in states]


def _extra_end(outputs: Sequence[OutputSpec]) -> int:
    kinds = ("loss", "extra", "norm", "overflow")
    return sum(1 for output in outputs if output.kind in kinds)


def _emit_update(
    emitter: Emitter,
    updates: Updates,
    item: Update,
    parameter: Any,
    grad: Any,
    hyper: relax.Var,
    coefficient: Any,
    may_skip: bool,
) -> list[relax.Var]:
    """Emit one update; ``may_skip``: a coefficient that is NaN leaves everything as it was."""
    name = variable_name(item.target)
    emitter.locate(f"{name}_update", SourceLine("", 0))
    program, dtype = item.program, emitter.dtype(parameter)
    if not is_elementwise(program):
        if coefficient is not None:
            grad = emitter.emit(relax.op.multiply(grad, emitter.cast(coefficient, dtype)))
        skipped = emitter.emit(relax.op.isnan(coefficient)) if may_skip else None
        return _Translation(emitter, updates, item, parameter, grad, hyper).results(skipped)
    shape = tuple(int(n) for n in emitter.shape(parameter))
    reads = [updates.variables[item.states[s.key]] for s in states_read(program, may_skip)]
    args = [parameter, grad, *reads, hyper]
    if coefficient is not None:
        args.append(emitter.cast(coefficient, hyper_dtype(dtype)))
    kernel = update_kernel(program, shape, dtype, coefficient is not None, may_skip)
    extents: Any = list(shape)
    types = [dtype, *(dtype_name(state.dtype) for state in program.written)]
    kinds = [relax.TensorType(extents, each) for each in types]
    if len(kinds) == 1:
        return [emitter.kernel(kernel, "update", args, kinds[0])]
    both = emitter.kernel(kernel, "update", args, kinds)
    emitter.locate(f"{name}_new", SourceLine("", 0))
    return [emitter.emit(relax.TupleGetItem(both, k)) for k in range(len(kinds))]


class _Translation:
    """Emits an update that is no single kernel operator by operator, as the model's own."""

    def __init__(
        self,
        emitter: Emitter,
        updates: Updates,
        item: Update,
        parameter: Any,
        grad: Any,
        hyper: relax.Var,
    ) -> None:
        self._emitter, self._program, self._hyper = emitter, item.program, hyper
        self._name = variable_name(item.target)
        self._known = {"parameter": parameter, "gradient": grad}
        self._states = {key: updates.variables[k] for key, k in item.states.items()}
        self._entries = {expr: k for k, expr in enumerate(item.program.entries)}
        self._made: dict[Any, Any] = {}

    def results(self, skipped: relax.Expr | None) -> list[relax.Var]:
        """Emit the new parameter and the new states, as the way that is taken makes them.

        With ``skipped``, where that is true, the old ones.
        """
        emitter, ways = self._emitter, self._program.ways
        found = []
        for name in ("parameter", *(state.key for state in self._program.written)):
            old = self._known.get(name, self._states.get(name))
            chosen = self._output(ways[0].outputs.get(name), old)
            for k, way in enumerate(ways[1:], len(self._entries)):
                if way.outputs.get(name) is not ways[0].outputs.get(name):
                    flag = emitter.emit(relax.op.greater(self._entry(k), relax.const(0, "float64")))
                    other = self._output(way.outputs.get(name), old)
                    chosen = emitter.emit(relax.op.where(flag, other, chosen))
            if skipped is not None:
                chosen = emitter.emit(relax.op.where(skipped, old, chosen))
            found.append(chosen)
        return found

    def _output(self, value: Value | None, old: Any) -> Any:
        return old if value is None else self._emitter.cast(self._emit(value), old.ty.dtype.dtype)

    def _entry(self, k: int) -> Any:
        if k not in self._made:
            self._emitter.locate(f"{self._name}_setting", SourceLine("", 0))
            self._made[k] = self._emitter.te(
                "setting", lambda vector: te.compute((), lambda: vector[k], name="x"), self._hyper
            )
        return self._made[k]

    def _emit(self, value: Value) -> Any:
        if value.op in self._known:
            return self._known[value.op]
        if id(value) not in self._made:
            self._made[id(value)] = self._operation(value)
        return self._made[id(value)]

    def _operation(self, value: Value) -> Any:
        emitter, node = self._emitter, value.node
        if value.op == "state":
            return self._states[value.args[0]]
        if value.op == "entry":
            if (number := constant(value.args[0])) is not None:
                return relax.const(number, "float64")
            return self._entry(self._entries[value.args[0]])
        count = len(node.args)
        args = [] if value.op == "filled" else [self._operand(x) for x in value.args[:count]]
        emitter.at(node)
        emitter.locate(f"{self._name}_update", SourceLine("", 0))
        if value.op == "filled":
            number = relax.const(value.args[0], dtype_name(value.dtype))
            return (
                emitter.emit(relax.op.broadcast_to(number, value.shape)) if value.shape else number
            )
        if value.op == "<built-in function getitem>":
            return args[0][value.args[1]]
        named = {k: self._operand(x) for k, x in value.args[count:] if k not in PLACEMENT}
        return convert(emitter, args, named)

    def _operand(self, argument: Any) -> Any:
        if isinstance(argument, Value):
            return self._emit(argument)
        return [self._operand(x) for x in argument] if isinstance(argument, tuple) else argument
