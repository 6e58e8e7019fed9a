"""What the example batch gives for a truth that the model's code asks for while it is exported.

Tensors have no values then.  The operators that were recorded so far are run on the example, as
many as that truth needs, and on copies where any of them writes.  The answer decides which way is
compiled, not whether that is right: each call checks it (:mod:`.model_checks`).

A number that was taken out of a tensor (``x.max().item()``) is a symbol in the trace; a condition
on such symbols, and on sizes that data tell, is written as a tensor again.

Limits: truths inside a recorded loop, or in a function that is traced apart, are not known; nor are
those behind a loop that has no step on the example, and of random numbers alone
(``if torch.rand(()) < 0.1``), which no batch tells.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy import functions as torch_sympy

from relax_disc.frontend.capture.loops import operators  # noqa: F401  registers what loops have
from relax_disc.frontend.capture.source_lines import SourceLine, calling_line
from relax_disc.frontend.capture.traced.writes import writes

_logger = logging.getLogger(__name__)
_OURS = torch.ops.relax_disc

_OPERATORS: tuple[tuple[Any, Callable[..., Any]], ...] = (
    (sympy.Add, operator.add),
    (sympy.Mul, operator.mul),
    (sympy.Eq, torch.eq),
    (sympy.Ne, torch.ne),
    (sympy.Le, torch.le),
    (sympy.Lt, torch.lt),
    (sympy.Ge, torch.ge),
    (sympy.Gt, torch.gt),
    (sympy.And, torch.logical_and),
    (sympy.Or, torch.logical_or),
    (sympy.Not, torch.logical_not),
    ((torch_sympy.FloorDiv, torch_sympy.CleanDiv), torch.floor_divide),
    ((torch_sympy.Mod, torch_sympy.PythonMod, sympy.Mod), torch.remainder),
    ((sympy.Max, torch_sympy.Max), torch.maximum),
    ((sympy.Min, torch_sympy.Min), torch.minimum),
    (torch_sympy.FloatTrueDiv, torch.div),
    (torch_sympy.IntTrueDiv, lambda x, y: torch.div(x.double(), y.double())),
    (torch_sympy.ToFloat, Tensor.double),
    (torch_sympy.OpaqueUnaryFn_sqrt, lambda x: torch.sqrt(x.double())),
    ((sympy.Pow, torch_sympy.PowByNatural, torch_sympy.FloatPow), torch.pow),
    (torch_sympy.TruncToInt, lambda x: x.trunc().long()),
    (torch_sympy.FloorToInt, lambda x: x.floor().long()),
    (torch_sympy.CeilToInt, lambda x: x.ceil().long()),
    (torch_sympy.RoundToInt, lambda x: x.round().long()),
    (sympy.Abs, torch.abs),
)


class ExampleValues:
    """The inputs of one export, in the order in which torch.export flattens them."""

    def __init__(self, module: nn.Module, leaves: Sequence[Any]) -> None:
        parameters = dict(module.named_parameters(remove_duplicate=False))
        buffers = dict(module.named_buffers(remove_duplicate=False))
        self._inputs = [*({**parameters, **buffers}).values(), *leaves]
        # Of a number the tensor, its value at that moment, and the line.
        self._taken: dict[sympy.Symbol, tuple[Tensor, Tensor, SourceLine]] = {}
        self.deciding: set[SourceLine | None] = set()

    def truth(self, x: Tensor) -> bool | None:
        """Return the truth of a tensor of the trace; None where it cannot be told."""
        mode = get_proxy_mode()
        tracer: Any = getattr(mode, "tracer", None)
        slot = None if tracer is None else get_proxy_slot(x, tracer, None)
        if slot is None or slot.constant is not None:
            return None
        try:
            with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
                node = slot.proxy.node
                return None if _is_drawn(node) else bool(self._value(node, tracer.root))
        except Exception as error:  # of any operator: the model is then refused by its line
            _logger.info("%s cannot be run on the example: %s", slot.proxy.node, error)
            return None

    def take(self, x: Tensor, number: Any) -> None:
        """Remember that a number of the trace is the value of a tensor."""
        if isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool):
            value = x.detach().clone()  # the model may write into the tensor afterwards
            for symbol in number.node.expr.free_symbols:
                self._taken[symbol] = x, value, calling_line()

    def condition(self, condition: torch.SymBool) -> Tensor | None:
        """Write a condition on numbers that were taken as a tensor; None where that fails."""
        expr = condition.node.expr
        try:
            result = self._tensor(expr, condition.node.shape_env)
        except NotImplementedError as error:
            _logger.info("%s cannot be written as a tensor: %s", expr, error)
            return None
        self.deciding |= {self._taken[s][2] for s in expr.free_symbols if s in self._taken}
        return result

    def taken(self, number: Any) -> Tensor | None:
        """Return the tensor out of which a number was taken; None of any other."""
        expr = number.node.expr if isinstance(number, torch.SymInt) else None
        return self._taken[expr][0] if expr in self._taken else None

    def number(self, number: torch.SymInt | torch.SymFloat) -> Tensor | None:
        """Write a number made of those that were taken as a tensor without axes or a gradient.

        It is of int64 or float64, as Python's numbers are; None of any other number.
        """
        expr: Any = number.node.expr
        unknown = free_unbacked_symbols(number)
        if not unknown or not unknown <= self._taken.keys():
            return None
        try:
            made = self._tensor(expr, number.node.shape_env).detach()
        except NotImplementedError as error:
            _logger.info("%s cannot be written as a tensor: %s", expr, error)
            return None
        self.deciding |= {self._taken[symbol][2] for symbol in unknown}
        return made

    def _tensor(self, expr: Any, env: Any) -> Tensor:
        if expr in self._taken:
            x = self._taken[expr][1].reshape(())
            return x.to(torch.float64 if x.is_floating_point() else torch.int64)  # as Python's are
        if expr.is_Integer:
            return torch.scalar_tensor(int(expr), dtype=torch.int64)
        if expr.is_number and expr.is_real:
            return torch.scalar_tensor(float(expr), dtype=torch.float64)
        if expr.is_Symbol and expr.is_integer:  # a size
            size: Any = env.create_symintnode(expr, hint=None)
            return torch.scalar_tensor(size, dtype=torch.int64)
        for classes, combine in _OPERATORS:
            if isinstance(expr, classes):
                parts = [self._tensor(part, env) for part in expr.args]
                return functools.reduce(combine, parts) if len(parts) > 1 else combine(*parts)
        raise NotImplementedError(type(expr).__name__)

    def _value(self, node: fx.Node, root: nn.Module) -> Tensor:
        """Run what a node needs, and nothing that it does not."""
        nodes = list(node.graph.nodes)
        inputs = node.graph.find_nodes(op="placeholder")
        given = dict(zip(inputs, self._inputs, strict=True))
        writers = {n for n in nodes if writes(n)}
        needed = {node, *writers}
        last: dict[fx.Node, fx.Node] = {}
        for n in reversed(nodes):
            if n in needed:
                needed.update(n.all_input_nodes)
                for source in n.all_input_nodes:
                    last.setdefault(source, n)
        values: dict[fx.Node, Any] = {}
        devices = {x.device for x in self._inputs if isinstance(x, Tensor) and x.is_cuda}

        def run(n: fx.Node) -> Any:
            return self._run(n, values, given, root, bool(writers))

        def forget(n: fx.Node) -> None:
            for source in n.all_input_nodes:
                if last[source] is n and source is not node:
                    values.pop(source, None)

        with torch.random.fork_rng([device.index for device in devices]):
            _walk([n for n in nodes if n in needed], values, run, forget)
        return values[node]

    def _run(
        self, n: fx.Node, values: Any, given: dict[fx.Node, Any], root: nn.Module, copy: bool
    ) -> Any:
        if n.op == "call_function":
            args, kwargs = fx.map_arg((n.args, n.kwargs), values.__getitem__)
            return n.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        value = given[n] if n.op == "placeholder" else operator.attrgetter(str(n.target))(root)
        if isinstance(value, FakeTensor):
            raise ValueError(f"{n} has no values")
        return value.detach().clone() if copy and isinstance(value, Tensor) else value


def _walk(
    nodes: Sequence[fx.Node],
    values: dict[fx.Node, Any],
    run: Callable[[fx.Node], Any],
    after: Callable[[fx.Node], None] = lambda _: None,
) -> None:
    """Run nodes in order, and a loop, of which one step was recorded, as often as it has steps.

    ``after``: is told of each node that has run, but for those of loops.
    """
    waiting = list(nodes)
    while waiting:
        n = waiting.pop(0)
        if n.target is _OURS.loop_index.default:
            end = next(e for e in waiting if e.target is _OURS.loop_end.default and e.args[0] is n)
            steps, waiting = waiting[: waiting.index(end)], waiting[waiting.index(end) + 1 :]
            values[end] = _run_loop(end, steps, values, run)
        else:
            values[n] = run(n)
            after(n)


def _run_loop(
    end: fx.Node,
    steps: Sequence[fx.Node],
    values: dict[fx.Node, Any],
    run: Callable[[fx.Node], Any],
) -> list[Tensor]:
    """Run all steps of a loop, and return what its end does; ``steps``: the nodes of one."""
    arguments: Any = end.args
    index, olds, news, fresh, stacked, count = arguments
    rows: list[list[Tensor]] = []
    for step in range(values[count] if isinstance(count, fx.Node) else count):
        values[index] = torch.tensor(step)
        before = [new if step else old.args[1] for old, new in zip(olds, news, strict=True)]
        values.update(zip(olds, [values[each].clone() for each in before], strict=True))
        _walk([n for n in steps if n not in olds], values, run)
        rows.append([values[each] for each in stacked])
    if not rows:
        raise ValueError(f"{end} has no step on the example")
    return [*(values[each] for each in (*news, *fresh)), *map(torch.stack, zip(*rows, strict=True))]


def _is_drawn(node: fx.Node) -> bool:
    """Whether random numbers alone decide a value, which is another one at each call."""
    waiting, seen, drawn = [node], {node}, False
    while waiting:
        n = waiting.pop()
        if n.op == "placeholder":
            return False
        drawn |= torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())
        sources = n.all_input_nodes if isinstance(n.meta.get("val"), Tensor) else ()
        waiting += [source for source in sources if source not in seen]
        seen.update(sources)
    return drawn


_active: list[ExampleValues] = []


@contextlib.contextmanager
def example_values(module: nn.Module, leaves: Sequence[Any]) -> Iterator[ExampleValues]:
    """Have the values of an example while a module is exported; one export runs at a time."""
    values = ExampleValues(module, leaves)
    _active.append(values)
    try:
        yield values
    finally:
        _active.remove(values)


def active() -> ExampleValues | None:
    """Return the values of the export that is running."""
    return _active[-1] if _active else None
