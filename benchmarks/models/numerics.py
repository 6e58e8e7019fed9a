"""PyTorch's own step, in float64 and float32, as a measure for a compiled one.

Some models convert to float32 by name (norms, rotary angles, softmax), whatever the type of their
weights.  A float64 reference that did so would be no better than what it judges, so such
conversions go to float64 while it runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Reference:
    """One step's loss, and by name gradients and the buffers after it; all on the CPU."""

    loss: float
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


class _Float64(TorchFunctionMode):
    """Reads every ``torch.float32`` in a call as ``torch.float64``."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()

        def widen(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        wide_args = pytree.tree_map(widen, tuple(args))
        wide_kwargs: dict[str, Any] = pytree.tree_map(widen, dict(kwargs or {}))
        if getattr(func, "__name__", "") == "_grouped_mm" and wide_args[0].dtype == torch.float64:
            return _grouped_product(wide_args[0], wide_args[1], wide_kwargs["offs"])
        return func(*wide_args, **wide_kwargs)


def _grouped_product(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """``torch.nn.functional.grouped_mm``, which PyTorch does not have in float64."""
    ends = offsets.tolist()
    borders = zip([0, *ends[:-1]], ends, weights, strict=True)
    return torch.cat([rows[start:end] @ weight for start, end, weight in borders])


def reference(model: nn.Module, batch: Mapping[str, Tensor], dtype: torch.dtype) -> Reference:
    """Take the loss and gradients of a copy of a model.

    Parameters
    ----------
    model : torch.nn.Module
        In float32; left as it is.
    batch : mapping of str to Tensor
        Keywords of the model.
    dtype : torch.dtype
        ``torch.float64`` or ``torch.float32``.
    """
    twin = copy.deepcopy(model).to(dtype)
    given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        if dtype == torch.float64:
            with _Float64():
                output = twin(**given)
        else:
            output = twin(**given)
    finally:
        torch.set_default_dtype(before)
    loss = output if isinstance(output, Tensor) else output.loss
    loss.backward()
    gradients = {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}
    # A buffer that forward adds is a cache: a compiled step runs no Python, and warns of it.
    held = dict(model.named_buffers())
    buffers = {name: value for name, value in twin.named_buffers() if name in held}
    return Reference(loss.item(), gradients, buffers)


def relative_error(values: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Norm of the difference over the norm of what is exact, all tensors together."""
    difference = sum(
        float((values[n].double() - e.double()).square().sum()) for n, e in exact.items()
    )
    norm = sum(float(e.double().square().sum()) for e in exact.values())
    return (difference / norm) ** 0.5 if norm > 0 else difference**0.5
