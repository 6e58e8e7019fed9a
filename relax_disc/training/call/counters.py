"""Optimizer hyper-parameters and step counts: read before a step, raised after it.

PyTorch keeps the counts in ``optimizer.state[parameter]``, as tensors of one element or as numbers.
They stay there; the vectors that the kernels read are computed from them in float64, by the
expressions that were recorded of the optimizer's own step.  State that PyTorch would create at the
first step is created at the first step, and taken back when that fails.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch

from relax_disc.errors import InputMismatchError
from relax_disc.frontend.optimizer.numbers import (
    Expr,
    plain_number,
    plain_settings,
    settings_read,
)
from relax_disc.frontend.optimizer.program import UpdateProgram
from relax_disc.frontend.optimizer.programs import programs_of
from relax_disc.frontend.optimizer.several import groups_of
from relax_disc.frontend.spec import UpdateGroup
from relax_disc.training.call.state_dicts import state_dicts


class StepCounters:
    """The step counts of one update group, cached while nobody else writes them."""

    def __init__(self, group: UpdateGroup, model: torch.nn.Module, optimizer: Any) -> None:
        owned = groups_of(optimizer)
        self._optimizer, settings = owned[group.param_group]
        first = next(k for k, (owner, _) in enumerate(owned) if owner is self._optimizer)
        self._group, self._index = group, group.param_group - first
        self._parameters = [model.get_parameter(name) for name in group.targets]
        self._use([programs_of(self._optimizer).of(settings, p) for p in self._parameters])
        self._keys = self._program.order[:1]  # one tells of all
        self._pending = False  # the state was created here and no step has been finished since
        self._created: list[dict[str, Any]] = []
        self._found: list[Any] = []
        self._versions: list[Any] = []
        self._now: dict[str, Any] = {}
        self._next: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        self._ids = [id(parameter) for parameter in self._parameters]
        self._settings: list[Any] = []  # of the last call, if none of them can change in place
        self._plain: dict[str, Any] = {}  # the same as Python's numbers, by name

    def _use(self, programs: list[UpdateProgram]) -> None:
        self._programs, self._program = programs, programs[0]
        self._distinct = list({id(program): program for program in programs}.values())

    def values(self, check: bool) -> list[float]:
        """Return the hyper-parameter vector of the coming step; create state that is missing.

        With ``check`` the step stops before the first update when the loss is not finite.

        Raises `InputMismatchError`: the parameters' counts differ now, though they agreed when the
        step was compiled, or a setting changed that decides what the optimizer computes.
        """
        settings = self._optimizer.param_groups[self._index]
        for key, count in self._program.begins.items():
            settings.setdefault(key, count)
        now = list(settings.values())
        if not _same(now, self._settings) or self._program.changed_attributes(self._optimizer):
            self._plain = plain_settings(settings)
            self._refuse_changed(settings)
            is_fixed = all(_is_fixed(settings[key]) for key in self._plain)
            self._settings = now if is_fixed else []
        if self._keys:
            self._create_missing(settings)
        self._read()
        numbers, scalars, changed = self._program.host(self._plain, self._now, self._pending)
        self._next = scalars, changed
        return [*numbers, float(check)]

    def advance(self) -> None:
        """Count a finished step."""
        scalars, settings = self._next
        for state in self._program.scalars:
            if state.dtype is None:
                for held in self._states():
                    held[state.key] = scalars[state.key]
            else:
                tensors = [held[state.key] for held in self._states()]
                value = torch.tensor(scalars[state.key], dtype=state.dtype)
                with torch.no_grad():
                    torch._foreach_copy_(tensors, [value] * len(tensors))  # pyright: ignore[reportPrivateImportUsage]
                scalars[state.key] = value.item()
        self._optimizer.param_groups[self._index].update(settings)
        self._now, self._pending, self._created = scalars, False, []
        self._remember()

    def withdraw(self) -> None:
        """Take back the state that was created for a step that did not come."""
        if self._pending:
            for parameter in self._parameters:
                self._optimizer.state.pop(parameter, None)
            self._found = []

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that the group belongs to."""
        return self._optimizer

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The counts that PyTorch keeps as tensors."""
        states = [self._optimizer.state.get(p, {}) for p in self._parameters]
        found = [state.get(s.key) for s in self._program.scalars for state in states]
        return tuple(value for value in found if isinstance(value, torch.Tensor))

    def mark(self) -> tuple[Any, ...]:
        """Return what `restore` needs besides the tensors' values."""
        missing = any(self._is_missing(parameter) for parameter in self._parameters)
        settings = self._optimizer.param_groups[self._index]
        named = {key for way in self._program.ways for key in way.trace.group}
        kept = {key: settings[key] for key in named & settings.keys()}
        plain = [s.key for s in self._program.scalars if s.dtype is None]
        states = [] if missing else [self._optimizer.state[p] for p in self._parameters]
        return missing, kept, [{key: state[key] for key in plain} for state in states]

    def restore(self, mark: tuple[Any, ...]) -> None:
        """Go back to a mark, once the tensors have their values of then."""
        missing, settings, plain = mark
        self._optimizer.param_groups[self._index].update(settings)
        for parameter, numbers in zip(self._parameters, plain, strict=not missing):
            self._optimizer.state[parameter].update(numbers)
        self._found = []
        if missing and self._keys:
            self._created = [dict(self._optimizer.state.get(p, {})) for p in self._parameters]
            self._pending = True
            self.withdraw()

    def _is_missing(self, parameter: torch.nn.Parameter) -> bool:
        state = self._optimizer.state.get(parameter)
        return bool(self._keys) and (state is None or state.get(self._keys[0]) is None)

    def _create_missing(self, settings: dict[str, Any]) -> None:
        """Create the state of parameters that have none."""
        found, key = state_dicts(self._optimizer), self._keys[0]
        missing = [found.get(place, _NO_STATE).get(key) is None for place in self._ids]
        if not any(missing):
            self._pending, self._created = False, []  # somebody loaded it or took a step
            return
        if not all(missing):
            name = self._group.targets[missing.index(True)]
            raise InputMismatchError(
                f"The optimizer has no state of {name}, but has one of others of its group, which "
                f"had as many updates as it when the step was compiled. {_APART}"
            )
        self._pending = True
        again = self._created or [{}] * len(self._parameters)
        self._created = []
        for k, (parameter, program) in enumerate(
            zip(self._parameters, self._programs, strict=True)
        ):
            made = program.initial_state(parameter, settings)
            for key, value in made.items():
                if isinstance(value, torch.Tensor) and isinstance(again[k].get(key), torch.Tensor):
                    made[key] = again[k][key].copy_(value)  # the program is bound to this one
            self._optimizer.state[parameter] = made
            self._created.append(made)

    def _read(self) -> None:
        scalars = self._program.scalars
        found = [held.get(s.key) for s in scalars for held in self._states()]
        if self._found and _same(found, self._found) and _versions(found) == self._versions:
            return
        state = self._optimizer.state
        count = len(self._parameters)
        for k, scalar in enumerate(scalars):
            for parameter, value in zip(self._parameters, found[k * count :], strict=False):
                if scalar.dtype is not None and not isinstance(value, torch.Tensor):
                    made = torch.tensor(0.0 if value is None else value, dtype=scalar.dtype)
                    state[parameter][scalar.key] = made
        self._now = {}
        for scalar in scalars:
            numbers = {plain_number(state[p][scalar.key]) for p in self._parameters}
            if len(numbers) > 1:
                raise InputMismatchError(
                    f"The optimizer's step counts ({scalar.key}) of {self._group.targets[0]} and "
                    f"others of its parameter group differ ({sorted(numbers)[:4]}), but they "
                    f"agreed when the step was compiled. {_APART}"
                )
            self._now[scalar.key] = numbers.pop()
        self._remember()

    def _states(self) -> list[dict[str, Any]]:
        """Return the dict of each parameter's state."""
        if not self._keys:
            return []
        found = state_dicts(self._optimizer)
        return [found[place] for place in self._ids]

    def _remember(self) -> None:
        self._found = [held[s.key] for s in self._program.scalars for held in self._states()]
        self._versions = _versions(self._found)

    def _refuse_changed(self, settings: dict[str, Any]) -> None:
        """Refuse settings that make the optimizer compute something else than was compiled."""
        now = [(program, program.check(self._plain)) for program in self._distinct]
        wrong = [(p, found) for p, found in now if found != tuple(p.guards.values())]
        known = self._program.settings
        changed = [key for key, value in known.items() if settings.get(key, value) != value]
        attributes = self._program.changed_attributes(self._optimizer)
        if not changed and not wrong and not attributes:
            return
        programs_now = programs_of(self._optimizer)
        found = [programs_now.of(settings, parameter) for parameter in self._parameters]
        if all(a.digest == b.digest for a, b in zip(found, self._programs, strict=True)):
            self._use(found)
            return
        if attributes:
            known = self._program.attributes
            settings = self._program.attributes_of(self._optimizer)
        if changed := [*attributes, *changed]:
            was = f"{changed[0]} was {known[changed[0]]!r} when the step was compiled"
            self._refuse(was, settings.get(changed[0]))
        program, outcomes = wrong[0]
        guards = zip(program.guards.items(), outcomes, strict=True)
        expr, outcome = next(guard for guard, found in guards if guard[1] != found)
        names = settings_read(settings, expr)
        held = "held" if outcome else "did not hold"
        self._refuse(
            f"{' and '.join(names)} decides what it computes: {_text(expr)} {held} when the "
            "step was compiled",
            ", ".join(repr(settings[name]) for name in names),
        )

    def _refuse(self, what: str, now: Any) -> None:
        raise InputMismatchError(
            f"Parameter group {self._index} of {type(self._optimizer).__name__}: "
            f"{what}, now it is {now}; set it back or compile the step again."
        )


class GroupWatch:
    """Which parameters each group of an optimizer held when the step was compiled."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._members = [list(map(id, group["params"])) for group in optimizer.param_groups]

    def check(self) -> None:
        """Refuse groups that were added, removed or changed.

        Raises `InputMismatchError`: names the group and its parameters.
        """
        now = [list(map(id, group["params"])) for group in self._optimizer.param_groups]
        if now == self._members:
            return
        for k, (old, new) in enumerate(zip(self._members, now, strict=False)):
            if changed := [*(i for i in new if i not in old), *(i for i in old if i not in new)]:
                self._refuse(f"parameter group {k} changed", changed)
        if len(now) > len(self._members):
            k = len(self._members)
            self._refuse(f"parameter group {k} was added", now[k])
        self._refuse("parameter groups were removed or ordered anew", [])

    def _refuse(self, what: str, members: Sequence[int]) -> None:
        names = {id(p): name for name, p in self._model.named_parameters()}
        listed = ", ".join(names.get(i, "a parameter of another model") for i in members[:6])
        more = f" and {len(members) - 6} more" if len(members) > 6 else ""
        raise InputMismatchError(
            f"The optimizer's {what} after compiling{': ' + listed if listed else ''}{more}; the "
            "compiled step would not train it so. Compile the step again."
        )


_NO_STATE: dict[str, Any] = {}
_APART = (
    "Does another step, or a backward() of yours, train only some of them (the head of one task, "
    "say)? Give those a parameter group of their own before compiling: "
    'AdamW([{"params": shared}, {"params": head}]). Was state loaded or cleared for some of them? '
    "Do so for all, or compile the step again."
)
"""What to do where one vector of hyper-parameters would have to hold several counts."""


def _is_fixed(value: Any) -> bool:
    """Say whether a setting can only be replaced, not changed in place."""
    if type(value) is tuple:
        return all(map(_is_fixed, value))
    return value is None or isinstance(value, int | float | str)


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


def _versions(found: Sequence[Any]) -> list[Any]:
    return [x._version if isinstance(x, torch.Tensor) else x for x in found]


def _text(expr: Expr) -> str:
    """Write a condition as people do."""
    shown = re.sub(r"(eq|ne)_\((.*), (.*)\)", r"(\2 \1 \3)", expr)
    return shown.replace(" eq ", " == ").replace(" ne ", " != ").removeprefix("(").removesuffix(")")


def fill(vectors: Sequence[torch.Tensor], counters: Sequence[StepCounters], *, check: bool) -> None:
    """Write every group's hyper-parameters into the vectors that the kernels read."""
    for vector, counter in zip(vectors, counters, strict=True):
        values = torch.tensor(counter.values(check), dtype=torch.float64, device="cpu")
        vector.copy_(values)
