"""Find what a model and a loss function can reach besides their arguments, and name its places.

The walk starts at the model and at the loss function.  It follows submodules, attributes,
containers, what functions close over, the globals that their code names, and the functions that
they call.  PyTorch, numpy and Python's own library are not entered, nor globals of installed ones.
"""

from __future__ import annotations

import argparse
import collections
import dis
import functools
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Step = tuple[str, Any]
"""How to go on from an object: ("attribute", name), ("item", key), ("closure", name), ..."""

_FOREIGN = {"torch", "numpy", "relax_disc", "tvm", "tvm_ffi", "_pytest", "pytest", "pluggy"}
_FOREIGN |= set(sys.stdlib_module_names) - {"__main__"}
_INTERNAL = frozenset(nn.Module().__dict__)
_MOST_ELEMENTS = 10_000
CONTAINERS = (dict, collections.OrderedDict, collections.defaultdict, list, set, collections.deque)
"""Whose elements are looked at; subclasses may compute them."""
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_MEMBERS = ("__self__", "__func__", "func", "args", "keywords")


@dataclass(frozen=True, slots=True)
class Source:
    """A path from the model or the loss function to a place, which can be walked again."""

    root: str  # ``"model"`` or ``"loss_fn"``
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
            elif kind == "attribute":
                text += f".{key}"
            elif kind == "child":
                text += f".{key[1]}"
        return text

    @property
    def target(self) -> str:
        """A name that no other place has; without ``model.`` for what the model holds."""
        parts = [str(key[1] if kind == "child" else key) for kind, key in self.steps]
        return ".".join(parts if self.root == "model" else [self.root, *parts])


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

    def put(self, value: Any) -> None:
        """Put something else there."""
        if isinstance(self.container, types.CellType):
            self.container.cell_contents = value
        else:
            self.container[self.key] = value


def resolve(source: Source, model: nn.Module, loss_fn: Callable[..., Any] | None) -> Place:
    """Walk a path again, on another model perhaps.

    Raises `LookupError`: there is no such place.
    """
    found: Any = model if source.root == "model" else loss_fn
    place = Place([found], 0)
    for kind, key in source.steps:
        try:
            place = _step(found, kind, key)
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
            return Place(list(defaults), names[len(names) - len(defaults) :].index(key))
        return Place(holder.__kwdefaults__, key)
    if kind == "method":
        return Place([getattr(type(holder), key)], 0)
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
    # variables of closures and globals that functions name
    cells: list[tuple[Source, Place]] = field(default_factory=list)
    names: set[str] = field(default_factory=set)  # all names and texts in the code of the functions


def is_plain(value: Any) -> bool:
    """Say whether a value can be compared and written down: a number, a text, None, a tuple."""
    if type(value) is tuple:
        return len(value) <= _MOST_ELEMENTS and all(map(is_plain, value))
    kinds = (bool, int, float, str, torch.dtype, torch.device)
    return value is None or type(value) in kinds or isinstance(value, np.generic)


def reachable(model: nn.Module, loss_fn: Callable[..., Any] | None) -> Reachable:
    """Walk from the model and the loss function, nearest things first."""
    found = Reachable()
    seen: set[int] = set()
    queue: collections.deque[tuple[Any, Source]] = collections.deque([(model, Source("model"))])
    if loss_fn is not None:
        queue.append((loss_fn, Source("loss_fn")))
    while queue:
        value, source = queue.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        for kind, key in _members(value, source, found):
            further = source.to(kind, key)
            place = _step(value, kind, key)
            try:
                member = place.get()
            except (LookupError, ValueError):  # a variable without a value yet
                continue
            if kind in ("closure", "global"):
                found.cells.append((further, place))
            if isinstance(member, Tensor):
                found.tensors.setdefault(id(member), (further, place))
            elif is_plain(member) or type(member) is np.ndarray:
                # Attributes of libraries' layers are noted when they are read.
                if kind != "default" and (not source.steps or not is_layer(value)):
                    found.plain.append((further, place, value))
            else:
                queue.append((member, further))
    return found


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
            yield from _variables(value, found)
    elif isinstance(value, types.MethodType | functools.partial):
        yield from (("member", name) for name in _MEMBERS if hasattr(value, name))
    elif type(value) in (dict, collections.OrderedDict, collections.defaultdict):
        found.containers.append((source, value))
        if len(value) <= _MOST_ELEMENTS:
            yield from (("item", key) for key in value if isinstance(key, str | int))
    elif isinstance(value, list | tuple):
        if type(value) is list:
            found.containers.append((source, value))
        if len(value) <= _MOST_ELEMENTS:
            yield from (("item", index) for index in range(len(value)))
    elif type(value) in (set, collections.deque):
        found.containers.append((source, value))
    elif isinstance(value, type):
        kinds: tuple[type, ...] = ()
        if issubclass(value, torch.autograd.Function):  # its gradient is the user's code
            kinds = (staticmethod,)
        elif source.steps[-1][0] not in ("closure", "global") and _is_library(value):
            return
        own = [kind for kind in value.__mro__ if not is_foreign(kind.__module__)]
        members = {k: v for kind in reversed(own) for k, v in vars(kind).items()}
        for name, member in members.items():
            inner = isinstance(member, type) and not _is_library(member)
            if is_plain(member) or inner or isinstance(member, kinds):
                yield "attribute", name
    elif isinstance(value, staticmethod):
        yield "member", "__func__"
    elif isinstance(value, types.ModuleType):
        if not is_foreign(value.__name__):
            yield from (("attribute", k) for k in vars(value) if k in found.names)
    elif hasattr(value, "__dict__") and (
        type(value) in _NAMESPACES or is_dataclass(value) or not is_foreign(type(value).__module__)
    ):
        found.containers.append((source, value))
        yield from (("attribute", key) for key in value.__dict__)
        yield from _methods(value)


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
            if isinstance(function, types.FunctionType) and getattr(type(value), name) is function:
                yield "method", name


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
            elif isinstance(constant, str):
                found.names.add(constant)
            elif isinstance(constant, tuple):
                found.names.update(part for part in constant if isinstance(part, str))
    installed = _is_installed(function)
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
    if hasattr(function, "__wrapped__"):
        yield "member", "__wrapped__"


def _is_installed(function: types.FunctionType) -> bool:
    """Say whether a function is a library's, whose globals are its own affair."""
    return any(f"/{name}-packages/" in function.__code__.co_filename for name in ("site", "dist"))


def _is_fixed(cell: types.CellType) -> bool:
    """Say whether a variable that nobody assigns again holds nothing that can change."""
    try:
        value = cell.cell_contents
    except ValueError:  # no value yet
        return False
    return is_plain(value) or (isinstance(value, type) and _is_library(value))


@functools.cache
def _is_library(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return is_foreign(kind.__module__) or any(f"/{n}-packages/" in file for n in ("site", "dist"))


def is_layer(holder: Any) -> bool:
    """Say whether an object is a library's module: its numbers are sizes, which nobody anneals."""
    if not isinstance(holder, nn.Module):
        return False
    kinds = holder.__class__.__mro__  # of a weakref.proxy, as Lightning keeps: what it stands for
    return any(map(_is_library, kinds[: kinds.index(nn.Module)]))


def is_foreign(module: str | None) -> bool:
    """Say whether a module is one that the walk does not enter."""
    return (module or "").split(".")[0] in _FOREIGN
