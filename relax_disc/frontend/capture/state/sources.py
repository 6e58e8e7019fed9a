"""Find what a model and a loss function can reach besides their arguments, and name its places.

The walk starts at the model and at the loss function.  It follows submodules, attributes,
containers, what functions close over, the globals that their code names, and the functions that
they call.  PyTorch, numpy and Python's own library are not entered, nor globals of installed ones.
"""

from __future__ import annotations

import argparse
import array
import collections
import contextvars
import datetime
import dis
import enum
import functools
import os
import random
import re
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from queue import Queue, SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from relax_disc.frontend.capture.source_lines import is_installed

Step = tuple[str, Any]
"""How to go on from an object: ("attribute", name), ("item", key), ("closure", name), ..."""

FOREIGN = {"torch", "numpy", "relax_disc", "tvm", "tvm_ffi", "_pytest", "pytest", "pluggy"}
FOREIGN |= set(sys.stdlib_module_names) - {"__main__"}
"""Top names of the modules that the walk does not enter."""
_INTERNAL = frozenset(nn.Module().__dict__)
_MOST_ELEMENTS = 10_000
CONTAINERS = (dict, collections.OrderedDict, collections.defaultdict, list, set, collections.deque)
"""Whose elements are looked at; of subclasses only where `is_listed`."""
NAMESPACES = (
    types.SimpleNamespace,
    argparse.Namespace,
    threading.local,
    collections.UserDict,
    collections.UserList,
    collections.ChainMap,
)
"""Classes of Python's own whose instances are entered like the user's."""
ARRAYS = (np.ndarray, bytearray, array.array)
"""Numbers in one block of memory, compared by value."""
RANDOM = (
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
)
_STEPS = frozenset({"__next__", "send", "throw"})
_TAKES = frozenset({"get", "get_nowait"})
_ASKS = frozenset({"is_set", "isSet", "wait"})
CLOCKS = frozenset(
    name
    for name in dir(time)
    if name.removesuffix("_ns") in ("time", "perf_counter", "monotonic", "process_time")
    or name in ("thread_time", "thread_time_ns", "localtime", "gmtime", "ctime")
)
"""Functions of the module `time` that tell the time of the call."""
_LATER = (types.ModuleType, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
_PLAIN = frozenset({bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
_MEMBERS = ("__self__", "__func__", "func", "args", "keywords")
_METHODS = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)
_BY_TEXT = frozenset({"globals", "eval"})
"""Functions that find a global variable by a text."""
_WORD = re.compile(r"[^\W\d]\w*")


@dataclass(frozen=True, slots=True)
class Source:
    """A path from the model or the loss function to a place, which can be walked again."""

    root: str  # ``"model"``, ``"loss_fn"``, ``"os.environ"`` or ``"files"``
    steps: tuple[Step, ...] = ()  # see `Step`

    def to(self, kind: str, key: Any) -> Source:
        """Go one step further."""
        return Source(self.root, (*self.steps, (kind, key)))

    def __str__(self) -> str:
        """Name the place as the user's code does."""
        text = self.root
        for kind, key in self.steps:
            if kind == "item":
                text += f"[{key!r}]"
            elif kind in ("closure", "global", "default"):
                text = str(key)
            elif kind in ("attribute", "class"):
                text += f".{key}"
            elif kind in ("variable", "referent"):
                text += ".get()" if kind == "variable" else "()"
            elif kind == "child":
                text += f".{key[1]}"
        return text

    @property
    def target(self) -> str:
        """A name that no other place has; without ``model.`` for what the model holds."""
        keys = [key[1] if kind == "child" else key for kind, key in self.steps]
        parts = [str(key) if isinstance(key, str | int) else f"[{key!r}]" for key in keys]
        return ".".join(parts if self.root == "model" else [self.root, *parts])


class FileStates:
    """What is to be seen of files, by their paths, without reading them."""

    def __getitem__(self, path: str) -> str:
        """Return the state of this moment."""
        try:
            found = Path(path).stat()
        except OSError:
            return "not there"
        return f"{found.st_size} bytes, written at {found.st_mtime_ns} ns"


ENVIRON = Source("os.environ")
FILES, STATES = Source("files"), FileStates()


@dataclass(frozen=True, slots=True)
class AttributesOf:
    """The attributes of an object that keeps them in no dict, as one."""

    holder: Any

    def __getitem__(self, name: str) -> Any:
        """Return an attribute; LookupError where it has no value."""
        try:
            return getattr(self.holder, name)
        except AttributeError as error:
            raise LookupError(name) from error

    def __setitem__(self, name: str, value: Any) -> None:
        """Set an attribute."""
        setattr(self.holder, name, value)


class NoValue(enum.Enum):
    """What a context variable without a default has before it is set."""

    NO_VALUE = "not set"

    def __repr__(self) -> str:
        """Say so in messages."""
        return self.value


@dataclass(frozen=True, slots=True)
class ValueOf:
    """The value of a context variable, under any key."""

    variable: contextvars.ContextVar[Any]

    def __getitem__(self, _: Any) -> Any:
        """Return the value of this moment."""
        try:
            return self.variable.get()
        except LookupError:
            return NoValue.NO_VALUE


@dataclass(frozen=True, slots=True)
class DefaultsOf:
    """The default values of a function's arguments, by their positions."""

    function: types.FunctionType

    def __getitem__(self, index: int) -> Any:
        """Return a default value."""
        return (self.function.__defaults__ or ())[index]

    def __setitem__(self, index: int, value: Any) -> None:
        """Put another in its place."""
        values = list(self.function.__defaults__ or ())
        values[index] = value
        self.function.__defaults__ = tuple(values)


@dataclass(frozen=True, slots=True)
class ArgumentsOf:
    """The arguments that a partial function holds, under ``"args"``."""

    function: functools.partial[Any]

    def __getitem__(self, name: str) -> Any:
        """Return them."""
        return getattr(self.function, name)

    def __setitem__(self, _: str, values: tuple[Any, ...]) -> None:
        """Put others in their place."""
        function, _, named, own = self.function.__reduce__()[2]  # pyright: ignore
        self.function.__setstate__((function, values, named, own))  # pyright: ignore


@dataclass(frozen=True, slots=True)
class Place:
    """Where an object holds another: an entry of a dict or list, or the cell of a closure."""

    container: Any
    key: Any = None

    def get(self) -> Any:
        """Return what is there; LookupError or ValueError if nothing."""
        if isinstance(self.container, types.CellType):
            return self.container.cell_contents
        return self.container[self.key]

    @property
    def is_writable(self) -> bool:
        """Whether something else can be put there for a while, which nobody notices."""
        if isinstance(self.container, AttributesOf | ValueOf | DefaultsOf | types.MappingProxyType):
            return False
        kind = type(self.container)
        return not isinstance(self.container, dict) or kind.__setitem__ is dict.__setitem__

    def put(self, value: Any) -> None:
        """Put something else there."""
        if isinstance(self.container, types.CellType):
            self.container.cell_contents = value
        else:
            self.container[self.key] = value


def resolve(
    source: Source,
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    may_be_absent: bool = False,
) -> Place:
    """Walk a path again, on another model perhaps.

    Raises `LookupError`: there is no such place; or nothing is there, unless it ``may_be_absent``.
    """
    roots = {"model": model, "loss_fn": loss_fn, ENVIRON.root: os.environ, FILES.root: STATES}
    found: Any = roots[source.root]
    place = Place([found], 0)
    for index, (kind, key) in enumerate(source.steps):
        try:
            place = _step(found, kind, key)
            if may_be_absent and index == len(source.steps) - 1:
                return place
            found = place.get()
        except (LookupError, AttributeError, ValueError, TypeError) as error:
            raise LookupError(f"{source} is not there") from error
    return place


def _step(holder: Any, kind: str, key: Any) -> Place:
    if kind == "attribute":
        kinds = holder.__mro__ if isinstance(holder, type) else type(holder).__mro__
        owner = next((kind for kind in kinds if key in vars(kind)), holder)
        return Place(vars(holder if key in vars(holder) else owner), key)
    if kind == "child":
        return Place(getattr(holder, key[0]), key[1])
    if kind == "item":
        return Place(holder, key)
    if kind == "closure":
        return Place(holder.__closure__[holder.__code__.co_freevars.index(key)])
    if kind == "global":
        return Place(holder.__globals__, key)
    if kind == "default":
        names = holder.__code__.co_varnames[: holder.__code__.co_argcount]
        defaults = holder.__defaults__ or ()
        if key in names[len(names) - len(defaults) :]:
            index = names[len(names) - len(defaults) :].index(key)
            return Place(DefaultsOf(holder), index)
        return Place(holder.__kwdefaults__, key)
    if kind == "method":
        return Place([getattr(type(holder), key)], 0)
    if kind == "slot":
        return Place(AttributesOf(holder), key)
    if kind == "class":
        kinds = holder.__mro__ if isinstance(holder, type) else type(holder).__mro__
        return Place(AttributesOf(next(kind for kind in kinds if key in vars(kind))), key)
    if kind == "variable":
        return Place(ValueOf(holder))
    if kind == "referent":
        return Place([holder()], 0)
    if key == "args" and isinstance(holder, functools.partial):
        return Place(ArgumentsOf(holder), key)
    return Place([getattr(holder, key)], 0)  # "member"


@dataclass(slots=True)
class Reachable:
    """What the walk has found; objects are listed once, by the first path to them."""

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

    def may_name(self, key: Any) -> bool:
        """Say whether the code names a key, or has the first part of a name to put together."""
        if key in self.names or not isinstance(key, str):
            return key in self.names
        return any(len(text) > 2 and key.startswith(text) for text in self.texts)


def _is_key(value: Any) -> bool:
    """Say whether a key has a text that no other has, so that a path may contain it."""
    return is_plain(value) or (isinstance(value, type) and "<locals>" not in value.__qualname__)


def is_listed(value: Any) -> bool:
    """Say whether a list, set or deque holds its elements as Python's own do."""
    kind = type(value)
    base = next((base for base in (list, set, collections.deque) if issubclass(kind, base)), None)
    return base is not None and all(
        getattr(kind, name) is getattr(base, name, None)
        for name in ("__iter__", "__len__", "__getitem__")
        if hasattr(kind, name)
    )


def is_plain(value: Any) -> bool:
    """Say whether a value can be compared and written down: a number, a text, None, a tuple."""
    if type(value) is tuple:
        return len(value) <= _MOST_ELEMENTS and all(map(is_plain, value))
    if type(value) in (slice, range):
        return True
    if type(value) is frozenset:
        return all(map(is_plain, value))
    return value is None or type(value) in _PLAIN or isinstance(value, np.generic | enum.Enum)


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
                for step in _named(holder, found.names):
                    if (id(holder), step) not in entered:
                        entered.add((id(holder), step))
                        _follow(holder, source, step, found, queue)
        if not queue:
            return found
        value, source = queue.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _LATER):
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
    place = _step(value, kind, key)
    try:
        member = place.get()
    except (LookupError, ValueError):  # a variable without a value yet
        return
    of_module = isinstance(value, types.ModuleType) and not is_installed(
        getattr(value, "__file__", None) or ""
    )
    if kind in ("closure", "global") or of_module:
        found.cells.append((further, place))
    if isinstance(member, tuple):
        found.tuples.setdefault(id(member), place)
    if isinstance(member, Tensor):
        found.tensors.setdefault(id(member), (further, place))
        for name in vars(member):  # those of the model's own are noted when they are read
            if kind != "child" or (source.root != "model" and name[0] != "_"):
                _follow(member, further, ("attribute", name), found, queue)
    elif is_plain(member) or type(member) in ARRAYS:
        # Attributes of libraries' layers are noted when they are read.
        is_fixed = kind == "default" and type(member) not in ARRAYS
        if not is_fixed and (not source.steps or not is_layer(value)):
            found.plain.append((further, place, value))
    else:
        if _moves(member):
            found.moving.append((further, place, member))
        queue.append((member, further))


def _named(value: Any, names: set[str]) -> Iterator[Step]:
    """List what is entered of an object of `_LATER`, if code names it."""
    if isinstance(value, types.ModuleType):
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
            yield from _variables(value, found)
    elif isinstance(value, contextvars.ContextVar):
        yield "variable", None
    elif isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
        if value.__self__ is not None and not isinstance(value.__self__, types.ModuleType):
            yield "member", "__self__"
    elif isinstance(value, types.MethodType | functools.partial):
        yield from (("member", name) for name in _MEMBERS if hasattr(value, name))
    elif isinstance(value, dict) and type(value).__getitem__ is dict.__getitem__:
        found.containers.append((source, value))
        if len(value) <= _MOST_ELEMENTS:
            yield from (("item", key) for key in dict.keys(value) if _is_key(key))
        if type(value) not in CONTAINERS and not is_foreign(type(value).__module__):
            yield from (("attribute", key) for key in getattr(value, "__dict__", ()))
    elif isinstance(value, types.MappingProxyType):
        if len(value) <= _MOST_ELEMENTS:
            yield from (("item", key) for key in value if _is_key(key))
    elif isinstance(value, list | tuple | collections.deque):
        if is_listed(value):
            found.containers.append((source, value))
        if len(value) <= _MOST_ELEMENTS:
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
            elif _moves(member):
                yield "class", name
            elif isinstance(member, _METHODS) and not is_library(value):
                yield "attribute", name
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
    elif _is_entered(value):
        if hasattr(value, "__dict__"):
            found.containers.append((source, value))
            yield from (("attribute", key) for key in value.__dict__)
        yield from (("slot", key) for key in _slots(type(value)))
        yield from _methods(value)


def moved_by(value: Any) -> frozenset[str]:
    """Name the methods by which an object goes on, so that the next read finds another value.

    ``"__call__"``: to call it. Generators of random numbers are found by their state instead.
    """
    if isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
        holder = value.__self__
        moves = holder is time and value.__name__ in CLOCKS
        if moves or value.__name__ in _moved_by(type(holder)):
            return frozenset({"__call__"})
        return frozenset()
    if value is datetime.datetime or value is datetime.date:
        return frozenset({"now", "utcnow", "today"})
    return frozenset({"datetime", "date"}) if value is datetime else _moved_by(type(value))


@functools.cache
def _moved_by(kind: type) -> frozenset[str]:
    if issubclass(kind, Iterator):
        return _STEPS if is_foreign(kind.__module__) else frozenset()
    if issubclass(kind, threading.Event):
        return _ASKS
    return _TAKES if issubclass(kind, Queue | SimpleQueue) else frozenset()


def _moves(value: Any) -> bool:
    """Say whether another read finds another value, also of a method by its object."""
    bound = isinstance(value, types.BuiltinFunctionType | types.MethodType)
    return bool(moved_by(value)) or isinstance(value.__self__ if bound else value, RANDOM)


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
    for kind in type(value).__mro__:
        if is_foreign(kind.__module__):
            continue
        for name, function in vars(kind).items():
            is_plain_function = isinstance(function, types.FunctionType)
            if isinstance(function, _METHODS) and (
                not is_plain_function or getattr(type(value), name) is function
            ):
                yield "method", name
            elif _moves(function):
                yield "class", name


def _variables(function: types.FunctionType, found: Reachable) -> Iterator[Step]:
    """List the variables from outside that a function's code names."""
    codes = [function.__code__]
    loaded: dict[str, None] = {}
    stored: set[str] = set()  # variables of closures
    for code in codes:  # grows
        found.names.update(code.co_names)  # of attributes, too
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                loaded[str(instruction.argval)] = None
            elif instruction.opname == "STORE_DEREF":
                stored.add(str(instruction.argval))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                codes.append(constant)
            parts = constant if isinstance(constant, tuple) else (constant,)
            found.texts.update(part for part in parts if isinstance(part, str))
    found.names |= found.texts
    installed = _is_installed(function)
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


@functools.cache
def is_library(kind: type) -> bool:
    """Say whether a class is one that a library defines."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return is_foreign(kind.__module__) or is_installed(file)


def is_layer(holder: Any) -> bool:
    """Say whether an object is a library's module: its numbers are sizes, which nobody anneals."""
    if not isinstance(holder, nn.Module):
        return False
    kinds = holder.__class__.__mro__  # of a weakref.proxy, as Lightning keeps: what it stands for
    return any(map(is_library, kinds[: kinds.index(nn.Module)]))


def is_foreign(module: str | None) -> bool:
    """Say whether a module is one that the walk does not enter."""
    return (module or "").split(".")[0] in FOREIGN
