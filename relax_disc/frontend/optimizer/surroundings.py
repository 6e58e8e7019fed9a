"""What the step of a user's own optimizer may read besides its groups and its state.

Numbers, texts and flags that its code names: attributes, globals, variables of closures, what lies
in dicts, lists and plain objects there, and in its groups.  A program is traced with them as they
are; where one changes, the step is traced again, and refused if it is another program then.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from relax_disc.frontend.capture.state.kinds import (
    MOST_ELEMENTS,
    is_foreign,
    is_library,
    is_listed,
    is_plain,
)
from relax_disc.frontend.capture.state.sources import codes_of, function_of
from relax_disc.frontend.optimizer.numbers import Untraceable

_KNOWN: weakref.WeakKeyDictionary[Optimizer, Surroundings] = weakref.WeakKeyDictionary()
_DEPTH = 4
_WITHOUT = (Tensor, nn.Module, Optimizer)
_OF_TRACES = ("param_groups", "state")


def is_own(kind: type) -> bool:
    """Say whether a class of optimizers is none of `torch.optim`, of which all is known."""
    return getattr(torch.optim, kind.__name__, None) is not kind


def surroundings_of(optimizer: Optimizer) -> Surroundings:
    """Return an optimizer's surroundings, which are found once."""
    if optimizer not in _KNOWN:
        _KNOWN[optimizer] = Surroundings(optimizer)
    return _KNOWN[optimizer]


class Surroundings:
    """What the code of one optimizer names."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._roots: dict[str, Callable[[Optimizer], Any]] = {}
        if not is_own(type(optimizer)):
            return
        self._roots["step"] = lambda optimizer: inspect.unwrap(type(optimizer).step)
        functions = [*_methods(type(optimizer)), *map(function_of, vars(optimizer).values())]
        functions = [each for each in functions if _is_users(each)]
        names: set[str] = set()
        for function in functions:  # grows
            codes = codes_of([function])
            for code in codes:
                names |= {*code.co_names, *(c for c in code.co_consts if isinstance(c, str))}
            space = function.__globals__
            for name in {name for code in codes for name in code.co_names} & space.keys():
                self._roots[name] = functools.partial(_global, space, name)
            cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            for name, cell in cells:
                self._roots.setdefault(name, functools.partial(_cell, cell))
            given = {**self._roots}.values()
            for value in map(function_of, [read(optimizer) for read in given]):
                if _is_users(value) and value not in functions:
                    functions.append(value)
        for name in names & vars(optimizer).keys():
            if name not in _OF_TRACES:
                self._roots[name] = functools.partial(_attribute, name)

    def values(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return all numbers, texts and flags by where they lie."""
        return self._walked(optimizer)[0]

    @contextlib.contextmanager
    def unchanged(self, optimizer: Optimizer) -> Iterator[dict[str, Any]]:
        """Hold the `values`, which are given, while a step is traced, and put them back.

        Raises `Untraceable`: the step has changed something.
        """
        before, containers = self._walked(optimizer)
        held = [(each, each.copy()) for each in containers]
        yield before
        after = self.values(optimizer)
        for container, values in held:
            if container != values:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(values)
        changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        if changed:
            raise Untraceable(f"changes {changed[0]}, which is none of its state")

    def _walked(self, optimizer: Optimizer) -> tuple[dict[str, Any], list[Any]]:
        found: dict[str, Any] = {}
        containers: dict[int, Any] = {}
        for name, read in self._roots.items():
            _walk(name, read(optimizer), found, containers, _DEPTH)
        if self._roots:
            for index, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    if key != "params" and not is_plain(value):
                        path = f"param_groups[{index}][{key!r}]"
                        _walk(path, value, found, containers, _DEPTH)
        return found, list(containers.values())


def _walk(
    path: str, value: Any, found: dict[str, Any], containers: dict[int, Any], depth: int
) -> None:
    if is_plain(value) or isinstance(value, types.FunctionType):
        found[path] = value
    elif depth == 0 or isinstance(value, _WITHOUT) or id(value) in containers:
        return
    elif hasattr(value, "__len__") and len(value) > MOST_ELEMENTS:
        found[f"len({path})"] = len(value)  # it is data
    elif isinstance(value, dict):
        containers[id(value)] = value
        for key, held in list(dict.items(value)):
            if is_plain(key):
                _walk(f"{path}[{key!r}]", held, found, containers, depth - 1)
    elif is_listed(value):
        containers[id(value)] = value
        found[f"len({path})"] = len(value)
        if isinstance(value, set):
            found[path] = frozenset(filter(is_plain, value))
        else:
            for index, held in enumerate(value):
                _walk(f"{path}[{index}]", held, found, containers, depth - 1)
    elif isinstance(value, types.SimpleNamespace) or _is_users_object(value):
        containers[id(value)] = vars(value)
        for key, held in list(vars(value).items()):
            _walk(f"{path}.{key}", held, found, containers, depth - 1)


def _methods(kind: type) -> Iterator[Any]:
    for base in kind.__mro__:
        if not is_foreign(base.__module__):
            yield from (inspect.unwrap(function_of(x)) for x in vars(base).values() if callable(x))


def _is_users(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and not is_library(value)


def _is_users_object(value: Any) -> bool:
    return hasattr(value, "__dict__") and not (
        isinstance(value, type | types.ModuleType) or callable(value) or is_library(type(value))
    )


def _global(space: dict[str, Any], name: str, _: Optimizer) -> Any:
    return space.get(name)


def _cell(cell: Any, _: Optimizer) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty still
        return None


def _attribute(name: str, optimizer: Optimizer) -> Any:
    return vars(optimizer).get(name)
