"""Update programs that the optimizers of one class share within a process.

To trace a step takes longer than all else of a small model's capture, and gives the same program
for each optimizer of a class whose settings are of one kind.  Only classes of `torch.optim` share:
what their steps read is known.  That is the group's settings, sizes, the state, public attributes
(which a program notes and `changed_attributes` compares), functions of their own modules, and the
few settings of PyTorch in `_surroundings`.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from relax_disc.frontend.optimizer.program import UpdateProgram, reachable

_MOST = 64  # a program with its graphs takes some 200 KB
_SHARED: OrderedDict[Any, list[Shared]] = OrderedDict()


class Shared(NamedTuple):
    """A program, and how far it holds."""

    program: UpdateProgram
    alone: bool  # for the shape that was traced alone
    uncoupled: bool  # it was traced where another parameter's update was shown not to matter


def shared_key(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: torch.Tensor, settings: str
) -> Any:
    """Return all that a trace depends on but what programs check; None: it is not known.

    ``settings`` describes those that are no numbers.
    """
    kind = type(optimizer)
    if getattr(torch.optim, kind.__name__, None) is not kind:
        return None
    surroundings = _surroundings()
    signs = [_signs(value) for key, value in group.items() if key != "params"]
    if surroundings is None or None in signs:
        return None
    return (
        kind,
        _functions(kind),
        surroundings,
        settings,
        tuple(group),
        tuple(signs),
        parameter.dtype,
        tuple(min(size, 2) for size in parameter.shape),  # sizes of one are broadcast
    )


def find_shared(
    key: Any,
    optimizer: Optimizer,
    group: Mapping[str, Any],
    parameter: torch.Tensor,
    held: Mapping[str, Any],
    is_uncoupled: bool,
) -> Shared | None:
    """Return a program that holds for a parameter as it is.

    ``is_uncoupled``: of this optimizer's group it is shown that parameters do not depend on others.
    """
    if key is None:
        return None
    for shape in (None, tuple(parameter.shape)):
        for known in _SHARED.get((key, shape), ()):
            program, is_shown = known.program, is_uncoupled or known.uncoupled
            fits = is_shown and program.fits(group, parameter, held)
            if fits and not program.changed_attributes(optimizer):
                return known
    return None


def share(key: Any, shared: Shared) -> None:
    """Keep a program for other optimizers, unless it holds tensors of this one."""
    program = shared.program
    outputs = [value for way in program.ways for value in way.outputs.values()]
    values = reachable([*outputs, *program.created.values()])
    if key is None or any(value.op == "constant" for value in values):
        return
    shape = program.traced_shape if shared.alone else None
    _SHARED.setdefault((key, shape), []).append(shared)
    while len(_SHARED) > _MOST:
        _SHARED.popitem(last=False)


def _surroundings() -> Any:
    """Describe the settings of PyTorch that tracing reads; None where a mode may change it."""
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        return None
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        return None
    return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()


def _functions(kind: type[Any]) -> tuple[Any, ...]:
    """List the functions of a class and of its modules; one that is replaced makes another key."""
    methods = [x for base in kind.__mro__ for x in vars(base).values() if inspect.isroutine(x)]
    known = (getattr(inspect.unwrap(x), "__globals__", None) for x in methods)
    scopes = {id(scope): scope for scope in known if scope is not None}
    functions = [x for scope in scopes.values() for x in scope.values() if inspect.isfunction(x)]
    return (*methods, *functions)


def _signs(value: Any) -> Any:
    """Return what of a setting may choose the way that is traced; None: anything may."""
    if isinstance(value, bool | str | None):
        return "given"  # in the description of the settings
    if type(value) in (int, float):
        return (value > 0) - (value < 0)
    if type(value) not in (list, tuple):
        return None
    if any(type(each) not in (int, float, bool, str, type(None)) for each in value):
        return None
    are_numbers = all(type(each) in (int, float) for each in value)
    # Numbers beside other values are not recorded, but taken as they are.
    return type(value), tuple(map(_signs, value) if are_numbers else map(repr, value))
