"""Notice what eager PyTorch would call, or use, and a compiled step does not.

Hooks, another ``forward``, the optimizer's own updates.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from relax_disc.errors import InputMismatchError, RelaxDiscWarning
from relax_disc.frontend.optimizer.programs import GLOBAL_HOOKS, is_replaced

_OF_MODULES = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward hook",
    "_backward_hooks": "backward hook",
}
_OF_TENSORS = {"_backward_hooks": "hook", "_post_accumulate_grad_hooks": "gradient hook"}
_FOR_MODELS = (
    "register a forward hook before compiling, so that what it computes is compiled, return "
    "tensors as (loss, extras), and take gradients from step(..., keep_gradients=True)"
)
_REPLACED = "was replaced after the step was compiled: put it back or compile again."
_FOR_OPTIMIZERS = "do what it does before or after the call of the step"


class HookWatch:
    """The hooks of a model when it was compiled, compared at each call.

    PyTorch counts the hooks that it registers, wherever that is; only a new count is looked into.

    Hooks of the model's modules and parameters, of modules outside it that the program contains, of
    the optimizers, and those for all modules and optimizers.  The classes of these modules, their
    ``forward`` and that of their classes are compared, too, and the ``step`` of the optimizers.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        outside: Mapping[str, nn.Module] | None = None,
    ) -> None:
        self._model, self._optimizers = model, optimizers
        self._modules = [(path or "the model", module) for path, module in model.named_modules()]
        seen = {module for _, module in self._modules}
        for path, outer in (outside or {}).items():
            self._modules += outer.named_modules(seen, path)
        self._held = [
            (m, type(m), vars(m), vars(m).get("forward"), path) for path, m in self._modules
        ]
        by_class = {type(m): None for _, m in self._modules if "forward" not in vars(m)}
        self._kinds = [(kind, kind.forward) for kind in by_class]
        self._steps = [[optimizer, None] for optimizer in optimizers]  # with one that may be there
        self._known = {(id(table), key) for _, table in self._tables() for key in table}
        self._compiled = [(what, table, set(table)) for what, table in self._tables() if table]
        self._count = RemovableHandle.next_id

    def check(self) -> None:
        """Compare.

        Raises `InputMismatchError`: names a hook that was added or removed, or the module or
        optimizer whose ``forward`` or ``step`` is another one.
        """
        for module, kind, own, forward, path in self._held:
            if type(module) is not kind:
                raise InputMismatchError(f"The class of {path}, {kind.__name__}, {_REPLACED}")
            if own.get("forward") is not forward:
                raise InputMismatchError(f"The forward of {path} {_REPLACED}")
        for kind, forward in self._kinds:
            if kind.forward is not forward:
                raise InputMismatchError(f"{kind.__name__}.forward {_REPLACED}")
        for entry in self._steps:
            optimizer, known = entry
            if (step := vars(optimizer).get("step")) is not known:
                if is_replaced(step):
                    raise InputMismatchError(
                        f"The step of {type(optimizer).__name__} was replaced on this object after "
                        "the training step was compiled, which calls no Python code: put it back; "
                        f"or {_FOR_OPTIMIZERS}."
                    )
                entry[1] = step
        for what, table, keys in self._compiled:
            if not keys.issubset(table):
                raise InputMismatchError(
                    f"A {what}, which the compiled step contains, was removed: compile again."
                )
        if RemovableHandle.next_id == self._count:
            return
        for what, table in self._tables():
            if any((id(table), key) not in self._known for key in table):
                remedy = _FOR_OPTIMIZERS if what.startswith("step") else _FOR_MODELS
                raise InputMismatchError(
                    f"A {what} was registered after the step was compiled, which calls no Python "
                    f"code: remove it; or {remedy}."
                )
        self._count = RemovableHandle.next_id

    def _tables(self) -> Iterator[tuple[str, dict[int, Any]]]:
        for name, what in _OF_MODULES.items():
            yield f"{what} of all modules", getattr(modules, f"_global{name}", {})
        for path, module in self._modules:
            for name, what in _OF_MODULES.items():
                yield f"{what} of {path}", getattr(module, name)
        for path, parameter in self._model.named_parameters():
            for name, what in _OF_TENSORS.items():
                yield f"{what} of {path}", getattr(parameter, name) or {}
        for optimizer in self._optimizers:
            name = type(optimizer).__name__
            yield f"step pre-hook of {name}", optimizer._optimizer_step_pre_hooks
            yield f"step post-hook of {name}", optimizer._optimizer_step_post_hooks
        for table in GLOBAL_HOOKS if self._optimizers else ():
            yield "step hook of all optimizers", table


_WATCHED: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()


def watch_step(optimizer: Optimizer, method: Callable[[Optimizer], None]) -> None:
    """Call a method, which is not kept alive, before the user's own ``optimizer.step()``."""
    _WATCHED[optimizer] = weakref.WeakMethod(method)


def _before_step(optimizer: Optimizer, *_: object) -> None:
    watched = _WATCHED.get(optimizer)
    if watched is not None and (method := watched()) is not None:
        method(optimizer)


register_optimizer_step_pre_hook(_before_step)


def watch_clipping() -> None:
    """Let PyTorch's clipping of gradients warn, once, when it finds no gradients at all.

    After a compiled step there are none: it has used them.  Clipping by value then ends in an
    error of PyTorch that does not say so.
    """
    functions: Any = clip_grad
    if getattr(functions._get_total_norm, "_relax_disc", False):
        return
    functions._get_total_norm = _warning_of_none(
        functions._get_total_norm, len, "clip_grad_norm_", "max_grad_norm=..."
    )
    functions._group_tensors_by_device_and_dtype = _warning_of_none(
        functions._group_tensors_by_device_and_dtype,
        lambda lists: len(lists[0]),
        "clip_grad_value_",
        "max_grad_norm=..., which clips by the norm",
    )


def _warning_of_none(
    original: Callable[..., Any], count: Callable[[Any], int], name: str, option: str
) -> Callable[..., Any]:
    """Return the function with a warning for the first time that it gets no gradients."""
    warned = False

    def watched(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal warned
        tensors = list(tensors) if not isinstance(tensors, torch.Tensor) else tensors
        if not warned and count(tensors) == 0:
            warned = True
            warnings.warn(
                f"{name} found no gradients. If a compiled step trains these parameters it has "
                f"used and dropped them: clip with relax_disc.compile(..., {option}), or get them "
                "with step(..., keep_gradients=True).",
                RelaxDiscWarning,
                stacklevel=4,
            )
        return original(tensors, *args, **kwargs)

    watched._relax_disc = True  # pyright: ignore[reportFunctionMemberAccess]
    return watched
