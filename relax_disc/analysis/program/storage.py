"""Decide where every buffer of a function lives, and in which order its kernels run.

A result escapes: it gets memory of its own.  A result that replaces a parameter (attribute
``relax_disc.inplace_pairs``) is written into the parameter's buffer by the kernel that makes it, if
every kernel that reads the old value can come first and the kernel itself may write where it reads;
else it is made in the arena and copied over at the end.  Nothing is written over a parameter before
the guards have run (`vm_builtins/guard.py`): what they depend on is copied, too.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tvm import relax

from relax_disc.analysis.program.table import FunctionTable, Joined, KernelCall, View
from relax_disc.vm_builtins.guard import GUARD
from relax_disc.vm_builtins.plan_metadata import Storage

MayOverwrite = Callable[[KernelCall, int, int], bool]
"""Whether a kernel may write an output (view position) over an input that it reads."""

_COPY_NAME: Any = "relax_disc.copy"
COPY = relax.ExternFunc(_COPY_NAME)


def place_results(
    table: FunctionTable,
    pairs: Mapping[int, int],
    may_overwrite: MayOverwrite,
    *,
    only_copies: bool = False,
) -> None:
    """Set the storage of every result, adding copies where a result cannot be made in place.

    ``table``: as `read_function` made it; changed in place. ``pairs``: flat result -> index of the
    given tensor that it replaces. ``may_overwrite``: `may_overwrite(kernel, given_buffer,
    output_buffer)`. ``only_copies``: copy every result that replaces a parameter at the end, which
    always has an order.
    """
    given = table.given_buffers()
    results = table.flat_result()
    overwritten = {given[param] for param in pairs.values()}
    producers = {b: k for k, kernel in enumerate(table.kernels) for b in kernel.outputs}
    guards = [k for k, kernel in enumerate(table.kernels) if kernel.name == GUARD]
    guarded_by = _ancestors(table, guards)
    readers = table.readers()  # a kernel that is added below needs none that writes a result
    replacement: dict[int, int] = {}
    deferred: list[tuple[int | None, int, int]] = []
    for position, leaf, target in _placed(table, results, pairs, given):
        buffer = table.views[leaf].buffer
        if target == buffer:
            continue
        maker = producers.get(buffer, -1)
        rest = readers.get(given[table.buffers[target].given], ()) if position is None else ()
        movable = maker >= 0 and table.buffers[buffer].storage is Storage.ARENA
        if target < 0:
            assert position is not None
            replacement[position] = _escape(table, leaf, overwritten, movable)
        elif (
            movable
            and not only_copies
            and maker not in guarded_by
            and _can_write(
                *(table, maker, buffer, target, may_overwrite), [*readers.get(target, ()), *rest]
            )
        ):
            entry = table.buffers[buffer]
            old = table.buffers[target]
            entry.storage, entry.given, entry.begin = Storage.OVERWRITE, old.given, old.begin
            kernel = table.kernels[maker]
            kernel.recomputable = False
            if target not in kernel.inputs:
                kernel.inputs.append(target)
        else:
            deferred.append((position, leaf, target))
    # Old values that are results themselves are saved first: any parameter may be overwritten.
    saved = [
        _copy(table, leaf, Storage.ARENA) if table.views[leaf].buffer in overwritten else leaf
        for _, leaf, _ in deferred
    ]
    for (position, _, target), source in zip(deferred, saved, strict=True):
        stored = _store(table, source, target)
        if position is not None:
            replacement[position] = stored
    _order_writers(table, given, guards)
    if replacement:
        positions = iter(range(len(results)))
        table.result = _replace(table.result, replacement, positions)


def _placed(
    table: FunctionTable, results: Sequence[Any], pairs: Mapping[int, int], given: Mapping[int, int]
) -> Iterator[tuple[int | None, int, int]]:
    """List the results with the buffers that they replace, or -1: position, view, buffer.

    Those that replace parts of a given tensor have no position.
    """
    for position, leaf in enumerate(results):
        if isinstance(leaf, int):
            yield position, leaf, given[pairs[position]] if position in pairs else -1
        elif isinstance(leaf, Joined):
            begin = 0
            for part in leaf.parts:
                yield None, part, table.part_of(pairs[position], begin)
                begin += table.buffers[table.views[part].buffer].bytes.as_int()


def _can_write(
    table: FunctionTable,
    maker: int,
    buffer: int,
    target: int,
    may_overwrite: MayOverwrite,
    readers: Sequence[int],
) -> bool:
    kernel = table.kernels[maker]
    if table.buffers[buffer].bytes != table.buffers[target].bytes:
        return False
    if target in kernel.inputs and not may_overwrite(kernel, target, buffer):
        return False
    if any(k > maker for k in readers):
        later = _descendants(table, maker)
        if any(k != maker and k in later for k in readers):
            return False
    return True


def _escape(table: FunctionTable, leaf: int, overwritten: set[int], movable: bool) -> int:
    """Make a result outlive the call; a constant or an old value is copied."""
    buffer = table.views[leaf].buffer
    entry = table.buffers[buffer]
    if movable:
        entry.storage = Storage.ESCAPING
        return leaf
    is_constant = entry.storage is Storage.GIVEN and not _is_parameter(table.given[entry.given])
    if entry.storage is Storage.GIVEN and (is_constant or buffer in overwritten):
        return _copy(table, leaf, Storage.ESCAPING)
    return leaf


def _is_parameter(expr: relax.Expr) -> bool:
    return isinstance(expr, relax.Var | relax.TupleGetItem)


def _store(table: FunctionTable, source: int, target: int) -> int:
    """Add a kernel that copies a result over a given tensor; return the view of its new value."""
    old = table.buffers[target]
    stored = _copy(table, source, Storage.OVERWRITE, old.given, old.begin)
    kernel = table.kernels[-1]
    kernel.recomputable = False
    if target not in kernel.inputs:
        kernel.inputs.append(target)
    return stored


def _order_writers(table: FunctionTable, given: Mapping[int, int], guards: Sequence[int]) -> None:
    """Put what overwrites a given tensor after the guards and all readers of the old value."""
    all_readers = table.readers()
    for writer, kernel in enumerate(table.kernels):
        for buffer in kernel.outputs:
            entry = table.buffers[buffer]
            if entry.storage is Storage.OVERWRITE:
                readers = list(all_readers.get(given[entry.given], ()))
                if entry.begin >= 0:
                    readers += all_readers.get(table.part_of(entry.given, entry.begin), ())
                kernel.after.update(k for k in (*readers, *guards) if k != writer)


def _copy(
    table: FunctionTable, source: int, storage: Storage, given: int = -1, begin: int = -1
) -> int:
    """Add a kernel that copies a view into a buffer of its own; return the copy's view."""
    view: View = table.views[source]
    original = table.buffers[view.buffer]
    name = f"{original.name}.copy"
    table.buffers.append(type(original)(name, original.bytes, storage, given, begin))
    target = table.view(len(table.buffers) - 1, view.dtype, view.shape)
    table.kernels.append(
        KernelCall(
            name="relax_disc.copy",
            callee=COPY,
            arguments=[("view", source), ("view", target)],
            inputs=[view.buffer],
            outputs=[len(table.buffers) - 1],
        )
    )
    return target


def _replace(structure: object, replacement: Mapping[int, int], positions: object) -> object:
    if isinstance(structure, tuple):
        return tuple(_replace(part, replacement, positions) for part in structure)
    return replacement.get(next(positions), structure)  # type: ignore[call-overload]


def order_halves(table: FunctionTable, late_outputs: int) -> None:
    """Put the kernels that read what is given late after those that make the early results.

    ``late_outputs``: how many of the last results belong to the second half.
    """
    results = table.flat_result()
    early = results[: len(results) - late_outputs]
    buffers = {table.views[leaf].buffer for leaf in early if isinstance(leaf, int)}
    makers = {k for k, kernel in enumerate(table.kernels) if buffers & set(kernel.outputs)}
    for kernel in table.kernels:
        if table.late & set(kernel.inputs):
            kernel.after |= makers


def _descendants(table: FunctionTable, start: int) -> set[int]:
    """Kernels that need a kernel's results or must come after it."""
    found = {start}
    made = set(table.kernels[start].outputs)
    for k in range(len(table.kernels)):
        kernel = table.kernels[k]
        if k not in found and (made & set(kernel.inputs) or found & kernel.after):
            found.add(k)
            made |= set(kernel.outputs)
    return found - {start}


def _ancestors(table: FunctionTable, kernels: Sequence[int]) -> set[int]:
    """Kernels that must come before some kernels, and those themselves."""
    producers = {b: k for k, kernel in enumerate(table.kernels) for b in kernel.outputs}
    found: set[int] = set()
    waiting = list(kernels)
    while waiting:
        k = waiting.pop()
        if k not in found:
            found.add(k)
            kernel = table.kernels[k]
            waiting += [producers[b] for b in kernel.inputs if b in producers]
            waiting += kernel.after
    return found


def execution_order(table: FunctionTable) -> list[int] | None:
    """Program order, changed only where a kernel must come after a later one; None if none exists.

    Among the kernels that may come next, the first in program order does.  An added copy that
    writes a result over a parameter goes as early as it can, since it frees what it reads; one that
    saves an old value goes just before the first kernel that waits for it.
    """
    producers = {b: k for k, kernel in enumerate(table.kernels) for b in kernel.outputs}
    needs = [
        {producers[b] for b in kernel.inputs if b in producers} | kernel.after
        for kernel in table.kernels
    ]
    followers: list[list[int]] = [[] for _ in needs]
    for k, wanted in enumerate(needs):
        for other in wanted:
            followers[other].append(k)
    rank = [_rank(table, k, followers[k]) for k in range(len(needs))]
    missing = [len(wanted) for wanted in needs]
    ready = [(rank[k], k) for k, count in enumerate(missing) if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, k = heapq.heappop(ready)
        order.append(k)
        for follower in followers[k]:
            missing[follower] -= 1
            if missing[follower] == 0:
                heapq.heappush(ready, (rank[follower], follower))
    return order if len(order) == len(needs) else None


def _rank(table: FunctionTable, k: int, followers: list[int]) -> tuple[int, int]:
    """Which of the kernels that may come next does: the one of least rank."""
    kernel = table.kernels[k]
    if kernel.callee is not COPY:
        return k, 1
    if table.buffers[kernel.outputs[0]].storage is Storage.OVERWRITE:
        return -1, 0
    return min(followers, default=k), 0
