"""Modelled time of PyTorch's kernels, counted in a dry run by the rule of our own plans.

A kernel takes ``max(flops / flops_per_ns, bytes / bytes_per_ns) + launch_ns``; its bytes are those
of the tensors that it reads and of those that it writes (`relax_disc.vm_builtins.planner` counts
ours so).  An operator of eager PyTorch is one kernel, though some are several; views are none.
Nothing of it was compared with a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Rates of a GPU: operations and bytes a nanosecond, and the time of an empty kernel."""

    flops_per_ns: float
    bytes_per_ns: float
    launch_ns: float


class ModelledTime(TorchDispatchMode):
    """Adds up what operators would take on a machine.

    Attributes
    ----------
    nanoseconds : float
        Of all kernels so far.
    """

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.nanoseconds = 0.0
        self._machine = machine

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator, and count it."""
        result = func(*args, **(kwargs or {}))
        if not _moves_nothing(func):
            given = kwargs or {}
            count = _flops_of(func)
            flops = count(args, given, result) if count else 0
            read = [value for name, value in given.items() if name not in _RESULTS]
            self.add((args, read), _written(func, args, given, result), flops)
        return result

    def add(self, read: Any, written: Any, flops: int = 0) -> None:
        """Count a kernel; ``read`` and ``written``: anything that holds tensors."""
        machine = self._machine
        moved = _bytes(tree_iter(read)) + _bytes(tree_iter(written))
        self.nanoseconds += machine.launch_ns
        self.nanoseconds += max(flops / machine.flops_per_ns, moved / machine.bytes_per_ns)


def flops_of_product(name: str, args: Sequence[Any], out: Tensor) -> int:
    """Count the operations of a product by its name, such as ``"mm"``; KeyError: it is none."""
    return flop_registry[getattr(aten, name)](*args, out_val=out)


def _bytes(values: Iterable[Any]) -> int:
    """Bytes of tensors, once each; those of a storage where a tensor repeats its elements."""
    places = {}
    for x in values:
        if isinstance(x, Tensor):
            storage = x.untyped_storage()
            place = storage._cdata, x.storage_offset(), x.shape
            places[place] = min(x.nbytes, storage.nbytes())
    return sum(places.values())


_RESULTS = ("out", "out0", "out1", "out2")  # arguments that are written and not read
_FREE = {
    aten.alias, aten.detach, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty,
    aten.new_empty_strided, aten.lift_fresh,
}  # fmt: skip


def _moves_nothing(func: Any) -> bool:
    """Say whether an operator makes views, or memory without contents."""
    aliases = [value.alias_info for value in func._schema.returns]
    views = any(alias is not None and not alias.is_write for alias in aliases)
    return views or func.overloadpacket in _FREE


def _written(func: Any, args: Sequence[Any], kwargs: Any, result: Any) -> list[Any]:
    """List what an operator makes or changes."""
    found = [result]
    for index, argument in enumerate(func._schema.arguments):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written and argument.name != "grads":  # an optimizer's, written only by a scale
            found.append(
                args[index]
                if index < len(args) and not argument.kwarg_only
                else kwargs.get(argument.name)
            )
    return found


def _flops_of(func: Any) -> Callable[[Any, Any, Any], int] | None:
    packet = func.overloadpacket
    if packet in _ATTENTION:
        return _ATTENTION[packet]
    known = flop_registry.get(packet)
    return None if known is None else lambda args, kwargs, out: known(*args, **kwargs, out_val=out)


def _attention(products: int, query: int) -> Callable[[Any, Any, Any], int]:
    """Count so many products of length x length x width; half of each under a causal mask.

    ``query``: the place of the queries [batch, heads, length, width]; keys come next.
    """

    def count(args: Any, kwargs: Any, out: Any) -> int:
        del out
        batch, heads, rows, width = args[query].shape
        causal = [x for x in (*args, *kwargs.values()) if isinstance(x, bool)]
        whole = 2 * products * batch * heads * rows * args[query + 1].shape[2] * width
        return whole // 2 if any(causal) else whole

    return count


_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention(2, 0),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention(5, 1),
}
