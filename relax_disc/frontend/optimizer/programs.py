"""The update programs of an optimizer, traced once for each group and rank or shape.

Settings of zero may choose a way which the general one contains: ``if weight_decay != 0``. Where
the way for other values, computed with zero, is the way for zero, only the general one is compiled,
and the setting may change at any call.  This is shown on the recorded values: a factor that becomes
1 and a term that becomes 0 are dropped, and the rest must be equal.

Limit: what is multiplied by zero is taken to be finite.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
import torch.optim.optimizer as torch_optimizer
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.optim import Optimizer

from relax_disc.errors import UnsupportedOperatorError
from relax_disc.frontend.optimizer.kernels import is_elementwise
from relax_disc.frontend.optimizer.numbers import Expr, Untraceable, evaluate
from relax_disc.frontend.optimizer.places import refuse_places
from relax_disc.frontend.optimizer.program import UpdateProgram, Value, combine, needs_shape
from relax_disc.frontend.optimizer.several import optimizers_of
from relax_disc.frontend.optimizer.shared import Shared, find_shared, share, shared_key
from relax_disc.frontend.optimizer.tracing import Member, OptimizerTracer, TensorState, Trace

GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (
    torch_optimizer._global_optimizer_pre_hooks,
    torch_optimizer._global_optimizer_post_hooks,
)
"""PyTorch's tables of the hooks around every optimizer's ``step``."""

_KNOWN: weakref.WeakKeyDictionary[Optimizer, Programs] = weakref.WeakKeyDictionary()


def programs_of(optimizer: Optimizer) -> Programs:
    """Return an optimizer's programs, those that are known already included."""
    if optimizer not in _KNOWN:
        _KNOWN[optimizer] = Programs(optimizer)
    return _KNOWN[optimizer]


class Programs:
    """Update programs of one optimizer's parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._name = type(optimizer).__name__
        self._known: dict[Any, list[UpdateProgram]] = {}
        self._uncoupled: set[Any] = set()
        self._alike: set[Any] = set()  # parameters that are treated alike, by their ids

    def of(self, group: Mapping[str, Any], parameter: torch.Tensor) -> UpdateProgram:
        """Return the program that updates a parameter under a group's settings as they are.

        Raises `UnsupportedOperatorError`: the optimizer's step, or a flag, cannot be followed.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        self._refuse(optimizer, group)
        settings = repr(sorted((k, type(v).__name__, _settled(v)) for k, v in group.items()))
        place = (id(group["params"]), settings)
        rank = (*place, parameter.dtype, parameter.dim())
        held = _held(optimizer, parameter)
        for key in ((*rank, None), (*rank, tuple(parameter.shape))):
            for known in self._known.get(key, ()):
                if known.fits(group, parameter, held) and not known.changed_attributes(optimizer):
                    return known
        shared = shared_key(optimizer, group, parameter, settings)
        is_uncoupled = place in self._uncoupled
        found = find_shared(shared, optimizer, group, parameter, held, is_uncoupled)
        if found is None:
            try:
                found = self._trace(optimizer, group, parameter, held, place)
            except Exception as error:
                raise self._refusal(error) from error
            if not held:  # else the states have its types, not those that the optimizer makes
                share(shared, found)
        self._uncoupled.add(place)
        program = found.program
        key = (*rank, tuple(parameter.shape) if found.alone else None)
        self._known.setdefault(key, []).append(program)
        return program

    def refuse_places(self, updates: Sequence[tuple[Mapping[str, Any], torch.Tensor]]) -> None:
        """Refuse a step that does not treat the parameters of one kind alike.

        Raises `UnsupportedOperatorError`: it does not, or cannot be followed over all of them.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        key = frozenset(id(parameter) for _, parameter in updates)
        if key in self._alike:
            return
        listed = [(group, parameter, self.of(group, parameter)) for group, parameter in updates]
        try:
            refuse_places(optimizer, listed)
        except Exception as error:
            raise self._refusal(error) from error
        self._alike.add(key)

    def _trace(
        self,
        optimizer: Optimizer,
        group: Mapping[str, Any],
        parameter: torch.Tensor,
        held: Mapping[str, TensorState],
        place: Any,
    ) -> Shared:
        uncoupled = place not in self._uncoupled  # then it is shown
        program, alone = self._follow(optimizer, group, parameter, held, {}, place)
        forced: dict[Expr, bool] = {}
        for guard, hyper in zero_guards(program):
            trial = {**forced, guard: not program.guards[guard]}
            try:
                general, shaped = self._follow(optimizer, group, parameter, held, trial, None)
            except Exception:  # that way is not for zero
                continue
            if contains(general, program, hyper):
                forced, program, alone = trial, general, shaped
        for guard in forced:
            del program.guards[guard]
        return Shared(program, alone, uncoupled)

    def _follow(
        self,
        optimizer: Optimizer,
        group: Mapping[str, Any],
        parameter: torch.Tensor,
        held: Mapping[str, TensorState],
        forced: Mapping[Expr, bool],
        place: Any,
    ) -> tuple[UpdateProgram, bool]:
        tracer = OptimizerTracer(optimizer, forced)
        first = tracer.explore(Member(group, parameter))
        begins = _counts_made(first[0], group)
        if begins:
            group = {**group, **begins}
            first = tracer.explore(Member(group, parameter))
        tensors = [held.get(state.key, state) for state in first[0].tensors]
        known = {state.key for state in tensors}
        scalars = [s for s in first[0].scalar_states.values() if s.key not in known]
        member = Member(group, parameter, tensors, scalars)
        steady = tracer.explore(member)
        if place is not None and place not in self._uncoupled:
            tracer.refuse_coupling(steady[0], member)
            self._uncoupled.add(place)
        program = combine(first, steady, group, begins)
        return program, needs_shape(first, program) or not is_elementwise(program)

    def _refuse(self, optimizer: Optimizer, group: Mapping[str, Any]) -> None:
        hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
        calls = [hook for table in (*hooks, *GLOBAL_HOOKS) for hook in table.values()]
        if any(not getattr(hook, "__module__", "").startswith("relax_disc.") for hook in calls):
            raise UnsupportedOperatorError(
                f"{self._name} has hooks around step(), which a compiled step does not call; call "
                "them yourself before or after it.",
                ((f"{self._name}.register_step_hook", "the optimizer"),),
            )
        if is_replaced(vars(optimizer).get("step")):
            raise refusal(self._name, "step was replaced on this object, and may do something else")
        if group.get("differentiable"):
            raise UnsupportedOperatorError(
                f"{self._name}(differentiable=True) cannot be compiled; construct it without "
                "differentiable.",
                ((f"{self._name}.differentiable", "the optimizer"),),
            )

    def _refusal(self, error: Exception) -> UnsupportedOperatorError:
        said = str(error).partition("\n")[0].rstrip(".")
        if isinstance(error, DataDependentOutputException):
            said = "branches on a value that it computes from gradients or parameters"
        elif not isinstance(error, Untraceable):
            said = f"raised: {said}"
        return refusal(self._name, f"step {said}")


def is_replaced(step: Any) -> bool:
    """Say whether a ``step`` that an optimizer itself holds is more than a schedule's counter.

    `functools.wraps` hands the mark of such a counter on to what is put round it, but not the code.
    """
    if step is None:
        return False
    code = getattr(getattr(step, "__func__", step), "__globals__", {})
    home = code.get("__name__", "").startswith(("torch.", "relax_disc."))
    return not home or not hasattr(step, "_wrapped_by_lr_sched")


def refusal(name: str, why: str) -> UnsupportedOperatorError:
    """Make the error for an optimizer whose ``why`` forbids to compile it, with the way out."""
    return UnsupportedOperatorError(
        f"{name} cannot be compiled: its {why}. Compile with optimizer=None, call "
        "step(*batch, update=False), which leaves the gradients in p.grad, then the optimizer's "
        "own step() and zero_grad().",
        ((name, "the optimizer"),),
    )


def refuse_told_apart(optimizer: Any, is_trained: Callable[[torch.Tensor], bool]) -> None:
    """Refuse an optimizer, or one of several, that treats parameters of one kind in different ways.

    Raises `UnsupportedOperatorError`: it does.
    """
    for owner in optimizers_of(optimizer):
        groups = owner.param_groups
        trained = [(group, p) for group in groups for p in group["params"] if is_trained(p)]
        programs_of(owner).refuse_places(trained)


def refuse_operators(
    optimizer: Optimizer,
    programs: Sequence[UpdateProgram],
    untranslated: Callable[[UpdateProgram], list[str]],
) -> None:
    """Refuse an optimizer whose step uses operators that cannot be translated."""
    for program in programs:
        if names := untranslated(program):
            raise refusal(type(optimizer).__name__, f"step uses {', '.join(names)}")


def _counts_made(first: Trace, group: Mapping[str, Any]) -> dict[str, int]:
    """Return counts that a step makes in its group where there are none, as timm's Adan does: 0.

    Raises `Untraceable`: what it makes is no count.
    """
    made = {key: evaluate(expr, group) for key, expr in first.group.items() if key not in group}
    for key, value in made.items():
        if type(value) is not int or value != 1:
            raise Untraceable(
                f"makes {key} in its group at its first step, {value!r}, which is no count of "
                "steps; set it in the group before compile"
            )
    return dict.fromkeys(made, 0)


def _settled(value: Any) -> Any:
    """Return what of a setting decides the program; numbers only through guards."""
    return value if isinstance(value, bool | str | None) else None


def _held(optimizer: Optimizer, parameter: torch.Tensor) -> dict[str, TensorState]:
    state = optimizer.state.get(parameter, {})
    return {
        key: TensorState(key, tuple(value.shape), value.dtype)
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }


_GUARD = re.compile(r"(ne_|eq_)?\((\w+(?:\[\d+\])?)(,| >| <=) 0(?:\.0)?\)")
_INDEX, _NAME, _FUNCTION = (
    re.compile(text) for text in (r"\['?(\w+)'?\]", r"\b[A-Za-z_]\w*", r"\w+(?=\()")
)
_PRODUCTS = ("aten.mul.Tensor", "aten.mul.Scalar")
_SUMS = ("aten.add.Tensor", "aten.sub.Tensor")


def zero_guards(program: UpdateProgram) -> list[tuple[Expr, Expr]]:
    """List the guards that hold because a hyper-parameter is zero, each with that."""
    special = {"ne_,": False, " >": False, "eq_,": True, " <=": True}
    return [
        (expr, found[2])
        for expr, outcome in program.guards.items()
        if (found := _GUARD.fullmatch(expr)) and special.get((found[1] or "") + found[3]) is outcome
    ]


def contains(general: UpdateProgram, special: UpdateProgram, hyper: Expr) -> bool:
    """Say whether one program with a hyper-parameter of zero computes what the other does."""
    if (general.order, general.tensors) != (special.order, special.tensors):
        return False
    canon = _Canon(hyper)
    return canon.describe(general) == canon.describe(special)


class _Canon:
    """Numbers values, equal ones alike, with a hyper-parameter of zero."""

    def __init__(self, hyper: Expr) -> None:
        self._hyper = hyper
        self._numbers: dict[Any, int] = {}
        self._known: dict[int, int] = {}
        self._zero, self._one = self._number("zero"), self._number("one")

    def describe(self, program: UpdateProgram) -> Any:
        """Describe what a program computes."""
        ways = {
            tuple((self._simple(expr), outcome) for expr, outcome in way.path): (
                {key: self._value(value) for key, value in way.outputs.items()},
                {key: self._simple(expr) for key, expr in way.trace.scalars.items()},
                {key: self._simple(expr) for key, expr in way.trace.group.items()},
            )
            for way in program.ways
        }
        created = {key: self._value(value) for key, value in program.created.items()}
        scalars = [(state, self._simple(state.initial)) for state in program.scalars]
        return ways, created, scalars

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _value(self, value: Value) -> int:
        if id(value) not in self._known:
            self._known[id(value)] = self._describe(value)
        return self._known[id(value)]

    def _describe(self, value: Value) -> int:
        if value.op == "entry":
            expr = self._simple(value.args[0])
            if expr in (0, 1):
                return self._one if expr == 1 else self._zero
            return self._number(("entry", expr))
        args = tuple(self._argument(x) for x in value.args)
        if value.op in _PRODUCTS and len(args) == 2:
            if self._zero in args:
                return self._zero
            if self._one in args:
                return args[0] if args[1] == self._one else args[1]
        if value.op in _SUMS and len(args) == 2 and args[1] == self._zero:
            return args[0]
        if value.shape == ():  # numbers of one element are computed in float64 anyway
            if value.op == "aten._to_copy.default":
                return args[0]
            return args[1] if value.op == "aten.copy.default" else self._number((value.op, args))
        return self._number((value.op, args, value.shape, value.dtype))

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, Value):
            return self._value(argument)
        if isinstance(argument, tuple):
            return tuple(self._argument(x) for x in argument)
        return (type(argument).__name__, repr(argument))

    def _simple(self, expr: Expr) -> Any:
        """Write an expression in sympy's canonical form."""
        expr, hyper = (_INDEX.sub(r"__\1", text) for text in (expr, self._hyper))
        names: dict[str, Any] = {name: sympy.Symbol(name) for name in _NAME.findall(expr)}
        names |= {name: sympy.Function(name) for name in _FUNCTION.findall(expr)}
        return sympy.sympify(expr, {**names, hyper: sympy.Integer(0)})
