"""What a model's own code sees otherwise while it is exported: masks, checkpoints, lengths.

* nn.Transformer compares a mask with a causal one to pass a hint on, which decides nothing where
  the mask itself is applied; one compiled program cannot decide from data, so it does not look.
* The regions of ``torch.utils.checkpoint`` are inlined.  A model that marks them for recomputation
  (``gradient_checkpointing_enable()`` of Hugging Face) asks for what every compiled step does
  anyway, with the whole step in view.  Left as it is, the reentrant form would run its region
  without gradients, and the region's parameters would silently not train.
* Batch norms with ``momentum=None`` average over all batches, by a count that PyTorch's own code
  reads as a number: they take it as the tensor that it is.
* torch.export puts copies of lists and dicts into the modules that hold them; a user who goes on
  to change the own one would change nothing.
* Python's ``len`` returns a plain number, so that ``torch.arange(len(logits))`` would fix the batch
  to the size of the example: ``len(tensor)`` follows the shape, and so does what
  `math` makes of sizes (`math_of_sizes`).  ``isinstance(x.shape[0], int)`` is true, as it is of the
  plain number.
* Hooks that a model registers while it runs (Hugging Face's, to collect hidden states) are gone
  afterwards, as is the attribute by which it knows of them: torch.export puts attributes back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._export import non_strict_utils
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn import functional
from torch.nn.modules import transformer
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import checkpoint

from relax_disc.errors import UnsupportedOperatorError
from relax_disc.frontend.capture.loops.sequences import DynamicList
from relax_disc.frontend.capture.replaced.math_of_sizes import METHODS, replacements
from relax_disc.frontend.capture.source_lines import calling_line
from relax_disc.frontend.capture.state.live_number import LiveNumber

Changes = Sequence[tuple[dict[str, Any], dict[str, Any]]]
"""The global variables of files, and what these are to be for a while, by their names."""

_ABSENT = object()


def masks_unread() -> Any:
    """Take a mask for causal only where the model says so, in the context that is returned."""
    read = lambda mask, is_causal=None, size=None: bool(is_causal)  # noqa: E731
    return patch.object(transformer, "_detect_is_causal_mask", read)


class _Inlined:
    """Stands for ``torch.utils.checkpoint.CheckpointFunction``, the reentrant form."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """Run the region like any other code."""
        return function(*args)


def _inlined(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    """Stand for the form without re-entrance: what it does before and after the region."""
    yield


def inlined_checkpoints() -> Any:
    """Make ``torch.utils.checkpoint.checkpoint`` run its function like any other code.

    Models hold on to ``checkpoint`` itself, so what it calls is replaced.
    """
    changed = {"_checkpoint_without_reentrant_generator": _inlined, "CheckpointFunction": _Inlined}
    return patch.multiple(checkpoint, **changed)


_forward = _BatchNorm.forward


def _batch_norm(self: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
    """``forward`` of a batch norm, with the average over all batches by tensors."""
    mean, variance, count = self.running_mean, self.running_var, self.num_batches_tracked
    averages = self.momentum is None and self.training and self.track_running_stats
    if not averages or mean is None or variance is None or count is None:
        return _forward(self, x)
    self._check_input_dim(x)
    count.add_(1)
    own = torch.zeros_like(mean), torch.zeros_like(variance)
    result = functional.batch_norm(x, own[0], own[1], self.weight, self.bias, True, 1.0, self.eps)
    for average, each in zip((mean, variance), own, strict=True):
        average.lerp_(each, 1 / count.to(each.dtype))
    return result


def cumulative_averages() -> Any:
    """Let batch norms with ``momentum=None`` count by tensors, in the context that is returned."""
    return patch.object(_BatchNorm, "forward", _batch_norm)


_tensor_min_max: Any = non_strict_utils._tensor_min_max


def _first_extreme(*values: Any, real_callable: Any, tensor_callable: Any, **options: Any) -> Any:
    """``max`` or ``min``, whose own for an export ask a tensor of one axis for another one."""
    only = values[0] if len(values) == 1 else None
    if not isinstance(only, torch.Tensor) or only.dim() != 1 or options:
        of_both = {"real_callable": real_callable, "tensor_callable": tensor_callable}
        return _tensor_min_max(*values, **of_both, **options)
    is_greatest, seen = tensor_callable is torch.maximum, only.detach()
    if only.is_floating_point():  # it passes NaN over, unless that is the first
        later = torch.arange(only.shape[0], device=only.device) > 0
        seen = seen.masked_fill(seen.isnan() & later, -torch.inf if is_greatest else torch.inf)
    place = seen.argmax() if is_greatest else seen.argmin()
    return only.index_select(0, place.reshape(1)).squeeze(0)  # the first of equal ones


def extremes_of_tensors() -> Any:
    """Let ``max`` and ``min`` take a tensor of one axis, in the context that is returned."""
    return patch.object(non_strict_utils, "_tensor_min_max", _first_extreme)


def _converted(self: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
    """Leave a module as it is whose tensors ``.to(dtype)``, ``.cpu()`` and the like do not change.

    Raises `UnsupportedOperatorError`: they would.
    """
    with torch.no_grad():
        for each in (*self.parameters(recurse), *self.buffers(recurse)):
            made = function(each)
            if (made.dtype, made.device, made.shape) != (each.dtype, each.device, each.shape):
                line = calling_line()
                raise UnsupportedOperatorError(
                    f"{line}: {type(self).__name__} is converted from {each.dtype} on "
                    f"{each.device} to {made.dtype} on {made.device} while the model runs: do that "
                    "before compile.",
                    (("a module that is converted", str(line)),),
                )
    return self


def modules_unconverted() -> Any:
    """Let modules that a model converts to what they are already stay as they are."""
    return patch.object(nn.Module, "_apply", _converted)


@contextlib.contextmanager
def hooks_as_before(model: nn.Module) -> Iterator[None]:
    """Remove the forward hooks that are registered while this is active."""
    held = [h for m in model.modules() for h in (m._forward_hooks, m._forward_pre_hooks)]
    before = [set(hooks) for hooks in held]
    try:
        yield
    finally:
        for hooks, known in zip(held, before, strict=True):
            for key in set(hooks) - known:
                del hooks[key]


def _length(value: Any) -> Any:
    """``len``, but the symbolic extent of a tensor or of a list that a range made."""
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return value.shape[0]
    return value.length() if isinstance(value, DynamicList) else len(value)


def _is_instance(value: Any, kinds: Any) -> bool:
    """``isinstance``, to which a size is the number that it stands for."""
    if type(value) is LiveNumber and issubclass(int, kinds) != issubclass(float, kinds):
        value.kind()
    number = _NUMBERS.get(type(value))
    return isinstance(value, kinds) or (number is not None and issubclass(number, kinds))


class _Asked(type):
    """What ``type`` is, but for the answer that it gives of stand-ins."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not _Type:  # a metaclass of the user's
            return super().__call__(*args, **kwargs)
        return _type_of(args[0]) if len(args) == 1 and not kwargs else type(*args, **kwargs)

    def __getitem__(cls, item: Any) -> Any:
        return type[item]

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, type)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, type)


_Type = _Asked("type", (type,), {"__module__": "builtins"})
"""``type``, to which a stand-in of the trace is of the type that it stands for."""


def _type_of(value: Any) -> type:
    kind = type(value)
    if kind is LiveNumber:
        return value.kind()
    if issubclass(kind, FakeTensor | FunctionalTensor):
        return nn.Parameter if isinstance(value, nn.Parameter) else torch.Tensor
    if kind is type:
        return _Type  # which the user's code calls `type`
    return list if kind is DynamicList else _NUMBERS.get(kind, kind)


_NUMBERS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
_BUILT_IN = {"len": _length, "isinstance": _is_instance, "type": _Type}


@contextlib.contextmanager
def own_attributes(model: nn.Module) -> Iterator[None]:
    """Keep the lists and dicts that modules hold: torch.export leaves copies in their place."""
    before = [(module.__dict__, dict(module.__dict__)) for module in model.modules()]
    try:
        yield
    finally:
        for attributes, own in before:
            attributes.update(own)


def changes_of(functions: Sequence[FunctionType]) -> Changes:
    """List what the files of functions see in place of ``len``, functions of `math` and others."""
    files: dict[int, list[FunctionType]] = {}
    for function in functions:
        files.setdefault(id(function.__globals__), []).append(function)
    found = []
    for of_file in files.values():
        space = of_file[0].__globals__
        own = {name: f for name, f in _BUILT_IN.items() if name not in space}
        found.append((space, {**replacements(space, of_file), **own}))
    return found


@contextlib.contextmanager
def symbolic_builtins(changes: Changes) -> Iterator[None]:
    """Let files see something else in place of some names while this is active."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    with contextlib.ExitStack() as stack:
        for name, method in METHODS.items():
            for kind in (torch.SymInt, torch.SymFloat):
                stack.enter_context(patch.object(kind, name, method, create=True))
        try:
            for space, made in changes:
                before += [(space, name, space.get(name, _ABSENT)) for name in made]
                space.update(made)
            yield
        finally:
            for space, name, own in before:
                if own is _ABSENT:
                    del space[name]
                else:
                    space[name] = own
