"""What the arguments and the results of a graph of TorchDynamo are, and which of its sizes vary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sympy
import torch
from torch import fx
from torch.export import Dim

from relax_disc.errors import RelaxDiscError, UnsupportedOperatorError
from relax_disc.frontend import CapturedStep
from relax_disc.frontend.capture.traced.trace import Halves


@dataclass(frozen=True, slots=True)
class _Result:
    """One result: nothing, an argument, what the program makes, a view of an argument, a number."""

    kind: Literal["nothing", "given", "made", "view", "number"]
    place: int = 0  # among the arguments, or among what is made
    # over the symbols: the number; of a view sizes, strides, offset and minus the base's own
    numbers: tuple[Any, ...] = ()
    requires_grad: bool = False


class _Number:
    """A plain number of a graph, which reads it from a tensor by ``item()``."""

    def __init__(self, value: float) -> None:
        self._value = value

    def item(self) -> float:
        return self._value


class GraphLayout:
    """What the arguments and the results of a graph are, by place."""

    def __init__(self, graph: fx.GraphModule) -> None:
        _inline_checkpoints(graph)
        self.graph = graph
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        self._fakes = [node.meta["example_value"] for node in nodes]
        self._names = [node.name.removeprefix("l_").strip("_") for node in nodes]
        self.tensors = [k for k, node in enumerate(nodes) if self._is_tensor(k, node)]
        self._narrowed: dict[str, tuple[str, int, int | None]] = {}
        self._sizes: dict[int, tuple[int, int]] = {}  # place -> tensor's place in the list, axis
        for place, fake in enumerate(self._fakes):
            if isinstance(fake, torch.SymInt) and (where := self._shown(fake)):
                self._sizes[place] = where
        known = {*self.tensors, *self._sizes}
        self.numbers = [place for place in range(len(nodes)) if place not in known]
        self._axes = {
            extent.node.expr: (index, axis)
            for index, place in enumerate(self.tensors)
            for axis, extent in enumerate(self._fakes[place].shape)
            if isinstance(extent, torch.SymInt) and extent.node.expr.is_Symbol
        }
        self.made: list[fx.Node] = []
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        flat: Any = output.args[0]
        self._results = [self._result(node, nodes) for node in flat]

    def _is_tensor(self, place: int, node: fx.Node) -> bool:
        if not isinstance(self._fakes[place], torch.Tensor):
            return False
        argument = node.meta.get("grapharg")
        return not getattr(argument, "pass_arg_as_tensor", False)

    def _shown(self, size: torch.SymInt) -> tuple[int, int] | None:
        """Find the axis of a tensor that shows a size."""
        for index, place in enumerate(self.tensors):
            for axis, extent in enumerate(self._fakes[place].shape):
                if isinstance(extent, torch.SymInt) and extent.node.expr == size.node.expr:
                    return index, axis
        return None

    def _result(self, node: fx.Node | None, given: Sequence[fx.Node]) -> _Result:
        if node is None:
            return _Result("nothing")
        if node in given:
            return _Result("given", given.index(node))
        value = node.meta.get("example_value")
        if not isinstance(value, torch.Tensor):
            return _Result("number", numbers=(self._expression(value, node),))
        storage = value.untyped_storage()._cdata
        for place in self.tensors:
            if self._fakes[place].untyped_storage()._cdata == storage:
                return self._view(node, value, place)
        if node not in self.made:
            self.made.append(node)
        return _Result("made", self.made.index(node))

    def _view(self, node: fx.Node, value: torch.Tensor, place: int) -> _Result:
        """Describe a view of an argument, which is made again outside the program."""
        base = self._fakes[place]
        numbers = (*value.shape, *value.stride(), value.storage_offset(), -base.storage_offset())
        if value.dtype != base.dtype:
            name = self._names[place]
            raise UnsupportedOperatorError(
                f"The graph returns a view of its argument {name} as {value.dtype} ({node.name}), "
                "which cannot be made outside the program; return a copy of it: `.clone()`.",
                ((node.name, name),),
            )
        exprs = tuple(self._expression(number, node) for number in numbers)
        return _Result("view", place, exprs, bool(value.requires_grad))

    def _expression(self, number: Any, node: fx.Node) -> Any:
        """Write a number of the graph over the symbols that tensors show."""
        expr = sympy.sympify(getattr(getattr(number, "node", number), "expr", number))
        if unknown := expr.free_symbols - self._axes.keys():
            names = ", ".join(sorted(map(str, unknown)))
            raise UnsupportedOperatorError(
                f"The graph returns {node.name}, which depends on a number ({names}) that is no "
                "size of its arguments; return a tensor.",
                ((node.name, "the results"),),
            )
        return expr

    def results(self, args: Sequence[Any], made: Sequence[Any]) -> tuple[Any, ...]:
        """Put together what the graph returns for some arguments, of what the program made."""
        return tuple(self._returned(result, args, made) for result in self._results)

    def _returned(self, result: _Result, args: Sequence[Any], made: Sequence[Any]) -> Any:
        if result.kind == "nothing":
            return None
        if result.kind == "made":
            return made[result.place]
        if result.kind == "given":
            return args[result.place]
        sizes = {
            symbol: args[self.tensors[index]].shape[axis]
            for symbol, (index, axis) in self._axes.items()
        }
        if result.kind == "number":
            return _as_number(result.numbers[0].subs(sizes))
        *layout, offset, base = (int(expr.subs(sizes)) for expr in result.numbers)
        rank, given = len(layout) // 2, args[result.place]
        start = given.storage_offset() + offset + base
        view = given.as_strided(layout[:rank], layout[rank:], start)
        return view if result.requires_grad else view.detach()

    def run(self, tensors: Sequence[Any], numbers: Sequence[Any]) -> tuple[Any, ...]:
        """Run the graph; only what it makes is returned."""
        args: list[Any] = [None] * len(self._fakes)
        for place, tensor in zip(self.tensors, tensors, strict=True):
            args[place] = tensor
        for place, (index, axis) in self._sizes.items():
            args[place] = tensors[index].shape[axis]
        for place, number in zip(self.numbers, numbers, strict=True):
            wrapped = isinstance(self._fakes[place], torch.Tensor)
            args[place] = _Number(number) if wrapped else number
        flat = self.graph(*args)
        made: list[Any] = [None] * len(self.made)
        for value, result in zip(flat, self._results, strict=True):
            if result.kind == "made":
                made[result.place] = value
        return tuple(made)

    def halves(self, tensors: Sequence[torch.Tensor]) -> Halves:
        """Say which gradients the backward pass of a call with these tensors makes of which."""
        leaves = frozenset(k for k, tensor in enumerate(tensors) if tensor.requires_grad)
        values = [node.meta.get("example_value") for node in self.made]
        outputs = tuple(k for k, value in enumerate(values) if _is_differentiable(value))
        if not (leaves and outputs and torch.is_grad_enabled()):
            return Halves(frozenset(), ())
        return Halves(leaves, outputs)

    def check_gradients(self, halves: Halves, captured: CapturedStep) -> None:
        """Refuse a program that misses a gradient which TorchDynamo's own run of the graph has."""
        waiting = [self.made[k].meta["example_value"].grad_fn for k in halves.outputs]
        seen: set[Any] = set()
        reached: set[int] = set()
        while waiting:
            function = waiting.pop()
            if function is not None and function not in seen:
                seen.add(function)
                reached.add(id(getattr(function, "variable", None)))
                waiting += [following for following, _ in function.next_functions]
        found = {int(out.name) for out in captured.outputs if out.kind == "gradient"}
        for leaf in sorted(halves.leaves - found):
            place = self.tensors[leaf]
            if id(self._fakes[place]) in reached:
                raise UnsupportedOperatorError(
                    f"The graph loses the gradient of {self._names[place]}: something in it has a "
                    "gradient of its own that cannot be traced.",
                    (("gradient", self._names[place]),),
                )

    def dynamic_shapes(self) -> list[dict[int, Any]]:
        """Say which axes of the tensors vary, as ``torch.export.Dim`` over the graph's symbols."""
        roots: dict[Any, Any] = {}
        for bare in (True, False):  # a dim is named after the axis that shows it alone
            for place in self.tensors:
                for axis, extent in enumerate(self._fakes[place].shape):
                    if isinstance(extent, torch.SymInt) and not _is_fixed(extent):
                        for symbol in extent.node.expr.free_symbols:
                            if symbol not in roots and (extent.node.expr == symbol) is bare:
                                roots[symbol] = self._root(symbol, extent, place, axis)
        return [
            {
                axis: self._dim(extent, roots)
                for axis, extent in enumerate(self._fakes[place].shape)
                if isinstance(extent, torch.SymInt) and not _is_fixed(extent)
            }
            for place in self.tensors
        ]

    def narrow(self, error: RelaxDiscError) -> bool:
        """Let TorchDynamo guard the sizes for which a graph can be compiled; say if there are some.

        Others get a graph of their own when they come.  Where an error tells no range, the dims
        that it is about, or all, are compiled for the sizes of the example alone.
        """
        varying = self._varying()
        allowed = getattr(error, "allowed", None)
        if allowed is not None and allowed[0] in varying:
            name, lower, upper = allowed
            is_new = self._narrowed.get(name) != allowed
            self._narrowed[name] = allowed
            extent = varying[name]
            if is_new and (extent >= lower and (upper is None or extent <= upper)):
                return True
        told = [name for name in getattr(error, "dims", ()) if name in varying]
        for name in told or varying:
            int(varying[name])  # one size, which TorchDynamo guards
        return bool(varying)

    def _varying(self) -> dict[str, torch.SymInt]:
        """Sizes that are not fixed, by the names that dims get after them."""
        return {
            self._name(place, axis): extent
            for place in self.tensors
            for axis, extent in enumerate(self._fakes[place].shape)
            if isinstance(extent, torch.SymInt) and not _is_fixed(extent)
        }

    def _name(self, place: int, axis: int) -> str:
        return f"{self._names[place]}_{axis}"

    def _root(self, symbol: Any, extent: torch.SymInt, place: int, axis: int) -> Any:
        bounds = extent.node.shape_env.bound_sympy(symbol)
        upper = int(bounds.upper) if bounds.upper.is_Integer else None
        name = self._name(place, axis)
        return Dim(name, min=max(int(bounds.lower), 1), max=upper)

    def _dim(self, extent: torch.SymInt, roots: Mapping[Any, Any]) -> Any:
        expr = extent.node.expr
        symbols = sorted(expr.free_symbols, key=str)
        if len(symbols) == 1:
            (symbol,) = symbols
            slope = expr.diff(symbol)
            rest = (expr - slope * symbol).expand()
            if slope.is_Integer and rest.is_Integer and slope > 0:
                dim = roots[symbol] if slope == 1 else int(slope) * roots[symbol]
                return dim if rest == 0 else dim + int(rest)
        raise UnsupportedOperatorError(
            f"A tensor that the graph takes has the size {expr}, which is no multiple of one dim."
        )


def _inline_checkpoints(graph: fx.GraphModule) -> None:
    """Call the regions of ``torch.utils.checkpoint`` like any other module, nested ones too.

    What is computed again is decided by the budget.
    """
    for node in list(graph.graph.nodes):
        if node.target is torch.ops.higher_order.tag_activation_checkpoint:
            region, *arguments = node.args
            with graph.graph.inserting_before(node):
                call = graph.graph.call_module(region.target, tuple(arguments))
            call.meta.update(node.meta)
            node.replace_all_uses_with(call)
            graph.graph.erase_node(node)
            _inline_checkpoints(getattr(graph, region.target))
    graph.recompile()


def _is_fixed(extent: torch.SymInt) -> bool:
    """Whether TorchDynamo has found one size only."""
    return extent.node.shape_env.bound_sympy(extent.node.expr).is_singleton()


def _as_number(value: Any) -> Any:
    if value in (sympy.true, sympy.false):
        return bool(value)
    return int(value) if value.is_Integer else float(value)


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
