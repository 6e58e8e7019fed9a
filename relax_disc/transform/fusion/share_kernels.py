"""Let calls of kernels that differ in sizes only run one kernel, which is compiled once.

Layers of a network repeat at other resolutions and with other numbers of channels.  Here every size
of a kernel that is an expression, such as ``(height - 1) // 4 + 1``, or ``height * 4`` where the
height itself is no size, becomes a dim of the kernel itself, and so does a number that another
kernel, otherwise equal, has another one in place of.  Kernels that are then equal become one; their
index arithmetic is short, which is most of the time that TVM's passes take.

A number stays one where a schedule needs it: along the last axis of the largest operands, where
vector loops run; below 16 (windows, heads); where indices are divided by it; and in sums over
nothing but numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, relax, s_tir, tirx
from tvm.ir import prim
from tvm.sym.analyzer import Analyzer

from relax_disc.analysis.kernels.mutate import mutate, walk
from relax_disc.analysis.kernels.stages import constant, is_buffer, nodes_of
from relax_disc.tir_kernels.cpu.elementwise import APART, FEW_ELEMENTS, SERIAL_ELEMENTS
from relax_disc.transform.functions import (
    block_like,
    copy_module,
    is_reshape,
    program_functions,
    result_types,
    size_meanings,
    substitute_sizes,
    with_blocks,
)
from relax_disc.transform.fusion.fusion_groups import blocks_of
from relax_disc.transform.fusion.producers import CALL_TIR

_LEAST = 16
# TVM's simplifier takes a second for products of more unknown sizes, as flat indices have them.
_MOST_SIZES = 4
_DIVISIONS = (prim.FloorDiv, prim.FloorMod)


@tvm.transform.module_pass(opt_level=0, name="ShareKernels")
class ShareKernels:
    """One kernel for those that are equal but for sizes; run before kernels are scheduled.

    Private kernels that nothing calls are removed.
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with fewer kernels."""
        del ctx
        calls, used = _uses(mod)
        open_ = {v: c for v, c in calls.items() if used[v] == len(c) and _is_open(mod[v])}
        shared = _share({v: (mod[v], len(result_types(c[0]))) for v, c in open_.items()})
        functions: dict[Any, Any] = {
            variable: function
            for variable, function in mod.functions_items()
            if variable not in shared and (variable in used or not _is_private_kernel(function))
        }
        for each in shared.values():
            functions.setdefault(each.variable, each.kernel)
        for variable, function in program_functions(mod):
            blocks = [
                block_like(block, [_renewed(b, mod, shared) for b in block.bindings])
                for block in blocks_of(function)
            ]
            if blocks:
                functions[variable] = with_blocks(function, blocks)
        return relax.transform.Normalize()(copy_module(mod, functions))


@dataclass(frozen=True, slots=True)
class _General:
    """A kernel with dims in place of sizes."""

    kernel: tirx.PrimFunc  # its parameters: operands, integers, results
    dims: list[Any]  # all of its dims and integers, by first occurrence
    sizes: dict[Any, Any]  # what those stand for that are new, in the terms of the kernel before
    integers: list[Any]  # parameters that are no buffers, by first occurrence

    def numbers(self) -> list[int | None]:
        """Values of those dims that stand for numbers."""
        return [constant(self.sizes.get(dim)) for dim in self.dims]


@dataclass(frozen=True, slots=True)
class _Shared:
    """What a call of a kernel calls instead, and the integers it passes, as `_General.sizes`."""

    variable: ir.GlobalVar
    kernel: tirx.PrimFunc
    integers: list[Any]


def _uses(mod: tvm.IRModule) -> tuple[dict[Any, list[Any]], Counter[Any]]:
    """Find the calls by `call_tir` in programs of each kernel, and count all uses of it."""
    calls: dict[Any, list[Any]] = {}
    used: Counter[Any] = Counter()

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, ir.GlobalVar):
            used[expr] += 1

    for _, function in mod.functions_items():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, visit)
    for _, function in program_functions(mod):
        for binding in (b for block in blocks_of(function) for b in block.bindings):
            value: Any = binding.value
            if _is_call(value) and isinstance(value.args[0], ir.GlobalVar):
                calls.setdefault(value.args[0], []).append(value)
    return calls, used


def _is_call(value: Any) -> bool:
    return isinstance(value, relax.Call) and value.op == CALL_TIR and len(value.args) == 2


def _is_private_kernel(function: Any) -> bool:
    return isinstance(function, tirx.PrimFunc) and "global_symbol" not in function.attrs


def _is_open(function: Any) -> bool:
    """Whether a kernel is still to be scheduled and nobody outside knows it."""
    if not _is_private_kernel(function) or function.attrs.get("tirx.is_scheduled", False):
        return False
    # The proofs of a joined kernel name its parameters by position, and sizes would move those.
    return APART not in function.attrs and not is_reshape(function)


def _share(kernels: Mapping[Any, tuple[tirx.PrimFunc, int]]) -> dict[Any, _Shared]:
    """Choose for each kernel, given with its number of results, the one to call instead."""
    groups: dict[Any, list[tuple[Any, _General]]] = {}
    for variable, (kernel, results) in kernels.items():
        general = _generalize(kernel, results)
        groups.setdefault(tvm_ffi.StructuralKey(general.kernel), []).append((variable, general))
    result = {}
    for members in groups.values():
        variable, first = members[0]
        numbers = zip(*(general.numbers() for _, general in members), strict=True)
        agreed = {
            dim: first.sizes[dim]
            for dim, values in zip(first.dims, numbers, strict=True)
            if values[0] is not None and len(set(values)) == 1
        }
        kernel = substitute_sizes(first.kernel, agreed) if agreed else first.kernel
        renewed = ir.GlobalVar(variable.name_hint)  # it carries the new type
        relax.expr._update_type(renewed, kernel.ty)
        for variable, general in members:
            integers = [general.sizes.get(each, each) for each in general.integers]
            result[variable] = _Shared(renewed, kernel, integers)
    return result


def _renewed(binding: relax.Binding, mod: tvm.IRModule, shared: dict[Any, _Shared]) -> Any:
    call: Any = binding.value
    if not _is_call(call) or call.args[0] not in shared:
        return binding
    chosen = shared[call.args[0]]
    fields = [x for x in call.args[1].fields if isinstance(x.ty, relax.TensorType)]
    if chosen.integers:
        meanings = size_meanings(mod[call.args[0]], call)
        fields += [substitute_sizes(each, meanings) for each in chosen.integers]
    arguments = [chosen.variable, relax.Tuple(fields)]
    renewed = relax.Call(call.op, arguments, call.attrs, call.ty_args, call.span)
    return relax.VarBinding(binding.var, renewed, binding.span)


def _generalize(kernel: tirx.PrimFunc, results: int) -> _General:
    """Give a kernel dims in place of all sizes that may become some."""
    sizes: dict[Any, Any] = {}
    known: dict[Any, Any] = {}
    free = _free_dims(kernel)

    def named(size: Any) -> Any:
        key = tvm_ffi.StructuralKey(size)
        if key not in known:
            known[key] = tirx.Var(f"size_{len(known)}", "int64")
            sizes[known[key]] = size
        return known[key]

    def on_size(expr: Any, mutator: Any) -> Any:
        return named(expr) if _is_over(expr, free) else mutator.default_mutate(expr)

    def on_sum(expr: Any, mutator: Any) -> Any:
        parts = {type(expr.a), type(expr.b)}
        is_size = prim.FloorDiv in parts and prim.IntImm in parts and _is_over(expr, free)
        return named(expr) if is_size else mutator.default_mutate(expr)

    def on_number(number: Any, mutator: Any) -> Any:
        del mutator
        return named(number) if int(number.value) in numbers and _is_index(number) else number

    if _divisions(kernel):
        rules = [(kind, on_size) for kind in _DIVISIONS]
        rules += [(kind, on_sum) for kind in (prim.Add, prim.Sub)]
        kernel = _without_needless_divisions(mutate(kernel, rules))
    shapes = _large_sizes(kernel)
    # Vector loops need to know the factor of a multiple, and divisions what it is a multiple of.
    if all(constant(size) for *_, size in filter(None, shapes)) and not _divisions(kernel):
        multiples = [size for shape in shapes for size in shape if isinstance(size, prim.Mul)]
        changed = mutate(kernel, (prim.Mul, on_size))
        scaled = nodes_of(tirx.Var, multiples)
        if not {*scaled} & {*_variables(changed)}:  # else `h * 4` would be nothing to `h`
            kernel = changed
    if numbers := _free_numbers(kernel):
        elements = _most_elements(_large_sizes(kernel))
        if elements is not None and elements <= SERIAL_ELEMENTS:
            kernel = kernel.with_attr(FEW_ELEMENTS, True)
        kernel = mutate(kernel, (prim.IntImm, on_number))
    return _with_integers(kernel, results, sizes)


def _divisions(kernel: tirx.PrimFunc) -> list[Any]:
    shapes = [list(param.shape) for param in kernel.params if is_buffer(param)]
    return nodes_of(_DIVISIONS, [*shapes, kernel.body])


def _without_needless_divisions(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
    """Drop divisions of indices whose ranges tell the result, as reshapes leave them."""
    analyzer = Analyzer()

    def on_block(block: Any) -> None:
        for axis in block.iter_vars:
            analyzer.bind(axis.var, axis.dom, True)

    def on_division(expr: Any, mutator: Any) -> Any:
        del mutator
        return analyzer.simplify(expr)

    walk(kernel.body, s_tir.SBlock, on_block)
    return mutate(kernel, [(kind, on_division) for kind in _DIVISIONS])


def _is_index(expr: Any) -> bool:
    return str(expr.ty) == "int64"


def _is_over(expr: Any, free: set[Any]) -> bool:
    """Whether an index expression is made of dims (and numbers) only."""
    found = nodes_of(tirx.Var, expr)
    return _is_index(expr) and bool(found) and all(var in free for var in found)


def _free_dims(kernel: tirx.PrimFunc) -> set[Any]:
    """Dims and integers that a kernel takes."""
    found = [param for param in kernel.params if not is_buffer(param)]
    shapes = [list(param.shape) for param in kernel.params if is_buffer(param)]
    return {*found, *nodes_of(tirx.Var, shapes)}


def _variables(kernel: tirx.PrimFunc) -> list[Any]:
    """Variables in the shapes and the body of a kernel, as they occur."""
    shapes = [list(param.shape) for param in kernel.params if is_buffer(param)]
    return nodes_of(tirx.Var, [*shapes, kernel.body])


def _free_numbers(kernel: tirx.PrimFunc) -> set[int]:
    """Sizes of a kernel that are numbers and need not be."""
    shapes = _large_sizes(kernel)
    found = {constant(size) for shape in shapes for size in shape} - {None}
    numbers = {size for size in found if size is not None and size >= _LEAST}
    if not numbers:
        return set()
    if any((constant(division.b) or 0) >= _LEAST for division in _divisions(kernel)):
        return set()
    if _is_uniform(shapes) and not _sums(kernel):
        return numbers
    if _most_elements(shapes) is not None:
        return set()
    rank = max(map(len, shapes))
    if rank > _MOST_SIZES:
        return set()
    return numbers - {constant(shape[-1]) for shape in shapes if shape and len(shape) == rank}


def _large_sizes(kernel: tirx.PrimFunc) -> list[list[Any]]:
    """Shapes of operands and results without the sizes 1."""
    buffers = filter(is_buffer, kernel.params)
    return [[size for size in buffer.shape if constant(size) != 1] for buffer in buffers]


def _is_uniform(shapes: list[list[Any]]) -> bool:
    """Whether all operands and results have one shape, but for small vectors and scalars."""
    keys = {tvm_ffi.StructuralKey(shape) for shape in shapes if not _is_tiny(shape)}
    return len(keys) <= 1


def _is_tiny(shape: list[Any]) -> bool:
    return prod(constant(size) or _LEAST for size in shape) < _LEAST


def _most_elements(shapes: list[list[Any]]) -> int | None:
    """Elements of the largest operand; None where that is no number."""
    counts = [[constant(size) for size in shape] for shape in shapes]
    if any(size is None for shape in counts for size in shape):
        return None
    return max(prod(size or 0 for size in shape) for shape in counts)


def _sums(kernel: tirx.PrimFunc) -> bool:
    """Whether anything is summed (or otherwise combined)."""
    return any(block.init is not None for block in nodes_of(s_tir.SBlock, kernel.body))


def _with_integers(kernel: tirx.PrimFunc, results: int, sizes: dict[Any, Any]) -> _General:
    """Make parameters of the dims that no operand or result has, and of no others."""
    buffers = [param for param in kernel.params if is_buffer(param)]
    bound = {size for buffer in buffers for size in buffer.shape if isinstance(size, tirx.Var)}
    possible = {*(param for param in kernel.params if not is_buffer(param)), *sizes, *bound}
    dims = [var for var in dict.fromkeys(_variables(kernel)) if var in possible]
    integers = [var for var in dims if var not in bound]
    operands = len(buffers) - results
    params = [*buffers[:operands], *integers, *buffers[operands:]]
    attrs: Any = kernel.attrs
    kernel = tirx.PrimFunc(params, kernel.body, kernel.ret_type, attrs, kernel.span)
    return _General(kernel, dims, sizes, integers)
