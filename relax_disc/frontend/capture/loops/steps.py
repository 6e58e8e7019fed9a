"""One step of a loop over a dynamic length, recorded while the model is exported.

The body runs once, on stand-ins: the number of the step is a size that nothing is known of but its
range, and each variable that the loop carries is a value that came from the step before.  What the
step makes of them ends in one operator, from which :mod:`.cut` finds the step in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from relax_disc.frontend.capture.loops import operators as _operators  # noqa: F401
from relax_disc.frontend.capture.loops.aliases import callers_values, is_whole, sharing
from relax_disc.frontend.capture.loops.attributes import StepAttribute, watch_reads
from relax_disc.frontend.capture.loops.bounds import ask_for_longer, fewest
from relax_disc.frontend.capture.loops.kept import copied, unchanged
from relax_disc.frontend.capture.loops.recorded import (
    FirstStepDiffers,
    LoopRefusal,
    RecordedLoops,
    active,
)
from relax_disc.frontend.capture.loops.rows import sequence_of
from relax_disc.frontend.capture.loops.sequences import (
    DynamicList,
    HiddenList,
    Rows,
    Tuples,
    is_same,
    is_same_shape,
    least,
)
from relax_disc.frontend.capture.loops.syntax import PREFIX
from relax_disc.frontend.capture.source_lines import SourceLine, calling_line
from relax_disc.frontend.capture.versions import times_written

_WEIGHTS_AGAIN = ("_flat_weights", "_flat_weight_refs")
"""Lists that nn.RNN, nn.LSTM and nn.GRU make of their parameters when they are called."""

_PLAIN = (Tensor, type, torch.SymInt, torch.SymBool, torch.SymFloat)
"""Values whose attributes are no state of the model's."""


class _Plain:
    """A loop that runs as it is written."""

    is_dynamic = is_left = False

    def __init__(self, values: Any) -> None:
        self._values = values

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)


_Target = str | tuple["_Target", ...]
"""The variables that a loop sets, as they are written: names, in tuples."""


@dataclass(frozen=True, slots=True)
class Names:
    """What the body of a loop does with names of its function."""

    bound: tuple[str, ...] = ()  # that it binds
    stored: tuple[str, ...] = ()  # that it only stores into
    continued: tuple[str, ...] = ()  # of those, lists whose last element it reads
    prepended: tuple[str, ...] = ()  # of those, lists that grow in front
    rebound: tuple[str, ...] = ()  # that it binds before it reads them
    masked: tuple[str, ...] = ()  # of tensors that it binds to themselves, written by masks
    attributed: tuple[str, ...] = ()  # of objects that it sets attributes of
    read: tuple[str, ...] = ()  # that it reads


def steps(values: Any, why_not: str, target: _Target, names: dict[str, Any], line: int) -> Any:
    """Make what a prepared ``for`` runs over.

    ``why_not``: why it cannot be one step; empty if it can. ``target``: its variables.
    ``names``: fields of `Names`. ``line``: of the loop.
    """
    loops, made = active(), sequence_of(values)
    if loops is None or made is None:
        return _Plain(values)
    values = made
    where = SourceLine(calling_line().file, line)
    if loops.inside is not None:
        raise LoopRefusal(
            f"the loop at {loops.inside} cannot be run as one step: it holds another loop over a "
            f"dynamic length ({where}); write one of them with operators over the whole axis"
        )
    if sum(not isinstance(count, int) for count, _ in values.runs) != 1:
        why_not = why_not or "its elements are no tensors of one shape"
    if why_not:
        loops.reasons.append(f"the loop at {where} cannot be run as one step: {why_not}")
        return _Plain(values)
    return _Loop(target, values, Names(**names), where, loops)


class _Unbound:
    """Stands in a name that has yet to be bound."""


UNBOUND = _Unbound()


class _Loop:
    """A loop over a dynamic length: it runs its body once, or again on better stand-ins.

    A first or last step that differs from the others is run by itself, as it is written.
    """

    is_dynamic = False  # whether the body that runs now is the step
    hidden = HiddenList()  # where a list lies that the step appends to by another name

    def __init__(
        self,
        target: _Target,
        values: DynamicList,
        names: Names,
        where: SourceLine,
        loops: RecordedLoops,
    ) -> None:
        self._where = where
        self._first, values, self._rest = _ends_apart(values)
        apart = loops.apart.get(where)
        if apart and fewest(values.length()) < 1:
            raise self.refuse(f"its {apart} step differs from the others, and may not be there")
        if apart == "first":
            self._first.append(values.at(0))
        if apart == "last":
            self._rest.insert(0, values.at(values.length() - 1))
        self._values = values[1 if apart == "first" else 0 : -1 if apart == "last" else None]
        self._names = names
        self._target = target
        self._element: Any = None
        self._state: dict[tuple[str, int], Any] = {}
        self._attributes: dict[tuple[int, str], StepAttribute] = {}  # that the steps set
        self._count = self._values.length()
        if apart:
            ask_for_longer(self._count)
        self._may_be_empty = fewest(self._count) < 1
        self._loops = loops
        self._number = -1
        self._index: Any = None
        self._before: dict[str, Any] | None = None
        self._entered: dict[str, Any] = {}
        self._better: dict[tuple[str, int], Tensor] = {}  # first values, by name and place
        # states, by name and place, that are written in place and read elsewhere
        self._written: set[tuple[str, int]] = set()
        # the value that stands for the step before, and its version, by the name's stand-in
        self._carried: dict[int, tuple[Any, int]] = {}
        self._again = True

    def __iter__(self) -> Iterator[Any]:
        yield from self._first
        self.is_dynamic = True
        while self._again:
            self._again = False
            self._number = len(self._loops.lines)
            self._loops.lines.append(self._where)
            self._loops.may_be_empty.append(self._may_be_empty)
            self._index = torch.ops.relax_disc.loop_index(self._number, self._count)
            step: Any = torch.ops.aten.item.default(self._index)
            _note_range(step, self._count)
            self._loops.inside = self._where
            self._loops.step, self._loops.count = step, self._count
            self._loops.checks.clear()
            self._element = self._values.at(step)
            yield self._element
            self._loops.inside = None
        self.is_dynamic = False
        yield from self._rest

    @property
    def is_left(self) -> bool:
        """Whether the body has just run as the step, on the last stand-ins."""
        return self.is_dynamic and not self._again

    def refuse(self, why: str, kind: type[LoopRefusal] = LoopRefusal) -> LoopRefusal:
        """Make the error for a body that is no step."""
        return kind(f"the loop at {self._where} cannot be run as one step: {why}")

    def enter(self, found: dict[str, Any]) -> tuple[Any, ...]:
        """Put stand-ins into the names that the body binds or stores into."""
        if self._before is None:
            names = (*self._names.bound, *self._names.stored)
            self._before = {name: found.get(name, UNBOUND) for name in names}
            for name in self._names.masked:
                self._check_masked(name, found)
            self._check_lists(found)
            for name in self._names.attributed:
                if not hasattr(found.get(name), "__dict__") or isinstance(found[name], _PLAIN):
                    raise self.refuse(f"it sets an attribute of {name}, which keeps none")
            for holder in self._holders(found):
                for name in [name for name in vars(holder) if self._is_carried(holder, name)]:
                    self._note_attribute(holder, name, vars(holder)[name])
        self._state = self._kept(found)
        self._entered = {name: self._enter(name, self._before[name]) for name in self._before}
        self._enter_attributes()
        # Containers are copied, so that what is appended or stored can be told.
        return tuple(
            v.copy() if isinstance(v, DynamicList) else pytree.tree_map(lambda x: x, v)
            for v in (self._entered[name] for name in (*self._names.bound, *self._names.stored))
        )

    def _check_masked(self, name: str, found: dict[str, Any]) -> None:
        """Check that the steps can read no other name of what they write by masks."""
        if not isinstance(found.get(name), Tensor):
            raise self.refuse(f"it writes into {name} by a mask")
        others = {key: value for key, value in found.items() if key != name}
        for what in sharing(found[name], others | self._held(found)):
            raise self.refuse(f"it writes by a mask into {name}, which {what} is too")

    def _check_lists(self, found: dict[str, Any]) -> None:
        """Check that no one else holds a list that the steps append to: it would miss them."""
        for name in self._names.stored:
            if not isinstance(found.get(name, UNBOUND), list | dict | Tensor | _Unbound):
                where = "" if name.startswith(PREFIX) else f"{name}, "
                raise self.refuse(f"it stores into {where}a {type(found[name]).__name__}")
        lists = {id(found[n]): n for n in self._names.stored if isinstance(found.get(n), list)}
        seen_by_name = _seen(found).items()
        waiting = [(n, value) for n, value in seen_by_name if n not in self._names.stored]
        for holder in self._holders(found):
            kind = type(holder).__name__
            waiting += [(f"{kind}.{name}", value) for name, value in vars(holder).items()]
        seen: set[int] = set()
        while waiting:
            what, value = waiting.pop()
            if id(value) in lists:
                name = lists[id(value)]
                named = "a list" if name.startswith(PREFIX) else name
                raise self.refuse(f"it appends to {named}, which {what} is too or holds")
            if type(value) in (list, tuple, dict) and id(value) not in seen:
                seen.add(id(value))
                parts = value.values() if isinstance(value, dict) else value
                waiting += [(what, part) for part in parts]
        values = [id(found[name]) for name in self._names.stored if id(found.get(name)) in lists]
        if len(values) > len(lists):
            raise self.refuse("it appends to one list by two names")

    def _is_carried(self, holder: Any, name: str) -> bool:
        return (id(holder), name) in self._loops.carried

    def _note_attribute(self, holder: Any, name: str, before: Any) -> None:
        """Let steps set an attribute; ``before``: what it holds before the first."""
        assert self._before is not None
        attribute = StepAttribute(holder, name, f"{type(holder).__name__}.{name}")
        while attribute.text in self._before:
            attribute = replace(attribute, text=f"{attribute.text} of another")
        self._attributes[attribute.key] = attribute
        self._before[attribute.text] = before

    def _enter_attributes(self) -> None:
        """Let attributes hold stand-ins, or what no step may read."""
        assert self._before is not None
        hidden = []
        for key, attribute in self._attributes.items():
            if key in self._loops.carried:
                if self._before[attribute.text] is UNBOUND:
                    raise self.refuse(f"{attribute.text} is not there before the first step")
                attribute.set(self._entered[attribute.text])
            else:
                attribute.hide()
                hidden.append(attribute)
        watch_reads(self._loops, hidden)

    def _leave_attributes(self, ends: _Ends) -> list[tuple[StepAttribute, Callable[[], Any]]]:
        """Note the new values; returned: the attributes with what gives them after the last one."""
        made = []
        for key, attribute in self._attributes.items():
            new = attribute.get(UNBOUND)
            if new is UNBOUND:
                raise self.refuse(f"it sets {attribute.text} in some steps; set it in each")
            is_carried = key in self._loops.carried
            each = self._leave(attribute.text, new, ends) if is_carried else self._fresh(new, ends)
            made.append((attribute, each))
        return made

    def _own_names(self) -> set[str]:
        """List the names that the loop itself binds or stores into."""
        return {*self._names.bound, *self._names.stored, *pytree.tree_leaves(self._target)}

    def _holders(self, found: dict[str, Any]) -> list[Any]:
        """List the objects whose attributes a step may set: modules, and what variables hold."""
        own = self._own_names()
        seen = _seen(found).items()
        others = [v for k, v in seen if k not in own or not isinstance(v, DynamicList)]
        held = [x for x in others if not isinstance(x, _PLAIN) and hasattr(x, "__dict__")]
        return list({id(x): x for x in (*self._loops.modules, *held)}.values())

    def _held(self, found: dict[str, Any]) -> dict[str, list[Any]]:
        """List what the attributes of those objects hold, by what messages call them."""
        held: dict[str, list[Any]] = {}
        for holder in self._holders(found):
            held.setdefault(f"an attribute of {type(holder).__name__}", []).extend(
                vars(holder).values()
            )
        return held

    def _kept(self, found: dict[str, Any]) -> dict[tuple[str, int], Any]:
        """What the body may read and must not change: other names, members of objects."""
        own = self._own_names()
        state = {(name, 0): value for name, value in _seen(found).items() if name not in own}
        for holder in self._holders(found):
            for name, value in vars(holder).items():
                if name in _WEIGHTS_AGAIN and isinstance(holder, nn.RNNBase):
                    continue
                if (id(holder), name) not in self._attributes:
                    state[f"{type(holder).__name__}.{name}", id(holder)] = value
        return {name: copied(value) for name, value in state.items()}

    def _enter(self, name: str, value: Any) -> Any:
        if name in self._names.stored and isinstance(value, Tensor):
            return value
        if name in self._names.stored and value is UNBOUND:
            raise self.refuse(f"it stores into {name}, which is no local name")
        if isinstance(value, DynamicList):
            if name not in self._names.continued:
                return value
            entered = value[:-1]
            entered.append(pytree.tree_map(self._stand_in, value[-1]))
            return entered
        leaves, structure = pytree.tree_flatten(value)
        for place, leaf in enumerate(leaves):
            leaf = self._better.get((name, place), leaf)
            if isinstance(leaf, Tensor):
                # What is written into afterwards is not what the gradient reads.
                is_written = (name, place) in self._written or name in self._names.masked
                first = leaf.clone() if is_written else leaf
                leaves[place] = self._stand_in(first)
        return pytree.tree_unflatten(leaves, structure)

    def _stand_in(self, first: Tensor) -> Tensor:
        """Make what stands for a state of the step before; ``first``: before the first step."""
        carried = torch.ops.relax_disc.loop_carry(self._index, first)
        # Another name for it: `h += y` leaves the variable the same tensor.
        made = torch.ops.aten.alias.default(carried)
        self._carried[id(made)] = carried, times_written(made)
        return made

    def leave(self, found: dict[str, Any]) -> tuple[Any, ...]:
        """Take what the step has made, and return what the names hold after the last one."""
        assert self._before is not None
        self._loops.watching.close()
        self._find_attributes(found)
        ends = _Ends()
        names = (*self._names.bound, *self._names.stored)
        fill = [self._leave(name, found[name], ends) for name in names]
        self._find_written(found)
        attributes = self._leave_attributes(ends)
        if self._again:
            return (*(found[name] for name in names), self._element)
        element = self._values.at(self._count - 1)
        last = self._last(self._target, self._element, element, found, ends)
        checks = [*self._loops.checks]
        ends.stacked += [holds for holds, _ in checks]
        ends.made = torch.ops.relax_disc.loop_end(
            self._index, ends.olds, ends.news, ends.fresh, ends.stacked, self._count
        )
        for made, (_, message) in zip(
            ends.made[len(ends.made) - len(checks) :], checks, strict=True
        ):
            torch.ops.aten._assert_async.msg(made.all(), message)  # of all steps
        for attribute, value in attributes:
            attribute.set(value())
        made = {name: each() for name, each in zip(names, fill, strict=True)}
        # Other names see what was written.
        for name, place in {*((name, 0) for name in self._names.masked), *self._written}:
            leaves, structure = pytree.tree_flatten(made[name])
            leaves[place] = pytree.tree_leaves(self._before[name])[place].copy_(leaves[place])
            made[name] = pytree.tree_unflatten(leaves, structure)
        return (*made.values(), last())

    def _find_written(self, found: dict[str, Any]) -> None:
        """Find out which tensors a step writes in place, as ``h += x`` does, under other names too.

        What no step reads is written after the last one; then the loop is recorded again.
        """
        assert self._before is not None
        written = [*self._written_states()]
        if not written:
            return
        own, now = self._own_names(), _seen(found)
        others = {key: value for key, value in now.items() if key not in own}
        others |= {key: self._before[key] for key in own & self._before.keys() if key in now}
        attributes = self._held(found)
        for key, stand_in, first in written:
            name, place = key
            rest = {k: v for k, v in others.items() if k != name} | attributes
            shared = [*sharing(first, rest)]
            for what in shared:
                if what in own or what in self._names.read or what in attributes:
                    raise self.refuse(
                        f"it writes into {name} in place, which {what} is too: write "
                        f"`{name} = {name} + ...` for `{name} += ...`, or clone it before the loop"
                    )
            if key in self._written or not (shared or any(sharing(first, callers_values()))):
                continue
            if not is_whole(pytree.tree_leaves(found[name])[place], stand_in):
                why = f"its first step alone writes into {name} in place, which has another name"
                raise self.refuse(why, FirstStepDiffers)
            self._written.add(key)
            self._again = True

    def _written_states(self) -> Iterator[tuple[tuple[str, int], Tensor, Tensor]]:
        """Yield what a step has written in place: name and place, its stand-in, the first state."""
        assert self._before is not None
        for name in (*self._names.bound, *self._names.stored):
            olds, firsts = (pytree.tree_leaves(x[name]) for x in (self._entered, self._before))
            for place, (old, first) in enumerate(zip(olds, firsts, strict=False)):
                is_state = isinstance(first, Tensor) and id(old) in self._carried
                if is_state and times_written(old) != self._carried[id(old)][1]:
                    yield (name, place), old, first

    def _find_attributes(self, found: dict[str, Any]) -> None:
        """Find out which attributes a step has set; with new ones it is recorded again."""
        now = self._kept(found)
        holders = {id(holder): holder for holder in self._holders(found)}
        for what in now:
            if what in self._state and unchanged(self._state[what], now[what]):
                continue
            text, key = what
            name = text.rpartition(".")[2]
            before = self._state[what].value if what in self._state else UNBOUND
            if key not in holders or before is now[what].value:
                raise self.refuse(f"it changes {text}; let the loop itself carry it in a variable")
            self._note_attribute(holders[key], name, before)
            self._again = True

    def _last(
        self, target: _Target, element: Any, last: Any, found: dict[str, Any], ends: _Ends
    ) -> Callable[[], Any]:
        """Return what gives the loop's own variables after the last step."""
        if isinstance(target, str):
            if found[target] is element:
                return lambda: last
            return self._fresh(found[target], ends)  # its body binds it anew
        if not target:
            return lambda: last
        parts = zip(target, element, last, strict=True)
        each = [self._last(*part, found, ends) for part in parts]
        return lambda: tuple(part() for part in each)

    def _leave(self, name: str, new: Any, ends: _Ends) -> Callable[[], Any]:
        """Note a name's new value; returned: what gives its value after the last step."""
        assert self._before is not None
        before, entered = self._before[name], self._entered[name]
        if name in self._names.stored and isinstance(new, Tensor):
            return lambda: new
        if before is UNBOUND:
            return self._fresh(new, ends)
        appended = None
        if isinstance(new, list) and isinstance(entered, list):
            new, appended = self._without_appended(name, new, entered)
        if isinstance(new, DynamicList):
            return self._append(name, before, entered, appended, ends)
        if name in self._names.rebound and not are_alike(before, new):
            return self._fresh(new, ends)
        news, structure = pytree.tree_flatten(new)
        olds = pytree.tree_leaves(entered)
        if len(news) != len(olds):
            why = f"{name} is another kind of value after a step than before"
            raise self.refuse(why, FirstStepDiffers)
        firsts = pytree.tree_leaves(before)
        leaves = [
            self._carry(name, k, first, old, new, ends)
            for k, (first, old, new) in enumerate(zip(firsts, olds, news, strict=True))
        ]
        if appended is None:
            return lambda: pytree.tree_unflatten([leaf() for leaf in leaves], structure)
        grown = self._append(name, [], entered, appended, ends)

        def whole() -> Any:
            kept = pytree.tree_unflatten([leaf() for leaf in leaves], structure)
            made = grown() + kept if name in self._names.prepended else kept + grown()
            before[:] = DynamicList.mark()  # another name of it would miss what the steps appended
            return made

        return whole

    def _without_appended(self, name: str, new: list, entered: list) -> tuple[Any, Any]:
        """Split a list into what it was when the step began, and what the step appended to it."""
        in_front = name in self._names.prepended
        if isinstance(new, DynamicList):
            then = DynamicList.of(entered).runs
            kept, grown = _split(new.runs, len(then), in_front)
            if not isinstance(entered, DynamicList) or kept != then:
                raise self.refuse(f"it changes {name} otherwise than by {name}.append()")
            before, more = entered, [at(0) for _, at in grown]
        else:
            before, more = _split(new, len(entered), in_front)
            if len(new) < len(entered):
                raise self.refuse(f"it takes elements out of {name}")
        if not more:
            return before, None
        leaves = pytree.tree_leaves(more[0])
        for (written, _), stand_in, _ in self._written_states():
            if any(sharing(stand_in, {name: leaves})):
                raise self.refuse(
                    f"it appends {written} to {name} and writes into it in place, which makes all "
                    f"elements one tensor: append {written}.clone()"
                )
        are_tensors = bool(leaves) and all(isinstance(leaf, Tensor) for leaf in leaves)
        if len(more) > 1 or not are_tensors or name not in self._names.stored:
            raise self.refuse(
                f"{name} grows by {len(more)} of type {type(more[-1]).__name__}; let each step "
                "append one tensor, or a tuple of them, that is as large in every step, and "
                "compute positions with torch.arange"
            )
        return before, more[0]

    def _append(
        self, name: str, before: list, entered: list, appended: Any, ends: _Ends
    ) -> Callable[[], Any]:
        """Note what a step appended to a list; returned: what gives the list after the last one."""
        if appended is None:
            return lambda: before
        leaves, structure = pytree.tree_flatten(appended)
        if name in self._names.continued and entered:  # else it reads what the step itself appended
            self._continue(name, entered[-1], appended, ends)
        first = len(ends.stacked)
        ends.stacked += leaves

        def grown() -> Any:
            start = len(ends.news) + len(ends.fresh) + first
            rows = tuple(map(Rows, ends.made[start : start + len(leaves)]))
            at = rows[0] if isinstance(appended, Tensor) else Tuples(rows, structure)
            made = DynamicList([(self._count, at)])
            if name in self._names.prepended:
                return reversed(made) + DynamicList.of(before)
            return DynamicList.of(before) + made

        return grown

    def _continue(self, name: str, last: Any, appended: Any, ends: _Ends) -> None:
        """Let what a step appends be what the next one reads as the list's last element."""
        if not are_alike(last, appended):
            raise self.refuse(f"what it appends to {name} is not as {name}[-1] is")
        ends.olds += [self._carried[id(old)][0] for old in pytree.tree_leaves(last)]
        ends.news += pytree.tree_leaves(appended)

    def _carry(
        self, name: str, place: int, first: Any, old: Any, new: Any, ends: _Ends
    ) -> Callable[[], Any]:
        """Note one state's new value; returned: what gives it after the last step."""
        first = self._better.get((name, place), first)
        carried, version = self._carried.get(id(old), (old, 0))
        if new is old and (not isinstance(old, Tensor) or times_written(old) == version):
            return lambda: first
        if not isinstance(new, Tensor):
            if isinstance(old, Tensor) or not _same(new, old):
                raise self.refuse(
                    f"{name} changes from step to step and is no tensor; make it a tensor",
                    FirstStepDiffers,
                )
            return lambda: new
        if not isinstance(first, Tensor):
            if isinstance(first, bool) or not isinstance(first, int | float):
                why = f"{name} is {first!r} before the first step; make it a tensor"
                raise self.refuse(why, FirstStepDiffers)
            self._better[name, place] = torch.full(
                new.shape, first, dtype=new.dtype, device=new.device
            )
            self._again = True
        elif not is_same_shape(first.shape, new.shape) or first.dtype != new.dtype:
            self._better[name, place] = self._widened(name, first, new, (name, place))
            self._again = True
        else:
            ends.olds.append(carried)
            ends.news.append(new)
        row = len(ends.news) - 1
        return lambda: ends.made[row]

    def _widened(self, name: str, first: Tensor, new: Tensor, key: Any) -> Tensor:
        """Broadcast and convert a first state as the first step does."""
        try:
            if key not in self._better:
                return first.expand(new.shape).to(torch.promote_types(first.dtype, new.dtype))
        except RuntimeError:
            pass
        why = f"the shape or type of {name} changes from step to step"
        raise self.refuse(why, FirstStepDiffers)

    def _fresh(self, new: Any, ends: _Ends) -> Callable[[], Any]:
        """Return what a name that only the body binds holds after the last step."""
        leaves, structure = pytree.tree_flatten(new)
        rows: list[int | None] = []
        for leaf in leaves:
            known = isinstance(leaf, Tensor) and not self._may_be_empty
            known = known and least(self._count) >= 1
            rows.append(len(ends.fresh) if known else None)
            if known:
                ends.fresh.append(leaf)

        def last() -> Any:
            first = len(ends.news)
            values = [
                leaf if row is None else ends.made[first + row]
                for leaf, row in zip(leaves, rows, strict=True)
            ]
            return pytree.tree_unflatten(values, structure)

        return last


def _seen(found: dict[str, Any]) -> dict[str, Any]:
    """Leave out the variables that prepared code has beside its own."""
    return {name: value for name, value in found.items() if not name.startswith(PREFIX)}


def _note_range(step: Any, count: Any) -> None:
    """Tell PyTorch the range of a step's number, but do not let it conclude that there is one."""
    torch._check(step >= 0)
    env = count.node.shape_env
    most: Any = env.bound_sympy(count.node.expr).upper
    with patch.object(env, "_refine_ranges", lambda _: None):
        torch._check(step < count)
    if most.is_Integer and most > 1:
        torch._check(step <= int(most) - 1)


def _ends_apart(values: DynamicList) -> tuple[list[Any], DynamicList, list[Any]]:
    """Split a list into single elements in front, its run of symbolic length, and those behind."""
    (middle,) = (k for k, (count, _) in enumerate(values.runs) if not isinstance(count, int))
    ends = [
        [at(k) for count, at in runs for k in range(count)]
        for runs in (values.runs[:middle], values.runs[middle + 1 :])
    ]
    return ends[0], DynamicList([values.runs[middle]]), ends[1]


@dataclass(slots=True)
class _Ends:
    """What a step makes; ``made``: the values after the last one, then what was stacked."""

    olds: list[Tensor] = field(default_factory=list)
    news: list[Tensor] = field(default_factory=list)
    fresh: list[Tensor] = field(default_factory=list)
    stacked: list[Tensor] = field(default_factory=list)
    made: Sequence[Tensor] = ()


def _split(grown: Sequence[Any], kept: int, in_front: bool) -> tuple[Any, Any]:
    """Split what grew at one end into what it was, so many, and what is new."""
    if in_front:
        new = max(len(grown) - kept, 0)
        return grown[new:], grown[:new]
    return grown[:kept], grown[kept:]


def are_alike(one: Any, other: Any) -> bool:
    """Whether two values hold tensors of the same types and shapes."""
    (leaves, structure), (others, own) = pytree.tree_flatten(one), pytree.tree_flatten(other)
    return structure == own and all(
        isinstance(x, Tensor)
        and isinstance(y, Tensor)
        and x.dtype == y.dtype
        and is_same_shape(x.shape, y.shape)
        for x, y in zip(leaves, others, strict=True)
    )


def _same(new: Any, old: Any) -> bool:
    if isinstance(new, torch.SymInt) or isinstance(old, torch.SymInt):
        return is_same(new, old)
    return new is old or (type(new) is type(old) and new == old)
