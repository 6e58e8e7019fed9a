"""Find what a model and a loss function can reach besides their arguments.

The walk starts at the model and at the loss function.  It follows submodules, attributes,
containers, what functions close over, the globals that their code names, and the functions that
they call.  What is not entered: see :mod:`relax_disc.frontend.capture.state.kinds`; nor are globals
of installed ones.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dis
import functools
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from relax_disc.frontend.capture.source_lines import is_installed
from relax_disc.frontend.capture.state.kinds import (
    ARRAYS,
    CONTAINERS,
    MOST_ELEMENTS,
    NAMESPACES,
    is_foreign,
    is_layer,
    is_library,
    is_listed,
    is_plain,
    moves,
)
from relax_disc.frontend.capture.state.sources import (
    Place,
    Source,
    Step,
    codes_of,
    function_of,
    is_replaced,
    resolve,
    step_from,
)

_INTERNAL = frozenset(nn.Module().__dict__)
_LATER = (types.ModuleType, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
_MEMBERS = ("__self__", "__func__", "func", "args", "keywords")
_METHODS = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)
_INTEGRATIONS = "relax_disc.integrations."
_BY_TEXT = frozenset({"globals", "eval"})
"""Functions that find a global variable by a text."""
_WORD = re.compile(r"[^\W\d]\w*")


@dataclass(slots=True)
class Reachable:
    """What the walk has found; objects are listed once, by the first path to them.

    ``again``: the other paths to an object, by its ``id``. ``reads_past``: the user's code reads
    attributes by ``object.__getattribute__``, which notes nothing.
    """

    tensors: dict[int, tuple[Source, Place]] = field(default_factory=dict)  # tensors, by ``id``
    # modules, the model's own among them
    modules: dict[int, tuple[Source, nn.Module]] = field(default_factory=dict)
    # numbers, texts and the like with who holds them, but for attributes of libraries' layers
    plain: list[tuple[Source, Place, Any]] = field(default_factory=list)
    # lists, dicts, sets, deques, and objects with attributes that are no modules
    containers: list[tuple[Source, Any]] = field(default_factory=list)
    # what another read finds changed, wherever it lies: see `moved_by`
    moving: list[tuple[Source, Place, Any]] = field(default_factory=list)
    tuples: dict[int, Place] = field(default_factory=dict)  # where each lies, by ``id``
    # variables of closures and globals that functions name
    cells: list[tuple[Source, Place]] = field(default_factory=list)
    names: set[str] = field(default_factory=set)  # all names and texts in the code of the functions
    texts: set[str] = field(default_factory=set)  # the texts alone
    # functions of the user's own with the code that they had, which is edited in place by reloading
    functions: list[tuple[Source, types.FunctionType, types.CodeType]] = field(default_factory=list)
    # functions of the user's classes, and what stands around them there
    methods: list[tuple[Source, Place]] = field(default_factory=list)
    again: dict[int, list[Source]] = field(default_factory=dict)
    reads_past: bool = False
    # what functions of this package call for the user (a Trainer, say), by ``id``, with the names
    # in the methods that they call; no more of it is entered than code names
    served: dict[int, set[str]] = field(default_factory=dict)

    def may_name(self, key: Any) -> bool:
        """Say whether the code names a key, or has the first part of a name to put together."""
        if key in self.names or not isinstance(key, str):
            return key in self.names
        return any(len(text) > 2 and key.startswith(text) for text in self.texts)


def _is_key(value: Any) -> bool:
    """Say whether a key has a text that no other has, so that a path may contain it."""
    return is_plain(value) or (isinstance(value, type) and "<locals>" not in value.__qualname__)


def reachable(model: nn.Module, loss_fn: Callable[..., Any] | None) -> Reachable:
    """Walk from the model and the loss function, nearest things first."""
    found = Reachable()
    seen: set[int] = set()
    queue: collections.deque[tuple[Any, Source]] = collections.deque([(model, Source("model"))])
    if loss_fn is not None:
        queue.append((loss_fn, Source("loss_fn")))
    later: list[tuple[Any, Source]] = []
    entered: set[tuple[int, Step]] = set()
    while True:
        if not queue:  # all functions are known that may name what modules hold, and the like
            for holder, source in later:
                for step in _named(holder, found):
                    if (id(holder), step) not in entered:
                        entered.add((id(holder), step))
                        _follow(holder, source, step, found, queue)
        if not queue:
            for key, (source, place) in found.tensors.items():
                if is_replaced(place.container):
                    with contextlib.suppress(LookupError):  # in a tuple that was made for the walk
                        lasting = resolve(source, model, loss_fn, is_lasting=True)
                        found.tensors[key] = source, lasting
            return found
        value, source = queue.popleft()
        if id(value) in seen:
            found.again.setdefault(id(value), []).append(source)
            continue
        seen.add(id(value))
        if isinstance(value, _LATER) or id(value) in found.served:
            later.append((value, source))
        for step in _members(value, source, found):
            _follow(value, source, step, found, queue)


def _follow(
    value: Any,
    source: Source,
    step: Step,
    found: Reachable,
    queue: collections.deque[tuple[Any, Source]],
) -> None:
    """Note what lies one step further, or put it into the queue."""
    kind, key = step
    further = source.to(kind, key)
    place = step_from(value, kind, key)
    try:
        member = place.get()
    except (LookupError, ValueError):  # a variable without a value yet
        return
    of_module = isinstance(value, types.ModuleType) and not is_installed(
        getattr(value, "__file__", None) or ""
    )
    if kind in ("closure", "global") or of_module:
        found.cells.append((further, place))
    if isinstance(value, type) and isinstance(member, _METHODS) and not is_library(value):
        found.methods.append((further, place))
    if isinstance(member, tuple):
        found.tuples.setdefault(id(member), place)
    if isinstance(member, Tensor):
        if found.tensors.setdefault(id(member), (further, place))[0] != further:
            found.again.setdefault(id(member), []).append(further)
        for name in vars(member):  # those of the model's own are noted when they are read
            if kind != "child" or (source.root != "model" and name[0] != "_"):
                _follow(member, further, ("attribute", name), found, queue)
    elif is_plain(member) or type(member) in ARRAYS:
        # Attributes of libraries' layers are noted when they are read.
        is_fixed = kind == "default" and type(member) not in ARRAYS
        if not is_fixed and (not source.steps or not is_layer(value)):
            found.plain.append((further, place, value))
    else:
        if moves(member):
            found.moving.append((further, place, member))
        queue.append((member, further))


def _named(value: Any, found: Reachable) -> Iterator[Step]:
    """List what is entered of an object of `_LATER`, or of one that is served, if code names it."""
    names = found.names
    if id(value) in found.served:
        yield from [("attribute", name) for name in vars(value) if name in names]
        for kind in type(value).__mro__:
            called = found.served[id(value)] if is_library(kind) else names
            for name, function in () if is_foreign(kind.__module__) else vars(kind).items():
                if name in called and isinstance(function, _METHODS):
                    yield "method", name
    elif isinstance(value, types.ModuleType):
        if not is_foreign(value.__name__):
            yield from [("attribute", name) for name in vars(value) if name in names]
        elif value is sys and "argv" in names:
            yield "attribute", "argv"
    elif isinstance(value, torch.optim.Optimizer):
        if "param_groups" in names:
            yield "attribute", "param_groups"
    elif {"get_last_lr", "last_epoch"} & names:
        yield from (("attribute", name) for name in ("_last_lr", "last_epoch"))


def _members(value: Any, source: Source, found: Reachable) -> Iterator[Step]:
    """List how the walk goes on from an object, and note the object."""
    if isinstance(value, nn.Module):
        found.modules.setdefault(id(value), (source, value))
        for table in (
            "_parameters",
            "_buffers",
            "_modules",
            "_forward_pre_hooks",
            "_forward_hooks",
        ):
            yield from (("child", (table, key)) for key in getattr(value, table))
        yield from (("attribute", key) for key in value.__dict__ if key not in _INTERNAL)
        yield from _methods(value)
    elif isinstance(value, types.FunctionType):
        if not is_foreign(value.__module__):
            if vars(value) and not _is_installed(value):
                found.containers.append((source, value))
            if not is_library(value):
                found.functions.append((source, value, value.__code__))
            yield from _variables(value, found)
        elif value.__module__.startswith(_INTEGRATIONS) and value.__closure__:
            for name, cell in zip(value.__code__.co_freevars, value.__closure__, strict=True):
                called = _names_in_methods(type(cell.cell_contents), value.__code__.co_names)
                found.names |= called
                found.served[id(cell.cell_contents)] = called
                yield "closure", name
    elif isinstance(value, contextvars.ContextVar):
        yield "variable", None
    elif isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
        if value.__self__ is not None and not isinstance(value.__self__, types.ModuleType):
            yield "member", "__self__"
    elif isinstance(value, types.MethodType | functools.partial):
        yield from (("member", name) for name in _MEMBERS if hasattr(value, name))
    elif isinstance(value, dict) and type(value).__getitem__ is dict.__getitem__:
        found.containers.append((source, value))
        if len(value) <= MOST_ELEMENTS:
            yield from (("item", key) for key in dict.keys(value) if _is_key(key))
        if type(value) not in CONTAINERS and not is_foreign(type(value).__module__):
            yield from (("attribute", key) for key in getattr(value, "__dict__", ()))
    elif isinstance(value, types.MappingProxyType):
        if len(value) <= MOST_ELEMENTS:
            yield from (("item", key) for key in value if _is_key(key))
    elif isinstance(value, list | tuple | collections.deque):
        if is_listed(value):
            found.containers.append((source, value))
        if len(value) <= MOST_ELEMENTS:
            yield from (("item", index) for index in range(len(value)))
    elif isinstance(value, set) and is_listed(value):
        found.containers.append((source, value))
    elif isinstance(value, weakref.ref):
        yield "referent", None
    elif isinstance(value, type):
        kinds: tuple[type, ...] = ()
        if issubclass(value, torch.autograd.Function):  # its gradient is the user's code
            kinds = (staticmethod,)
        elif source.steps[-1][0] not in ("closure", "global") and is_library(value):
            return
        own = [kind for kind in value.__mro__ if not is_foreign(kind.__module__)]
        members = {k: v for kind in reversed(own) for k, v in vars(kind).items()}
        for name, member in members.items():
            inner = isinstance(member, type) and not is_library(member)
            if is_plain(member) or inner or isinstance(member, kinds):
                yield "attribute", name
            elif moves(member):
                yield "class", name
            elif isinstance(member, _METHODS) and not is_library(value):
                yield "attribute", name
        yield from _overridden(value)
    elif isinstance(value, staticmethod | classmethod):
        yield "member", "__func__"
    elif isinstance(value, property):
        yield "member", "fget"
    elif isinstance(value, functools.cached_property):
        yield "member", "func"
    elif isinstance(value, functools._lru_cache_wrapper):
        yield "cached", "__wrapped__"
    elif isinstance(value, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler):
        found.containers.append((source, value))
    elif isinstance(value, _LATER):
        return
    elif id(value) in found.served:
        found.containers.append((source, value))
    elif isinstance(value, DataLoader) and is_library(type(value)):  # not its dataset
        found.containers.append((source, value))
        yield from (("attribute", key) for key, held in vars(value).items() if is_plain(held))
    elif _is_entered(value):
        if hasattr(value, "__dict__"):
            found.containers.append((source, value))
            yield from (("attribute", key) for key in value.__dict__)
        yield from (("slot", key) for key in _slots(type(value)))
        yield from _methods(value)


def _is_entered(value: Any) -> bool:
    """Say whether the walk looks at the attributes of an object."""
    known = isinstance(value, (*NAMESPACES, torch.distributions.Distribution)) or is_dataclass(
        value
    )
    return known or not is_foreign(type(value).__module__)


def _slots(kind: type) -> list[str]:
    """List the attributes that instances of a class keep in no dict."""
    found = []
    for base in kind.__mro__:
        slots = () if is_foreign(base.__module__) else vars(base).get("__slots__", ())
        found += [slots] if isinstance(slots, str) else list(slots)
    return [name for name in found if name[:2] != "__"]


def _methods(value: Any) -> Iterator[Step]:
    """List the functions that calling an object runs."""
    for name in ("forward", "__call__"):
        function = getattr(type(value), name, None)
        if isinstance(function, types.FunctionType) and not is_foreign(function.__module__):
            yield "method", name
    own = getattr(value, "__dict__", ())
    for kind in type(value).__mro__:
        if is_foreign(kind.__module__):
            continue
        for name, function in vars(kind).items():
            is_plain_function = isinstance(function, types.FunctionType)
            if isinstance(function, _METHODS) and (
                not is_plain_function or getattr(type(value), name) is function
            ):
                yield "method", name
            elif moves(function):
                yield "class", name
            elif isinstance(function, Tensor) and name not in own:
                yield "attribute", name
    yield from _overridden(type(value))


def _overridden(kind: type) -> Iterator[Step]:
    """List the methods of a class's bases that its other methods may call by ``super()``."""
    called, known = set[str](), set[str]()
    leads_there = {"super", *(base.__name__ for base in kind.__mro__[1:])}
    for index, base in enumerate(kind.__mro__):
        if is_foreign(base.__module__):
            continue
        for name, member in vars(base).items():
            function = function_of(member)
            if not isinstance(function, types.FunctionType):
                continue
            if name in known and name in called:
                yield "inherited", (index, name)
            known.add(name)
            for code in codes_of([function]):
                if not leads_there.isdisjoint(code.co_names):
                    called.update(code.co_names)


def _names_in_methods(kind: type, names: Iterable[str]) -> set[str]:
    """List the names in those methods of a class, and of its bases, that names lead to."""
    found, left = set(names), list(names)
    while left:
        name = left.pop()
        for base in kind.__mro__:
            function = function_of(vars(base).get(name))
            if isinstance(function, types.FunctionType) and not is_foreign(base.__module__):
                new = {name for code in codes_of([function]) for name in code.co_names} - found
                found |= new
                left += new
    return found


def _variables(function: types.FunctionType, found: Reachable) -> Iterator[Step]:
    """List the variables from outside that a function's code names."""
    codes = codes_of([function])
    loaded: dict[str, None] = {}
    stored: set[str] = set()  # variables of closures
    for code in codes:
        found.names.update(code.co_names)  # of attributes, too
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                loaded[str(instruction.argval)] = None
            elif instruction.opname == "STORE_DEREF":
                stored.add(str(instruction.argval))
        for constant in code.co_consts:
            parts = constant if isinstance(constant, tuple) else (constant,)
            found.texts.update(part for part in parts if isinstance(part, str))
    found.names |= found.texts
    installed = _is_installed(function)
    found.reads_past |= not installed and any("__getattribute__" in c.co_names for c in codes)
    if _BY_TEXT & loaded.keys() and not installed:
        texts = [part for code in codes for part in code.co_consts if isinstance(part, str)]
        loaded |= dict.fromkeys(word for text in texts for word in _WORD.findall(text))
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    # A library's settings of a decorator, and the class that super() needs, stay as they are.
    yield from (
        ("closure", name)
        for name, cell in cells
        if not installed or name in stored or not _is_fixed(cell)
    )
    if not installed:
        yield from (("global", name) for name in loaded if name in function.__globals__)
    defaults = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    yield from (("default", name) for name in names[len(names) - len(defaults) :])
    yield from (("default", name) for name in function.__kwdefaults__ or ())
    yield from (("attribute", name) for name in vars(function) if name in found.names)
    if hasattr(function, "__wrapped__"):
        yield "member", "__wrapped__"


def _is_installed(function: types.FunctionType) -> bool:
    """Say whether a function is a library's, whose globals are its own affair."""
    return is_installed(function.__code__.co_filename)


def _is_fixed(cell: types.CellType) -> bool:
    """Say whether a variable that nobody assigns again holds nothing that can change."""
    try:
        value = cell.cell_contents
    except ValueError:  # no value yet
        return False
    return is_plain(value) or (isinstance(value, type) and is_library(value))
