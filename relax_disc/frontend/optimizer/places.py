"""Whether an optimizer's step does with each parameter what its program says, wherever it lies.

A program is traced over one parameter and used for all of a kind.  A step of the user's own may
tell them apart: by the place in its group (``enumerate``), by what the parameter itself holds
(``p.lr_scale``), or by which one it is (``p in self.special``).  So such a step is traced over all
parameters at once, too, and what it computes of each must be what it computes of its kind alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx
from torch.optim import Optimizer

from relax_disc.frontend.optimizer.numbers import Untraceable
from relax_disc.frontend.optimizer.program import UpdateProgram
from relax_disc.frontend.optimizer.surroundings import is_own
from relax_disc.frontend.optimizer.tracing import Member, MemberTrace, OptimizerTracer, Trace

_FEW = 16


def refuse_places(
    optimizer: Optimizer, updates: Sequence[tuple[Mapping[str, Any], Tensor, UpdateProgram]]
) -> None:
    """Refuse a step that updates parameters of one kind in different ways.

    ``updates``: the parameters that it trains, with their groups and programs.

    Raises `Untraceable`: it does.
    """
    if not is_own(type(optimizer)):
        return
    tracer = OptimizerTracer(optimizer)
    groups: dict[int, Mapping[str, Any]] = {}
    members, kinds = [], []
    for group, parameter, program in updates:
        shaped = [replace(s, shape=program.shape_of(s, parameter)) for s in program.tensors]
        begun = groups.setdefault(id(group), program.begun(group))
        members.append(Member(begun, parameter, tuple(shaped), tuple(program.scalars)))
        kinds.append((id(group), id(program)))
    for member in {id(member.group): member for member in members}.values():
        tracer.explore(member)  # which notes what settings the step counts in
    names: dict[Any, int] = {}
    alone = {}
    for kind, member in dict(zip(kinds, members, strict=True)).items():
        trace = tracer.trace([member])
        alone[kind] = _described(trace, trace.members[0], "", names)
    every = [groups.get(id(group), group) for group in optimizer.param_groups]
    whole = tracer.trace(members, every)
    for kind, member, found in zip(kinds, members, whole.members, strict=True):
        place = next(k for k, group in enumerate(every) if group is member.group)
        if _described(whole, found, f"group{place}_", names) != alone[kind]:
            raise Untraceable(
                "updates parameters of one group and type in different ways, by their places in "
                "it, their number, their attributes or which they are; give them groups with "
                "settings of their own"
            )


def _described(trace: Trace, one: MemberTrace, prefix: str, names: dict[Any, int]) -> Any:
    """Number what is computed of a parameter, equal values alike.

    ``prefix``: before the names of its group's settings. ``names``: the numbers so far.
    """
    known: dict[fx.Node, int] = {}

    def number(key: Any) -> int:
        return names.setdefault(key, len(names))

    for name, node in one.inputs.items():
        known[node] = number(("input", name))
    left = [*one.outputs.values()]
    while left:
        node = left.pop()
        missing = [each for each in node.all_input_nodes if each not in known]
        if node in known:
            continue
        if missing:
            left += [node, *missing]
        elif node in trace.entries:
            known[node] = number(("entry", trace.entries[node].replace(prefix, "")))
        elif node.op == "get_attr":
            known[node] = number(_constant(getattr(trace.graph, str(node.target))))
        else:
            taken = fx.map_arg((node.args, node.kwargs), lambda x: f"%{known[x]}")
            # Other parameters' placeholders differ from all else.
            apart = node.name if node.op == "placeholder" else ""
            known[node] = number((node.op, str(node.target), repr(taken), apart))
    outputs = {key: known[node] for key, node in one.outputs.items()}
    return outputs, {key: expr.replace(prefix, "") for key, expr in one.scalars.items()}


def _constant(tensor: Tensor) -> Any:
    """Describe a tensor that the optimizer holds, or a small one by its values."""
    if tensor.numel() > _FEW or tensor.device.type == "meta":
        return "constant", id(tensor)
    return "constant", tensor.dtype, tensor.shape, repr(tensor.tolist())
