"""The update programs of an optimizer, traced once for each group and rank or shape."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.optim import Optimizer

from relax_disc.errors import UnsupportedOperatorError
from relax_disc.frontend.optimizer.kernels import is_elementwise
from relax_disc.frontend.optimizer.neutral import contains, zero_guards
from relax_disc.frontend.optimizer.numbers import Expr, Untraceable
from relax_disc.frontend.optimizer.program import UpdateProgram, combine, needs_shape
from relax_disc.frontend.optimizer.tracing import OptimizerTracer, TensorState

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

    def of(self, group: Mapping[str, Any], parameter: torch.Tensor) -> UpdateProgram:
        """Return the program that updates a parameter under a group's settings as they are.

        Raises
        ------
        UnsupportedOperatorError
            The optimizer's step, or a flag, cannot be followed.
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
        try:
            program, alone = self._trace(optimizer, group, parameter, held, place)
        except Exception as error:
            raise self._refusal(error) from error
        key = (*rank, tuple(parameter.shape) if alone else None)
        self._known.setdefault(key, []).append(program)
        return program

    def _trace(
        self,
        optimizer: Optimizer,
        group: Mapping[str, Any],
        parameter: torch.Tensor,
        held: Mapping[str, TensorState],
        place: Any,
    ) -> tuple[UpdateProgram, bool]:
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
        return program, alone

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
        first = tracer.explore(group, parameter)
        tensors = [held.get(state.key, state) for state in first[0].tensors]
        known = {state.key for state in tensors}
        scalars = [s for s in first[0].scalar_states.values() if s.key not in known]
        steady = tracer.explore(group, parameter, tensors, scalars)
        if place is not None and place not in self._uncoupled:
            tracer.refuse_coupling(steady[0], group, parameter, tensors, scalars)
            self._uncoupled.add(place)
        program = combine(first, steady, group)
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
        own = vars(optimizer).get("step")
        if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
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


def refusal(name: str, why: str) -> UnsupportedOperatorError:
    """Make the error for an optimizer whose ``why`` forbids to compile it, with the way out."""
    return UnsupportedOperatorError(
        f"{name} cannot be compiled: its {why}. Compile with optimizer=None, call "
        "step(*batch, update=False), which leaves the gradients in p.grad, then the optimizer's "
        "own step() and zero_grad().",
        ((name, "the optimizer"),),
    )


def refuse_operators(
    optimizer: Optimizer,
    programs: Sequence[UpdateProgram],
    untranslated: Callable[[UpdateProgram], list[str]],
) -> None:
    """Refuse an optimizer whose step uses operators that cannot be translated."""
    for program in programs:
        if names := untranslated(program):
            raise refusal(type(optimizer).__name__, f"step uses {', '.join(names)}")


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
