"""Plan and emit the optimizer's updates: groups, extra parameters of the function, kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from tvm import relax

from relax_disc.errors import InputMismatchError
from relax_disc.frontend.capture.arguments import Argument
from relax_disc.frontend.capture.source_lines import SourceLine
from relax_disc.frontend.capture.trace import Traced
from relax_disc.frontend.emitter import Emitter, dtype_name
from relax_disc.frontend.guarding import Guards
from relax_disc.frontend.importer import Parameters, variable_name
from relax_disc.frontend.optimizer.clipping import emit_clip
from relax_disc.frontend.optimizer.kernels import hyper_dtype, update_kernel
from relax_disc.frontend.optimizer.states import (
    Rule,
    hyper_names,
    required_state,
    state_step,
    update_rule,
)
from relax_disc.frontend.spec import InputSpec, OutputSpec, UpdateGroup


@dataclass(frozen=True, slots=True)
class Update:
    """One parameter to update: indices of inputs, and which gradient."""

    target: str
    rule: Rule
    parameter: int
    gradient: int
    states: tuple[int, ...]
    hyper: int


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
    optimizer: Optimizer | None,
    max_grad_norm: float | None,
    parameters: Parameters,
    like: Sequence[UpdateGroup] | None = None,
) -> Updates:
    """Decide which parameters are updated how; declare states and hyper-parameters.

    Parameters of one ``param_group`` whose counts of steps differ, or whose types differ, go into
    update groups of their own, because one vector of hyper-parameters holds one bias correction.
    Parameters that the optimizer does not hold, or that get no gradient, are left alone.  With
    ``like`` the groups are those of another function of the same model and optimizer.

    Raises
    ------
    UnsupportedOperatorError
        The optimizer or one of its flags cannot be honoured.
    InputMismatchError
        The optimizer trains nothing of this model, or ``max_grad_norm`` is not positive.
    """
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise InputMismatchError(f"max_grad_norm must be positive, got {max_grad_norm}.")
    targets = tuple(str(traced.arguments[i].target) for i in traced.gradients)
    tensors = [traced.arguments[i].tensor for i in traced.gradients]
    gradient_of = {id(tensor): k for k, tensor in enumerate(tensors)}
    position = {s.target: k for k, s in enumerate(parameters.specs) if s.kind == "parameter"}
    items: list[Update] = []
    groups: list[UpdateGroup] = []
    for index, grads in _members(optimizer, gradient_of, targets, like):
        assert optimizer is not None
        group = optimizer.param_groups[index]
        rule, keys = update_rule(optimizer, group), required_state(optimizer, group)
        number = len(groups)
        names = tuple(targets[k] for k in grads)
        dtype = dtype_name(_tensor(tensors, grads[0]).dtype)
        hyper = _declare_hyper(parameters, rule, number, names[0], dtype)
        for name, grad in zip(names, grads, strict=True):
            tensor = _tensor(tensors, grad)
            states = _declare_states(parameters, name, number, tensor, dtype, keys)
            items.append(Update(name, rule, position[name], grad, states, hyper))
        groups.append(UpdateGroup(index, names, hyper))
    if optimizer is not None and not items:
        raise InputMismatchError(
            "None of the optimizer's parameters gets a gradient from this loss; was the optimizer "
            "made for this model?"
        )
    return Updates(
        tuple(items),
        tuple(groups),
        parameters.specs,
        parameters.variables,
        targets,
        max_grad_norm,
    )


def _members(
    optimizer: Optimizer | None,
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
    for index, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
        assert optimizer is not None
        for members in _split(optimizer, group, gradient_of):
            yield index, [gradient_of[id(tensor)] for tensor in members]


def describe_updates(optimizer: Optimizer | None, arguments: Sequence[Argument]) -> list[Any]:
    """Describe all of an optimizer that `plan_updates` looks at, whichever gradients there are.

    Returns
    -------
    list
        For each ``param_group`` its rule, the states that it keeps, and the names of its
        parameters, listed apart where they cannot share one vector of hyper-parameters; JSON can
        hold it.

    Raises
    ------
    UnsupportedOperatorError
        The optimizer or one of its flags cannot be honoured.
    """
    names = {id(argument.tensor): argument.target for argument in arguments}
    place = {known: k for k, known in enumerate(names)}
    if optimizer is None:
        return []
    return [
        [
            update_rule(optimizer, group),
            required_state(optimizer, group),
            [[names[id(p)] for p in part] for part in _split(optimizer, group, place)],
        ]
        for group in optimizer.param_groups
    ]


def _tensor(tensors: Sequence[torch.Tensor | None], index: int) -> torch.Tensor:
    tensor = tensors[index]
    assert tensor is not None
    return tensor


def _split(
    optimizer: Optimizer, group: dict[str, Any], gradient_of: dict[int, int]
) -> list[list[torch.Tensor]]:
    """Split the trained parameters of a group by type and by count of steps."""
    parts: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
    for tensor in group["params"]:
        if id(tensor) in gradient_of:
            key = (state_step(optimizer, tensor), tensor.dtype)
            parts.setdefault(key, []).append(tensor)
    return list(parts.values())


def _declare_hyper(parameters: Parameters, rule: Rule, number: int, target: str, dtype: str) -> int:
    shape = (len(hyper_names(rule)),)
    spec = InputSpec(f"hyper_{number}", "hyper", target, "", number, shape, hyper_dtype(dtype))
    parameters.add(spec, shape)
    return len(parameters.specs) - 1


def _declare_states(
    parameters: Parameters,
    target: str,
    number: int,
    tensor: torch.Tensor,
    dtype: str,
    keys: Sequence[str],
) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    for key in keys:
        name = f"{variable_name(target)}_{key}"
        parameters.add(InputSpec(name, "state", target, key, number, shape, dtype), shape)
    count = len(parameters.specs)
    return tuple(range(count - len(keys), count))


def emit_updates(
    emitter: Emitter,
    updates: Updates,
    grads: Sequence[Any],
    outputs: list[OutputSpec],
    values: list[Any],
    guards: Guards,
) -> None:
    """Emit one kernel a parameter, and list the new values as outputs paired with the old.

    New parameters come first, then new states, each in the order of the updates.  Without updates
    the gradients themselves become outputs.
    """
    coefficient = None
    if updates.max_grad_norm is not None and grads:
        coefficient, norm = emit_clip(emitter, grads, updates.max_grad_norm)
        outputs.insert(_extra_end(outputs), OutputSpec("grad_norm", "norm"))
        values.insert(_extra_end(outputs) - 1, norm)
    if not updates.items:
        outputs += [OutputSpec(target, "gradient") for target in updates.targets]
        values += grads
        return
    states: list[tuple[OutputSpec, Any]] = []
    hyper = {
        group.hyper_input: guards.behind(updates.variables[group.hyper_input])
        for group in updates.groups
    }
    for item in updates.items:
        grad = grads[item.gradient]
        results = _emit_update(emitter, updates, item, grad, hyper[item.hyper], coefficient)
        outputs.append(OutputSpec(item.target, "parameter", item.parameter))
        values.append(results[0])
        for state, result in zip(item.states, results[1:], strict=True):
            states.append((OutputSpec(updates.specs[state].name, "state", state), result))
    outputs += [spec for spec, _ in states]
    values += [value for _, value in states]


def _extra_end(outputs: Sequence[OutputSpec]) -> int:
    kinds = ("loss", "extra", "norm")
    return sum(1 for output in outputs if output.kind in kinds)


def _emit_update(
    emitter: Emitter, updates: Updates, item: Update, grad: Any, hyper: relax.Var, coefficient: Any
) -> list[relax.Var]:
    name = variable_name(item.target)
    emitter.locate(f"{name}_update", SourceLine("", 0))
    parameter = updates.variables[item.parameter]
    shape = tuple(int(n) for n in emitter.shape(parameter))
    dtype = emitter.dtype(parameter)
    args = [parameter, grad, *(updates.variables[k] for k in item.states)]
    args.append(hyper)
    if coefficient is not None:
        args.append(emitter.cast(coefficient, hyper_dtype(dtype)))
    kernel = update_kernel(item.rule, shape, dtype, coefficient is not None)
    extents: Any = list(shape)
    kinds = [relax.TensorType(extents, dtype)] * (1 + len(item.states))
    if len(kinds) == 1:
        return [emitter.kernel(kernel, f"update_{item.rule}", args, kinds[0])]
    both = emitter.kernel(kernel, f"update_{item.rule}", args, kinds)
    emitter.locate(f"{name}_new", SourceLine("", 0))
    return [emitter.emit(relax.TupleGetItem(both, k)) for k in range(len(kinds))]
