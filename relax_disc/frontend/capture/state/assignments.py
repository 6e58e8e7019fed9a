"""What the user's code has assigned anew while it was traced: state, and what would be lost.

A tensor in the place of another of its shape and type is state: the step gives the new value.  So
are the tensors of a tuple, list or dict in the place of one of the same form.  Other changes are
put back; where the trace computes with what is changed, the next call would need the new value, and
the change is refused.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

from torch import Tensor, nn

from relax_disc.errors import UnsupportedOperatorError
from relax_disc.frontend.capture.state.kinds import NAMESPACES, is_foreign, is_plain
from relax_disc.frontend.capture.state.live_number import LiveNumber
from relax_disc.frontend.capture.state.outer import OuterTensor
from relax_disc.frontend.capture.state.reachable import Reachable
from relax_disc.frontend.capture.state.snapshot import ATTRIBUTES, Kept, further, same
from relax_disc.frontend.capture.state.sources import ElementsAt, Place, Source, is_replaced

INTERNAL = frozenset(nn.Module().__dict__) | {"forward", "__dict__", "__class__"}
"""Attributes of modules that are PyTorch's own."""
_HIDDEN = INTERNAL | {"_flat_weights", "_flat_weight_refs"}  # of PyTorch's recurrent layers
_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
_NUMBERS = {int, float}
_Change = tuple[Source, Place, Any, Any]
"""Where something lies, and what lay there before and lies there now."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a trace knows when the user's code has run."""

    known: Reachable
    registered: Mapping[tuple[int, str], Tensor]  # by the ids of modules' tables and the names
    own: Collection[int]  # ids of the model's parameters and buffers
    touched: Collection[int]  # ids of the tensors that the trace was given
    reads: Mapping[tuple[int, str], tuple[Any, Any]]  # attributes that were read, and first found
    absent: Collection[tuple[int, str]]  # attributes that were asked for in vain
    is_used: Callable[[int], bool]  # whether a number has decided something, or is computed with
    is_computed_with: Callable[[Tensor], bool]
    # names, the user's tensors, and the trace's
    inputs: Callable[[], Sequence[tuple[str, Tensor, Tensor]]]
    stand_in: Callable[[Tensor], Tensor]  # the trace's tensor for one of the user's


@dataclass(slots=True)
class Assigned:
    """What was found.

    ``states``: the places of state, for which ``values`` are the new tensors. ``changed``: places,
    and containers with None, that are no longer what a guard may compare. ``lost``: what is put
    back, in words, with where it lies and what the next call would find there, if it looks.
    """

    states: list[OuterTensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    changed: set[tuple[int, Any]] = field(default_factory=set)
    lost: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    written: set[int] = field(default_factory=set)  # ids of old tensors, written in place as well


def assignments(held: Held, saved: Sequence[Kept]) -> Assigned:
    """Compare what is there now with what was ``saved`` before the user's code ran.

    Raises `UnsupportedOperatorError`: the step computes with something that is given a value which
    it cannot keep.
    """
    found = Assigned()
    holders = {id(vars(module)): id(module) for _, module in held.known.modules.values()}
    inside = {id(where): before for kind, _, where, before in saved if kind == "container"}
    dropped = _dropped(held, saved)
    for kind, source, where, before in saved:
        if id(where) in dropped:
            continue
        if kind == "internal":  # of PyTorch's own, but for numbers that the user sets
            for target, place, old, new in _of_dict(kind, source, where, before):
                was_read = (holders.get(id(where)), place.key) in held.reads
                if was_read and {type(old), type(new)} <= _NUMBERS:
                    raise _lost_number(str(target))
                _refuse_lost_number(held, str(target), old)
            continue
        for change in _changes(held, found, kind, source, where, before):
            _note(held, found, kind, holders, _with_first_elements(change, inside))
    _refuse_one_for_two(found)
    _refuse_written_twins(held, found)
    return found


def _dropped(held: Held, saved: Sequence[Kept]) -> set[int]:
    """Return the ``id`` of each container in whose only place another lies.

    Nobody looks into it any more, whatever the code has put there meanwhile.
    """
    gone: set[int] = set()
    for kind, _, where, before in saved:
        if kind == "variable":
            gone |= {id(before)} if where.get() is not before else set()
        elif kind in ATTRIBUTES:
            gone |= {id(old) for key, old in before.items() if where.get(key) is not old}
    return {key for key in gone if key not in held.known.again}


def _with_first_elements(change: _Change, inside: Mapping[int, Any]) -> _Change:
    """Give for a container that was there before what it held then; ``inside``: of all of them."""
    target, place, old, new = change
    if old is not new and id(old) in inside and not same(old, inside[id(old)]):
        old = inside[id(old)]
    return target, place, old, new


def _changes(
    held: Held, found: Assigned, kind: str, source: Source, where: Any, before: Any
) -> Iterator[_Change]:
    """List what changed in one thing that was kept; note what changed of it as a whole."""
    if kind == "variable":
        yield source, where, before, where.get()
    elif isinstance(where, dict):
        if len(where) < len(before):
            found.lost.append((str(source), (where, dict(where))))
        if where.keys() != before.keys():
            found.changed.add((id(where), None))
        yield from _of_dict(kind, source, where, before)
    elif isinstance(where, list | collections.deque) and len(where) == len(before):
        for index, value in enumerate(where):
            yield further(source, kind, index), Place(where, index), before[index], value
    elif not same(where, before):
        found.changed.add((id(where), None))
        _refuse_lost(held, str(source), before)
        found.lost.append((str(source), (where, where.copy())))


def _of_dict(kind: str, source: Source, where: Any, before: Any) -> list[_Change]:
    named = "attributes" if kind == "internal" else kind
    return [
        (further(source, named, key), Place(where, key), before.get(key), value)
        for key, value in dict.items(where)
        if before.get(key) is not value and not (kind in ATTRIBUTES and key in _HIDDEN)
    ]


def _note(
    held: Held, found: Assigned, kind: str, holders: Mapping[int, int], change: _Change
) -> None:
    target, place, old, new = change
    if old is new or _is_same(held, old, new):
        return
    states = _as_states(held, target, place, old, new)
    if states is None or isinstance(old, Tensor):  # other containers are compared at each call
        found.changed.add((id(place.container), place.key))
    if states is not None:
        found.states += [state for state, _ in states]
        found.values += [held.stand_in(value) for _, value in states]
    elif not _computed_before(old):
        _refuse_lost(held, str(target), old)
        _refuse_lost_number(held, str(target), old)
        if kind == "settings" and old is None and isinstance(new, str):
            return  # transformers notes in a config which loss goes with the labels
        holder = holders.get(id(place.container))
        is_found = holder is None or _is_read_first(held, (holder, place.key), old)
        found.lost.append((str(target), (place, new) if is_found else ()))


def _refuse_lost(held: Held, what: str, before: Any) -> None:
    """Refuse a change of tensors that the trace reads, and that no input can take.

    Raises `UnsupportedOperatorError`: the next call would read the old ones again.
    """
    read = [x for x in _tensors_in(before) if held.is_computed_with(x)]
    if not read:
        return
    raise UnsupportedOperatorError(
        f"{what} holds a tensor of shape {tuple(read[0].shape)} that the model or loss_fn "
        "reads, and is given others while it runs, of another shape, type or number, or with "
        "other numbers or texts beside them, or in another object: a compiled step keeps the "
        "shape and type of its state, in a tuple, list or dict. Use a buffer of fixed size "
        "that is written in place (a ring with a position; a counter that is a tensor), or pass "
        "the tensor as an argument and return the new one beside the loss, as (loss, extras).",
        (("state of another shape", what),),
    )


def _refuse_lost_number(held: Held, what: str, before: Any) -> None:
    """Refuse to set a number anew that the trace computes with, or decides by.

    Raises `UnsupportedOperatorError`: the next call would start from the old one again.
    """
    if type(before) is not LiveNumber or not any(map(held.is_used, before.leaves)):
        return
    raise _lost_number(what)


def _as_states(
    held: Held, source: Source, place: Place, old: Any, new: Any
) -> list[tuple[OuterTensor, Tensor]] | None:
    """Return the inputs whose new values lie in a tensor or a container; None: there is more.

    The container has the form of the old one, as a pair of hidden and cell state has.
    """
    if isinstance(old, Tensor):
        state = _as_state(held, source, place, old, new)
        return None if state is None else [(state, new)]
    if is_plain(old):
        return [] if type(old) is type(new) and old == new else None
    if not is_replaced(old) or type(old) is not type(new) or len(old) != len(new):
        return None
    keys = list(old) if isinstance(old, dict) else range(len(old))
    if isinstance(old, dict) and keys != list(new):
        return None
    found: list[tuple[OuterTensor, Tensor]] = []
    for key in keys:
        if old[key] is not new[key] and not _is_same(held, old[key], new[key]):
            inner = Place(ElementsAt(place), key)
            states = _as_states(held, source.to("item", key), inner, old[key], new[key])
            if states is None:
                return None
            found += states
    return found


def _is_same(held: Held, old: Any, new: Any) -> bool:
    """Say whether the tensor that lies there now is what the trace has for the old one."""
    if type(old) not in _TENSORS or not isinstance(new, Tensor):
        return False
    return any(tensor is old and fake is new for _, tensor, fake in held.inputs())


def _as_state(held: Held, source: Source, place: Place, old: Any, new: Any) -> OuterTensor | None:
    """Return the input whose new value this is, None if it is none."""
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        return None
    original = held.registered.get((id(place.container), place.key), old)
    if not all(isinstance(size, int) for size in new.shape):  # to compare would fix the size
        return None
    if type(original) not in _TENSORS or (old.shape, old.dtype) != (new.shape, new.dtype):
        return None
    if id(original) not in held.touched and id(original) not in held.own and new.requires_grad:
        return None
    return OuterTensor(original, source, place)


def _is_read_first(held: Held, attribute: tuple[int, str], old: Any) -> bool:
    """Say whether the code asked for an attribute of a module before it set it."""
    return attribute in held.absent or held.reads.get(attribute, (None, held))[1] is old


def _refuse_one_for_two(found: Assigned) -> None:
    """Refuse new values for two names of what is one tensor before the step.

    Raises `UnsupportedOperatorError`: there are; a step writes a new value into the old tensor.
    """
    known: dict[int, OuterTensor] = {}
    for state in found.states:
        other = known.setdefault(id(state.tensor), state)
        if other is not state:
            raise UnsupportedOperatorError(
                f"{other.source} and {state.source} are one tensor, and are given others by the "
                "model or loss_fn: a compiled step writes each into what was there. Give each a "
                "tensor of its own before compile, such as .clone().",
                (("one tensor for two states", str(state.source)),),
            )


def _lost_number(what: str) -> UnsupportedOperatorError:
    return UnsupportedOperatorError(
        f"{what} is a number that the model or loss_fn computes with, or decides by, and sets anew "
        "while it runs: each compiled step would start from what it is now. Keep it in a buffer "
        "that is written in place, such as self.step.add_(1), or set it in your loop.",
        (("state in a number", what),),
    )


def _refuse_written_twins(held: Held, found: Assigned) -> None:
    """Refuse to give a tensor a second name where the one or the other is written in place.

    Raises `UnsupportedOperatorError`: eager PyTorch's next call would write both.
    """
    old = {id(state.tensor) for state in found.states}
    inputs = held.inputs()
    written = {id(tensor) for _, tensor, fake in inputs if fake._version}
    found.written = old & written
    names: dict[int, list[tuple[str, bool]]] = {}
    for name, tensor, fake in inputs:
        if id(tensor) not in old:
            names.setdefault(_memory(fake), []).append((name, id(tensor) in written))
    for state, value in zip(found.states, found.values, strict=True):
        what = str(state.source)
        twins = names.get(_memory(value), [])
        if twins and (id(state.tensor) in written or any(is_written for _, is_written in twins)):
            raise UnsupportedOperatorError(
                f"The model or loss_fn makes {what} one tensor with {twins[0][0]}, and writes in "
                "place what is there: its next call would change both, and a compiled step keeps "
                "them apart. Put a .clone() there.",
                (("one tensor for two states", what),),
            )


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors_in(value: Any) -> list[Tensor]:
    """List the tensors in a value, in its elements and attributes, and in theirs."""
    found, left, known = [], [value], set[int]()
    while left:
        held = left.pop()
        if id(held) in known:
            continue
        known.add(id(held))
        if isinstance(held, Tensor):
            found.append(held)
        elif isinstance(held, dict):
            left += dict.values(held)
        elif isinstance(held, list | tuple | set | frozenset | collections.deque):
            left += held
        elif not isinstance(held, nn.Module | type) and _is_entered(held):
            left += getattr(held, "__dict__", {}).values()
    return found


def _is_entered(value: Any) -> bool:
    is_ours = is_dataclass(value) or type(value) in NAMESPACES
    return is_ours or not is_foreign(type(value).__module__)


def _computed_before(old: Any) -> bool:
    """Say whether an attribute held a computed tensor, as weight normalisation keeps one."""
    return isinstance(old, Tensor) and old.grad_fn is not None
