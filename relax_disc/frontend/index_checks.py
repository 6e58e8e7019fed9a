"""Make every index of a traced program safe: proved in range, checked at entry, or by the program.

What an index may be follows from `index_ranges`.  Where that proves it in range nothing is done.
Where it stems from the batch, or from sizes alone, a condition is noted that each call checks
before it runs.  Any other is brought into range, so that kernels read and write inside their
tensors, and a flag says by how much it was outside: a scalar that `vm_builtins/guard.py` looks at
before the step writes anything.  That kernel may stop the function; `Guards` emits it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from tvm import relax, te, tirx
from tvm.ir import StringImm

from relax_disc.analysis.symbolic.comparison.compare import at_most
from relax_disc.frontend.capture.arguments import Argument
from relax_disc.frontend.capture.source_lines import SourceLine, at_line
from relax_disc.frontend.emitter import Emitter
from relax_disc.frontend.index_ranges import IndexRanges, Interval, Size, required
from relax_disc.frontend.spec import IndexCheck, SizeCheck
from relax_disc.vm_builtins.guard import GUARD

_FARTHEST = 2**40
"""Distances from the range are cut to this, so that twice one fits a flag."""

# Of these, which PyTorch writes as advanced indexing, a negative index is an error.
_NEVER_NEGATIVE = ("aten.index_add", "aten.index_copy", "aten.index_reduce")


@dataclass(frozen=True, slots=True)
class Use:
    """An index among the arguments of a node."""

    path: tuple[int, ...]  # its argument, and its place there if that is a list
    extent: Any  # of the axis that it selects from
    wraps: bool = False  # whether negative positions count from the end
    ignored: int | None = None  # a value that selects nothing


def uses(node: fx.Node) -> Iterator[Use]:
    """List the indices that an operator takes."""
    name = str(node.target)
    args: Any = node.args
    if name == "aten.embedding.default":
        yield Use((1,), args[0].meta["val"].shape[0])
    elif name == "aten.embedding_dense_backward.default":
        rows = args[2].meta["val"] if isinstance(args[2], fx.Node) else args[2]
        yield Use((1,), rows)
    elif name.startswith("relax_disc.cross_entropy"):
        at = 2 if "backward" in name else 1
        ignored = int(args[6 if "backward" in name else 3])
        yield Use((at,), args[at - 1].meta["val"].shape[1], ignored=ignored)
    elif name.startswith("aten.multi_margin_loss"):
        at = 2 if "backward" in name else 1
        yield Use((at,), args[at - 1].meta["val"].shape[-1])
    elif name.startswith("aten.multilabel_margin_loss_forward"):  # -1 ends a row's labels
        yield Use((1,), args[0].meta["val"].shape[-1], ignored=-1)
    elif name.startswith(("aten.gather.", "aten.scatter", "aten.index_select.")):
        shape = args[0].meta["val"].shape
        yield Use((2,), shape[args[1]] if shape else 1)
    elif name in ("aten.index.Tensor", "aten.index_put.default"):
        wraps = not _origin(node).startswith(_NEVER_NEGATIVE)
        for place, index in enumerate(args[1]):
            if index is not None and index.meta["val"].dtype not in (torch.bool, torch.uint8):
                yield Use((1, place), args[0].meta["val"].shape[place], wraps)
    elif name == "aten.eq.Tensor" and _origin(node).startswith("aten.one_hot."):
        yield Use((0,), node.meta["val"].shape[-1])


def _origin(node: fx.Node) -> str:
    sources = node.meta.get("from_node") or []
    return str(sources[0].target) if sources else ""


class IndexChecks:
    """What one function checks of its indices.

    ``at_entry``: on the batch. ``sizes``: on the dims. ``flags``: for the guard: flag, least and
    greatest value, place in the model, of each index and of each assertion.
    """

    def __init__(
        self, emitter: Emitter, graph: fx.GraphModule, arguments: Sequence[Argument]
    ) -> None:
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        self._emitter = emitter
        self._argument = dict(zip(nodes, arguments, strict=True))
        on_device = any(
            a.tensor is not None and a.tensor.device.type != "cpu" for a in arguments
        )  # to look there at the batch would wait for it
        leaves = {
            node: int(a.target)
            for node, a in self._argument.items()
            if a.kind == "batch" and not on_device
        }
        self._ranges = IndexRanges(emitter.symbols, leaves)
        self._safe: dict[tuple[Any, ...], Any] = {}
        self.at_entry: list[IndexCheck] = []
        self.sizes: list[SizeCheck] = []
        self.flags: list[Any] = []

    def apply(self, node: fx.Node, args: Sequence[Any]) -> list[Any]:
        """Return the translated arguments of a node with safe indices."""
        result = list(args)
        for use in uses(node):
            source: Any = node.args[use.path[0]]
            for place in use.path[1:]:
                source = source[place]
            first, *rest = use.path
            if rest:
                result[first] = list(result[first])
            holder, last = (result[first], rest[0]) if rest else (result, first)
            safe = self._checked(node, source, use, holder[last])
            if safe is not None:
                holder[last] = safe
        return result

    def _checked(self, node: fx.Node, source: fx.Node, use: Use, index: Any) -> Any:
        """Check one index; return what to read in its place, None for itself."""
        key = (source, str(use.extent), use.wraps, use.ignored)
        if key in self._safe:
            return self._safe[key]
        found, extent = self._ranges.of(source), self._ranges.size(use.extent)
        self._safe[key] = None
        if extent is not None:
            lower, upper = (-extent if use.wraps else extent * 0), extent - 1
            if self._is_proved(found, lower, upper):
                return None
            if found.is_reached and self._by_sizes(node, found, lower, upper):
                return None
            if self._by_batch(node, found, use, lower, upper):
                return None
        self._safe[key] = self._flagged(node, use, index)
        return self._safe[key]

    def _is_proved(self, found: Interval, lower: Size, upper: Size) -> bool:
        return at_most(lower, found.lower) and at_most(found.upper, upper)

    def _by_sizes(self, node: fx.Node, found: Interval, lower: Size, upper: Size) -> bool:
        """Note what the dims must fulfil where data play no part."""
        if found.lower is None or found.upper is None:
            return False
        if self._is_counted(found.lower, found.upper, lower, upper):
            return False
        table = self._table(node)
        if not at_most(found.upper, upper):
            self.sizes.append(
                SizeCheck(
                    _plain(found.upper + 1),
                    "<=",
                    _plain(upper + 1),
                    f"{_where(node)} needs {found.upper + 1} = {{size}} rows of {table}, which has "
                    "{limit}. Crop the batch, or declare a narrower Dim.",
                )
            )
        if not at_most(lower, found.lower):
            self.sizes.append(
                SizeCheck(
                    _plain(lower),
                    "<=",
                    _plain(found.lower),
                    f"{_where(node)} reads position {{limit}} of {table}; the least is {{size}}.",
                )
            )
        return True

    def _by_batch(self, node: fx.Node, found: Interval, use: Use, lower: Size, upper: Size) -> bool:
        """Note what the batch must fulfil; False where that does not follow."""
        origin = found.origin
        if origin is None or self._is_counted(lower, upper):
            return False
        ignored = use.ignored
        if origin.ignored is not None:
            if not (at_most(lower, origin.instead) and at_most(origin.instead, upper)):
                return False
            ignored = origin.ignored
        elif ignored is not None and origin.steps:
            return False
        limits = required(self._ranges, origin, lower, upper)
        if limits is None:
            return False
        views = list(origin.views)
        while views and views[-1][0] in ("reshape", "permute"):
            views.pop()
        numbers = tuple((name, *map(_plain, rest)) for name, *rest in views)
        low, high = (None if end is None else _plain(end) for end in limits)
        self.at_entry.append(IndexCheck(origin.leaf, numbers, low, high, ignored, _where(node)))
        return True

    def _is_counted(self, *sizes: Size) -> bool:
        """Whether one of several sizes is known only when a call has counted it."""
        counted = self._emitter.symbols.counted
        return any(dim.name in counted for size in sizes for dim in size.free_dims)

    def _flagged(self, node: fx.Node, use: Use, index: Any) -> relax.Var:
        """Emit a flag, and the index brought into range."""
        emitter = self._emitter
        # Messages to nodes have one index for all features: as many copies are not looked at.
        whole, index = emitter.shape(index), emitter.before_broadcast(index)
        extent = emitter.symbols.size(use.extent)
        dtype, zero = emitter.dtype(index), tirx.const(0, "int64")

        def distance(value: Any, extent: Any) -> Any:
            value, far = value.astype("int64"), tirx.const(_FARTHEST, "int64")
            least = -extent if use.wraps else zero
            below = tirx.min(least - value, far) * 2 + 1
            above = tirx.min(value - (extent - 1), far) * 2
            flag = tirx.Select(value < least, below, tirx.Select(value >= extent, above, zero))
            return _unless(use.ignored, value, zero, flag)

        # Sizes as the kernel gets them: TVM gives it variables of its own.
        def flag(index: Any, size: Any = extent) -> Any:
            axes = [te.reduce_axis((0, n), "i") for n in index.shape]
            if not axes:
                return te.compute((), lambda: distance(index(), size), name="outside")
            return te.compute(
                (), lambda: te.max(distance(index(*axes), size), axis=axes), name="outside"
            )

        def inside(index: Any, size: Any = extent) -> Any:
            def element(*i: Any) -> Any:
                value = index(*i).astype("int64")
                place = tirx.Select(value < 0, value + size, value) if use.wraps else value
                place = tirx.max(tirx.min(place, size - 1), zero)
                return _unless(use.ignored, value, value, place).astype(dtype)

            return te.compute(index.shape, element, name="inside")

        number = [] if isinstance(extent, tirx.IntImm) else [extent]
        outside = emitter.te("index_outside", flag, index, *number)
        least = -extent if use.wraps else zero
        bounds = [relax.prim_value(bound) for bound in (least, extent - 1)]
        self.flags += [outside, *bounds, StringImm(_where(node))]
        safe = emitter.te("index_inside", inside, index, *number)
        if emitter.same_shape(emitter.shape(safe), whole):
            return safe
        return emitter.emit(relax.op.broadcast_to(safe, relax.ShapeExpr(whole)))

    def add_assertion(self, node: fx.Node, condition: Any) -> None:
        """Emit the flag of an assertion, and its message; that no value is allowed tells it."""
        if _origin(node).startswith("aten.one_hot."):
            return  # of indices, which are checked as such

        def flag(condition: Any) -> Any:
            zero, one = tirx.const(0, "int64"), tirx.const(1, "int64")
            fails = lambda *i: tirx.Select(condition(*i).astype("int32") != 0, zero, one)  # noqa: E731
            return te.compute(condition.shape, fails, name="fails")

        text = node.args[1] if len(node.args) > 1 else ""
        message = text or f"An assertion of the model{at_line(node)} fails."
        bounds = [relax.prim_value(1), relax.prim_value(0)]
        self.flags += [self._emitter.te("fails", flag, condition), *bounds, StringImm(message)]

    def _table(self, node: fx.Node) -> str:
        table: Any = node.args[0]
        while str(table.target) in ("aten.alias.default", "aten.detach.default"):
            table = table.args[0]
        argument = self._argument.get(table)
        if argument is not None and argument.kind in ("parameter", "buffer"):
            return str(argument.target)
        return "the tensor"


def _unless(ignored: int | None, value: Any, this: Any, other: Any) -> Any:
    return other if ignored is None else tirx.Select(value == ignored, this, other)


def _plain(size: Size) -> int | str:
    return size.as_int() if size.is_constant else str(size)


def _where(node: fx.Node) -> str:
    name = _origin(node) or str(node.target)
    return name.removesuffix(".default") + at_line(node)


class Guards:
    """Emits the guards of one function; the first looks at everything.

    ``buffers`` are names and new values of the buffers that the function writes, ``flags`` those of
    `IndexChecks`.
    """

    def __init__(
        self,
        emitter: Emitter,
        loss: relax.Expr,
        buffers: Sequence[tuple[str, Any]],
        flags: Sequence[Any],
    ) -> None:
        self._emitter, self._loss = emitter, loss
        floats = [(x, StringImm(name)) for name, x in buffers if "float" in emitter.dtype(x)]
        self._rest = [relax.prim_value(len(floats)), *(part for pair in floats for part in pair)]
        self._rest += flags

    def behind(self, hyper: relax.Var) -> relax.Var:
        """Return hyper-parameters that are there only when nothing forbids the step."""
        self._emitter.locate(f"{hyper.name}_checked", SourceLine("", 0))
        call = relax.call_dps_packed(GUARD, [hyper, self._loss, *self._rest], hyper.ty)
        self._rest = [relax.prim_value(0)]
        return self._emitter.emit(call)

    def token(self) -> relax.Var:
        """Guard a function without hyper-parameters; the result must be returned."""
        self._emitter.locate("guarded", SourceLine("", 0))
        nothing = relax.const([0.0], "float32")
        kind = relax.TensorType([1], "float32")
        return self._emitter.emit(
            relax.call_dps_packed(GUARD, [nothing, nothing, *self._rest], kind)
        )
