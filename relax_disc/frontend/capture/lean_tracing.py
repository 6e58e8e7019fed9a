"""Less work for PyTorch's tracing of symbolic sizes: it takes most of the time of a capture.

For every tensor PyTorch works out anew which layouts it has: some fifty products and comparisons
of the same few sizes, each a call of sympy.  While a trace runs, results are kept by operands.
Its own cache of the results of operators costs more than it saves where sizes are symbols, and
the summary that it writes beside each value of a graph is read by nobody here.  Together: a third
of the time, for a convolution net of 120 layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import sympy
import torch._dynamo
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode

_BINARY = ("add", "sub", "mul", "int_floordiv", "mod", "sym_max", "sym_min", "and_", "or_")
_BINARY += ("eq", "ne", "lt", "le", "gt", "ge")


@contextlib.contextmanager
def lean_tracing() -> Iterator[None]:
    """Keep what sizes combine to, and leave out what is not needed, until the context ends."""
    changes = [
        torch._dynamo.config.patch(fake_tensor_cache_enabled=False),
        patch.object(proxy_tensor, "_extract_tensor_metadata", lambda *_, **__: None),
        patch.object(SymNode, "expr", property(_expression)),
    ]
    for name in ("is_number", "free_symbols"):
        plain = vars(sympy.Expr if name == "is_number" else sympy.Basic)[name]
        changes.append(patch.object(sympy.Expr, name, property(_by_expression(plain.fget))))
    for name in _BINARY:
        changes.append(patch.object(SymNode, f"_{name}", _by_operands(vars(SymNode)[f"_{name}"])))
    with contextlib.ExitStack() as stack:
        for change in changes:
            stack.enter_context(change)
        yield


def _by_expression(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[Any, Any] = {}

    def get(expression: Any) -> Any:
        found = known.get(expression)
        if found is None:
            found = known[expression] = plain(expression)
        return found.copy() if isinstance(found, set) else found

    return get


def _expression(node: SymNode) -> Any:
    """What `SymNode.expr` is, without asking first whether it is a number, which takes longer."""
    env = node.shape_env
    version = 0 if env is None else env._replacements_version_counter
    if version == 0 or isinstance(node._expr, int | sympy.Number):
        return node._expr
    if node._expr_cache is None or node._expr_ver != version:
        assert env is not None
        node._expr_cache, node._expr_ver = env.replace(node._expr), version
    return node._expr_cache


def _by_operands(plain: Callable[[SymNode, SymNode], SymNode]) -> Callable[..., SymNode]:
    known: dict[Any, SymNode] = {}

    def combine(left: SymNode, right: SymNode) -> SymNode:
        if get_proxy_mode() is not None:  # a graph records each
            return plain(left, right)
        key = (left.shape_env, *_facts(left), *_facts(right))
        found = known.get(key)
        if found is None:
            found = known[key] = plain(left, right)
        return found

    return combine


def _facts(node: SymNode) -> tuple[Any, ...]:
    return node.expr, node.pytype, node._hint, node.fx_node
