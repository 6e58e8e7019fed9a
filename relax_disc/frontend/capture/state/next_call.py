"""What the user's code would find at its next call, where it changes more than its tensors.

Eager PyTorch's second call starts from what the first one left: a flag, a list, a tensor that was
kept.  A compiled step runs no Python, so that each of its calls starts from the same.  Whether that
makes a difference, a second export tells, which starts from what the first one left.

Not looked at is code that leaves what depends on sizes alone, a mask that is kept until the length
changes, say: a compiled step makes that anew for each batch.  Nor are objects of unknown classes,
hooks, and models whose code goes several ways by sizes.
"""

from __future__ import annotations

import collections
import contextlib
import enum
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes

from relax_disc.frontend.capture.state.live_number import LiveNumber
from relax_disc.frontend.capture.state.sources import Place

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_ORDINARY = (Tensor, nn.Parameter, nn.Buffer)  # of no trace
_OF_SHAPES = {
    *("new_empty", "new_full", "new_ones", "new_zeros"),
    *("empty_like", "full_like", "ones_like", "zeros_like"),
    *("sym_numel", "sym_size", "sym_storage_offset", "sym_stride"),
}
"""Operators that ask nothing but the shape and the type of their operand."""


class _UnknownError(Exception):
    """What cannot be told of the next call."""


class NextCall:
    """What a trace leaves behind, but for tensors that the program writes.

    ``names``: of what is changed. ``is_known``: whether that is all. ``data``: the tensors of the
    trace whose values differ between calls, the batch's and the parameters.
    """

    def __init__(self, data: Iterable[Tensor]) -> None:
        self.names: list[str] = []
        self._data = list(data)
        self._writes: list[tuple[Any, Any]] = []
        self.is_known = True

    def __bool__(self) -> bool:
        return self.is_known and bool(self._writes)

    def note(self, name: str, where: Any, new: Any) -> None:
        """Note what lies now in a `Place`, or in a list, a set or a dict."""
        self.names.append(name)
        try:
            self._writes.append((where, self._later(new)))
        except _UnknownError:
            self.is_known = False

    @contextlib.contextmanager
    def begun(self) -> Iterator[None]:
        """Put what was left in its place, until the context ends."""
        with contextlib.ExitStack() as undo:
            for where, value in self._writes:
                if isinstance(where, Place):
                    undo.callback(_put_back(where))
                    where.put(value)
                else:
                    undo.callback(_fill, where, where.copy())
                    _fill(where, value)
            yield

    def _later(self, value: Any) -> Any:
        """Return what stands for a value of the trace in another trace.

        Raises `_UnknownError`: nothing can.
        """
        kind = type(value)
        if kind in _PLAIN or isinstance(value, enum.Enum | type) or kind in _ORDINARY:
            return value
        if kind is LiveNumber:
            return value.value
        if kind in (list, tuple, set, collections.deque):
            return kind(map(self._later, value))
        if kind in (dict, collections.OrderedDict, collections.defaultdict):
            made = value.copy()
            made.update({key: self._later(held) for key, held in value.items()})
            return made
        if isinstance(value, Tensor) and self._depends_on_data(value):
            return _stand_in(value)
        raise _UnknownError

    def _depends_on_data(self, tensor: Tensor) -> bool:
        node = _node_of(tensor)
        if node is None:
            raise _UnknownError
        data = {_node_of(each) for each in self._data}
        left, seen = [node], {node}
        while left:
            each = left.pop()
            if each in data:
                return True
            if getattr(each.target, "_opname", None) not in _OF_SHAPES:
                left += [other for other in each.all_input_nodes if other not in seen]
                seen.update(left)
        return False


def _node_of(tensor: Tensor) -> fx.Node | None:
    tracer: Any = getattr(get_proxy_mode(), "tracer", None)
    slot: Any = None if tracer is None else get_proxy_slot(tensor, tracer, None)
    return None if slot is None else slot.proxy.node


def _stand_in(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape and type that belongs to no trace, and holds nothing."""
    sizes = [size if isinstance(size, int) else size.node.hint for size in tensor.shape]
    if None in sizes:
        raise _UnknownError
    with _disable_current_modes():
        return torch.zeros((), dtype=tensor.dtype).expand(sizes)


def _put_back(place: Place) -> Any:
    """Return a function that restores what lies in a place now."""
    try:
        held = place.get()
    except (LookupError, ValueError):
        return lambda: place.container.pop(place.key, None)
    return lambda: place.put(held)


def _fill(container: Any, values: Any) -> None:
    container.clear()
    (container.extend if hasattr(container, "extend") else container.update)(values)
