"""Trace an optimizer's own ``step`` over one parameter, as eager PyTorch would run it.

A shadow of the optimizer, with the same class and attributes, holds one fake parameter.  Its
hyper-parameters and counts are numbers that record what is computed of them (:mod:`.numbers`);
its tensors are traced by ``make_fx``.  A condition on a count (RAdam's first steps) is followed
both ways, a trace for each; so is one on a setting of the group in which the step counts itself, if
both ways can be gone.  Any other on a hyper-parameter (``weight_decay != 0``) is taken as it is now
and becomes a guard.  The step is traced without state, as the first one runs, and with
it; where the first is the second on new state, only that is kept.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from relax_disc.frontend.capture.state.kinds import is_plain
from relax_disc.frontend.capture.traced.decompositions import decomposition_table
from relax_disc.frontend.capture.tracing import tracing
from relax_disc.frontend.optimizer.numbers import (
    RECORDER,
    Cell,
    Expr,
    Number,
    Untraceable,
    depends_on_state,
    expression,
    is_tensor,
    plain_number,
    recording_functions,
    settings_read,
)
from relax_disc.frontend.optimizer.surroundings import is_own, surroundings_of

IMPLEMENTATION = ("foreach", "fused", "capturable")
"""Flags of groups that choose among PyTorch's own implementations of one formula."""
_SIZES = frozenset(
    ("shape", "size", "numel", "nelement", "__len__", "stride", "nbytes", "is_contiguous")
)
_GRAD = Tensor.grad.__get__  # pyright: ignore
_OF_OBJECTS = {
    Tensor.requires_grad.__get__,  # pyright: ignore
    Tensor.is_leaf.__get__,  # pyright: ignore
}
"""What is asked of a parameter itself."""
_MAKERS = (torch.tensor, torch.as_tensor, torch.scalar_tensor)
_FILLED = {torch.zeros: 0.0, torch.ones: 1.0}
_MOST_TRACES = 8


@dataclass(frozen=True, slots=True)
class ScalarState:
    """A state outside the kernel: a plain number, or (``dtype``) a tensor of one element."""

    key: str
    dtype: torch.dtype | None
    initial: Expr


@dataclass(frozen=True, slots=True)
class TensorState:
    """A state tensor that the kernel reads and writes."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter that a step is traced over: its group, and the state that it has."""

    group: Mapping[str, Any]
    like: Tensor
    tensors: Sequence[TensorState] = ()
    scalars: Sequence[ScalarState] = ()


@dataclass(frozen=True, slots=True)
class MemberTrace:
    """What a step does with one parameter.

    ``outputs`` are nodes of the graph: the new parameter and the new states; ``scalars`` the new
    numbers of its state.
    """

    inputs: dict[str, fx.Node]
    outputs: dict[str, fx.Node]
    scalars: dict[str, Expr]


@dataclass(slots=True)
class Trace:
    """What one run of the step recorded.

    ``members``: of each parameter that it was traced over; all else is of the last one.
    ``created``: the states as they were made, where there were none.  ``entries`` gives the numbers
    that placeholders stand for.
    """

    graph: fx.GraphModule
    members: Sequence[MemberTrace]
    entries: dict[fx.Node, Expr]
    created: dict[str, fx.Node]
    tensors: list[TensorState]
    scalar_states: dict[str, ScalarState]
    group: dict[str, Expr]
    path: list[tuple[Expr, bool]]
    guards: dict[Expr, Any]
    sizes_read: bool
    keys: tuple[str, ...]
    attributes: dict[str, Any]

    @property
    def inputs(self) -> dict[str, fx.Node]:
        """What the last parameter brings: itself, its gradient and its states."""
        return self.members[-1].inputs

    @property
    def outputs(self) -> dict[str, fx.Node]:
        """The last parameter and its states as they are afterwards."""
        return self.members[-1].outputs

    @property
    def scalars(self) -> dict[str, Expr]:
        """The numbers of its state as they are afterwards."""
        return self.members[-1].scalars


class _State(dict[str, Any]):
    """The state of the shadow's parameter: notes how each entry was made."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        super().__init__(known)
        self.created: dict[str, Any] = {}
        self.scalars: dict[str, ScalarState] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self:
            if is_tensor(value):
                self.created[key] = value.clone()
            elif isinstance(value, (int, float, Number)) and not isinstance(value, bool):
                dtype = value.dtype if isinstance(value, Cell) else None
                initial = expression(value)
                self.scalars[key] = ScalarState(key, dtype, initial)
                value = scalar_input(self.scalars[key])
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *others: Any, **named: Any) -> None:
        for key, value in dict(*others, **named).items():
            self[key] = value


class _States(dict[Any, Any]):
    """The shadow's ``state``: of its parameters alone."""

    def __missing__(self, key: Any) -> _State:
        raise Untraceable("keeps state that belongs to no parameter")

    def __setitem__(self, key: Any, value: Any) -> None:
        self[key].clear()
        self[key].update(value)


def scalar_input(state: ScalarState) -> Number:
    """Return a scalar state as the step finds it."""
    expr = f"s_[{state.key!r}]"
    return Number(expr) if state.dtype is None else Cell(expr, None, state.dtype)


class _PoolEmpty(Exception):
    """More numbers meet tensors than placeholders were prepared for."""


class _Run:
    """The recorder of one run: decisions ahead of it, and what it met."""

    def __init__(
        self, decisions: Sequence[bool], forced: Mapping[Expr, bool], counting: Set[str]
    ) -> None:
        self._decisions, self._forced, self._counting = decisions, forced, counting
        self.path: list[tuple[Expr, bool]] = []
        self.guards: dict[Expr, Any] = {}
        self.entries: dict[Expr, int] = {}
        self.pool: Sequence[Tensor] = ()
        self.sizes_read = False
        self.attributes: dict[str, Any] = {}

    def decide(self, expr: Expr, value: bool | None) -> bool:
        if not depends_on_state(expr) and not settings_read(self._counting, expr):
            return self.guards.setdefault(expr, self._forced.get(expr, bool(value)))
        known = dict(self.path)
        if expr not in known:
            count = len(self.path)
            outcome = self._decisions[count] if count < len(self._decisions) else True
            self.path.append((expr, outcome))
            return outcome
        return known[expr]

    def freeze(self, expr: Expr, value: Any) -> None:
        self.guards[f"eq_({expr}, {value!r})"] = True

    def entry(self, expr: Expr) -> Tensor:
        index = self.entries.setdefault(expr, len(self.entries))
        if index >= len(self.pool):
            raise _PoolEmpty
        return self.pool[index]


class _Numbers(TorchFunctionMode):
    """Lets PyTorch's functions take numbers, and notes when sizes are asked for."""

    def __init__(self, run: _Run, stand_ins: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._run, self._stand_ins = run, stand_ins

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _OF_OBJECTS:
            return func(*args)
        if func == _GRAD and id(args[0]) not in self._stand_ins and type(args[0]) is nn.Parameter:
            return None  # it is not trained
        args = self._stand_in(args)
        kwargs = {key: self._stand_in(value) for key, value in (kwargs or {}).items()}
        name = getattr(func, "__name__", "")
        is_set = name == "__set__"
        if name in ("__get__", "__set__"):
            name = getattr(func.__self__, "__name__", "")
        if is_set and name == "data":
            return _set_data(*args)
        if name in _SIZES:
            self._run.sizes_read = True
        if (made := _made(func, args, kwargs)) is not None:
            return made
        if name in ("item", "__float__", "__int__", "__bool__", "tolist"):
            if name != "item":
                raise Untraceable("branches on a value that it computes from gradients")
            return Number("", None, args[0].reshape(()).to(torch.float64))
        if name == "__setitem__" and isinstance(args[1], Tensor) and args[1].dtype is torch.bool:
            value = args[2].tensor() if isinstance(args[2], Number) else args[2]
            return args[0].copy_(torch.where(args[1], value, args[0]))
        flat = [*_flat(args), *_flat(kwargs.values())]
        if not any(isinstance(x, Number) for x in flat):
            return func(*args, **kwargs)
        like = next((x for x in flat if is_tensor(x)), None)
        # Beside a tensor of one element a number must not widen the result.
        single = like is not None and like.dim() == 0 and like.is_floating_point()
        dtype = like.dtype if like is not None and single else None
        args, kwargs = _tensors(args, dtype), {k: _tensors(x, dtype) for k, x in kwargs.items()}
        if (rewritten := _rewritten(name, args, kwargs)) is not NotImplemented:
            return rewritten
        return func(*args, **kwargs)

    def _stand_in(self, value: Any) -> Any:
        """Put in the trace's tensors for an optimizer's own parameters."""
        if isinstance(value, list | tuple):
            made = [self._stand_in(each) for each in value]
            return tuple(made) if isinstance(value, tuple) else made
        return self._stand_ins.get(id(value), value)


def _set_data(x: Tensor, value: Any) -> None:
    """``x.data = value``: nothing else knows the memory that ``x`` would leave."""
    value = value.tensor() if isinstance(value, Number) else value
    if value.shape != x.shape or value.dtype != x.dtype:
        raise Untraceable("gives a parameter data of another shape or type")
    x.copy_(value)


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def _tensors(value: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(value, list | tuple):
        return type(value)([_tensors(x, dtype) for x in value])
    if not isinstance(value, Number):
        return value
    return value.tensor() if dtype is None else value.tensor().to(dtype)


def _made(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Cell | None:
    """Make a cell where PyTorch would make a tensor of one number."""
    dtype = kwargs.get("dtype")
    if func in _MAKERS and args and isinstance(args[0], (int, float, Number)):
        if isinstance(args[0], Number) and args[0].data is not None:
            return None
        if dtype is None and len(args) > 1 and isinstance(args[1], torch.dtype):
            dtype = args[1]
        return Cell(expression(args[0]), getattr(args[0], "value", args[0]), _default(dtype))
    shape = args[0] if args else kwargs.get("size", kwargs.get("shape"))
    if func in _FILLED and isinstance(shape, list | tuple) and not len(shape):
        return Cell(repr(_FILLED[func]), _FILLED[func], _default(dtype))
    return None


def _default(dtype: torch.dtype | None) -> torch.dtype:
    return torch.get_default_dtype() if dtype is None else dtype


def _rewritten(name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Write a function with numbers for factors in terms of products."""
    plain, x = name.rstrip("_"), args[0]
    out = kwargs.pop("out", None)

    def operand(place: int, word: str, default: Any = None) -> Any:
        return args[place] if len(args) > place else kwargs.get(word, default)

    if plain in ("add", "sub", "subtract") and "alpha" in kwargs:
        change = operand(1, "other") * kwargs["alpha"]
        result = x + change if plain == "add" else x - change
    elif plain in ("addcmul", "addcdiv"):
        one, other = operand(1, "tensor1"), operand(2, "tensor2")
        both = one * other if plain == "addcmul" else one / other
        result = x + both * operand(3, "value", 1)
    elif plain == "lerp":
        result = x + (operand(1, "end") - x) * operand(2, "weight")
    elif plain in ("addmm", "addmv", "baddbmm"):
        words = {"addmm": ("mat1", "mat2"), "addmv": ("mat", "vec")}
        one, other = words.get(plain, ("batch1", "batch2"))
        product = torch.matmul(operand(1, one), operand(2, other))
        result = x * kwargs.get("beta", 1) + product * kwargs.get("alpha", 1)
    elif plain in ("clamp", "clip", "clamp_min", "clamp_max"):
        is_upper = plain == "clamp_max"
        low = None if is_upper else operand(1, "min")
        high = operand(1 if is_upper else 2, "max")
        result = x if low is None else torch.maximum(x, _like(low, x))
        result = result if high is None else torch.minimum(result, _like(high, x))
    elif plain in ("full_like", "new_full"):
        value = kwargs.pop("fill_value", args[-1])
        shaped = torch.zeros_like(x, **kwargs) if plain == "full_like" else x.new_zeros(args[1])
        result = shaped + value
    else:
        if out is not None:
            kwargs["out"] = out
        return NotImplemented
    target = x if name.endswith("_") else out
    return result if target is None else target.copy_(result)


def _like(value: Any, x: Tensor) -> Tensor:
    return (value if isinstance(value, Tensor) else torch.full((), value)).to(x.dtype)


def lift_group(group: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a group whose numbers are recorded; tensors of one number count as numbers.

    ``prefix``: of their names in what is recorded.
    """
    return {key: _lift(key, value, prefix) for key, value in group.items() if key != "params"}


def _lift(key: str, value: Any, prefix: str = "") -> Any:
    if key in IMPLEMENTATION and isinstance(value, bool | None):
        return False
    name = prefix + key
    if isinstance(value, list | tuple) and value and all(map(_is_number, value)):
        return type(value)([Number(f"{name}[{k}]", plain_number(x)) for k, x in enumerate(value)])
    return Number(name, plain_number(value)) if _is_number(value) else value


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, int | float) and not isinstance(value, bool)


class OptimizerTracer:
    """Traces the steps of one optimizer's groups.

    ``forced`` are conditions on hyper-parameters that are taken to turn out so.
    """

    def __init__(self, optimizer: Optimizer, forced: Mapping[Expr, bool] | None = None) -> None:
        self._optimizer, self._forced = weakref.ref(optimizer), dict(forced or {})
        self._counting: frozenset[str] = frozenset()  # settings of a group that decide and change
        kind = type(optimizer)
        self._is_own = is_own(kind)
        self._step = inspect.unwrap(kind.step)
        methods = [x for base in kind.__mro__ for x in vars(base).values() if callable(x)]
        scopes = [getattr(inspect.unwrap(x), "__globals__", None) for x in methods]
        self._scopes = list({id(x): x for x in scopes if x is not None}.values())

    def explore(self, member: Member) -> list[Trace]:
        """Trace the step on a parameter and its state, once for each way through it."""
        found = self._explore(member)
        changed = {key for trace in found for key in trace.group}
        guards = [guard for trace in found for guard in trace.guards]
        deciding = {key for guard in guards for key in settings_read(changed, guard)}
        if deciding <= self._counting:
            return found
        before, self._counting = self._counting, self._counting | deciding
        try:
            return self.explore(member)
        except Exception:  # `(k + 1) / warmup` where k < warmup, which is 0, never holds
            self._counting = before
            return found

    def _explore(self, member: Member) -> list[Trace]:
        found: list[Trace] = []
        waiting: list[tuple[bool, ...]] = [()]
        while waiting:
            if len(found) == _MOST_TRACES:
                raise Untraceable(f"goes more than {_MOST_TRACES} ways, by the count of steps")
            decisions = waiting.pop()
            trace = self.trace([member], decisions=decisions)
            found.append(trace)
            outcomes = tuple(outcome for _, outcome in trace.path)
            waiting += [(*outcomes[:k], False) for k in range(len(decisions), len(outcomes))]
        return found

    def refuse_coupling(self, alone: Trace, member: Member) -> None:
        """Refuse a step that lets one parameter's update depend on another's."""
        other = replace(member, like=torch.empty_like(member.like, device="meta"))
        both = self.trace([other, member])
        waiting = [both.outputs[key] for key in alone.outputs]
        seen: set[fx.Node] = set()
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                waiting += node.all_input_nodes
        if (
            seen.intersection(both.members[0].inputs.values())
            or both.group != alone.group
            or both.scalars != alone.scalars
        ):
            raise Untraceable("lets one parameter's update depend on the others'")

    def trace(
        self,
        members: Sequence[Member],
        groups: Sequence[Mapping[str, Any]] = (),
        decisions: Sequence[bool] = (),
        pool: int = 12,
    ) -> Trace:
        """Trace one way of the step, the first one without ``decisions``.

        Over parameters of one group, or over all ``groups``, whose settings are named by their
        places, too.  ``pool``: how many numbers may meet tensors, at first.
        """
        is_whole = bool(groups)
        groups = groups or [members[0].group]
        prefixes = [f"group{k}_" if is_whole else "" for k in range(len(groups))]
        counting = {f"{prefix}{key}" for prefix in prefixes for key in self._counting}
        run = _Run(decisions, self._forced, counting)
        kept: dict[str, Any] = {}

        def step(*flat: Tensor) -> list[Tensor]:
            left = iter(flat)
            parameters, states = [], []
            for member in members:
                parameter, parameter.grad = next(left), next(left)
                known: dict[str, Any] = {s.key: next(left) for s in member.tensors}
                states.append(_State({**known, **{s.key: scalar_input(s) for s in member.scalars}}))
                states[-1].scalars = {s.key: s for s in member.scalars}
                parameters.append(parameter)
            run.pool = [*left]
            settings = [lift_group(g, prefix) for g, prefix in zip(groups, prefixes, strict=True)]
            objects = [m.like for m in members] if self._is_own else parameters
            for lifted, group in zip(settings, groups, strict=True):
                lifted["params"] = [*group["params"]] if is_whole else [*objects]
            stand_ins = {id(x): fake for x, fake in zip(objects, parameters, strict=True)}
            kept["group"] = self._run(run, settings, objects, states, stand_ins)
            for parameter, state in zip(parameters, states, strict=True):
                dict.update(state, {k: stand_ins.get(id(x), x) for k, x in state.items()})
                _refuse_one_memory(parameter, state)
            made = [{key: x for key, x in state.items() if is_tensor(x)} for state in states]
            kept["scalars"], kept["specs"] = [*map(_scalars_after, states)], states[-1].scalars
            kept["keys"] = tuple(states[-1])
            kept["outputs"], kept["created"] = [*map(list, made)], list(states[-1].created)
            kept["tensors"] = [TensorState(k, tuple(x.shape), x.dtype) for k, x in made[-1].items()]
            results = zip(parameters, made, strict=True)
            results = [x for parameter, state in results for x in (parameter, *state.values())]
            return [*results, *states[-1].created.values()]

        mode = FakeTensorMode()
        with mode:
            fakes = []
            for member in members:
                shapes = [(tuple(member.like.shape), member.like.dtype)] * 2
                shapes += [(state.shape, state.dtype) for state in member.tensors]
                fakes += [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
            fakes += [torch.empty((), dtype=torch.float64) for _ in range(pool)]
        functional = dispatch_functionalize(
            step, FunctionalTensorMode(pre_dispatch=False, _allow_token_discovery=False)
        )
        token = RECORDER.set(run)
        try:
            with tracing(), mode:
                graph = make_fx(
                    functional,
                    decomposition_table=decomposition_table(),
                    tracing_mode="real",
                    _allow_non_fake_inputs=True,
                )(*fakes)
        except _PoolEmpty:
            return self.trace(members, groups if is_whole else (), decisions, 2 * pool)
        finally:
            RECORDER.reset(token)
        graph.graph.eliminate_dead_code()
        given = iter([node for node in graph.graph.nodes if node.op == "placeholder"])
        results: Any = graph.graph.output_node().args[0]
        returned = iter(results)
        each = []
        for member, outputs, scalars in zip(members, kept["outputs"], kept["scalars"], strict=True):
            names = ["parameter", "gradient", *(s.key for s in member.tensors)]
            inputs = {name: next(given) for name in names}
            new = {name: next(returned) for name in ("parameter", *outputs)}
            each.append(MemberTrace(inputs, new, scalars))
        pool_nodes = list(given)
        return Trace(
            graph,
            each,
            {pool_nodes[index]: expr for expr, index in run.entries.items()},
            dict(zip(kept["created"], returned, strict=True)),
            kept["tensors"],
            kept["specs"],
            kept["group"],
            run.path,
            run.guards,
            run.sizes_read,
            kept["keys"],
            run.attributes,
        )

    def _run(
        self,
        run: _Run,
        settings: list[dict[str, Any]],
        objects: Sequence[Tensor],
        states: Sequence[_State],
        stand_ins: Mapping[int, Tensor],
    ) -> dict[str, Expr]:
        """Run the shadow's step; return what it changed in its last group.

        ``objects`` are its parameters, for which the trace has ``stand_ins``, by their ids.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        attributes = {**vars(optimizer), "param_groups": settings}
        attributes["state"] = _States(zip(objects, states, strict=True))
        shadow = object.__new__(_recording(type(optimizer), run.attributes))
        vars(shadow).update(attributes)
        simple = {key: x for key, x in attributes.items() if _is_simple(x)}
        before = {k: x if isinstance(x, Tensor) else copy.copy(x) for k, x in simple.items()}
        given = dict(settings[-1])
        own = [set(vars(each)) for each in objects]
        with (
            surroundings_of(optimizer).unchanged(optimizer) as around,
            torch.no_grad(),
            recording_functions(self._scopes),
            _Numbers(run, stand_ins),
        ):
            run.attributes |= around
            self._step(shadow)
        _refuse_changed_attributes(before, vars(shadow))
        for names, each in zip(own, objects, strict=True):
            if added := sorted(vars(each).keys() - names):
                for name in added:
                    delattr(each, name)
                raise Untraceable(f"keeps {added[0]} on the parameter itself, not in its state")
        return _group_after(given, settings[-1])


def _recording(kind: type[Any], reads: dict[str, Any]) -> type[Any]:
    """Make a class that notes the settings which are read of the optimizer itself."""
    original: Any = kind.__getattribute__

    def read(shadow: Any, name: str) -> Any:
        value = original(shadow, name)
        if name[:1] != "_" and (is_plain(value) or name == "defaults"):
            reads.setdefault(name, copy.copy(value))
        return value

    return type(kind.__name__, (kind,), {"__getattribute__": read, "__module__": kind.__module__})


def _is_simple(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | list | tuple | Tensor | None)


def _refuse_changed_attributes(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    for name, value in after.items():
        if name not in before and _is_simple(value):
            raise Untraceable(f"keeps an attribute of its own, {name}")
        if name in before and name != "param_groups" and _differs(before[name], value):
            raise Untraceable(f"changes its attribute {name}")


def _differs(old: Any, new: Any) -> bool:
    if old is new:
        return False
    if isinstance(old, Tensor) or isinstance(new, Tensor):
        return True
    return type(old) is not type(new) or bool(old != new)


def _refuse_one_memory(parameter: Tensor, state: Mapping[str, Any]) -> None:
    """Refuse states that are written where another one is, or the parameter."""
    known: dict[int, str] = {}
    for key, value in {"the parameter": parameter, **state}.items():
        if is_tensor(value):
            # PyTorch's tracing holds the memory behind a wrapper of each tensor.
            memory = getattr(value, "elem", value).untyped_storage()._cdata
            if memory in known:
                raise Untraceable(f"keeps {known[memory]} as {key} too, in one memory; clone it")
            known[memory] = key


def _scalars_after(state: _State) -> dict[str, Expr]:
    result = {}
    for key, value in state.items():
        if is_tensor(value):
            continue
        if isinstance(value, Number):
            if value.data is not None:
                raise Untraceable(f"keeps {key}, a number that it computes from tensors")
            result[key] = value.expr
        elif key in state.scalars and isinstance(value, int | float):
            result[key] = repr(value)
        elif not isinstance(value, bool | str | None):
            raise Untraceable(f"keeps {key}, a {type(value).__name__}, in its state")
    return result


def _group_after(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Expr]:
    changed = {}
    for key, value in after.items():
        if key in before and value is before[key]:
            continue
        if isinstance(value, Number) and value.data is not None:
            raise Untraceable(f"computes its group's {key} from tensors")
        if not isinstance(value, (int, float, Number)):
            raise Untraceable(f"changes its group's {key}")
        changed[key] = expression(value)
    return changed
