"""Write an exported graph without operators that write into tensors, where that is plain.

PyTorch's functionalization does it for every graph, at the price of one more layer under each
operator of the trace: two fifths of its time.  Most networks write in few ways: batch norms their
statistics, counters, activations and sums of residues what a convolution has just made.  There the
operator gives way to the one that returns its result, which later readers read instead.

Limits: a tensor of which a view was taken, operators that may return their operand, mixed types,
nested graphs and random operators are left to PyTorch's functionalization, with all of the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from relax_disc.ops.batch_norm import batch_norm_and_statistics, is_kept

_ATEN = torch.ops.aten
_BATCH_NORM = _ATEN.batch_norm.default
_NEW_TENSORS = frozenset(
    f"aten::{name}"
    for name in "batch_norm conv1d conv2d conv3d group_norm layer_norm linear matmul".split()
)
"""Operators in terms of others that never return an operand."""

_MAY_BE_OPERAND = frozenset(
    (
        *("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"),
        *("atleast_1d", "atleast_2d", "atleast_3d", "cartesian_prod", "einsum"),
        *("conj_physical", "sum_to_size", "to_dense", "unsafe_chunk"),
    )
)
"""A dropout that drops nothing, an einsum of one operand."""

# Their schemas do not tell that they write running statistics where they normalise by the batch's.
_WRITES_STATISTICS = ("aten::batch_norm", "aten::native_batch_norm", "aten::instance_norm")
_BY_BATCH = 5  # the position of that argument


def writes(node: fx.Node) -> bool:
    """Whether a node is an operator that writes into its operands."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return False
    return schema.is_mutable or (schema.name in _WRITES_STATISTICS and bool(node.args[_BY_BATCH]))


def memory_of(node: Any) -> Any:
    """Follow views to the node that holds their memory."""
    while isinstance(node, fx.Node) and (below := viewed(node)) is not None:
        node = below
    return node


def viewed(node: fx.Node) -> Any:
    """Return what a node is a view or a part of, or may be itself; None of a tensor of its own."""
    schema = getattr(node.target, "_schema", None)
    views = schema is not None and any(r.alias_info is not None for r in schema.returns)
    views = views or may_be_operand(node) or node.target is operator.getitem
    if node.op != "call_function" or not views:
        return None
    below: Any = node.args[1] if getattr(node.target, "_opname", None) == "einsum" else node.args[0]
    while isinstance(below, list | tuple) and below:  # of tensors
        below = below[0]
    return below


def may_be_operand(node: fx.Node) -> bool:
    """Whether an operator returns its operand or a view of it at times, as its schema hides."""
    name = getattr(node.target, "_opname", None)
    operands: Any = node.args[1] if name == "einsum" else ()
    return name in _MAY_BE_OPERAND and len(operands) < 2


def views_written_later(graph: fx.Graph) -> set[fx.Node]:
    """Find views whose memory is written behind them: by themselves, their base or another view.

    A graph inside that writes may write what it is given.
    """
    last: dict[Any, int] = {}
    for place, node in enumerate(graph.nodes):
        last.update((memory_of(operand), place) for operand in written_operands(node))
    return {
        node
        for place, node in enumerate(graph.nodes if last else ())
        if (memory := memory_of(node)) is not node and last.get(memory, -1) > place
    }


def written_operands(node: fx.Node) -> list[Any]:
    """List the tensors that an operator, or a graph that it runs, may write into."""
    if writes(node):
        schema: Any = node.target._schema  # pyright: ignore
        if not schema.is_mutable:
            return list(node.args[3:5])  # statistics
        given = dict(zip((a.name for a in schema.arguments), node.args, strict=False))
        given.update(node.kwargs)
        return [given[a.name] for a in written_arguments(schema) if a.name in given]
    inner = [each for graph in graphs_in(node) for each in graph.modules()]
    graphs = [each.graph for each in inner if isinstance(each, fx.GraphModule)]
    return node.all_input_nodes if any(writes(n) for g in graphs for n in g.nodes) else []


def graphs_in(node: fx.Node) -> Iterator[fx.GraphModule]:
    """List the graphs that a node runs, such as a region without gradients."""
    for operand in node.all_input_nodes:
        if operand.op == "get_attr" and "." not in str(operand.target):
            found = getattr(node.graph.owning_module, str(operand.target))
            if isinstance(found, fx.GraphModule):
                yield found


def written_arguments(schema: Any) -> list[Any]:
    """List the arguments that an operator writes into, as its schema has them."""
    return [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def views_parted_by_writes(graph: fx.Graph, kinds: Collection[Any]) -> set[fx.Node]:
    """Find views of some kinds that would differ from their base, if they were copies.

    One of the two is written, and the other is read behind that. What an input of the graph holds
    is read at its end.
    """
    place = {node: k for k, node in enumerate(graph.nodes)}
    written = [(place[node], operand) for node in place for operand in written_operands(node)]
    found: set[fx.Node] = set()
    for view in (node for node in place if node.target in kinds) if written else ():
        memory = memory_of(view)
        same = [node for node in place if memory_of(node) is memory]
        inside = {view}
        for node in same:
            if inside.intersection(node.all_input_nodes):
                inside.add(node)
        outside = set(same) - inside
        is_kept = memory.op == "placeholder"
        for k, operand in written:
            if operand in inside:
                others, is_read = outside, is_kept
            elif operand in outside:
                others, is_read = inside, False
            else:
                continue
            readers = (place[user] for node in others for user in node.users)
            if is_read or any(reader > k for reader in readers):
                found.add(view)
    return found


def without_writes(
    module: fx.GraphModule, writable: Collection[str]
) -> tuple[fx.GraphModule, list[str]] | None:
    """Return a graph that writes nothing, and the inputs whose new values it returns at its end.

    ``writable``: names of the inputs that may be written; no two are the same tensor.  None where
    this is not plain: see the module.
    """
    if any(isinstance(m, fx.GraphModule) for m in module.modules() if m is not module):
        return None
    graph = fx.Graph()
    output: Any = graph.graph_copy(module.graph, {})
    latest: dict[fx.Node, fx.Node] = {}  # what later readers read instead
    viewed: set[fx.Node] = set()

    def newest(node: fx.Node) -> fx.Node:
        while node in latest:
            node = latest[node]
        return node

    def is_plain(node: Any) -> bool:
        if node in viewed:
            return False
        if node.op == "placeholder":
            return node.name in writable
        return node in latest.values() or is_new(node)

    node: Any
    for node in list(graph.nodes):
        node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), newest)
        if node.op != "call_function":
            continue
        target: Any = node.target
        if target is _BATCH_NORM and node.args[5] and node.args[3] is not None:
            written, new = list(node.args[3:5]), _batch_norm(graph, node)
        elif isinstance(target, OpOverload) and target._schema.is_mutable:
            written, new = [node.args[0]], _functional(graph, node)
        else:
            if not is_new(node):
                viewed.update(node.all_input_nodes)
            continue
        if new is None or not all(map(is_plain, written)):
            return None
        latest[node] = new[0]
        latest.update(zip(written, new[-len(written) :], strict=True))
    changed = [node for node in graph.nodes if node.op == "placeholder" and node in latest]
    graph.output((*fx.map_arg(output, newest), *map(newest, changed)))
    for node in [node for node in latest if node.op != "placeholder" and not node.users]:
        graph.erase_node(node)
    return fx.GraphModule(module, graph), [node.name for node in changed]


def _batch_norm(graph: fx.Graph, node: Any) -> list[fx.Node] | None:
    """Compute the result and the new statistics of a batch norm."""
    operands = [operand for operand in node.args[:5] if isinstance(operand, fx.Node)]
    if not is_kept([operand.meta["val"] for operand in operands]):
        return None
    with graph.inserting_before(node):
        whole = graph.call_function(batch_norm_and_statistics, node.args[:8])
        parts = [graph.call_function(operator.getitem, (whole, k)) for k in range(3)]
    whole.meta = {key: value for key, value in node.meta.items() if key != "val"}
    for part, like in zip(parts, (node, *node.args[3:5]), strict=True):
        part.meta = dict(like.meta)
    return parts


def _functional(graph: fx.Graph, node: Any) -> list[fx.Node] | None:
    """Compute what an operator would write into its first operand, and into no other."""
    target: Any = node.target
    if not node.args or not isinstance(node.args[0], fx.Node):
        return None  # what makes a tensor, and writes it into another: ``torch.eye(5, out=x)``
    schema, value = target._schema, node.args[0].meta.get("val")
    name, _, base = schema.name.partition("::")
    others = [x.meta.get("val") for x in node.all_input_nodes[1:]]
    written = written_arguments(schema)
    is_plain = (
        name == "aten"
        and base.endswith("_")
        and written == schema.arguments[:1]
        and not _is_composite(target)
        and torch.Tag.nondeterministic_seeded not in target.tags
        and isinstance(value, Tensor)
        and all(x.dtype == value.dtype for x in others if isinstance(x, Tensor))
        and (value.is_floating_point() or not any(isinstance(x, float) for x in node.args))
    )
    if target is _ATEN.copy_.default:  # PyTorch has no gradient of ``copy``
        source = node.args[1].meta.get("val")
        return [_copied(graph, node)] if is_plain and _has_one_shape(source, value) else None
    packet = getattr(_ATEN, base[:-1], None) if is_plain else None
    functional = getattr(packet, target._overloadname, None)
    if functional is None or functional._schema.is_mutable:
        return None
    if any(r.alias_info is not None for r in functional._schema.returns):
        return None
    kinds = [[(a.name, str(a.type)) for a in s.arguments] for s in (schema, functional._schema)]
    if kinds[0] != kinds[1] or len(functional._schema.returns) != 1:
        return None
    with graph.inserting_before(node):
        new = graph.call_function(functional, node.args, node.kwargs)
    new.meta = dict(node.meta)
    return [new]


def _copied(graph: fx.Graph, node: Any) -> fx.Node:
    with graph.inserting_before(node):
        new = graph.call_function(_ATEN.clone.default, (node.args[1],))
    new.meta = dict(node.meta)
    return new


def _has_one_shape(one: Any, other: Any) -> bool:
    """Whether two tensors are written as of one shape: to ask PyTorch would be a guard."""
    return isinstance(one, Tensor) and str(list(one.shape)) == str(list(other.shape))


def is_new(node: fx.Node) -> bool:
    """Whether a call returns memory of its own and takes no view of an operand."""
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return False
    schema = target._schema
    if schema.name in _NEW_TENSORS:
        return True
    aliases = any(r.alias_info is not None for r in schema.returns)
    return target.namespace == "aten" and not aliases and not _is_composite(target)


def _is_composite(target: OpOverload) -> bool:
    """Whether an operator is a function of others, whose schema may not tell all."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), key)
