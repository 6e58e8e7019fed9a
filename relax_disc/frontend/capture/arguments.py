"""What a traced graph takes: the batch, and the tensors of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec

from relax_disc.errors import UnsupportedOperatorError
from relax_disc.frontend.capture.exported.export import MODEL, Exported
from relax_disc.frontend.capture.state.outer import Layouts, Outer, OuterTensor, strides_of
from relax_disc.frontend.capture.state.outer_state import OuterState


@dataclass(frozen=True, slots=True)
class Argument:
    """One input of a traced graph."""

    name: str  # name in the exported program
    # ``"batch"``, ``"parameter"``, ``"buffer"``, ``"constant"``, ``"number"``, ``"rng"`` or
    # ``"scale"``
    kind: str
    target: str | int  # full name in the model, or the index of the leaf of the batch
    tensor: Tensor | None  # the model's own tensor
    # for a constant or a number where the user's code keeps it; None for one that the code itself
    # holds, such as ``torch.tensor(2.0)``
    outer: OuterTensor | None = None


def outer_of(arguments: Sequence[Argument], exported: Exported) -> Outer:
    """Say where the inputs lie that are neither the model's own nor the batch's."""
    state = exported.outer
    inputs = {
        str(a.target): a.outer or OuterTensor(a.tensor, None, None)
        for a in arguments
        if a.kind in ("constant", "number") and a.tensor is not None
    }
    layouts = None
    if state.layout_line is not None:
        leaves = enumerate(exported.leaves)
        strides = {k: strides_of(leaf) for k, leaf in leaves if isinstance(leaf, Tensor)}
        layouts = Layouts(str(state.layout_line), strides)
    states = {id(assigned.tensor) for assigned in state.reassigned}
    assigned = frozenset(str(a.target) for a in arguments if id(a.tensor) in states)
    written = frozenset(str(a.target) for a in arguments if id(a.tensor) in state.written)
    return Outer(inputs, tuple(state.guards), layouts, assigned, written)


def is_foreign_parameter(argument: Argument) -> bool:
    """Whether eager PyTorch would make a gradient of it, and it is none of the model's."""
    tensor = argument.tensor
    return argument.kind == "constant" and isinstance(tensor, nn.Parameter) and tensor.requires_grad


def list_arguments(
    program: ExportedProgram, model: nn.Module, outer: OuterState
) -> tuple[tuple[Argument, ...], dict[str, int]]:
    """List the inputs of a trace, batch first, tied parameters and buffers once.

    Returned with where the value of each exported name comes from; the state of the random numbers,
    which comes last, is left out.

    Raises `UnsupportedOperatorError`: two parameters share memory without being one parameter.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    constants = {**program.state_dict, **program.constants}
    arguments: list[Argument] = []
    position: dict[str, int] = {}
    seen: dict[int, int] = {}
    leaf = 0
    for spec in sorted(program.graph_signature.input_specs, key=_rank):
        name = spec.arg.name
        target = (spec.target or "").removeprefix(f"{MODEL}.")
        if spec.kind is InputKind.USER_INPUT:
            argument = Argument(name, "batch", leaf, None)
            leaf += 1
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            is_parameter = spec.kind is InputKind.PARAMETER
            tensor = parameters[target] if is_parameter else model.get_buffer(target)
            if id(tensor) in seen:
                position[name] = seen[id(tensor)]
                continue
            seen[id(tensor)] = len(arguments)
            argument = Argument(name, "parameter" if is_parameter else "buffer", target, tensor)
        else:
            argument = _constant(name, target, constants[str(spec.target)], outer)
        position[name] = len(arguments)
        arguments.append(argument)
    known = {id(argument.tensor) for argument in arguments}
    for assigned in outer.reassigned:
        if id(assigned.tensor) not in known:  # written, never read
            target = str(assigned.source)
            arguments.append(Argument(target, "constant", target, assigned.tensor, assigned))
    _refuse_overlap(arguments)
    return tuple(arguments), position


def _constant(name: str, target: str, tensor: Tensor, outer: OuterState) -> Argument:
    found = outer.outer_tensor(tensor)
    if found is None:
        return Argument(name, "constant", target, tensor)
    if found.source is not None:
        target = found.source.target
    kind = "number" if found.is_number else "constant"
    return Argument(name, kind, target, found.tensor, found)


def _rank(spec: InputSpec) -> int:
    order = [InputKind.USER_INPUT, InputKind.PARAMETER, InputKind.BUFFER]
    return order.index(spec.kind) if spec.kind in order else len(order)


def _refuse_overlap(arguments: Sequence[Argument]) -> None:
    owners: dict[int, Argument] = {}
    for argument in arguments:
        if argument.kind != "parameter" or argument.tensor is None or argument.tensor.numel() == 0:
            continue
        other = owners.setdefault(argument.tensor.untyped_storage().data_ptr(), argument)
        if other is not argument:
            raise UnsupportedOperatorError(
                f"The parameters {other.target} and {argument.target} share memory without being "
                "one parameter; tie them by assigning the same Parameter to both."
            )
