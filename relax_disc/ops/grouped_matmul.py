"""Mixtures of experts: products of row groups whose borders are data.

Rows are sorted by expert; ``ends[e]`` is where the rows of expert ``e`` end.  Rows behind the last
border belong to none and give zero.  Nothing here has a size that depends on data.

On the CPU each group is one product of matrices; elsewhere a row reads the matrix of its expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm import relax, te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as script

from relax_disc.ops import registry
from relax_disc.ops.operand_views import permuted_view
from relax_disc.ops.registry import Kind

if TYPE_CHECKING:
    from relax_disc.transform.libraries.dispatch_library import Site

T: Any = script


def _results(rows: Kind, weights: Kind, *_: Kind, transposed: Any) -> list[tuple[Any, str]]:
    return [((rows.shape[0], weights.shape[1 if transposed else 2]), rows.dtype)]


grouped_matmul = registry.operator(
    "grouped_matmul(Tensor rows:2, Tensor weights:3, Tensor ends:1, SymInt transposed=0) -> Tensor",
    """Products of row groups with a matrix each: that of their expert.

    ``rows`` are ``[S, K]``, sorted by expert, ``weights`` ``[E, K, N]``, or ``[E, N, K]`` if
    ``transposed``, of the rows' type.  ``ends``, ``[E]``, int32 or int64, ascending, says where
    each expert's rows end.  The result is ``[S, N]``; sums are kept in float32, or
    float64 for float64.
    """,
    _results,
    is_traced=False,
)
grouped_outer = registry.operator(
    "grouped_outer(Tensor left:2, Tensor right:2, Tensor ends:1) -> Tensor",
    """Outer products summed by row group: ``left[its rows]^T @ right[its rows]``, ``[E, K, N]``.

    ``left`` and ``right`` are ``[S, K]`` and ``[S, N]`` of one type, ``ends`` is as of
    :func:`grouped_matmul`.
    """,
    lambda left, right, ends: [((ends.shape[0], left.shape[1], right.shape[1]), left.dtype)],
    is_traced=False,
)


def _expert_of_row(builder: relax.BlockBuilder, rows: relax.Expr, ends: relax.Expr) -> relax.Var:
    """Which expert each row belongs to; the number of experts where it belongs to none."""
    one, zero = (tirx.const(value, "int64") for value in (1, 0))

    def compute(x: Any, ends: Any) -> Any:
        e = te.reduce_axis((0, ends.shape[0]), "e")

        def passed(s: Any) -> Any:
            return te.sum(tirx.Select(ends(e).astype("int64") <= s, one, zero), axis=e)

        return te.compute((x.shape[0],), passed, name="expert_of_row")

    return builder.emit(builder.call_te(compute, rows, ends))


def _legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    rows, weights, ends = call.args
    dtype, wide = registry.dtype_name(rows.ty), registry.statistics_dtype(rows.ty)
    transposed = bool(registry.attribute(call, "transposed"))

    def compute(x: Any, w: Any, group: Any) -> Any:
        experts = w.shape[0].astype("int64")
        inner, outer = (w.shape[2], w.shape[1]) if transposed else w.shape[1:]
        k = te.reduce_axis((0, inner), "k")

        def element(s: Any, n: Any) -> Any:
            expert = te.min(group(s), experts - 1)
            place = (expert, n, k) if transposed else (expert, k, n)
            return te.sum(x(s, k).astype(wide) * w(*place).astype(wide), axis=k)

        def chosen(s: Any, n: Any) -> Any:
            return tirx.Select(group(s) < experts, sums(s, n), tirx.const(0, wide)).astype(dtype)

        sums = te.compute((x.shape[0], outer), element, name="grouped_sums")
        return te.compute(sums.shape, chosen, name="grouped_product")

    groups = _expert_of_row(builder, rows, ends)
    return builder.call_te(compute, rows, weights, groups, primfunc_name_hint="grouped_product")


def _legalize_outer(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    left, right, ends = call.args
    dtype, wide = registry.dtype_name(left.ty), registry.statistics_dtype(left.ty)
    experts = registry.extents(ends.ty)[0]

    def compute(left: Any, right: Any, group: Any) -> Any:
        shape = [experts, left.shape[1], right.shape[1]]

        def body(inputs: Any, outputs: Any) -> Any:
            left, right, group = inputs
            out = outputs[0]
            with IRBuilder() as made:
                with T.parallel(shape[1]) as k:  # an expert's row k is written by one thread alone
                    with T.seq_scope():
                        with T.grid(shape[0], shape[2]) as loops:
                            e, n = loops
                            T.buffer_store(out, tirx.const(0, wide), [e, k, n])
                        with T.serial(left.shape[0]) as s:
                            with T.If(group[s] < experts.astype("int64")):
                                with T.Then():
                                    with T.serial(shape[2]) as n:
                                        place = (group[s], k, n)
                                        product = left[s, k].astype(wide) * right[s, n].astype(wide)
                                        T.buffer_store(out, out[place] + product, list(place))
            return made.get()

        buffer = tirx.decl_buffer(shape, wide, "out")
        return te.extern(
            [shape], [left, right, group], body, dtype=wide, out_buffers=[buffer], name="outer_sums"
        )

    groups = _expert_of_row(builder, left, ends)
    sums = builder.call_te(compute, left, right, groups, primfunc_name_hint="outer_sums")
    return sums if dtype == wide else relax.op.astype(builder.emit(sums), dtype)


registry.register_legalization("relax_disc.grouped_matmul", _legalize)
registry.register_legalization("relax_disc.grouped_outer", _legalize_outer)


@registry.dispatches("relax_disc.grouped_matmul", "relax_disc.grouped_outer")
def dispatch(call: relax.Call, site: Site) -> relax.Expr | None:
    """Dispatch both to the CPU's library; halves are multiplied in float32.

    Matrices that the model transposes are read as they are stored.
    """
    if not site.family.endswith(".cpu"):
        return None
    kind = site.original.ty
    dtype, wide = registry.dtype_name(kind), registry.statistics_dtype(kind)
    operands = list(call.args)
    name = call.op.name.removeprefix("relax_disc.")
    flags = [int(call.attrs["transposed"])] if name == "grouped_matmul" else []
    if flags:
        view = permuted_view(operands[1], site.definition)
        if view.axes == (0, 2, 1):
            operands[1], flags = view.tensor, [1 - flags[0]]
    if dtype != wide:
        floats = (relax.op.astype(operand, wide) for operand in operands[:2])
        operands[:2] = [site.builder.emit(operand) for operand in floats]
    result = site.call(name, [*operands, *flags], relax.TensorType(kind.shape, wide))
    return result if dtype == wide else relax.op.astype(site.builder.emit(result), dtype)


def _sizes(views: list[Any], numbers: list[int]) -> tuple[Any, ...]:
    """Rows, columns and depth of the largest product: of a group that has all rows."""
    rows, out = views[0], views[-1]
    if len(out.shape) == 3:
        return out.shape[1], out.shape[2], rows.shape[0]
    return out.shape[0], out.shape[1], rows.shape[1]


for _name in ("grouped_matmul", "grouped_outer"):
    registry.LIBRARY[_name] = registry.LibraryFunction(
        flops=lambda views, numbers: 2 * registry.elements(_sizes(views, numbers)),
        workspace=lambda views, numbers: ("grouped_matmul", _sizes(views, numbers)),
    )
