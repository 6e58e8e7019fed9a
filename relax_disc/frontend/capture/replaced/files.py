"""The files whose code a model and a loss function run.

They are found by the names in that code, as a rapid type analysis finds a program's functions
(Bacon and Sweeney, OOPSLA 1996): a method counts as called if code that runs names it and an object
of its class is at hand.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from relax_disc.frontend.capture.source_lines import is_installed
from relax_disc.frontend.capture.state.kinds import is_foreign
from relax_disc.frontend.capture.state.sources import codes_of, function_of

Files = Sequence[dict[str, Any]]
"""The global variables of files."""

_EINX = "einx"
"""Is shown stand-ins for sizes instead: `relax_disc.frontend.capture.sizes.stand_ins`."""


def files_of(model: nn.Module, *functions: Callable[..., Any] | None) -> Files:
    """List the files of the functions that run, but for PyTorch's and Python's own.

    ``functions``: those that run besides the model, or objects that are called.
    """
    walk = _Walk()
    for root in (model, *functions):
        walk.enter(root)
    return walk.run()


class _Walk:
    """What was found: files by ``id``, the classes of objects at hand, the names in code."""

    def __init__(self) -> None:
        self._files: dict[int, dict[str, Any]] = {}
        self._kinds: dict[type, None] = {}
        self._names: set[str] = {"forward", "__call__"}
        self._seen: dict[int, Any] = {}  # kept alive, so that an ``id`` stays that of one object
        self._waiting: list[types.FunctionType] = []

    def run(self) -> Files:
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
                return list(self._files.values())

    def enter(self, value: Any) -> None:
        """Note what calling a value may run."""
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, types.FunctionType):
            self._waiting.append(value)
        elif isinstance(value, nn.Module):
            self.enter(type(value))
            self._enter_all((*value.children(), *value.__dict__.values()))
        elif isinstance(value, type):
            self._kinds.update((k, None) for k in value.__mro__ if not _is_left_out(k.__module__))
        elif isinstance(value, types.MethodType):
            self._enter_all((value.__func__, value.__self__))
        elif isinstance(value, functools.partial):
            self._enter_all((value.func, *value.args, *value.keywords.values()))
        elif not isinstance(value, types.ModuleType):
            self.enter(type(value))
            self.enter(_wrapped(value))

    def _enter_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.enter(value)

    def _read(self, function: types.FunctionType) -> None:
        """Follow what a function closes over, and the names in its code."""
        self.enter(_wrapped(function))
        for cell in function.__closure__ or ():
            try:
                self.enter(cell.cell_contents)
            except ValueError:  # no value yet
                continue
        space = function.__globals__
        if not _may_see_tensors(space):
            return
        self._files[id(space)] = space
        self._enter_all(function.__defaults__ or ())
        names = {name for code in codes_of([function]) for name in code.co_names}
        self._names |= names
        modules = []
        for name in names & space.keys():
            value = space[name]
            if isinstance(value, types.ModuleType):
                modules.append(value)
            else:
                self.enter(value)
        for module in modules:  # grows
            if _is_left_out(module.__name__):
                continue
            for name in names & vars(module).keys():
                value = vars(module)[name]
                if not isinstance(value, types.ModuleType):
                    self.enter(value)
                elif value not in modules:
                    modules.append(value)


def _wrapped(value: Any) -> Any:
    """Return what a decorator has put another function or object around; None if nothing."""
    return getattr(value, "__dict__", {}).get("__wrapped__")


def _may_see_tensors(space: dict[str, Any]) -> bool:
    """Say whether a file is the user's, or a library's that imports PyTorch."""
    if _is_left_out(space.get("__name__")):
        return False
    modules = (value for value in space.values() if isinstance(value, types.ModuleType))
    return not is_installed(space.get("__file__") or "") or any(
        module.__name__.split(".")[0] == "torch" for module in modules
    )


def _is_left_out(name: str | None) -> bool:
    return is_foreign(name) or (name or "").split(".")[0] == _EINX
