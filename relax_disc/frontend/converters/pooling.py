"""Pooling, bilinear resizing and their gradients: PyTorch's kernels, channels last.

Layers over one axis are layers over two in PyTorch's own decompositions.
"""

from __future__ import annotations

from typing import Any

from relax_disc.frontend import fallback
from relax_disc.frontend.converters.registry import converts
from relax_disc.frontend.emitter import Emitter

_KINDS = ("avg_pool", "max_pool{}_with_indices", "_adaptive_avg_pool", "adaptive_max_pool")
_FORWARD = [
    f"aten.{kind.format(rank) if '{' in kind else kind + rank}"
    for kind in _KINDS
    for rank in ("2d", "3d")
]


@converts(*(f"{name}.default" for name in _FORWARD))
def pool(emitter: Emitter, *args: Any) -> Any:
    """A mean or the greatest element of each window, with the position of the latter."""
    return _call(emitter, args)


@converts(*(f"{name}_backward.default" for name in _FORWARD))
def pool_backward(emitter: Emitter, *args: Any) -> Any:
    """Gradient of pooling; of the input only its sizes are read."""
    return _call(emitter, args, sizes_only=("self", "input"))


@converts("aten.upsample_bilinear2d.default", "aten.upsample_bilinear2d_backward.default")
def upsample(emitter: Emitter, *args: Any) -> Any:
    """Bilinear resizing of planes."""
    return fallback.call(emitter, list(args), {}, channels_last=True)


def _call(emitter: Emitter, args: Any, sizes_only: tuple[str, ...] = ()) -> Any:
    name = str(emitter.node.target)
    batched = len(emitter.shape(args[0])) == (5 if "3d" in name else 4)
    # PyTorch's mean over volumes takes its results for contiguous, whatever their strides.
    channels_last = batched and "avg_pool3d" not in name.replace("adaptive_avg", "")
    return fallback.call(
        emitter, list(args), {}, channels_last=channels_last, sizes_only=sizes_only
    )
