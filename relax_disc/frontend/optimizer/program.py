"""What a traced update computes: numbers on the host before a call, tensors in the kernel.

Traces become trees of `Value` in which equal ones are one.  The numbers that they need, which way
through the step is taken, and the counts after it are computed by one Python expression that is put
together of the recorded ones (`UpdateProgram.host`).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from relax_disc.frontend.optimizer.numbers import (
    FRESH,
    Expr,
    constant,
    depends_on_state,
    evaluate,
    evaluate_plain,
    plain_number,
    plain_settings,
    settings_read,
)
from relax_disc.frontend.optimizer.surroundings import surroundings_of
from relax_disc.frontend.optimizer.tracing import IMPLEMENTATION, ScalarState, TensorState, Trace

_SAME = frozenset(("aten.clone.default", "aten.detach.default", "aten.alias.default"))


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """A tensor of the update: an operation on others, or an input.

    Inputs have the operations ``parameter``, ``gradient``, ``state`` (with its key) and ``entry``
    (with its expression); ``filled`` is a new tensor of one number.
    """

    op: str
    args: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    node: fx.Node

    def operands(self) -> Iterator[Value]:
        """List the values among the arguments."""
        waiting = list(self.args)
        while waiting:
            argument = waiting.pop(0)
            if isinstance(argument, Value):
                yield argument
            elif isinstance(argument, tuple):
                waiting[:0] = argument


class Values:
    """Makes values; equal ones are the same object."""

    def __init__(self) -> None:
        self._known: dict[Any, Value] = {}

    def read(self, trace: Trace, states: Mapping[str, Value] | None = None) -> dict[fx.Node, Value]:
        """Make the values of a trace; ``states`` may stand for those that it reads."""
        found: dict[fx.Node, Value] = {}
        named = {node: key for key, node in trace.inputs.items()}
        for node in trace.graph.graph.nodes:
            if node.op == "placeholder" and node in named:
                key = named[node]
                if states is not None and key in states:
                    found[node] = states[key]
                elif key in ("parameter", "gradient"):
                    found[node] = self._make(key, (), node)
                else:
                    found[node] = self._make("state", (key,), node)
            elif node.op == "placeholder" and node in trace.entries:
                found[node] = self._make("entry", (trace.entries[node],), node)
            elif node.op == "get_attr":
                found[node] = self._make("constant", (str(node.target), id(trace)), node)
            elif node.op == "call_function" and not str(node.target).startswith("profiler."):
                found[node] = self._call(node, found)
        return found

    def _call(self, node: fx.Node, found: dict[fx.Node, Value]) -> Value:
        op = str(node.target)
        args = _freeze((*node.args, *sorted(node.kwargs.items())), found)
        if op in _SAME:
            return args[0]
        if op == "aten.copy.default" and _alike(args[0], args[1]):
            return args[1]
        made = node.meta["val"]
        if op == "aten._to_copy.default" and made.dtype is args[0].dtype:
            return args[0]
        if op in ("aten.full.default", "aten.full_like.default"):
            return self._make("filled", (args[1],), node)
        return self._make(op, args, node)

    def _make(self, op: str, args: tuple[Any, ...], node: fx.Node) -> Value:
        made = node.meta["val"]
        if not isinstance(made, Tensor):
            shape, dtype = (), torch.float64  # an operator with several results; a part of it
        else:
            shape, dtype = tuple(made.shape), made.dtype
        key = (op, _key(args), shape if op != "entry" else (), dtype)
        if key not in self._known:
            self._known[key] = Value(op, args, shape, dtype, node)
        return self._known[key]


def _freeze(argument: Any, found: dict[fx.Node, Value]) -> Any:
    if isinstance(argument, fx.Node):
        return found[argument]
    if isinstance(argument, list | tuple):
        return tuple(_freeze(x, found) for x in argument)
    return argument


def _key(argument: Any) -> Any:
    if isinstance(argument, Value):
        return ("value", id(argument))
    if isinstance(argument, tuple):
        return tuple(_key(x) for x in argument)
    return (type(argument).__name__, repr(argument))


def _alike(one: Value, other: Value) -> bool:
    return one.shape == other.shape and one.dtype is other.dtype


@dataclass(frozen=True, slots=True)
class Way:
    """One way through the step: new values by name, and the numbers beside them."""

    path: tuple[tuple[Expr, bool], ...]
    outputs: Mapping[str, Value]
    trace: Trace
    values: Mapping[fx.Node, Value]


@dataclass(frozen=True, eq=False)
class UpdateProgram:
    """The update of parameters of one group and rank, or one shape."""

    ways: tuple[Way, ...]  # at least one; the host says which one is taken
    tensors: tuple[TensorState, ...]  # states that the kernel reads or writes
    scalars: tuple[ScalarState, ...]  # states that the host computes
    # what a missing state tensor is made of; a state that is not there begins at zero
    created: Mapping[str, Value]
    # what the vector holds, after which come a flag for each way but the first, and ``check``
    entries: tuple[Expr, ...]
    guards: dict[Expr, Any]  # conditions on hyper-parameters, and how they turned out
    settings: Mapping[str, Any]  # the group's settings that are no numbers
    attributes: Mapping[str, Any]  # what the step reads of the optimizer itself
    begins: Mapping[str, Any]  # counts that the step makes in its group, as before the first step
    keys: tuple[str, ...]  # of a parameter's state, in the order in which the optimizer makes them
    kernels: dict[Any, Any] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Length of the vector of hyper-parameters."""
        return len(self.entries) + len(self.ways)

    @functools.cached_property
    def written(self) -> tuple[TensorState, ...]:
        """States that some way changes."""
        return tuple(
            state
            for state in self.tensors
            if any(not _is_state(way.outputs.get(state.key), state.key) for way in self.ways)
        )

    @functools.cached_property
    def host_text(self) -> str:
        """The source of `host`."""
        return _choice(self, range(len(self.ways)))

    def host(
        self, settings: Mapping[str, Any], scalars: Mapping[str, Any], fresh: bool
    ) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
        """Compute the vector, and the new scalar states and settings, from `plain_settings`."""
        return evaluate_plain(self._code["host"], settings, s_=scalars, fresh_=fresh)

    def check(self, settings: Mapping[str, Any]) -> tuple[Any, ...]:
        """Compute how the guards turn out for the `plain_settings` of a group."""
        return evaluate_plain(self._code["check"], settings)

    @functools.cached_property
    def _code(self) -> dict[str, Any]:
        guards = f"({''.join(f'{guard}, ' for guard in self.guards)})"
        texts = {"host": self.host_text, "check": guards}
        return {name: compile(text, "<optimizer>", "eval") for name, text in texts.items()}

    @functools.cached_property
    def digest(self) -> str:
        """A hash of all that decides code and numbers, but for shapes."""
        numbered: dict[int, int] = {}
        lines: list[str] = []

        def visit(value: Value) -> int:
            if id(value) not in numbered:
                parts = _describe(value.args, visit)
                numbered[id(value)] = len(numbered)
                lines.append(f"{value.op} {parts} {value.dtype} {len(value.shape)}")
            return numbered[id(value)]

        for way in self.ways:
            lines.append(repr({key: visit(value) for key, value in way.outputs.items()}))
        lines.append(repr({key: visit(value) for key, value in self.created.items()}))
        states = [(s.key, len(s.shape), str(s.dtype)) for s in self.tensors]
        facts = [states, [(s.key, str(s.dtype), s.initial) for s in self.scalars]]
        return hashlib.sha256("\n".join([*lines, repr(facts), self.host_text]).encode()).hexdigest()

    def begun(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a group's settings with the counts that its first step makes."""
        return {**self.begins, **group}

    def fits(
        self, group: Mapping[str, Any], parameter: Tensor, held: Mapping[str, TensorState]
    ) -> bool:
        """Say whether the program holds for a group's settings and a parameter's state."""
        return self.check(plain_settings(self.begun(group))) == tuple(self.guards.values()) and all(
            (known := held.get(state.key)) is None
            or (known.dtype, known.shape) == (state.dtype, self.shape_of(state, parameter))
            for state in self.tensors
        )

    def changed_attributes(self, optimizer: Any) -> list[str]:
        """List what the step reads of the optimizer itself that is not as it was."""
        now = self.attributes_of(optimizer)
        return [name for name, value in self.attributes.items() if now[name] != value]

    def attributes_of(self, optimizer: Any) -> dict[str, Any]:
        """Return what the step reads of the optimizer itself as it is now."""
        around = surroundings_of(optimizer).values(optimizer)
        return {
            name: around[name] if name in around else getattr(optimizer, name, None)
            for name in self.attributes
        }

    def shape_of(self, state: TensorState, parameter: Tensor) -> tuple[int, ...]:
        """Return the shape of a state of a parameter."""
        alike = state.shape == self.traced_shape
        return tuple(parameter.shape) if alike else state.shape

    @property
    def order(self) -> tuple[str, ...]:
        """The keys of the state, as the optimizer makes them."""
        known = [s.key for s in (*self.scalars, *self.tensors)]
        return tuple(sorted(known, key=self.keys.index))

    def initial_state(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Make the state of a parameter that has none, as the optimizer would."""
        scalars = {state.key: state for state in self.scalars}
        tensors = {state.key: state for state in self.tensors}
        made: dict[str, Any] = {}
        group = self.begun(group)
        for key in self.order:
            if key in tensors:
                made[key] = self._initial(tensors[key], parameter, group)
            else:
                value, dtype = evaluate(scalars[key].initial, group), scalars[key].dtype
                made[key] = value if dtype is None else torch.tensor(value, dtype=dtype)
        return made

    def scalars_now(self, state: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the scalar states of a parameter, those that are missing as they would begin."""
        return {
            scalar.key: evaluate(scalar.initial, self.begun(group))
            if state.get(scalar.key) is None
            else plain_number(state[scalar.key])
            for scalar in self.scalars
        }

    def is_fresh(self, state: Mapping[str, Any]) -> bool:
        """Say whether a parameter's state is missing, where the first step differs from others."""
        special = any((FRESH, True) in way.path for way in self.ways)
        return special and any(state.get(tensor.key) is None for tensor in self.tensors)

    def _initial(self, state: TensorState, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
        value = self.created.get(state.key)
        if value is None:
            return torch.zeros(self.shape_of(state, parameter), dtype=state.dtype)
        numbers = {"group": group, "parameter": parameter}
        if value.op == "filled" and value.shape == self.traced_shape:
            return torch.full_like(parameter, value.args[0], dtype=state.dtype)
        made = _evaluate(value, numbers, {})
        return made.detach().clone()

    @functools.cached_property
    def traced_shape(self) -> tuple[int, ...]:
        """Shape of the parameter that was traced."""
        return tuple(self.ways[0].trace.inputs["parameter"].meta["val"].shape)


def _is_state(value: Value | None, key: str) -> bool:
    return value is None or (value.op == "state" and value.args == (key,))


def _describe(argument: Any, visit: Callable[[Value], int]) -> str:
    if isinstance(argument, Value):
        return f"%{visit(argument)}"
    if isinstance(argument, tuple):
        return f"({' '.join(_describe(x, visit) for x in argument)})"
    return repr(argument)


def combine(
    first: Sequence[Trace],
    steady: Sequence[Trace],
    group: Mapping[str, Any],
    begins: Mapping[str, Any],
) -> UpdateProgram:
    """Make a program of the traces without state and with it.

    ``begins``: counts that the group has in the traces, but not before the first step.
    """
    values = Values()
    ways = [_way(trace, values.read(trace), ()) for trace in steady]
    created: dict[str, Value] = {}
    begun = [_way(trace, values.read(trace), ()) for trace in first]
    made = [_created(way) for way in begun]
    resumed = [_way(trace, values.read(trace, made[0]), ()) for trace in steady]
    if all(m == made[0] for m in made) and _equal(begun, resumed) and _known(made[0]):
        created = made[0]
    else:
        ways = [
            replace(way, path=((FRESH, fresh), *way.path))
            for fresh, those in ((False, ways), (True, begun))
            for way in those
        ]
    entries: dict[Expr, None] = {}
    for way in ways:
        for value in reachable(way.outputs.values()):
            if value.op == "entry" and constant(value.args[0]) is None:
                entries[value.args[0]] = None
    guards: dict[Expr, Any] = {}
    counted = {key for trace in steady for key in trace.group}
    for trace in first:  # how a first step finds its counts, later ones go both ways
        guards |= {k: v for k, v in trace.guards.items() if not settings_read(counted, k)}
    for trace in steady:
        guards |= trace.guards
    return UpdateProgram(
        tuple(ways),
        tuple(steady[0].tensors),
        tuple(steady[0].scalar_states.values()),
        created,
        tuple(entries),
        guards,
        {key: group[key] for key in group if _is_setting(key, group[key])},
        {key: value for trace in (*steady, *first) for key, value in trace.attributes.items()},
        begins,
        first[0].keys,
    )


def _is_setting(key: str, value: Any) -> bool:
    return key not in ("params", *IMPLEMENTATION) and isinstance(value, bool | str | None)


def _way(
    trace: Trace, values: Mapping[fx.Node, Value], before: tuple[tuple[Expr, bool], ...]
) -> Way:
    outputs = {key: values[node] for key, node in trace.outputs.items()}
    return Way((*before, *trace.path), outputs, trace, values)


def _created(way: Way) -> dict[str, Value]:
    return {key: way.values[node] for key, node in way.trace.created.items()}


def _equal(one: Sequence[Way], other: Sequence[Way]) -> bool:
    by_path = {way.path: way for way in other}
    return len(one) == len(other) and all(
        way.path in by_path
        and way.outputs == by_path[way.path].outputs
        and way.trace.scalars == by_path[way.path].trace.scalars
        and way.trace.group == by_path[way.path].trace.group
        for way in one
    )


def _known(created: Mapping[str, Value]) -> bool:
    """Say whether states can be made before the gradient is known."""
    return all(
        value.op != "gradient" and not (value.op == "entry" and depends_on_state(value.args[0]))
        for value in reachable(created.values())
    )


def needs_shape(first: Sequence[Trace], program: UpdateProgram) -> bool:
    """Say whether a program holds for the shape that was traced alone, not for all of its rank."""
    traces = [way.trace for way in program.ways] + list(first)
    shape = program.traced_shape
    return (
        any(trace.sizes_read for trace in traces)
        or any(state.shape != shape for state in program.tensors)
        or any(v.op not in ("parameter", "filled") for v in program.created.values())
    )


def reachable(roots: Any) -> list[Value]:
    """List values and all that they are made of, operands first."""
    found: dict[int, Value] = {}

    def visit(value: Value) -> None:
        if id(value) in found:
            return
        for operand in value.operands():
            visit(operand)
        found[id(value)] = value

    for root in roots:
        visit(root)
    return list(found.values())


def _evaluate(value: Value, numbers: Mapping[str, Any], known: dict[int, Any]) -> Any:
    if id(value) in known:
        return known[id(value)]
    if value.op == "parameter":
        result = numbers["parameter"].detach()
    elif value.op == "filled":
        result = torch.full(value.shape, value.args[0], dtype=value.dtype)
    elif value.op == "entry":
        result = torch.tensor(evaluate(value.args[0], numbers["group"]), dtype=torch.float64)
    else:
        count = len(value.node.args)
        args = [_thaw(x, numbers, known) for x in value.args]
        target: Any = value.node.target
        result = target(*args[:count], **dict(args[count:]))
    known[id(value)] = result
    return result


def _thaw(argument: Any, numbers: Mapping[str, Any], known: dict[int, Any]) -> Any:
    if isinstance(argument, Value):
        return _evaluate(argument, numbers, known)
    if isinstance(argument, tuple):
        return [_thaw(x, numbers, known) for x in argument]
    return argument


def _choice(program: UpdateProgram, ways: Sequence[int], step: int = 0) -> str:
    """Write what the host computes, for ways that agree on the first ``step`` conditions."""
    way = program.ways[ways[0]]
    if len(ways) > 1:
        holds = [k for k in ways if program.ways[k].path[step][1]]
        rest = [k for k in ways if k not in holds]
        yes, no = (_choice(program, those, step + 1) for those in (holds, rest))
        return f"({yes} if {way.path[step][0]} else {no})"
    used = {v.args[0] for v in reachable(way.outputs.values()) if v.op == "entry"}
    numbers = [expr if expr in used else "0.0" for expr in program.entries]
    numbers += [str(float(ways[0] == k)) for k in range(1, len(program.ways))]
    tables = [
        "{" + ", ".join(f"{key!r}: {expr}" for key, expr in table.items()) + "}"
        for table in (way.trace.scalars, way.trace.group)
    ]
    return f"([{', '.join(numbers)}], {', '.join(tables)})"
