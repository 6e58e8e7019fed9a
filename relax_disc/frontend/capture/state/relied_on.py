"""What a compiled step relies on: guards of the Python values that a trace has read.

What was read is known for attributes of modules and of objects whose class can be watched; of
variables, elements of containers and slots it is taken from the names in the code.  Containers are
compared by their lengths and keys, too, and what is looked for and is not there must stay away.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, fx, nn

from relax_disc.frontend.capture.state.kinds import (
    ARRAYS,
    CONTAINERS,
    NAMESPACES,
    is_foreign,
    is_library,
    is_plain,
)
from relax_disc.frontend.capture.state.live_number import LiveNumber
from relax_disc.frontend.capture.state.other_names import Names
from relax_disc.frontend.capture.state.outer import ABSENT, Guard
from relax_disc.frontend.capture.state.reads import (
    TABLES,
    Trace,
    holders_of,
    is_read,
    is_recorded,
    may_read,
    read_ids_of,
)
from relax_disc.frontend.capture.state.sources import (
    AttributesOf,
    Place,
    Source,
    Step,
    entries_of,
    resolve,
)

FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_AROUND = (staticmethod, classmethod, property)
_ITERATING = frozenset({"items", "values", "keys"})
_MOST_COMPARED = 1000
_OF_CODE = frozenset({"method", "inherited", "member", "default", "cached", "referent"})
"""Steps to what is no object that somebody replaces."""


def guards_of(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    trace: Trace,
    names: Names,
    used: Iterable[Source],
) -> list[Guard]:
    """List what the program relies on; ``used``: paths to its inputs."""
    inside = {id(module) for module in model.modules()}
    guards = [*_of_attributes(inside, trace), *_of_plain(trace), *_of_variables(trace)]
    paths = [guard.source for guard in guards]
    more = list(_of_containers(model, loss_fn, trace))
    paths += [guard.source for guard in more if not guard.part]
    guards += [*more, *_of_absent(trace), *_of_module_lists(trace), *_of_flags(trace)]
    guards += [*_of_tensors(trace), *_of_code(trace)]
    for holder, guard in _of_empty(trace):
        guards.append(guard)
        # A submodule that leads to parameters of the model is known by these.
        if id(holder) not in inside or not [*holder.parameters(), *holder.buffers()]:
            paths.append(guard.source)
    wanted = [path for path in [*paths, *used] if path is not None]
    others = [*names.of_tensors(), *names.of_holders(wanted)]
    wanted += [guard.source for guard in others if guard.source is not None]
    return [*guards, *others, *_links(model, loss_fn, trace, wanted)]


def _of_attributes(inside: Collection[int], trace: Trace) -> Iterator[Guard]:
    sources = _sources(trace)
    for (key, name), (holder, value) in trace.reads.items():
        if isinstance(holder, fx.GraphModule):  # the trace's own
            continue
        source = sources.get(key)
        path = None if source is None else source.to("attribute", name)
        if name == "training":
            if key not in inside:
                what = str(source or type(holder).__name__)
                yield Guard(what, path, Place(holder.__dict__, name), value)
            continue
        kind, place = _attribute(holder, name)
        if place is None or (id(place.container), name) in trace.changed:
            continue
        if isinstance(value, Tensor):  # of a class: what the instance has would hide it
            if kind is not None and isinstance(place.get(), Tensor):
                path = None if source is None else source.to("own", name)
                what = f"{source or type(holder).__name__}.{name}"
                yield Guard(what, path, Place(holder.__dict__, name), ABSENT)
            continue
        if isinstance(value, types.MethodType) and type(place.get()) is types.FunctionType:
            if kind is not None and is_library(kind):
                continue
            value = place.get()  # a method
        elif isinstance(place.get(), _AROUND):
            if kind is None or is_library(kind):
                continue
            value = place.get()  # the same in the class, whatever it gives
        elif type(value) is LiveNumber:
            (leaf,) = value.leaves
            if leaf not in trace.pinned and leaf not in trace.kinds:  # else see `_of_plain`
                what = f"{source or type(holder).__name__}.{name}"
                yield Guard(what, path, place, value.value, part="number")
            continue
        elif place.get() is not value:
            continue
        elif not (is_comparable(value) or type(value) in FUNCTIONS or _is_object(value)):
            continue
        shadow = None if name in holder.__dict__ else holder.__dict__
        what = f"{source or type(holder).__name__}.{name}"
        yield Guard(what, path, place, _copied(value), shadow)


def _of_absent(trace: Trace) -> Iterator[Guard]:
    """Guard what the user's code looked for by ``hasattr`` or ``getattr``, and did not find."""
    sources = _sources(trace)
    for (key, name), holder in trace.absent.items():
        own = vars(holder)
        if name not in trace.known.names:
            continue
        if (id(own), name) in trace.changed:
            continue
        steps: list[Step] = [("attribute", name)]
        tables = [own]
        if isinstance(holder, nn.Module):
            steps += [("child", (table, name)) for table in TABLES]
            tables += [own[table] for table in TABLES]
        if any(name in table for table in tables):
            continue
        for step, table in zip(steps, tables, strict=True):
            source = sources.get(key)
            path = None if source is None else source.to(*step)
            yield Guard(f"{type(holder).__name__}.{name}", path, Place(table, name), ABSENT)


def _of_empty(trace: Trace) -> Iterator[tuple[nn.Module, Guard]]:
    """Guard parameters, buffers and modules that were read and are None, as a layer's bias.

    Those of the user's own modules are among `_of_plain`.
    """
    sources = _sources(trace)
    listed = {(id(place.container), place.key) for _, place, _ in trace.known.plain}
    read = {
        (key, table, name): holder
        for (key, name), holder in trace.absent.items()
        if isinstance(holder, nn.Module) and not isinstance(holder, fx.GraphModule)
        for table in TABLES
    }
    read |= {
        (key, table, name): holder
        for (key, table), holder in trace.tables.items()
        if isinstance(holder, nn.Module)  # others may have an attribute of that name
        for name in vars(holder)[table]
    }
    for (key, table, name), holder in read.items():
        place = Place(vars(holder)[table], name)
        where = id(place.container), name
        if place.container.get(name, ABSENT) is not None:
            continue
        if where not in listed and where not in trace.changed:
            source = sources.get(key)
            path = None if source is None else source.to("child", (table, name))
            yield holder, Guard(f"{source or type(holder).__name__}.{name}", path, place, None)


def _sources(trace: Trace) -> dict[int, Source]:
    """Return the paths to the objects that have attributes, by their ids."""
    sources = {id(value): source for source, value in trace.known.containers}
    return sources | {key: source for key, (source, _) in trace.known.modules.items()}


def _of_plain(trace: Trace) -> Iterator[Guard]:
    holders, read_ids = holders_of(trace), read_ids_of(trace)
    inside = _inside_read(trace)
    for index, (source, place, holder) in enumerate(trace.known.plain):
        is_fixed = index not in trace.live or index in trace.pinned
        read = index in trace.pinned or index in trace.kinds
        if not read:
            read = id(holder) in trace.whole or may_read(trace.known, source, holder)
            kind = source.steps[-1][0]
            is_apart = kind == "item" and not trace.known.reads_past and id(holder) not in inside
            if read and (kind == "variable" or is_apart):
                path = Source(source.root, source.steps[:-1])
                read = is_read(trace, path, holder, holders, read_ids)
        if read and (id(place.container), place.key) not in trace.changed:
            inherits = isinstance(holder, type) and place.key not in vars(holder)
            shadow: Any = vars(holder) if inherits else None
            now = _copied(place.get())
            if is_fixed:
                yield Guard(str(source), source, place, now, shadow)
            elif index in trace.kinds:
                yield Guard(str(source), source, place, type(now).__name__, part="type")
            else:  # that it is a number may be asked without reading it
                yield Guard(str(source), source, place, now, part="number")


def _of_variables(trace: Trace) -> Iterator[Guard]:
    for source, place in trace.known.cells:
        value = place.get()
        if (source.root == "loss_fn" and callable(value)) or _is_object(value):
            yield Guard(str(source), source, place, value)


def _of_flags(trace: Trace) -> Iterator[Guard]:
    for tensor in trace.frozen_flags.values():
        source, _ = trace.known.tensors.get(id(tensor), (None, None))
        path = None if source is None else source.to("slot", "requires_grad")
        place = Place(AttributesOf(tensor), "requires_grad")
        yield Guard(f"{source or 'a tensor'}.requires_grad", path, place, tensor.requires_grad)


def _of_tensors(trace: Trace) -> Iterator[Guard]:
    """Guard what the user has set, or not set, as attributes of parameters and buffers."""
    for (key, name), tensor in trace.attributes.items():
        source, _ = trace.known.tensors.get(key, (None, None))
        path = None if source is None else source.to("attribute", name)
        value = vars(tensor).get(name, ABSENT)
        yield Guard(f"{source or 'a tensor'}.{name}", path, Place(vars(tensor), name), value)


def _of_code(trace: Trace) -> Iterator[Guard]:
    """Guard the code of functions, and what classes have by names that code names."""
    for source, function, code in trace.known.functions:
        name, (kind, _) = function.__name__, source.steps[-1] if source.steps else ("", None)
        if kind not in _OF_CLASSES or name in trace.known.names or name in _UNNAMED:
            path, place = source.to("slot", "__code__"), Place(AttributesOf(function), "__code__")
            yield Guard(f"The code of {function.__qualname__}", path, place, code)
            defaults = function.__defaults__ or ()
            if defaults and all(map(is_plain, defaults)):
                path = source.to("slot", "__defaults__")
                place = Place(AttributesOf(function), "__defaults__")
                yield Guard(f"{function.__qualname__}.__defaults__", path, place, defaults)
    for source, place in trace.known.methods:
        is_named = place.key in trace.known.names and place.key not in _UNNAMED
        if is_named and (id(place.container), place.key) not in trace.changed:
            yield Guard(str(source), source, place, place.get())


_OF_CLASSES = frozenset({"method", "attribute", "class", "inherited"})
_UNNAMED = frozenset({"forward", "__call__", "backward"})


def _of_module_lists(trace: Trace) -> Iterator[Guard]:
    """Guard how many modules there are where code goes through all of them, or all parameters."""
    iterates = bool(_ITERATING & trace.known.names)
    for source, module in trace.known.modules.values():
        table = "_parameters" if isinstance(module, nn.ParameterList) else "_modules"
        listed = isinstance(module, nn.Sequential | nn.ModuleList | nn.ParameterList)
        listed = listed or (iterates and isinstance(module, nn.ModuleDict))
        for name in TABLES:
            if (listed and name == table) or (id(module), name) in trace.tables:
                path, place = source.to("attribute", name), Place(vars(module), name)
                yield Guard(str(source), path, place, tuple(place.get()), part="keys")


def _of_containers(
    model: nn.Module, loss_fn: Callable[..., Any] | None, trace: Trace
) -> Iterator[Guard]:
    """Guard how many elements containers have, by which keys, and objects among them."""
    holders, read_ids = holders_of(trace), read_ids_of(trace)
    for source, value in trace.known.containers:
        if not source.steps or (id(value), None) in trace.changed:
            continue
        if not is_read(trace, source, value, holders, read_ids) and id(value) not in trace.whole:
            continue
        try:
            place = resolve(source, model, loss_fn)
        except LookupError:  # inside a tuple that was made for the walk
            continue
        guard = _of_container(trace, source, place, value)
        if guard is not None and not (id(value) in read_ids and is_comparable(value)):
            yield guard
        entries = entries_of(value)
        for key, element in _elements(value):
            further = source.to("item", key)
            # The walk goes past the entries of a dict that makes other values of them.
            is_past = entries is not value and is_plain(element)
            is_alone = type(element) in FUNCTIONS or _is_object(element) or is_past
            if is_alone and may_read(trace.known, further, value):
                yield Guard(str(further), further, Place(entries, key), element)


def _of_container(trace: Trace, source: Source, place: Place, value: Any) -> Guard | None:
    what = str(source)
    if isinstance(value, dict):
        names = _names_of_keys(trace, value)
        return Guard(what, source, place, tuple(value), part="keys", names=names)
    if isinstance(value, list | collections.deque):
        return Guard(what, source, place, len(value), part="length")
    if isinstance(value, set):
        if is_comparable(value):
            return Guard(what, source, place, value.copy())
        return Guard(what, source, place, tuple(value), part="keys")
    is_whole = id(value) in trace.whole and (id(vars(value)), None) not in trace.changed
    if is_whole or (type(value) in NAMESPACES and not is_recorded(value)):
        names = frozenset() if is_whole else frozenset(trace.known.names)
        path = source.to("member", "__dict__")
        return Guard(what, path, Place([vars(value)], 0), tuple(vars(value)), None, "keys", names)
    return None


def _names_of_keys(trace: Trace, value: Mapping[Any, Any]) -> frozenset[str]:
    """Return which keys may come and go only if named; none: all count."""
    names = trace.known.names
    by_name = not value or any(key in names for key in value)
    return frozenset() if _ITERATING & names or not by_name else frozenset(names)


def _inside_read(trace: Trace) -> set[int]:
    """List the containers that read attributes and variables hold, by whatever path, by ``id``."""
    left = [value for _, value in trace.reads.values()]
    for _, place in trace.known.cells:
        with contextlib.suppress(LookupError, ValueError):
            left.append(place.get())
    found: set[int] = set()
    while left:
        value = left.pop()
        if isinstance(value, dict | list | tuple | collections.deque) and id(value) not in found:
            found.add(id(value))
            left += dict.values(value) if isinstance(value, dict) else value
    return found


def _links(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    trace: Trace,
    paths: Iterable[Source],
) -> Iterator[Guard]:
    """Guard the objects on the way to what was read: closures and attributes that hold them."""
    wanted = {
        Source(path.root, path.steps[:n])
        for path in paths
        for n in range(1, len(path.steps))
        if path.steps[n - 1][0] not in _OF_CODE
    }
    holders, read_ids = holders_of(trace), read_ids_of(trace)
    for source in sorted(wanted, key=str):
        place = resolve(source, model, loss_fn)
        parent, (kind, key) = Source(source.root, source.steps[:-1]), source.steps[-1]
        if kind == "attribute" and _is_unread(trace, holders.get(parent), key, place, read_ids):
            continue
        if (id(place.container), place.key) not in trace.changed:
            yield Guard(str(source), source, place, place.get())


def _is_unread(
    trace: Trace, holder: Any, name: str, place: Place, read_ids: Collection[int]
) -> bool:
    """Say whether an attribute, of an object whose reads are noted, was not read."""
    if holder is None or not is_recorded(holder) or name[:2] == "__" or id(holder) in trace.whole:
        return False
    return (id(holder), name) not in trace.reads and id(place.get()) not in read_ids


def _attribute(holder: Any, name: str) -> tuple[type | None, Place | None]:
    """Find where an attribute lies; the class where one has it."""
    if name in holder.__dict__:
        return None, Place(holder.__dict__, name)
    for kind in type(holder).__mro__:
        if name in kind.__dict__:
            return kind, None if is_foreign(kind.__module__) else Place(vars(kind), name)
    return None, None


def _elements(value: Any) -> Iterable[tuple[Any, Any]]:
    if len(getattr(value, "__dict__", ())) and not isinstance(value, dict | list):
        return ()
    if isinstance(value, dict):
        pairs = dict.items(value)
    elif isinstance(value, list | collections.deque):
        pairs = enumerate(value)
    else:
        return ()
    return [pair for pair, _ in zip(pairs, range(_MOST_COMPARED), strict=False)]


def _is_object(value: Any) -> bool:
    """Say whether a value is an object that the walk does not look into: it must stay the same."""
    if isinstance(value, Tensor | nn.Module | types.ModuleType | types.MethodType | tuple):
        return False
    if type(value) in CONTAINERS or is_plain(value) or type(value) in ARRAYS:
        return False
    return is_foreign(type(value).__module__) and type(value) not in NAMESPACES


def is_comparable(value: Any) -> bool:
    """Say whether a value is compared by what it holds."""
    if is_plain(value) or type(value) in ARRAYS:
        return True
    if type(value) in (tuple, list, set, frozenset):
        return len(value) <= _MOST_COMPARED and all(map(is_comparable, value))
    if type(value) is dict:
        return len(value) <= _MOST_COMPARED and all(map(is_comparable, value.values()))
    return False


def _copied(value: Any) -> Any:
    if type(value) in ARRAYS:
        return copy.copy(value)
    return value.copy() if isinstance(value, list | set | dict) else value
