"""What the CUDA rules share: a launch over blocks and threads, elements dealt out to threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import tirx
from tvm.ir import Range

from relax_disc.analysis.kernels.mutate import mutate
from relax_disc.analysis.kernels.stages import Axis
from relax_disc.tir_kernels.flat import INDEX, as_index, index_const, product
from relax_disc.tir_kernels.loops import decode, group_extent, group_mapping, sequence

WARP = 32


def bound_loop(tag: str, extent: Any, body: Callable[[Any], Any]) -> Any:
    """Make a loop whose iterations are blocks or threads, such as ``"threadIdx.x"``."""
    var = tirx.Var(tag.replace(".", "_"), INDEX)
    thread = tirx.IterVar(Range(index_const(0), extent), var, tirx.IterVar.ThreadIndex, tag)
    return tirx.For(
        var, index_const(0), extent, tirx.ForKind.THREAD_BINDING, body(var), thread_binding=thread
    )


def short_indices(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Make the numbers of blocks and threads int32, as which TVM's code for LLVM takes them."""
    wide: dict[Any, Any] = {}

    def on_loop(loop: tirx.For, mutator: Any) -> Any:
        if loop.kind != tirx.ForKind.THREAD_BINDING or str(loop.loop_var.ty) == "int32":
            return mutator.default_mutate(loop)
        var = tirx.Var(loop.loop_var.name, "int32")
        wide[loop.loop_var] = var.astype(INDEX)
        extent, tag = loop.extent.astype("int32"), loop.thread_binding.thread_tag
        zero = tirx.IntImm("int32", 0)
        thread = tirx.IterVar(Range(zero, extent), var, tirx.IterVar.ThreadIndex, tag)
        body, kind = mutator.mutate(loop.body), tirx.ForKind.THREAD_BINDING
        return tirx.For(
            var, zero, extent, kind, body, thread_binding=thread, annotations=loop.annotations
        )

    def on_var(var: tirx.Var, mutator: Any) -> Any:
        return wide[var] if var in wide else mutator.default_mutate(var)

    return func.with_body(mutate(func.body, [(tirx.For, on_loop), (tirx.Var, on_var)]))


def launch(blocks: Any, threads: int, body: Callable[[Any, Any], Sequence[Any]]) -> Any:
    """Run ``body(block, thread)`` in every thread.

    Nothing is launched where there is no block: TVM would launch one.
    """
    whole = bound_loop(
        "blockIdx.x",
        blocks,
        lambda block: bound_loop(
            "threadIdx.x", index_const(threads), lambda thread: sequence(body(block, thread))
        ),
    )
    return whole if isinstance(blocks, tirx.IntImm) else only_where(blocks > 0, [whole])


def at_groups(
    groups: Sequence[Sequence[Axis]],
    index: Any,
    name: str,
    body: Callable[[dict[Any, Any]], Sequence[Any]],
) -> list[Any]:
    """Run ``body(mapping)`` where the flat index of collapsed axes is ``index``."""
    statements, indices = decode(index, [group_extent(group) for group in groups], name)
    mapping: dict[Any, Any] = {}
    for group, position in zip(groups, indices, strict=True):
        mapping.update(group_mapping(group, position))
    return [*statements, *body(mapping)]


def elements_count(groups: Sequence[Sequence[Axis]]) -> Any:
    """Number of elements of collapsed axes."""
    return product([group_extent(group) for group in groups])


def only_where(condition: Any, statements: Sequence[Any]) -> Any:
    """Run statements where a condition holds."""
    return tirx.IfThenElse(condition, sequence(statements), None)


def barrier() -> Any:
    """Wait for all threads of the block."""
    return tirx.Evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", "shared"))


def shuffle(kind: str, value: Any, operand: int) -> Any:
    """Ask another lane of the warp for its value, such as ``"shuffle_xor"``."""
    mask = tirx.call_intrin("uint32", "tirx.tvm_warp_activemask")
    dtype = str(value.ty.dtype)
    return tirx.call_intrin(dtype, f"tirx.tvm_warp_{kind}", mask, value, operand, WARP, WARP)


def split(index: Any, extents: Sequence[Any]) -> list[Any]:
    """Split a flat index, not negative, into one for each extent."""
    indices: list[Any] = []
    for extent in reversed(extents[1:]):
        indices.append(tirx.truncmod(index, as_index(extent)))
        index = tirx.truncdiv(index, as_index(extent))
    return [index, *reversed(indices)][: len(extents)]


def hold(values: Mapping[Any, Any]) -> tuple[list[Any], dict[Any, Any]]:
    """Keep whole numbers in registers; TVM writes named ones out again wherever they are used."""
    statements: list[Any] = []
    held: dict[Any, Any] = {}
    zero = index_const(0)
    for key, value in values.items():
        register = tirx.decl_buffer((1,), str(value.ty.dtype), "held", scope="local")
        statements += [tirx.AllocBuffer(register), tirx.BufferStore(register, value, [zero])]
        held[key] = tirx.BufferLoad(register, [zero])
    return statements, held
