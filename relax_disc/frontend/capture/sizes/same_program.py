"""Whether two exports of one model compute the same at some sizes of its dims.

Both are straight lines of operators, in the order of the model's code.  Left out are operators that
return their operand unchanged at all those sizes (a slice of the whole, padding by nothing, a copy)
or in another shape, and what nobody reads.  What is left must be the same, one by one: the
operator, its operands with their shapes, and each size that it is given, which is evaluated at all
those sizes.

Sizes that data decide are the same where the operators that make them are.
"""

from __future__ import annotations

import itertools
import math
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from relax_disc.frontend.capture.loops.cut import CHECKS, LoopBody
from relax_disc.frontend.capture.sizes.dims import DimTable, symbol_of
from relax_disc.frontend.capture.sizes.guards import everywhere
from relax_disc.frontend.capture.source_lines import SourceLine, source_line
from relax_disc.frontend.capture.traced.writes import memory_of, writes, written_arguments

_ATEN = torch.ops.aten
_ATTENTION = _ATEN.scaled_dot_product_attention.default
_COPIES = {_ATEN.clone.default, _ATEN.contiguous.default}
_IN_ORDER = {
    _ATEN.view.default,
    _ATEN._unsafe_view.default,
    _ATEN.alias.default,
    _ATEN.unflatten.int,
    _ATEN.unsqueeze.default,
    _ATEN.squeeze.default,
    _ATEN.squeeze.dim,
    _ATEN.squeeze.dims,
}
"""Views whose elements are those of their operand in the same order."""
_MAY_COPY_IN_ORDER = {_ATEN.reshape.default, _ATEN.flatten.using_ints}
_PADDING = {_ATEN.constant_pad_nd.default, _ATEN.pad.default}
_SYMBOLIC = (torch.SymInt, torch.SymBool, torch.SymFloat)
_NUMBERS = (*_SYMBOLIC, int, float)


class _Different(Exception):
    """Where two programs part; the line is of the user's code, if it is known."""

    def __init__(self, line: SourceLine | None = None) -> None:
        super().__init__()
        self.line = line


class Side:
    """One of two programs: its graph, with the loops that were cut out of it."""

    def __init__(self, program: ExportedProgram, dims: DimTable, loops: Sequence[LoopBody]) -> None:
        self.program, self.dims, self.loops = program, dims, loops
        sign = program.graph_signature
        self.inputs = {spec.arg.name: spec for spec in sign.input_specs}
        self.counted: dict[str, str] = {}  # names of sizes that data decide, by their symbols

    def expression(self, size: Any) -> sympy.Expr:
        """Write a size in symbols named after the dims, and those that data decide."""
        expr = sympy.sympify(size.node.expr if isinstance(size, _SYMBOLIC) else size)
        known = {**self.counted, **self.dims.names}
        names = {s: known.get(str(s)) for s in expr.free_symbols}
        if None in names.values():
            raise _Different  # a size that depends on data, of what is not known to be the same
        return expr.xreplace({s: symbol_of(str(name)) for s, name in names.items()})


def parting_line(one: Side, other: Side) -> SourceLine | None:
    """Return the line at which two programs part, None where they compute the same.

    They are compared at the sizes of ``other``'s dims, to which its ``dims.sizes`` may be limited.
    """
    try:
        _Comparison(one, other).run()
    except _Different as different:
        return different.line or SourceLine("", 0)
    return None


def _counts(body: LoopBody) -> tuple[int, ...]:
    places = len(body.parts), len(body.written)
    return (body.carries, body.wholes, body.lasts, body.stacked, *places)


def _places(body: LoopBody) -> list[Any]:
    places = (*body.parts, *body.written)
    return [body.count, *((place.axis, place.factor, place.offset) for place in places)]


class _Comparison:
    def __init__(self, one: Side, other: Side) -> None:
        self._one, self._other = one, other
        specs = one.dims.specs
        at = {"sizes": other.dims.sizes, "where": other.dims.where}
        self._dims = DimTable({name: name for name in specs}, specs, **at)
        self._equal: dict[tuple[Any, ...], bool | None] = {}

    def run(self) -> None:
        """Compare all; raises `_Different`."""
        one, other = self._one.program, self._other.program
        ends = [
            [(spec.kind, spec.target) for spec in p.graph_signature.output_specs]
            for p in (one, other)
        ]
        returned = [p.call_spec.out_spec for p in (one, other)]
        if (
            ends[0] != ends[1]
            or returned[0] != returned[1]
            or len(self._one.loops) != len(self._other.loops)
        ):
            raise _Different
        self._modules(one.graph_module, other.graph_module, is_whole=True)
        for left, right in zip(self._one.loops, self._other.loops, strict=True):
            if _counts(left) != _counts(right):
                raise _Different(left.line)
            if not self._same_leaves(_places(left), _places(right)):
                raise _Different(left.line)
            modules = [fx.GraphModule({}, body.graph) for body in (left, right)]
            self._modules(modules[0], modules[1])

    # -- graphs -----------------------------------------------------------------------------------

    def _modules(self, one: fx.GraphModule, other: fx.GraphModule, is_whole: bool = False) -> None:
        unchanged = self._passes(one, self._one)
        other_unchanged = self._passes(other, self._other)
        lines, other_lines = _needed(one.graph, unchanged), _needed(other.graph, other_unchanged)
        matched: dict[fx.Node, fx.Node] = {}

        def same(left: Any, right: Any) -> bool:
            if not self._same_shape(left, right):
                return False
            left, right = unchanged.get(left, left), other_unchanged.get(right, right)
            if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
                return False
            if left in matched:
                return matched[left] is right
            if left.op == right.op == "placeholder":
                return is_whole and self._are_one_input(left, right)
            if left.op != "get_attr" or right.op != "get_attr":
                return False
            both = (left, one), (right, other)
            values = [operator.attrgetter(str(node.target))(module) for node, module in both]
            if all(isinstance(value, fx.GraphModule) for value in values):
                self._modules(values[0], values[1])
                return True
            return all(isinstance(v, Tensor) for v in values) and _are_equal(*values)

        if not is_whole:
            inputs = [list(m.graph.find_nodes(op="placeholder")) for m in (one, other)]
            if len(inputs[0]) != len(inputs[1]):
                raise _Different
            matched.update(zip(*inputs, strict=True))
        for left, right in itertools.zip_longest(lines, other_lines):
            if left is None or right is None or not self._same_call(left, right, same):
                telling = left if len(lines) > len(other_lines) else right
                raise _Different(source_line(telling) if telling is not None else None)
            matched[left] = right
            self._name_counted(left, right)

    def _name_counted(self, left: fx.Node, right: fx.Node) -> None:
        """Name the sizes that two equal operators have counted."""
        one, other = (node.meta.get("unbacked_bindings") or {} for node in (left, right))
        if [*one.values()] == [*other.values()]:
            for symbol, same in zip(one, other, strict=True):
                name = f"counted {len(self._one.counted)}"
                self._one.counted[str(symbol)] = self._other.counted[str(same)] = name

    def _same_call(self, left: fx.Node, right: fx.Node, same: Callable[..., bool]) -> bool:
        if left.op != right.op or left.target != right.target:
            return False
        if left.target is _ATTENTION and self._is_of_one(left):
            return self._same_leaves(_not_causal(left), _not_causal(right), same)
        if left.target is _ATEN.slice.Tensor:
            return self._same_leaves(_slice_arguments(left), _slice_arguments(right), same)
        return self._same_leaves((left.args, left.kwargs), (right.args, right.kwargs), same)

    def _is_of_one(self, node: fx.Node) -> bool:
        """Whether attention is of one position to one: a causal mask would hide nothing."""
        operands: Any = node.args[:2]
        lengths = (x.meta["val"].shape[-2] for x in operands)
        return all(self._is(length, 1, self._one) for length in lengths)

    def _passes(self, module: fx.GraphModule, side: Side) -> dict[fx.Node, fx.Node]:
        """Find the operators that return an operand unchanged at all sizes in question.

        A copy is not its operand where one of them is written into, or read by its strides.
        """
        inner = [m for m in module.modules() if m is not module and isinstance(m, fx.GraphModule)]
        may_copy = not any(writes(node) for m in inner for node in m.graph.nodes)
        graphs = [m.graph for m in (module, *inner)]
        may_copy = may_copy and not any(_reads_by_strides(n) for g in graphs for n in g.nodes)
        writers = [node for node in module.graph.nodes if writes(node)]
        written = {memory_of(operand) for node in writers for operand in node.all_input_nodes}
        found: dict[fx.Node, fx.Node] = {}
        for node in module.graph.nodes:
            operand, is_view = self._in_order(node, side), node.target not in _MAY_COPY_IN_ORDER
            if operand is None:
                operand = self._operand(node, side)
                is_view = node.target in (_ATEN.slice.Tensor, _ATEN.expand.default)
            if operand is None:
                continue
            if is_view or (may_copy and not written & {node, memory_of(operand)}):
                found[node] = found.get(operand, operand)
        return found

    def _in_order(self, node: fx.Node, side: Side) -> fx.Node | None:
        """Return the operand whose elements a node returns in their order, in another shape."""
        source: Any = node.args[0] if node.args else None
        if node.target in _IN_ORDER or node.target in _MAY_COPY_IN_ORDER:
            return source
        if node.target is operator.getitem and source.target is _ATEN.unbind.int:
            node, source = source, source.args[0]
        elif node.target is not _ATEN.select.int:
            return None
        axis: Any = node.args[1] if len(node.args) > 1 else 0
        return source if self._is(source.meta["val"].shape[axis], 1, side) else None

    def _operand(self, node: fx.Node, side: Side) -> fx.Node | None:
        args: Any = node.args
        if node.target is _ATEN.slice.Tensor:
            x, axis, start, end, step = _slice_arguments(node)
            size = x.meta["val"].shape[axis]
            whole = step == 1 and self._holds(sympy.Ge, _value(end), size, side)
            return x if whole and self._is(_value(start), 0, side) else None
        if node.target in _COPIES:
            return args[0]
        if node.target is _ATEN.expand.default:
            shapes = [x.meta["val"].shape for x in (args[0], node)]
            alike = len(shapes[0]) == len(shapes[1]) and all(
                self._holds(sympy.Eq, before, after, side)
                for before, after in zip(*shapes, strict=True)
            )
            return args[0] if alike else None
        if node.target in _PADDING:
            mode = args[2] if node.target is _ATEN.pad.default and len(args) > 2 else "constant"
            x, amounts = args[:2]
            nothing = all(self._is(_value(amount), 0, side) for amount in amounts)
            return x if mode == "constant" and nothing else None
        if node.target is _ATEN.cat.default:
            axis = args[1] if len(args) > 1 else 0
            result = node.meta["val"]
            parts = [part for part in args[0] if part.meta["val"].dim() == result.dim()]
            some = [p for p in parts if not self._is(p.meta["val"].shape[axis], 0, side)]
            alone = len(some) == 1 and len(parts) == len(args[0])
            return some[0] if alone and some[0].meta["val"].dtype == result.dtype else None
        return None

    # -- operands -----------------------------------------------------------------------------

    def _are_one_input(self, left: fx.Node, right: fx.Node) -> bool:
        one, other = self._one.inputs[left.name], self._other.inputs[right.name]
        if one.kind != other.kind:
            return False
        constants = self._one.program.constants, self._other.program.constants
        if one.target in constants[0] and other.target in constants[1]:
            values = constants[0][one.target], constants[1][other.target]
            return values[0] is values[1] or _are_equal(*values)
        same_name = one.arg.name == other.arg.name if one.target is None else True
        return one.target == other.target and same_name

    def _same_leaves(
        self, left: Any, right: Any, same: Callable[[Any, Any], bool] | None = None
    ) -> bool:
        """Whether arguments are alike: nodes by ``same``, sizes at all sizes in question."""
        leaves, structure = pytree.tree_flatten(_as_tuples(left))
        others, other_structure = pytree.tree_flatten(_as_tuples(right))
        if structure != other_structure:
            return False
        for one, other in zip(leaves, others, strict=True):
            sizes = _value(one), _value(other)
            if any(isinstance(size, (*_SYMBOLIC, sympy.Basic)) for size in sizes):
                if not self._same_size(*sizes):
                    return False
            elif isinstance(one, fx.Node) or isinstance(other, fx.Node):
                if same is None or not same(one, other):
                    return False
            elif type(one) is not type(other) or not (one == other or _are_nan(one, other)):
                return False
        return True

    def _same_shape(self, left: Any, right: Any) -> bool:
        values = [x.meta.get("val") if isinstance(x, fx.Node) else None for x in (left, right)]
        if not all(isinstance(value, Tensor) for value in values):
            return True
        shapes = [tuple(value.shape) for value in values]  # pyright: ignore
        return self._same_leaves(shapes[0], shapes[1])

    def _same_size(self, left: Any, right: Any) -> bool:
        numbers = (*_NUMBERS, sympy.Basic)
        if not isinstance(left, numbers) or not isinstance(right, numbers):
            return False
        return self._everywhere(sympy.Eq, self._one.expression(left), self._other.expression(right))

    def _is(self, size: Any, number: int, side: Side) -> bool:
        return self._holds(sympy.Eq, size, number, side)

    def _holds(self, relation: Any, size: Any, number: Any, side: Side) -> bool:
        if isinstance(size, fx.Node) or isinstance(number, fx.Node):
            return False
        try:
            return self._everywhere(relation, side.expression(size), side.expression(number))
        except _Different:
            return False

    def _everywhere(self, relation: Any, left: sympy.Expr, right: sympy.Expr) -> bool:
        key = relation, left, right
        if key not in self._equal:
            self._equal[key] = left == right or everywhere(relation(left, right), self._dims)
        return self._equal[key] is True


def _needed(graph: fx.Graph, unchanged: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """List the operators that something reads or that do more than return their result.

    A write into memory of the graph's own, of which nothing is read, is none.
    """
    idle = {n: memory_of(n.args[0]) for n in graph.nodes if writes(n) and not _writes_an_input(n)}
    left = [
        n
        for n in reversed(graph.nodes)
        if n not in unchanged and not _is_size(n) and not str(n.target).startswith(CHECKS)
    ]
    needed = {n for n in left if n.op == "output" or (n not in idle and _does_more(n))}
    count = -1
    while count != len(needed):
        count = len(needed)
        for node in left:
            if node in needed:
                needed.update(unchanged.get(n, n) for n in node.all_input_nodes)
        read = {memory_of(node) for node in needed}
        needed.update(node for node, memory in idle.items() if memory in read)
    return [n for n in reversed(left) if n in needed and n.op in ("call_function", "output")]


def _writes_an_input(node: fx.Node) -> bool:
    """Whether a node may write into more than its first operand, or into memory from outside."""
    schema = node.target._schema  # pyright: ignore
    written = written_arguments(schema)
    memory = memory_of(node.args[0])
    own = isinstance(memory, fx.Node) and memory.op == "call_function"
    return not own or [a.name for a in written] != ["self"]


def _does_more(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    tags = getattr(node.target, "tags", ())
    namespace = getattr(node.target, "namespace", "")
    is_random = torch.Tag.nondeterministic_seeded in tags
    return is_random or writes(node) or node.is_impure() or namespace not in ("aten", "prims")


def _not_causal(node: fx.Node) -> Any:
    args = dict(zip((a.name for a in _ATTENTION._schema.arguments), node.args, strict=False))
    return {"attn_mask": None, "dropout_p": 0.0, **args, **node.kwargs, "is_causal": False}


def _slice_arguments(node: fx.Node) -> tuple[Any, ...]:
    """Return operand, axis, start, end and step: PyTorch writes ``x[:n]`` with and without a 0."""
    args: Any = node.args
    x, axis, start, end, step = (*args, *(0, None, None, 1)[len(args) - 1 :])
    return x, axis, 0 if start is None else start, sys.maxsize if end is None else end, step


def _reads_by_strides(node: fx.Node) -> bool:
    return str(node.target).startswith("aten.as_strided")


def _is_size(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.meta.get("val"), _NUMBERS)


def _value(x: Any) -> Any:
    """Return the size that a node stands for; anything else as it is."""
    return x.meta["val"] if isinstance(x, fx.Node) and _is_size(x) else x


def _are_nan(left: Any, right: Any) -> bool:
    return isinstance(left, float) and math.isnan(left) and math.isnan(right)


def _are_equal(left: Any, right: Any) -> bool:
    alike = left.shape == right.shape and left.dtype == right.dtype
    return alike and left.device == right.device and bool(torch.equal(left, right))


def _as_tuples(x: Any) -> Any:
    """Write fx's immutable containers as plain ones, of which pytree tells the structure."""
    if isinstance(x, dict):
        return {key: _as_tuples(value) for key, value in x.items()}
    if isinstance(x, slice):
        return ("slice", _as_tuples(x.start), _as_tuples(x.stop), _as_tuples(x.step))
    if isinstance(x, list | tuple):
        return tuple(map(_as_tuples, x))
    return x
