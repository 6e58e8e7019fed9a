"""Name the places that a model and a loss function can reach, and find them again.

A path of steps leads from the model or the loss function to each, on another model perhaps.
"""

from __future__ import annotations

import collections
import contextvars
import copy
import enum
import functools
import os
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

Step = tuple[str, Any]
"""How to go on from an object: ("attribute", name), ("item", key), ("closure", name), ..."""


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
            elif kind in ("attribute", "class", "own"):
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
class EntriesOf:
    """What a dict holds, whose class makes other values of that where they are read."""

    holder: dict[Any, Any]

    def __getitem__(self, key: Any) -> Any:
        """Return an entry."""
        return dict.__getitem__(self.holder, key)


def entries_of(holder: Any) -> Any:
    """Return what holds the entries of a list or a dict: itself, if it gives them as they are."""
    is_made = isinstance(holder, dict) and type(holder).__getitem__ is not dict.__getitem__
    return EntriesOf(holder) if is_made else holder


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
class ElementsAt:
    """What the list, tuple or dict holds that lies in a place at the time.

    ``is_kept``: setting an element changes that one; else a copy is put there, as a new one.
    """

    place: Place
    is_kept: bool = False

    def __getitem__(self, key: Any) -> Any:
        """Return an element; LookupError where no container lies there, or one without it."""
        held = self.place.get()
        if not is_replaced(held):
            raise LookupError(key)
        return held[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        """Set an element."""
        held = self.place.get()
        if self.is_kept:
            held[key] = value
        elif isinstance(held, tuple):
            values = [*held[:key], value, *held[key + 1 :]]
            kind: Any = type(held)
            self.place.put(kind(values) if kind is tuple else kind._make(values))
        else:
            changed = copy.copy(held)
            changed[key] = value
            self.place.put(changed)


_REPLACED = (list, tuple, dict, collections.OrderedDict, collections.defaultdict)


def is_replaced(value: Any) -> bool:
    """Say whether the user's code may put another such container there, and is followed.

    What a list, tuple, named tuple or dict holds is looked up again at each call.
    """
    return type(value) in _REPLACED or (isinstance(value, tuple) and hasattr(value, "_fields"))


_READ_ONLY = AttributesOf | ValueOf | DefaultsOf | EntriesOf | types.MappingProxyType


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
        if isinstance(self.container, _READ_ONLY):
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
    is_lasting: bool = False,
) -> Place:
    """Walk a path again, on another model perhaps.

    A place that ``is_lasting`` goes through containers (`is_replaced`) by their own places, so that
    another container is seen that was put there later.

    Raises `LookupError`: there is no such place; or nothing is there, unless it ``may_be_absent``.
    """
    roots = {"model": model, "loss_fn": loss_fn, ENVIRON.root: os.environ, FILES.root: STATES}
    found: Any = roots[source.root]
    place = Place([found], 0)
    for index, (kind, key) in enumerate(source.steps):
        try:
            by_place = is_lasting and kind == "item" and is_replaced(found)
            place = Place(ElementsAt(place), key) if by_place else step_from(found, kind, key)
            if may_be_absent and index == len(source.steps) - 1:
                return place
            found = place.get()
        except (LookupError, AttributeError, ValueError, TypeError) as error:
            raise LookupError(f"{source} is not there") from error
    return place


def function_of(member: Any) -> Any:
    """Return the function that a member of a class runs; the member itself if it is none."""
    if isinstance(member, property):
        return member.fget
    # By kind: an object of a user's may answer to any name, or raise (an absent optional import).
    is_around = isinstance(member, staticmethod | classmethod | types.MethodType)
    return member.__func__ if is_around else member


def codes_of(functions: Iterable[types.FunctionType]) -> list[types.CodeType]:
    """List the code of functions and of those inside them."""
    codes = [function.__code__ for function in functions]
    for code in codes:  # grows
        codes += [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return codes


def step_from(holder: Any, kind: str, key: Any) -> Place:
    """Go one step on from an object; LookupError, AttributeError or the like: it leads nowhere."""
    if kind == "attribute":
        kinds = holder.__mro__ if isinstance(holder, type) else type(holder).__mro__
        owner = next((kind for kind in kinds if key in vars(kind)), holder)
        return Place(vars(holder if key in vars(holder) else owner), key)
    if kind == "own":
        return Place(vars(holder), key)
    if kind == "inherited":
        kinds = holder.__mro__ if isinstance(holder, type) else type(holder).__mro__
        return Place([function_of(vars(kinds[key[0]])[key[1]])], 0)
    if kind == "child":
        return Place(getattr(holder, key[0]), key[1])
    if kind == "item":
        return Place(entries_of(holder), key)
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
