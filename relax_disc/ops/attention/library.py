"""Attention and its gradient as library calls that read and write permuted tensors in place."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import tvm_ffi
from tvm import relax, tirx

from relax_disc.ops import registry
from relax_disc.ops.attention import device_memory
from relax_disc.ops.operand_views import extents_of, is_call_of, permutation_of, permuted_view

if TYPE_CHECKING:
    from relax_disc.transform.libraries.dispatch_library import Site

# Orders in which the axes of [batch, heads, length, dim] may be stored, and what each adds to a
# layout for the first operand: as they are, [batch, length, heads, dim], [length, batch, ...].
_PLAIN = (0, 1, 2, 3)
_BITS = {_PLAIN: 0, (0, 2, 1, 3): 1, (2, 0, 1, 3): 1 << 8}
MOST_DIM = 384  # of the native kernels: one panel of `gemm_tile.h`
# As long as one number takes to draw: 1.5 ns where products run at 100 flops/ns (AVX-512).
_FLOPS_OF_A_DRAW = 150
_BACKWARD = tuple(
    f"relax_disc.{packed}attention_backward{trained}"
    for packed in ("", "packed_")
    for trained in ("", "_trained")
)
_NATIVE = ("float32", "float64", "float16", "bfloat16")  # the last two are computed in float32


@registry.dispatches("relax_disc.attention", "relax_disc.packed_attention")
def attention(call: relax.Call, site: Site) -> relax.Expr | None:
    """Dispatch `relax_disc.attention`; heads too wide or of unknown width are not ours."""
    q, k, v, *rest = call.args
    wide = _working_dtype(call, (q, k, v), site)
    if wide is None:
        return None
    kinds = list(site.original.ty.fields)
    dtype = registry.dtype_name(kinds[0])
    operands, layout = _operands((q, k, v), wide, site)
    order = _wanted_order(site, 0)
    out_type = _stored_type(kinds[0], order, wide)
    numbers = _parameters(call, layout | _BITS[order] << 3 | _sight(call, wide, 3, site), site)
    args = [*operands, *_in_type(rest, wide, site), *numbers]
    results = site.builder.emit(site.call(_function_of(call, 3), args, [out_type, kinds[1]]))
    out = _restored(site.builder.emit(relax.TupleGetItem(results, 0)), order, dtype, site)
    return relax.Tuple([out, site.builder.emit(relax.TupleGetItem(results, 1))])


@registry.dispatches(*_BACKWARD)
def attention_backward(call: relax.Call, site: Site) -> relax.Expr | None:
    """Dispatch `relax_disc.attention_backward`, with and without a gradient of the mask."""
    grad, q, k, v, out, lse, *rest = call.args
    wide = _working_dtype(call, (q, k, v), site)
    if wide is None:
        return None
    kinds = list(site.original.ty.fields)
    (grad, q, k, v, out), layout = _operands((grad, q, k, v, out), wide, site)
    orders = [_wanted_order(site, index) for index in range(3)] + [_PLAIN] * (len(kinds) - 3)
    for index, order in enumerate(orders):
        layout |= _BITS[order] << 5 + index
    layout |= _sight(call, wide, 6, site)
    types = [_stored_type(kind, order, wide) for kind, order in zip(kinds, orders, strict=True)]
    args = [grad, q, k, v, out, lse, *_in_type(rest, wide, site), *_parameters(call, layout, site)]
    results = site.builder.emit(site.call(_function_of(call, 6), args, types))
    fields = [site.builder.emit(relax.TupleGetItem(results, index)) for index in range(len(kinds))]
    return relax.Tuple(
        [
            _restored(field, order, registry.dtype_name(kind), site)
            for field, order, kind in zip(fields, orders, kinds, strict=True)
        ]
    )


def is_computed_by_library(q: relax.Expr, k: relax.Expr, v: relax.Expr) -> bool:
    """Whether the library takes heads like these."""
    dims = [extents_of(operand)[3] for operand in (q, k, v)]
    known = all(isinstance(dim, tirx.IntImm) and 0 < int(dim) <= MOST_DIM for dim in dims)
    return known and registry.dtype_name(q.ty) in _NATIVE


def _is_for_gpu(operands: tuple[relax.Expr, ...]) -> bool:
    """Whether PyTorch's kernels for a GPU take heads like these: rows of 16 bytes, no float64."""
    width = {"float32": 4, "float16": 2, "bfloat16": 2}.get(registry.dtype_name(operands[0].ty), 0)
    dims = [int(extents_of(operand)[3]) for operand in operands]
    return width > 0 and all(dim * width % 16 == 0 for dim in dims)


def needs_native_kernels(call: relax.Call) -> bool:
    """Whether no library of a GPU has a kernel over packed rows: for dropout, a mask's gradient."""
    return _drops(call) or _is_trained(call)


def _function_of(call: relax.Call, operands: int) -> str:
    """Name of the library function for an operator's call with so many operands before a mask."""
    if _is_packed(call):
        operands += 6  # starts and places of queries and keys, and the lengths of the padded batch
    rest = len(call.args) - operands - _drops(call)  # the state
    name = call.op.name.removeprefix("relax_disc.")
    is_masked = rest > 0 and not _is_trained(call)
    return name + "_masked" * is_masked + "_dropout" * _drops(call)


def _working_dtype(call: relax.Call, operands: tuple[relax.Expr, ...], site: Site) -> str | None:
    """Type that the library computes in; None if it cannot."""
    if not is_computed_by_library(*operands):
        return None
    if site.is_cuda and (_is_trained(call) or (_drops(call) and not _is_for_gpu(operands))):
        return None
    dtype = registry.dtype_name(operands[0].ty)
    if site.is_cuda or dtype in ("float32", "float64"):
        return dtype
    return "float32"


def _operands(
    exprs: tuple[relax.Expr, ...], dtype: str, site: Site
) -> tuple[list[relax.Expr], int]:
    """Tensors as stored, and the bits that say how."""
    tensors, layout = [], 0
    for index, expr in enumerate(exprs):
        view = permuted_view(expr, site.definition)
        order = _inverse(view.axes)
        stored = view.tensor if order in _BITS else expr
        layout |= _BITS.get(order, 0) << index
        if registry.dtype_name(stored.ty) != dtype:
            stored = site.builder.emit(relax.op.astype(stored, dtype))
        tensors.append(stored)
    return tensors, layout


def _in_type(exprs: list[relax.Expr], dtype: str, site: Site) -> list[relax.Expr]:
    """Masks are bool or of the working type; all other tensors are int64."""
    tensors = [expr for expr in exprs if isinstance(expr.ty, relax.TensorType)]
    return [
        expr
        if registry.dtype_name(expr.ty) in ("bool", "int64", dtype)
        else site.builder.emit(relax.op.astype(expr, dtype))
        for expr in tensors
    ]


def _sight(call: relax.Call, dtype: str, operands: int, site: Site) -> int:
    """What the layout says of a mask behind so many operands, which is computed in ``dtype``.

    Over packed rows no key of a padded batch is sure to be there.
    """
    is_packed = _is_packed(call)
    if not site.is_cuda or "masked" not in _function_of(call, operands):
        return 0
    mask = site.original.args[operands + (4 if is_packed else 0)]
    if registry.dtype_name(mask.ty) == "bool":
        return 0
    q, k = (extents_of(operand)[2] for operand in call.args[operands // 6 :][:2])
    is_own_key_seen = not is_packed and tvm_ffi.structural_equal(q, k)
    hides = dtype != "float16" and site.may_hide_rows(
        mask, is_own_key_seen=is_own_key_seen, is_first_key_seen=not is_packed
    )
    return 0 if hides else device_memory.SIGHTED


def _parameters(call: relax.Call, layout: int, site: Site) -> list[Any]:
    """What follows the tensors; the lengths of a padded batch are operands of packed attention."""
    attrs: Any = call.attrs
    known = [_double(attrs["scale"]), int(bool(attrs["is_causal"])), layout]
    lengths = list(call.args[-2:]) if _is_packed(call) else []
    if _drops(call):
        return [*known, _double(attrs["dropout"]), int(attrs["stream"]), *lengths]
    return [*known, *lengths] if site.is_cuda else known  # native kernels draw with them, no more


def _double(value: Any) -> relax.Expr:
    return relax.prim_value(tirx.FloatImm("float64", float(value)))


def _drops(call: relax.Call) -> bool:
    return float(registry.attribute(call, "dropout")) > 0


def _is_packed(call: relax.Call) -> bool:
    return call.op.name.startswith("relax_disc.packed_")


def _is_trained(call: relax.Call) -> bool:
    return call.op.name.endswith("_trained")


def _inverse(axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(axes.index(axis) for axis in range(len(axes)))


def _wanted_order(site: Site, index: int) -> tuple[int, ...]:
    """In which order all users of a result want its axes; the gradient's use fits any."""
    order = _PLAIN
    for variable, user in site.uses.users_of(site.variable):
        if not isinstance(user, relax.TupleGetItem):
            return _PLAIN
        for _, consumer in site.uses.users_of(variable) if user.index == index else ():
            if any(is_call_of(consumer, name) for name in _BACKWARD):
                continue
            if not is_call_of(consumer, "relax.permute_dims"):
                return _PLAIN
            wanted = permutation_of(consumer)
            if wanted not in _BITS or order not in (_PLAIN, wanted):
                return _PLAIN
            order = wanted
    return order


def _stored_type(kind: relax.TensorType, order: tuple[int, ...], dtype: str) -> relax.TensorType:
    extents = registry.extents(kind)
    return relax.TensorType([extents[axis] for axis in order], dtype)


def _restored(field: relax.Expr, order: tuple[int, ...], dtype: str, site: Site) -> relax.Expr:
    """Bring a result into the operator's own layout and type; unused copies are dead code."""
    if registry.dtype_name(field.ty) != dtype:  # first: whoever permutes it back reads it as it is
        field = site.builder.emit(relax.op.astype(field, dtype))
    if order != _PLAIN:
        field = site.builder.emit(relax.op.permute_dims(field, _inverse(order)))
    return field


def _facts(
    formula: str,
    products: int,
    key: int,
    starts: int | None,
    drops: bool,
    device_bytes: registry.DeviceBytes,
) -> registry.LibraryFunction:
    """Count so many products of length x length x depth; scratch by the widths of the heads.

    ``starts``: operand that says where packed keys start; all sequences count as equally long.
    """
    drawn = _FLOPS_OF_A_DRAW // 2 if drops else 0

    def flops(views: list[Any], numbers: list[int]) -> Any:
        is_causal, layout = numbers[:2]
        by_length, by_batch = layout >> 8 + key & 1, layout >> key & 1
        length = views[key].shape[0 if by_length else 1 if by_batch else 2]
        if starts is not None:
            length = length // (views[starts].shape[0] - 1)
        rows, width = registry.elements(views[0].shape[:3]), views[0].shape[3]
        whole = (products * width + drawn) * rows * length
        return whole if is_causal else 2 * whole

    def workspace(views: list[Any], numbers: list[int]) -> registry.Workspace:
        del numbers
        return formula, (views[key].shape[3], views[key + 1].shape[3])

    return registry.LibraryFunction(flops=flops, workspace=workspace, device_bytes=device_bytes)


for _form in product(("", "packed_"), ("", "_masked", "_trained"), ("", "_dropout")):
    _prefix, _suffix, _drop = _form[0], "".join(_form[1:]), bool(_form[2])
    _starts = 5 if _prefix else None
    _bounds = [device_memory.bound(_prefix, which, bool(_form[1])) for which in (False, True)]
    if _form[1] != "_trained":
        registry.LIBRARY[f"{_prefix}attention{_suffix}"] = _facts(
            "attention", 2, 1, _starts, _drop, _bounds[0]
        )
    registry.LIBRARY[f"{_prefix}attention_backward{_suffix}"] = _facts(
        "attention_backward", 5, 2, _starts and 8, _drop, _bounds[1]
    )
