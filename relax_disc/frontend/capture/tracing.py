"""One trace at a time, without the words of PyTorch's own tools.

torch.export and make_fx patch what the whole process shares, so that two threads that trace at once
mislead each other.  What they log and warn of is about their own insides; this package's errors say
what the user can change.  With the environment variable ``TORCH_LOGS`` set, all of it is heard.

They also note the line of each operator, but of functions called ``forward`` alone; here it is the
innermost line of the user's, in ``loss_fn`` and in helper functions too.

Tracing symbolic sizes takes most of the time of a capture: for every tensor PyTorch works out anew
which layouts it has, some fifty products and comparisons of the same few sizes, each a call of
sympy.  While a trace runs, results are kept by operands.  Its own cache of the results of operators
costs more than it saves where sizes are symbols, and the summary that it writes beside each value
of a graph is read by nobody here.  Together: a third of the time, for a convolution net of 120
layers.

What a trace makes stays until its end: collecting garbage would find next to nothing, and look at
all objects of the process again and again for it.  It is put off, which spares a twelfth of the
time of `relax_disc.compile`.

Functions marked by ``torch.fx.wrap`` stay as they are: fx replaces them while it traces, for a
tracer that nobody uses here, and a guard of such a global would remember the replacement.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import operator
import os
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import sympy
import torch._dynamo
import torch.export._trace
from torch.fx import _symbolic_trace, interpreter
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.proxy import TracerBase
from torch.utils._thunk import Thunk

from relax_disc.frontend.capture.source_lines import users_frames

_LOCK = threading.RLock()
_EXPORT: Any = torch.export._trace
_AS_PYTORCH_RECORDS = proxy_tensor._build_proxy_for_sym_expr
_BINARY = ("add", "sub", "mul", "int_floordiv", "mod", "sym_max", "sym_min", "and_", "or_")
_BINARY += ("eq", "ne", "lt", "le", "gt", "ge")
_RARE = (50_000, 20, 1000)  # thresholds of gc, which by default are 700, 10, 10
_INSIDE = r"(torch\.(_dynamo|_export|_functorch|_higher_order_ops|export|fx|utils)\b|copyreg$)"


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Hold the process's right to trace, and keep PyTorch's tools quiet meanwhile.

    A context and, written as ``@tracing()``, a decorator.
    """
    unwrapped = patch.dict(_symbolic_trace._wrapped_fns_to_patch, clear=True)
    with _LOCK, warnings.catch_warnings(), unwrapped:
        is_inner = getattr(_EXPORT, "print", None) is _say_nothing
        if is_inner or os.environ.get("TORCH_LOGS"):
            yield
            return
        warnings.filterwarnings("ignore", module=_INSIDE)
        loggers = list(_loggers())
        for logger in loggers:
            logger.addFilter(_hear_nothing)
        try:
            with (
                # torch.export prints what it has traced of a model that it refuses.
                patch.object(_EXPORT, "print", _say_nothing, create=True),
                patch.object(TracerBase, "_filter_traceback_frames", _innermost),
                _lean_tracing(),
                _little_garbage(),
            ):
                yield
        finally:
            for logger in loggers:
                logger.removeFilter(_hear_nothing)


def _innermost(_: TracerBase, summary: traceback.StackSummary) -> traceback.StackSummary:
    """Keep the user's innermost frame."""
    return traceback.StackSummary.from_list(users_frames(summary)[-1:])


def _hear_nothing(_: logging.LogRecord) -> bool:
    """Reject every record."""
    return False


def _say_nothing(*_: object, **__: object) -> None:
    """Stand in for ``print``."""


def _no_progress(**_: Any) -> SimpleNamespace:
    """Stand in for a bar of tqdm's, which starts a thread and keeps that in its class."""
    return SimpleNamespace(update=_say_nothing)


def _loggers() -> Iterator[logging.Logger]:
    """PyTorch's loggers: a filter holds for the records of one logger alone."""
    for name in ("torch", *logging.root.manager.loggerDict):
        if name.partition(".")[0] == "torch":
            yield logging.getLogger(name)


@contextlib.contextmanager
def _lean_tracing() -> Iterator[None]:
    """Keep what sizes combine to, and leave out what is not needed, until the context ends."""
    changes = [
        torch._dynamo.config.patch(fake_tensor_cache_enabled=False),
        patch.object(proxy_tensor, "_extract_tensor_metadata", lambda *_, **__: None),
        patch.object(SymNode, "expr", property(_expression)),
        patch.object(SymNode, "wrap_int", _integers(SymNode.wrap_int)),
        patch.object(proxy_tensor, "_build_proxy_for_sym_expr", _recorded),
        patch.object(proxy_tensor, "thunkify", _at_its_first_use),
        patch.object(interpreter, "tqdm", _no_progress),
        _use_lazy_graph_module(True),  # nobody runs a graph as Python code
    ]
    for name in ("is_number", "free_symbols"):
        plain = vars(sympy.Expr if name == "is_number" else sympy.Basic)[name]
        changes.append(patch.object(sympy.Expr, name, property(_by_expression(plain.fget))))
    for name in _BINARY:
        combine = vars(SymNode)[f"_{name}"]
        if name in ("eq", "ne"):
            combine = _same_at_once(combine, name == "eq")
        changes.append(patch.object(SymNode, f"_{name}", _by_operands(combine)))
    with contextlib.ExitStack() as stack:
        for change in changes:
            stack.enter_context(change)
        yield


def _recorded(tracer: Any, expression: Any, out: Any = None) -> Any:
    """Record what a size is made of that a trace meets for the first time.

    PyTorch calls `operator.mul` with all factors of a product, which takes two.
    """
    if not isinstance(expression, sympy.Mul) or expression in tracer.sympy_expr_tracker:
        return _AS_PYTORCH_RECORDS(tracer, expression, out)
    factors = [_recorded(tracer, factor) for factor in expression.args]
    if any(factor is None for factor in factors):
        return None
    *others, last = factors
    first = functools.reduce(operator.mul, others)
    if out is None:
        return first * last
    proxy_tensor._sym_register(tracer, operator.mul, (first, last), out)  # type: ignore[arg-type]
    return out


def _at_its_first_use(_: Any, make: Callable[..., Any], *args: Any, **options: Any) -> Thunk[Any]:
    """Record a size in the graph when an operator takes it: nine of ten only compare layouts."""
    return Thunk(functools.partial(make, *args, **options))


@contextlib.contextmanager
def _little_garbage() -> Iterator[None]:
    """Collect garbage seldom, or never as before, until the context ends."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(*map(max, before, _RARE))
    try:
        yield
    finally:
        gc.set_threshold(*before)


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
    version = 0 if env is None else getattr(env, "_replacements_version_counter", None)
    if version is None:  # PyTorch before 2.13 keeps no expression
        return env.replace(node._expr)
    if version == 0 or isinstance(node._expr, int | sympy.Number):
        return node._expr
    if node._expr_cache is None or node._expr_ver != version:
        assert env is not None
        node._expr_cache, node._expr_ver = env.replace(node._expr), version
    return node._expr_cache


def _by_operands(plain: Callable[[SymNode, SymNode], SymNode]) -> Callable[..., SymNode]:
    known: dict[Any, SymNode] = {}
    nodes: dict[tuple[SymNode, SymNode], tuple[int, SymNode]] = {}  # with what is known of dims

    def combine(left: SymNode, right: SymNode) -> SymNode:
        if get_proxy_mode() is not None:  # a graph records each
            return plain(left, right)
        env = left.shape_env
        version = getattr(env, "_replacements_version_counter", -1)
        same = nodes.get((left, right))
        if same is not None and same[0] == version:
            return same[1]
        key = (env, *_facts(left), *_facts(right))
        found = known.get(key)
        if found is None:
            found = known[key] = plain(left, right)
        if version >= 0:  # PyTorch before 2.13 counts none
            nodes[left, right] = version, found
        return found

    return combine


def _integers(plain: Callable[[SymNode, int], SymNode]) -> Callable[[SymNode, int], SymNode]:
    """Keep one node for each number, by which `_by_operands` knows it."""
    known: dict[tuple[Any, int], SymNode] = {}

    def wrap(node: SymNode, number: int) -> SymNode:
        if type(number) is not int:
            return plain(node, number)  # which refuses it; True would be taken for 1
        key = node.shape_env, number
        found = known.get(key)
        if found is None:
            found = known[key] = plain(node, number)
        return found

    return wrap


def _same_at_once(
    plain: Callable[[SymNode, SymNode], SymNode], equal: bool
) -> Callable[[SymNode, SymNode], SymNode]:
    """Answer whether sizes are equal where both are the same sum of products.

    ``64*(h//2 + 1)*w`` and ``64*w + 64*w*(h//2)`` are: a stride and the product of sizes, which are
    compared for each tensor.  Sympy takes 10 ms to find out.
    """
    known: dict[Any, dict[frozenset[Any], int]] = {}

    def compare(left: SymNode, right: SymNode) -> SymNode:
        are_sizes = left.pytype is int and right.pytype is int and get_proxy_mode() is None
        if are_sizes and _terms(left.expr, known) == _terms(right.expr, known):
            return left.wrap_bool(equal)
        return plain(left, right)

    return compare


def _terms(
    expression: Any, known: dict[Any, dict[frozenset[Any], int]]
) -> dict[frozenset[Any], int]:
    """Expand a size: coefficients by monomial, which is its factors with their powers."""
    found = known.get(expression)
    if found is not None:
        return found
    if isinstance(expression, sympy.Integer):
        found = {frozenset(): int(expression)} if expression else {}
    elif isinstance(expression, sympy.Add):
        sums: Counter[frozenset[Any]] = Counter()
        for part in expression.args:
            sums.update(_terms(part, known))
        found = {monomial: number for monomial, number in sums.items() if number}
    elif factors := _factors(expression):
        found = {frozenset(): 1}
        for part in factors:
            products: Counter[frozenset[Any]] = Counter()
            for (a, m), (b, n) in product(found.items(), _terms(part, known).items()):
                products[frozenset((Counter(dict(a)) + Counter(dict(b))).items())] += m * n
            found = {monomial: number for monomial, number in products.items() if number}
    else:
        found = {frozenset({(expression, 1)}): 1}
    known[expression] = found
    return found


def _factors(expression: Any) -> tuple[Any, ...]:
    """Return the factors of a product or of a power, none of anything else."""
    if isinstance(expression, sympy.Mul):
        return expression.args
    is_power = isinstance(expression, sympy.Pow) and isinstance(expression.exp, sympy.Integer)
    return (expression.base,) * max(int(expression.exp), 0) if is_power else ()


def _facts(node: SymNode) -> tuple[Any, ...]:
    return node.expr, node.pytype, node._hint, node.fx_node
