"""Refuse malformed tensor graphs with a message that says what is wrong and where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_disc.analysis.program.workspace import LibraryWorkspace
from relax_disc.analysis.symbolic.expr import SymbolicExpr
from relax_disc.errors import GraphError

if TYPE_CHECKING:
    from relax_disc.analysis.program.tensor_graph import Kernel, Size, TensorGraph


def validate_graph(graph: TensorGraph) -> None:
    """Check ids, sizes, producers, order, `after` edges and in-place pairs.

    Raises `GraphError`: for an unknown tensor or kernel, a negative or non-integer size, a tensor
    made twice or never, a cycle, kernels out of order, or an in-place pair that overwrites a value
    somebody still needs.
    """
    _check_sizes(graph)
    _check_ids(graph)
    made = _check_producers(graph)
    _check_order(graph, made)
    _check_inplace(graph, made)


def _where(kernel: Kernel, index: int) -> str:
    return f"kernel {index} ({kernel.name})"


def _check_sizes(graph: TensorGraph) -> None:
    names = [dim.name for dim in graph.dims]
    if len(set(names)) != len(names):
        raise GraphError(f"two dims have the same name: {sorted(names)}")
    if graph.tensor_names and len(graph.tensor_names) != len(graph.sizes):
        raise GraphError(f"{len(graph.tensor_names)} tensor names for {len(graph.sizes)} tensors")
    for tensor, size in enumerate(graph.sizes):
        _check_size(size, f"{graph.tensor_name(tensor)}: size")
    for index, kernel in enumerate(graph.kernels):
        for field in ("workspace_bytes", "flops", "moved_bytes"):
            _check_size(getattr(kernel, field), f"{_where(kernel, index)}: {field}")
        if kernel.time_ns is not None:
            _check_size(kernel.time_ns, f"{_where(kernel, index)}: time_ns")
    if graph.recorded_peak_bytes is not None:
        _check_size(graph.recorded_peak_bytes, "recorded_peak_bytes")


def _check_size(size: Size | LibraryWorkspace, what: str) -> None:
    if isinstance(size, SymbolicExpr | LibraryWorkspace):
        return
    if isinstance(size, bool) or not isinstance(size, int):
        raise GraphError(f"{what} is {size!r}; it must be a whole number or an expression")
    if size < 0:
        raise GraphError(f"{what} is negative: {size}")


def _check_ids(graph: TensorGraph) -> None:
    count = len(graph.sizes)

    def check(tensors: tuple[int, ...], what: str, *, distinct: bool) -> None:
        for tensor in tensors:
            if isinstance(tensor, bool) or not isinstance(tensor, int):
                raise GraphError(f"{what}: {tensor!r} is no tensor number")
            if not 0 <= tensor < count:
                raise GraphError(f"{what}: unknown tensor {tensor}; there are {count}")
        if distinct and len(set(tensors)) != len(tensors):
            raise GraphError(f"{what}: a tensor is listed twice")

    check(graph.inputs, "graph inputs", distinct=True)
    check(graph.outputs, "graph outputs", distinct=False)
    for index, kernel in enumerate(graph.kernels):
        where = _where(kernel, index)
        check(kernel.inputs, f"{where}: inputs", distinct=False)
        check(kernel.outputs, f"{where}: outputs", distinct=True)
        check(kernel.views, f"{where}: views", distinct=False)
        for pair in kernel.inplace:
            if len(pair) != 2:
                raise GraphError(f"{where}: an in-place pair has two tensors, not {pair!r}")
        for other in kernel.after:
            if isinstance(other, bool) or not isinstance(other, int):
                raise GraphError(f"{where}: after: {other!r} is no kernel number")
            if not 0 <= other < len(graph.kernels):
                raise GraphError(f"{where}: runs after unknown kernel {other}")


def _check_producers(graph: TensorGraph) -> tuple[int | None, ...]:
    resident = frozenset(graph.inputs)
    made: list[int | None] = [None] * len(graph.sizes)
    for index, kernel in enumerate(graph.kernels):
        for tensor in kernel.outputs:
            name = graph.tensor_name(tensor)
            if tensor in resident:
                raise GraphError(f"{_where(kernel, index)} makes graph input {name}")
            other = made[tensor]
            if other is not None:
                first = _where(graph.kernels[other], other)
                raise GraphError(f"{name} is made twice: by {first} and by {_where(kernel, index)}")
            made[tensor] = index
    for tensor in graph.outputs:
        if made[tensor] is None and tensor not in resident:
            raise GraphError(f"graph output {graph.tensor_name(tensor)} is never made")
    for index, kernel in enumerate(graph.kernels):
        for tensor in (*kernel.inputs, *kernel.views):
            if made[tensor] is None and tensor not in resident:
                name = graph.tensor_name(tensor)
                raise GraphError(f"{_where(kernel, index)} reads {name}, which is never made")
    return tuple(made)


def _check_order(graph: TensorGraph, made: tuple[int | None, ...]) -> None:
    for index, kernel in enumerate(graph.kernels):
        for other in (*(made[tensor] for tensor in kernel.inputs), *kernel.after):
            if other is None or other < index:
                continue
            cycle = _find_cycle(graph, made)
            if cycle:
                path = " -> ".join(_where(graph.kernels[k], k) for k in cycle)
                raise GraphError(f"the graph has a cycle: {path}")
            raise GraphError(
                f"kernels are not in a valid order: {_where(kernel, index)} needs "
                f"{_where(graph.kernels[other], other)}, which comes later"
            )


def _find_cycle(graph: TensorGraph, made: tuple[int | None, ...]) -> list[int]:
    """Return kernels that need each other, each needed by the next; empty if there is no cycle."""
    needs = [
        sorted({j for j in (*(made[t] for t in kernel.inputs), *kernel.after) if j is not None})
        for kernel in graph.kernels
    ]
    state = [0] * len(needs)  # 0 new, 1 on the path, 2 done
    for start in range(len(needs)):
        if state[start]:
            continue
        path, iterators = [start], [iter(needs[start])]
        state[start] = 1
        while path:
            following = next(iterators[-1], None)
            if following is None:
                state[path.pop()] = 2
                iterators.pop()
            elif state[following] == 1:
                return [*path[path.index(following) :], following][::-1]
            elif state[following] == 0:
                state[following] = 1
                path.append(following)
                iterators.append(iter(needs[following]))
    return []


def _check_inplace(graph: TensorGraph, made: tuple[int | None, ...]) -> None:
    held = frozenset(graph.inputs) | graph.written_in_place()
    overwritten: dict[int, int] = {}
    for index, kernel in enumerate(graph.kernels):
        where = _where(kernel, index)
        for pair in kernel.inplace:
            source, target = pair
            if source not in kernel.inputs or target not in kernel.outputs:
                raise GraphError(f"{where}: in-place pair {pair} is no (input, output) of it")
            if source not in held:
                continue
            if source in overwritten:
                first = overwritten[source]
                raise GraphError(
                    f"{graph.tensor_name(source)} is overwritten twice: by "
                    f"{_where(graph.kernels[first], first)} and by {where}"
                )
            overwritten[source] = index
    if overwritten:
        _check_overwritten(graph, made, overwritten)


def _check_overwritten(
    graph: TensorGraph, made: tuple[int | None, ...], overwritten: dict[int, int]
) -> None:
    """Check that nobody can read a graph input after the kernel that writes its new value."""
    readers: dict[int, list[int]] = {}
    for index, kernel in enumerate(graph.kernels):
        for tensor in set(kernel.inputs):
            if tensor in overwritten and overwritten[tensor] != index:
                readers.setdefault(tensor, []).append(index)
    for tensor, writer in overwritten.items():
        missing = set(readers.get(tensor, ())) - set(graph.kernels[writer].after)
        if not missing:
            continue
        missing -= _ancestors(graph, made, writer, min(missing))
        if missing:
            reader = min(missing)
            raise GraphError(
                f"{_where(graph.kernels[writer], writer)} overwrites {graph.tensor_name(tensor)}, "
                f"but {_where(graph.kernels[reader], reader)}, a reader, is not ordered before it"
            )
        if tensor in graph.outputs:
            raise GraphError(
                f"{_where(graph.kernels[writer], writer)} overwrites {graph.tensor_name(tensor)}, "
                "which is a graph output"
            )


def _ancestors(
    graph: TensorGraph, made: tuple[int | None, ...], kernel: int, least: int
) -> set[int]:
    """Return the kernels with index >= `least` that must run before `kernel`."""
    found: set[int] = set()
    stack = [kernel]
    while stack:
        index = stack.pop()
        here = graph.kernels[index]
        for other in (*(made[tensor] for tensor in here.inputs), *here.after):
            if other is not None and other >= least and other not in found:
                found.add(other)
                stack.append(other)
    return found
