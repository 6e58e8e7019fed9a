"""Walk and rewrite kernels and expressions by callbacks, as `tvm_ffi.structural` does, but fast.

Its functions look up classes, and the signature of every callback, at each call, which takes longer
than the expressions of a kernel do.  Here callbacks take the value, and the mutator of a rewrite,
always.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tvm_ffi

Callback = tuple[type | tuple[type, ...], Callable[[Any, Any], Any]]
_MUTATE: Any = tvm_ffi.get_global_func("ffi.StructuralMutate")
_WALK: Any = tvm_ffi.get_global_func("ffi.StructuralWalk")


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


def walk(root: Any, kinds: type | tuple[type, ...], callback: Callable[[Any], Any]) -> Any:
    """Call back with every node of some classes, children first.

    ``callback``: what it returns is ignored, but for a `tvm_ffi.VisitInterrupt`, which ends the
    walk and is returned; None otherwise.
    """
    listed = kinds if isinstance(kinds, tuple) else (kinds,)
    children_first = int(tvm_ffi.WalkOrder.POSTORDER)
    return _WALK(root, [(_type_index(kind), callback) for kind in listed], [], children_first)


@functools.cache
def _type_index(kind: type) -> int:
    return tvm_ffi.core.TypeSchema.from_annotation(kind).origin_type_index
