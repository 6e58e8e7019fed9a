"""Matrix products to library calls: operands flattened, transpositions and additions folded in.

Short floats are multiplied by PyTorch's kernels, which sum in float32 and round once, where the
device has instructions for them, as every GPU is taken to have, and the program rounds the sum;
elsewhere copies in float32 are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tvm_ffi
from tvm import relax

from relax_disc.ops import registry
from relax_disc.ops.operand_views import (
    extents_of,
    is_call_of,
    matrix_view,
    permutation_of,
    permuted_view,
    same_shape,
)

if TYPE_CHECKING:
    from relax_disc.transform.libraries.dispatch_library import Site

_NATIVE = ("float32", "float64")
_HALF = ("float16", "bfloat16")
_MOST_AXES = 15  # of a packed permutation


def pack_axes(axes: Sequence[int]) -> int:
    """Encode a permutation of at most 15 axes, one hexadecimal digit per axis, first axis first."""
    code = 0
    for axis in axes:
        code = code << 4 | axis
    return code


@registry.dispatches("relax.matmul")
def matmul(call: relax.Call, site: Site) -> relax.Expr | None:
    """Dispatch `relax.matmul`; integers are not ours."""
    result = _result_type(call, site)
    if result is None:
        return None
    dtype = registry.dtype_name(result)
    operands, wide = list(call.args), dtype
    operands = [_unwidened(operand, site) for operand in operands]
    kinds = {registry.dtype_name(operand.ty) for operand in operands}
    if (
        kinds <= {*_HALF, *_NATIVE}
        and (kinds & {*_HALF})
        and (kinds != {dtype} or not site.is_cuda)
    ):
        wide = "float32"
    elif kinds != {dtype} or dtype not in (*_NATIVE, *_HALF):
        return None
    product = _product(operands, relax.TensorType(result.shape, wide), site)
    if product is None or wide == dtype:
        return product
    return relax.op.astype(site.builder.emit(product), dtype)


@registry.dispatches("relax.astype")
def rounded(call: relax.Call, site: Site) -> relax.Expr | None:
    """Multiply short floats as such if their product, or its sum with a bias, is rounded here."""
    dtype = registry.dtype_name(_normalized_type(call, site))
    if dtype not in _HALF or not (site.is_cuda or _multiplies(dtype)) or not _is_only_use(site):
        return None
    value = site.definition(call.args[0])
    if not is_call_of(value, "relax.call_dps_packed") or not isinstance(value.ty, relax.TensorType):
        return None
    name = value.args[0].global_symbol.removeprefix(f"{site.family}.")
    if name not in ("matmul", "matmul_add", "batch_matmul"):
        return None
    arguments = list(value.args[1].fields)
    for index, argument in enumerate(arguments):
        if isinstance(argument.ty, relax.TensorType):
            wide = site.definition(argument)
            if not is_call_of(wide, "relax.astype"):
                return None
            (arguments[index],) = wide.args
            if registry.dtype_name(arguments[index].ty) != dtype:
                return None
    name = name if site.is_cuda else f"aten_{name}"
    return site.call(name, arguments, _normalized_type(call, site))


@functools.cache
def _multiplies(dtype: str) -> bool:
    return bool(tvm_ffi.get_global_func("relax_disc.cpu.multiplies")(dtype))


def _is_only_use(site: Site) -> bool:
    operand = site.original.args[0]
    return isinstance(operand, relax.Var) and len(site.uses.users_of(operand)) == 1


@registry.dispatches("relax.add")
def add(call: relax.Call, site: Site) -> relax.Expr | None:
    """Fold an addition into the product that is one of its operands, if nothing else uses it."""
    for index in (1, 0):
        product = _only_product(site.original.args[index], site)
        if product is None:
            continue
        addend = call.args[1 - index]
        value = site.definition(call.args[index])
        while is_call_of(value, "relax.reshape"):
            value = site.definition(value.args[0])
        if not _is_matmul_call(value, site) or not isinstance(addend.ty, relax.TensorType):
            continue
        if not _addable(call, index, site):
            continue
        a, b, *flags = value.args[1].fields
        return site.call("matmul_add", [a, b, addend, *flags], _normalized_type(call, site))
    return None


def _result_type(call: relax.Call, site: Site) -> relax.TensorType | None:
    for operand in call.args:
        kind = operand.ty
        if not isinstance(kind, relax.TensorType) or not isinstance(kind.shape, relax.ShapeExpr):
            return None
    return _normalized_type(call, site)


def _normalized_type(call: relax.Call, site: Site) -> relax.TensorType:
    # The rewritten call has operands of the same types, so the original's type is its type.
    if isinstance(site.original.ty, relax.TensorType):
        return site.original.ty
    return site.builder.normalize(call).ty


def _product(operands: list[relax.Expr], result: relax.TensorType, site: Site) -> relax.Expr | None:
    a, b = operands
    dtype = registry.dtype_name(result)
    a_rank, b_rank = len(extents_of(a)), len(extents_of(b))
    if b_rank <= 2:
        left = matrix_view(a, a_rank - 1, site.definition, site.analyzer)
        right = matrix_view(b, 1, site.definition, site.analyzer)
        flags = [left.split, right.split, int(left.transposed), int(right.transposed)]
        stored = [_cast(view.tensor, dtype, site) for view in (left, right)]
        return site.call("matmul", [*stored, *flags], result)
    if a_rank < 2 or max(a_rank, b_rank) > _MOST_AXES:
        return None
    (left, left_axes), (right, right_axes) = (_batched(operand, site) for operand in (a, b))
    rank = len(registry.extents(result))
    order = _wanted_order(site, rank)
    stored = [registry.extents(result)[axis] for axis in order]
    inverse = [order.index(axis) for axis in range(rank)]
    call = site.call(
        "batch_matmul",
        [
            *(_cast(x, dtype, site) for x in (left, right)),
            left_axes,
            right_axes,
            pack_axes(inverse),
        ],
        relax.TensorType(stored, dtype),
    )
    if inverse == list(range(rank)):
        return call
    return relax.op.permute_dims(site.builder.emit(call), inverse)


def _batched(operand: relax.Expr, site: Site) -> tuple[relax.Expr, int]:
    """Stored tensor and code of its axes; a copy is better if neither matrix axis is contiguous."""
    view = permuted_view(operand, site.definition)
    last = len(view.axes) - 1
    if last in view.axes[-2:]:
        return view.tensor, pack_axes(view.axes)
    return operand, pack_axes(range(last + 1))


def _wanted_order(site: Site, rank: int) -> list[int]:
    """Order in which to store the axes of a batched product: that which all its users ask for."""
    wanted = {
        permutation_of(user) if is_call_of(user, "relax.permute_dims") else tuple(range(rank))
        for _, user in site.uses.users_of(site.variable)
    }
    order = wanted.pop() if len(wanted) == 1 else tuple(range(rank))
    return list(order if order[-1] == rank - 1 else range(rank))


def _only_product(expr: relax.Expr, site: Site) -> relax.Call | None:
    """Find the `matmul` whose result, reshaped or not, only this expression uses."""
    while isinstance(expr, relax.Var) and len(site.uses.users_of(expr)) == 1:
        value = site.uses.definitions.get(expr, expr)
        if is_call_of(value, "relax.matmul"):
            return value
        if not is_call_of(value, "relax.reshape"):
            return None
        expr = value.args[0]
    return None


def _is_matmul_call(value: relax.Expr, site: Site) -> bool:
    return is_call_of(value, "relax.call_dps_packed") and (
        value.args[0].global_symbol == f"{site.family}.matmul"
    )


def _addable(call: relax.Call, index: int, site: Site) -> bool:
    """Whether the other operand has the shape of the sum, or is one row of it."""
    product, addend = call.args[index], call.args[1 - index]
    if registry.dtype_name(product.ty) != registry.dtype_name(addend.ty):
        return False
    if not isinstance(addend.ty.shape, relax.ShapeExpr):
        return False
    if same_shape(product, addend, site.analyzer):
        return True
    rows, row = extents_of(product), extents_of(addend)
    return (
        len(row) == 1
        and len(rows) > 1
        and site.analyzer.can_prove_equal(rows[-1], row[0])
        and is_call_of(site.definition(product), "relax.call_dps_packed")
    )


def _cast(expr: relax.Expr, dtype: str, site: Site) -> relax.Expr:
    if registry.dtype_name(expr.ty) == dtype:
        return expr
    return site.builder.emit(relax.op.astype(expr, dtype))


def _unwidened(expr: relax.Expr, site: Site) -> relax.Expr:
    """Return the short floats of which an operand is a copy in float32, so that views show."""
    value = site.definition(expr)
    if registry.dtype_name(expr.ty) != "float32" or not is_call_of(value, "relax.astype"):
        return expr
    (source,) = value.args
    return source if registry.dtype_name(source.ty) in _HALF else expr


def _flops(views: list[Any], numbers: list[int]) -> Any:
    left, right = views[0], views[1]
    _, split, _, is_transposed = numbers[:4]
    columns = right.shape[:split] if is_transposed else right.shape[split:]
    return 2 * registry.elements(left.shape) * registry.elements(columns)


def _sizes(views: list[Any], numbers: list[int]) -> tuple[Any, ...]:
    """Rows, columns and depth of a product of matrices."""
    left, right = views[:2]
    left_split, right_split, left_transposed, right_transposed = numbers[:4]
    rows = registry.elements(left.shape[:left_split])
    depth = registry.elements(left.shape[left_split:])
    if left_transposed:
        rows, depth = depth, rows
    columns = right.shape[:right_split] if right_transposed else right.shape[right_split:]
    return rows, registry.elements(columns), depth


def _batch_flops(views: list[Any], numbers: list[int]) -> Any:
    left, result = views[0], views[-1]
    inner = left.shape[numbers[0] & 15]  # the last digit of the axes' code
    return 2 * registry.elements(result.shape) * inner


def _batch_sizes(views: list[Any], numbers: list[int]) -> tuple[Any, ...]:
    """Count, rows, columns and depth of products of matrices."""
    left, result = views[0], views[-1]
    left_axes, _, result_axes = numbers[:3]
    rows, columns = (result.shape[result_axes >> shift & 15] for shift in (4, 0))
    rank = len(result.shape)
    batch = [result.shape[result_axes >> 4 * axis & 15] for axis in range(2, rank)]
    return registry.elements(batch), rows, columns, left.shape[left_axes & 15]


def _batch_device_bytes(views: list[Any], numbers: list[Any], units: int) -> Any:
    """Bound what ``torch.matmul`` takes on CUDA beside cuBLAS's workspace.

    ``aten/src/ATen/native/LinearAlgebra.cpp`` of PyTorch 2.13, ``_matmul_impl``: operands whose
    batch axes cannot be seen as one are copied, and broadcast ones written out.
    """
    del units
    count, rows, columns, depth = _batch_sizes(views, numbers)
    elements = count * (rows * depth + depth * columns + rows * columns)
    return elements * registry.itemsize(views[0].dtype) + registry.SMALL_BYTES


def _no_device_bytes(views: list[Any], numbers: list[Any], units: int) -> Any:
    """``mm`` and ``addmm`` write where they are told; cuBLAS's workspace is the machine's."""
    del views, numbers, units
    return registry.SMALL_BYTES


def _library(prefix: str, name: str, overwrites: frozenset[tuple[int, int]] = frozenset()) -> None:
    is_batch = name == "batch_matmul"
    sizes = _batch_sizes if is_batch else _sizes
    formula = f"{prefix}{name.removesuffix('_add')}"

    def workspace(views: list[Any], numbers: list[int]) -> registry.Workspace:
        kind = (int(views[0].dtype == "bfloat16"),) if prefix else ()
        return formula, (*sizes(views, numbers), *kind)

    registry.LIBRARY[f"{prefix}{name}"] = registry.LibraryFunction(
        flops=_batch_flops if is_batch else _flops,
        workspace=workspace,
        overwrites=overwrites,
        device_bytes=_batch_device_bytes if is_batch else _no_device_bytes,
    )


for _prefix in ("", "aten_"):
    _library(_prefix, "matmul")
    # A product reads each element of its addend just before it writes the sum there.
    _library(_prefix, "matmul_add", frozenset({(2, 7)}))
    _library(_prefix, "batch_matmul")
