"""The functions that a model and a loss function run.

They are found by the names in that code, as a rapid type analysis finds a program's functions
(Bacon and Sweeney, OOPSLA 1996): a method counts as called if code that runs names it and an object
of its class is at hand.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any

from torch import nn

from relax_disc.frontend.capture.source_lines import is_installed
from relax_disc.frontend.capture.state.kinds import is_foreign
from relax_disc.frontend.capture.state.sources import codes_of, function_of


def functions_of(model: nn.Module, *called: Callable[..., Any] | None) -> list[FunctionType]:
    """List the functions that run, but for PyTorch's and Python's own.

    ``called``: functions that run besides the model, or objects that are called. A library's file
    that does not import PyTorch is left out.
    """
    walk = _Walk()
    for root in (model, *called):
        walk.enter(root)
    return walk.run()


_CALLED = FunctionType | types.MethodType | functools.partial | nn.Module
"""What is followed in a list or a dict: classes there are tables of libraries, of many models."""


class _Walk:
    """What was found: functions, the classes of objects at hand, the names and texts in code."""

    def __init__(self) -> None:
        self._found: list[FunctionType] = []
        self._kinds: dict[type, None] = {}
        self._names: set[str] = {"forward", "__call__"}
        self._seen: dict[int, Any] = {}  # kept alive, so that an ``id`` stays that of one object
        self._waiting: list[FunctionType] = []

    def run(self) -> list[FunctionType]:
        """Go on until nothing new is found."""
        while True:
            while self._waiting:
                self._read(self._waiting.pop())
            for kind in list(self._kinds):
                for name, member in vars(kind).items():
                    # Python itself calls the methods with two underscores.
                    if name in self._names or name[:2] == "__":
                        self.enter(function_of(member))
            if not self._waiting:
                return self._found

    def enter(self, value: Any) -> None:
        """Note what calling a value may run."""
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, FunctionType):
            self._waiting.append(value)
        elif isinstance(value, nn.Module):
            self.enter(value.__class__)  # also behind a weakref.proxy
            self._enter_all((*value.children(), *value.__dict__.values()))
        elif isinstance(value, type):
            self._kinds.update((k, None) for k in value.__mro__ if not is_foreign(k.__module__))
        elif isinstance(value, types.MethodType):
            self._enter_all((value.__func__, value.__self__))
        elif isinstance(value, functools.partial):
            self._enter_all((value.func, *value.args, *value.keywords.values()))
        elif type(value) in (list, tuple, dict):
            held = value.values() if isinstance(value, dict) else value
            self._enter_all([each for each in held if isinstance(each, _CALLED)])
        elif not isinstance(value, types.ModuleType):
            self.enter(type(value))
            self.enter(_wrapped(value))
            held = getattr(value, "__dict__", {}).values()
            self._enter_all([each for each in held if isinstance(each, _CALLED)])

    def _enter_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.enter(value)

    def _read(self, function: FunctionType) -> None:
        """Follow what a function closes over, and the names in its code."""
        self.enter(_wrapped(function))
        modules: list[types.ModuleType] = []
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # no value yet
                value = cell.cell_contents
                if isinstance(value, types.ModuleType):
                    modules.append(value)
                else:
                    self.enter(value)
        space = function.__globals__
        if not _may_see_tensors(space):
            return
        self._found.append(function)
        self._enter_all(function.__defaults__ or ())
        codes = codes_of([function])
        names = {name for code in codes for name in code.co_names}
        texts = {text for code in codes for text in code.co_consts if isinstance(text, str)}
        self._names |= names | texts  # `getattr` takes a text
        for name in names & space.keys():
            value = space[name]
            if isinstance(value, types.ModuleType):
                modules.append(value)
            else:
                self.enter(value)
        for module in modules:  # grows
            if is_foreign(module.__name__):
                continue
            for value in _members(module, names | texts):
                if not isinstance(value, types.ModuleType):
                    self.enter(value)
                elif value not in modules:
                    modules.append(value)


def _members(module: types.ModuleType, names: set[str]) -> Iterator[Any]:
    """List what a module holds by some names; a lazy one is asked, as the code will do."""
    held = vars(module)
    is_lazy = "__getattr__" in held or hasattr(type(module), "__getattr__")
    for name in names:
        if name in held:
            yield held[name]
        elif is_lazy and name.isidentifier():
            with contextlib.suppress(Exception):
                yield getattr(module, name)


def _wrapped(value: Any) -> Any:
    """Return what a decorator has put another function or object around; None if nothing."""
    return getattr(value, "__dict__", {}).get("__wrapped__")


def _may_see_tensors(space: dict[str, Any]) -> bool:
    """Say whether a file is the user's, or a library's that imports PyTorch."""
    if is_foreign(space.get("__name__")):
        return False
    modules = (value for value in space.values() if isinstance(value, types.ModuleType))
    return not is_installed(space.get("__file__") or "") or any(
        module.__name__.split(".")[0] == "torch" for module in modules
    )
