"""Cut the steps of recorded loops out of an exported graph, as graphs of their own.

What depends on the number of the step belongs to it; all else was computed before.  A tensor of
which the step reads one position, ``x[:, t]``, becomes an operand of which each step has a part;
one that it writes so, ``out[:, t] = h``, becomes a result that is written part by part.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from relax_disc.frontend.capture.loops.draws import (
    DrawnOperator,
    draw_before,
    is_random,
    once_inside,
)
from relax_disc.frontend.capture.loops.left import shared_and_written
from relax_disc.frontend.capture.loops.nodes import may_share_memory, values_of
from relax_disc.frontend.capture.loops.recorded import LoopRefusal, RecordedLoops
from relax_disc.frontend.capture.loops.regions import inline_regions
from relax_disc.frontend.capture.loops.tables import carry_rows
from relax_disc.frontend.capture.source_lines import SourceLine, source_line
from relax_disc.frontend.capture.traced.writes import is_new

_ATEN, _OURS = torch.ops.aten, torch.ops.relax_disc
CHECKS = ("aten._assert_scalar.", "aten.sym_constrain_range", "aten._assert_tensor_metadata.")


@dataclass(frozen=True, slots=True)
class Place:
    """The position ``factor * t + offset`` along an axis, expressions of the dims."""

    axis: int
    factor: Any
    offset: Any


@dataclass(frozen=True, slots=True)
class LoopBody:
    """A step of a loop.

    Placeholders of ``graph``: the states before the step, parts of operands and whole operands.
    Its outputs: the states after it, values of which the last step's is wanted, what is stacked and
    what is written.  Operands of the loop: first states, operands of parts, whole ones, and tensors
    that are written into.  Results: last states, last values, stacked tensors and written ones.
    """

    line: SourceLine
    graph: fx.Graph
    count: Any  # an integer or a size
    carries: int
    parts: tuple[Place, ...]
    wholes: int
    lasts: int
    stacked: int
    written: tuple[Place, ...]
    pieces: tuple[Tensor, ...]  # what is written in a step, without data
    operands: tuple[Tensor, ...]  # without data
    trains_alone: str = ""
    """A parameter that only its steps read, of which there are none at some length: PyTorch gives
    it no gradient there."""

    def text(self) -> str:
        """Write down all that decides what the loop computes."""
        nodes = [f"{n.format_node()} {n.meta.get('val')}" for n in self.graph.nodes]
        counts = (self.count, self.carries, self.parts, self.lasts, self.stacked, self.written)
        return "\n".join([str(counts), *nodes])


def cut_loops(program: ExportedProgram, loops: RecordedLoops) -> list[LoopBody]:
    """Put one operator in the place of each recorded loop, in a graph and in those inside it.

    Raises `LoopRefusal`: a body is no step.
    """
    bodies: list[LoopBody] = []
    module = program.graph_module
    for part in module.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        found = list(part.graph.find_nodes(op="call_function", target=_OURS.loop_index.default))
        may_be_empty: dict[int, fx.Node] = {}
        for index in reversed(found):  # loops inside others begin later
            number: Any = index.args[0]
            made = _Cut(part, index, loops.lines[number]).replace(bodies)
            if made is not None and loops.may_be_empty[number]:
                may_be_empty[len(bodies) - 1] = made
        names = program.graph_signature.inputs_to_parameters if part is module else None
        for k, name in _trained_alone(may_be_empty, bodies, names):
            bodies[k] = replace(bodies[k], trains_alone=name)
        if found:
            part.graph.lint()
            part.recompile()
    return bodies


def _trained_alone(
    loops: Mapping[int, fx.Node],
    bodies: Sequence[LoopBody],
    parameters: Mapping[str, str] | None,
) -> Iterator[tuple[int, str]]:
    """Find the loops without whose steps the loss would depend on fewer parameters, and name one.

    Of several that read a parameter, only one is found: with a step of that it has a gradient.

    ``loops``: those that may have no step, by the places of their bodies. ``parameters``: their
    names in the model, by those of the inputs; None: all inputs may be.
    """
    in_steps, outside = {}, {}
    for k, loop in loops.items():
        operands: Any = loop.args[2]
        first, last = bodies[k].carries, len(operands) - len(bodies[k].written)
        in_steps[k] = operands[first:last]
        outside[loop] = [*operands[:first], *operands[last:]]
    for k, loop in loops.items():
        output = loop.graph.output_node()
        missing = _inputs(in_steps[k], {}) - _inputs(output.all_input_nodes, outside)
        names = [node.name if parameters is None else parameters.get(node.name) for node in missing]
        if found := sorted(name for name in names if name):
            yield k, found[0]
            del outside[loop]  # it has a step, then


def _inputs(nodes: Iterable[fx.Node], made_of: Mapping[fx.Node, Sequence[fx.Node]]) -> set[fx.Node]:
    """Find the inputs that values are made of; ``made_of``: of these operands alone, some."""
    found: set[fx.Node] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += made_of.get(node, node.all_input_nodes)
    inputs = (node for node in found if node.op == "placeholder")
    return {node for node in inputs if isinstance(node.meta.get("val"), Tensor)}  # no sizes


class _Cut:
    """The step of one loop, and its way out of the graph."""

    def __init__(self, module: fx.GraphModule, index: fx.Node, line: SourceLine) -> None:
        self._outer, self._index, self._line = module.graph, index, line
        ends = [n for n in index.users if n.target is _OURS.loop_end.default]
        self._end: Any = ends[0] if ends else None
        self._find_inside()
        if self._end is not None and inline_regions(module, self._between()):
            self._find_inside()
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, Any] = {}
        self._written: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}  # select and copy, by tensor
        items = [n for n in self._inside if n.target is _ATEN.item.default]
        self._symbol = items[0].meta["val"].node.expr if items else None
        if self._end is not None:
            self._draw_before(items[0])
            if carry_rows(self._index, self._end, list(self._inside), self._place):
                self._find_inside()

    def _draw_before(self, step: fx.Node) -> None:
        """Let random operators between begin and end read numbers that are drawn before."""
        drawing = [node for node in self._between() if is_random(node)]
        for node in drawing:
            draw_before(self._index, step, node, self._refuse)
        if drawing:
            self._find_inside()

    def _between(self) -> list[fx.Node]:
        """List the nodes from the loop's begin to its end, whatever they depend on."""
        first, last = self._order[self._index], self._order[self._end]
        return [node for node, k in self._order.items() if first < k < last]

    def _find_inside(self) -> None:
        """Find the nodes of the step: all that the number of it leads to."""
        self._order = {node: k for k, node in enumerate(self._outer.nodes)}
        inside = {self._index}
        for node in self._outer.nodes:
            if node is not self._end and inside.intersection(node.all_input_nodes):
                inside.add(node)
        self._inside = {node: None for node in self._order if node in inside}

    def _refuse(self, why: str, node: fx.Node | None = None) -> LoopRefusal:
        line = None if node is None else source_line(node)
        at = f" ({line})" if line is not None and line.file else ""
        return LoopRefusal(f"the loop at {self._line} cannot be run as one step: {why}{at}")

    def replace(self, bodies: list[LoopBody]) -> fx.Node | None:
        """Put the operator in the place of the step, and enter the step.

        Returned: the operator; None where the step was recorded once more, or nothing is read.
        """
        made = None
        if self._end is not None:
            self._check()
            made = self._make(bodies)
            self._outer.erase_node(self._end)
        for node in reversed(self._inside):
            self._outer.erase_node(node)
        return made

    # -- what a step may be ---------------------------------------------------------------------

    def _check(self) -> None:
        last = self._order[self._end]
        for node in list(self._inside):
            if self._order[node] > last and not _is_check(node):
                raise self._refuse("what only a step knows is read after the loop", node)
        between = self._between()
        for node in between:
            self._check_node(node)
        for tensor, (select, _) in self._written.items():
            self._check_written(tensor, select, between)
        if (writer := shared_and_written(self._end)) is not None:
            raise self._refuse(
                "it leaves one tensor by two names, as `outs.append(h)` and `h = x[:, t]` do; one "
                "of them is written in place behind it, and the other read: clone one",
                writer,
            )

    def _check_node(self, node: fx.Node) -> None:
        target: Any = node.target
        if target is operator.getitem or _is_check(node):
            return
        if node in self._inside and str(target).startswith("aten._assert_async."):
            raise self._refuse("its check of data would be lost; check behind the loop", node)
        if (found := once_inside(node)) is not None:
            does, inner = found
            raise self._refuse(f"it {does} in a region of its own; do that before the loop", inner)
        if node in self._inside and not _is_size(node) and target is not _ATEN.item.default:
            known = isinstance(target, OpOverload) and target.namespace == "aten"
            known |= target is _OURS.loop_carry.default or isinstance(target, DrawnOperator)
            if not known:
                raise self._refuse(f"{target} inside it cannot be repeated", node)
        if not isinstance(target, OpOverload):
            return
        if not target._schema.is_mutable:
            return
        written = self._root(node.args[0])
        if node not in self._inside:
            if self._order[written] < self._order[self._index]:
                raise self._refuse("it writes into a tensor that is none of its states", node)
            return
        if written in self._inside:
            return
        select: Any = node.args[0]
        direct = select.target is _ATEN.select.int and select.args[0] is written
        if target is not _ATEN.copy_.default or not direct or written in self._written:
            raise self._refuse("it writes into a tensor otherwise than `out[:, t] = ...`", node)
        self._written[written] = (select, node)

    def _root(self, node: Any) -> Any:
        """Follow a view, or what was written in place, to the tensor that holds its memory."""
        while node in self._inside and may_share_memory(node):
            node = node.args[0]
        return node

    def _check_written(self, tensor: fx.Node, select: fx.Node, between: list[fx.Node]) -> None:
        if not is_new(tensor):
            raise self._refuse("it writes into a tensor that was not made for it", select)
        begin = self._order[self._index]
        for user in tensor.users:
            if user is select:
                continue
            if user in between or user in self._inside:
                raise self._refuse("it reads the tensor that it writes into", user)
            late = any(self._order[n] > begin for n in user.users)
            if self._order[user] < begin and late and not is_new(user):
                raise self._refuse("it writes into a tensor of which a view was taken", user)

    # -- the step as a graph --------------------------------------------------------------------

    def _make(self, bodies: list[LoopBody]) -> fx.Node | None:
        """Make the operator; None: nothing of what it makes is read."""
        olds, news, fresh, stacked = self._end.args[1:5]
        used = {n.args[1] for n in self._end.users if n.users}
        first = len(news)
        lasts = [k for k in range(len(fresh)) if first + k in used]
        rows = [k for k in range(len(stacked)) if first + len(fresh) + k in used]
        kept = [
            k
            for k, old in enumerate(olds)
            if k in used or any(n in self._inside for n in old.users)
        ]
        if not (kept or lasts or rows or self._written):  # as of a list that no one reads
            for getter in list(self._end.users):
                self._outer.erase_node(getter)
            return None
        values = [copy.args[1] for _, copy in self._written.values()]
        outputs = [*(news[k] for k in kept), *(fresh[k] for k in lasts)]
        outputs += [*(stacked[k] for k in rows), *values]
        needed = self._ancestors(outputs)
        firsts = [olds[k].args[1] for k in kept]
        for k in kept:
            self._placeholder(f"state_{k}", olds[k])
        sources, parts = self._parts(needed)
        whole = self._wholes(needed, outputs)
        for node in needed:
            if node not in self._copies:
                self._copy(node)
        self._graph.output(tuple(self._copies[x] for x in outputs))
        places = tuple(self._place(select) for select, _ in self._written.values())
        operands = [*firsts, *sources, *whole, *self._written]
        bodies.append(
            LoopBody(
                line=self._line,
                graph=self._graph,
                count=values_of(self._end.args[5]),
                carries=len(kept),
                parts=parts,
                wholes=len(whole),
                lasts=len(lasts),
                stacked=len(rows),
                written=places,
                pieces=tuple(select.meta["val"] for select, _ in self._written.values()),
                operands=tuple(x.meta["val"] for x in operands),
            )
        )
        order = [*kept, *(first + k for k in lasts), *(first + len(fresh) + k for k in rows)]
        return self._put(bodies, operands, order)

    def _ancestors(self, outputs: list[Any]) -> list[fx.Node]:
        """List the nodes of the step that its results need, with those that write in place."""
        wanted = {n for n in outputs if n in self._inside}
        for node in reversed(self._inside):
            schema = getattr(node.target, "_schema", None)
            in_place = schema is not None and schema.is_mutable and not _is_check(node)
            outwards = any(node is copy for _, copy in self._written.values())
            if node in wanted or (in_place and not outwards):
                wanted |= {n for n in node.all_input_nodes if n in self._inside} | {node}
        skipped = {_OURS.loop_index.default, _ATEN.item.default}
        return [
            n for n in self._inside if n in wanted and n.target not in skipped and not _is_size(n)
        ]

    def _placeholder(self, name: str, node: fx.Node) -> None:
        made = self._graph.placeholder(name)
        made.meta = {"val": node.meta["val"]}
        self._copies[node] = made
        if node.target is _OURS.loop_carry.default and self._is_overwritten(node):
            self._copies[node] = self._graph.call_function(_ATEN.clone.default, (made,))

    def _is_overwritten(self, carry: fx.Node) -> bool:
        for node in self._inside:
            schema = getattr(node.target, "_schema", None)
            if schema is not None and schema.is_mutable and not _is_check(node):
                if self._root(node.args[0]) is carry:
                    return True
        return False

    def _parts(self, needed: list[fx.Node]) -> tuple[list[fx.Node], tuple[Place, ...]]:
        sources, places = [], []
        known: dict[Any, fx.Node] = {}
        for node in needed:
            source: Any = node.args[0] if node.args else None
            if node.target is not _ATEN.select.int or source in self._inside:
                continue
            place = self._place(node)
            if (source, place) not in known:
                known[source, place] = node
                self._placeholder(f"part_{len(places)}", node)
                sources.append(source)
                places.append(place)
            self._copies[node] = self._copies[known[source, place]]
        return sources, tuple(places)

    def _place(self, select: fx.Node) -> Place:
        """Read the position that a step reads or writes: a multiple of its number."""
        _, axis, at = select.args
        position = _expression(values_of(at))
        factor = sympy.expand(position).coeff(self._symbol, 1)
        offset = sympy.expand(position - factor * self._symbol)
        if self._symbol in (factor.free_symbols | offset.free_symbols) or factor == 0:
            raise self._refuse("it reads at a position that is no multiple of its step", select)
        rank = values_of(select.args[0]).dim()
        return Place(axis % rank, factor, offset)  # pyright: ignore[reportOperatorIssue]

    def _wholes(self, needed: list[fx.Node], outputs: list[Any]) -> list[fx.Node]:
        """Enter what comes from outside; a state that no step changes is its first value."""
        found: list[fx.Node] = []

        def enter(node: fx.Node) -> None:
            if _is_size(node) or node in self._copies:
                return
            source: Any = node
            if node.target is _OURS.loop_carry.default:
                source = node.args[1]
            elif node in self._inside:
                return
            if node.op == "get_attr" and not isinstance(node.meta.get("val"), torch.Tensor):
                raise self._refuse("a region inside it cannot be repeated", node)
            if source in found:
                self._copies[node] = self._copies[source]
                return
            self._placeholder(f"whole_{len(found)}", source)
            self._copies[node] = self._copies[source]
            found.append(source)

        for node in needed:
            if node in self._copies:
                continue
            if node.target is _OURS.loop_carry.default:
                enter(node)
                continue
            for argument in node.all_input_nodes:
                enter(argument)
        for node in outputs:
            enter(node)
        return found

    def _copy(self, node: fx.Node) -> None:
        def translate(argument: fx.Node) -> Any:
            return argument.meta["val"] if _is_size(argument) else self._copies[argument]

        args, kwargs = pytree.tree_map_only(fx.Node, translate, (node.args, dict(node.kwargs)))
        if any(_has(x, self._symbol) for x in pytree.tree_leaves((args, kwargs))):
            raise self._refuse("it computes with the number of its step", node)
        if node.meta.get("unbacked_bindings"):
            why = "it picks by data, in each step as many as there are; choose with torch.where"
            raise self._refuse(why, node)
        made = self._graph.call_function(node.target, args, kwargs)  # pyright: ignore
        made.meta = {k: v for k, v in node.meta.items() if k in ("val", "stack_trace")}
        self._copies[node] = made

    def _put(self, bodies: list[LoopBody], operands: list[fx.Node], order: list[int]) -> fx.Node:
        body = bodies[-1]
        getters = {n.args[1]: n for n in self._end.users}
        made = self._end.meta["val"]
        values = [made[k] for k in order] + [tensor.meta["val"] for tensor in self._written]
        trace = {"stack_trace": self._index.meta.get("stack_trace")}
        with self._outer.inserting_after(self._end):
            loop = self._outer.call_function(
                _OURS.dynamic_loop.default, (len(bodies) - 1, body.text(), operands)
            )
        loop.meta = {"val": values, **trace}
        before = loop
        results = []
        for k, value in enumerate(values):
            with self._outer.inserting_after(before):
                before = self._outer.call_function(operator.getitem, (loop, k))
            before.meta = {"val": value, **trace}
            results.append(before)
        for place, result in zip(order, results, strict=False):
            if place in getters:
                getters[place].replace_all_uses_with(result)
        last = self._order[self._end]
        for tensor, result in zip(self._written, results[len(order) :], strict=True):
            late = [u for u in tensor.users if self._order.get(u, -1) > last]
            for user in late:
                user.replace_input_with(tensor, result)
        for getter in getters.values():
            self._outer.erase_node(getter)
        return loop


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymBool | torch.SymFloat)


def _is_check(node: fx.Node) -> bool:
    return str(node.target).startswith(CHECKS) or isinstance(node.meta.get("val"), torch.SymBool)


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _has(size: Any, symbol: Any) -> bool:
    numbers = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return isinstance(size, numbers) and symbol in size.node.expr.free_symbols
