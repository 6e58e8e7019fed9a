"""Read a Relax function in call_tir form: its kernels, the memory they use, in program order.

Every binding is a kernel (call_tir, call_tir_inplace, call_dps_packed), a free alias (reshape,
match_cast, the marks of `relax_disc.ops.memory`) or plain structure (tuples, shapes).
`read_function` walks the bindings once; what lies where is decided later, in `storage`.

Limits: straight-line functions; every shape is known from the parameters' shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm
from tvm import relax, tirx

from relax_disc.analysis.program.counted import counted_dims, order_behind_counts
from relax_disc.analysis.program.table import (
    CountCheck,
    FunctionTable,
    Joined,
    KernelCall,
    NotPlannableError,
)
from relax_disc.analysis.symbolic.dim import SymbolicDim
from relax_disc.analysis.symbolic.expr import SymbolicExpr
from relax_disc.ops.registry import dtype_name, itemsize
from relax_disc.vm_builtins.plan_metadata import Storage

ALIASES = frozenset(
    {
        "relax.reshape",
        "relax.memory.ensure_zero_offset",
        "relax_disc.evict",
        "relax_disc.regenerate",
        "relax_disc.await_gradient",
        "relax_disc.rows",
        "relax_disc.join_rows",
    }
)


_NEEDS_ONE = "takes an extremum, or the like, of what is selected, and nothing is"

KERNEL_CALLS = frozenset({"relax.call_tir", "relax.call_tir_inplace", "relax.call_dps_packed"})


def function_dims(func: relax.Function) -> dict[Any, SymbolicDim]:
    """Free dims of a function's parameters, with the ranges that its attributes declare."""
    attrs = func.attrs or {}
    declared = {
        str(k): [int(x) for x in v] for k, v in dict(attrs.get("relax_disc.dims") or {}).items()
    }
    lower = {str(k): int(v) for k, v in dict(attrs.get("tir_var_lower_bound") or {}).items()}
    upper = {str(k): int(v) for k, v in dict(attrs.get("tir_var_upper_bound") or {}).items()}
    parameters = relax.TupleType([param.ty for param in func.params])
    dims: dict[Any, SymbolicDim] = {}
    taken: set[str] = set()
    for var in relax.analysis.tir_vars_in_type(parameters):
        name = base = var.name if var.name.isidentifier() else "dim"
        while name in taken:
            name = f"{base}_{len(taken)}"
        taken.add(name)
        low, high, divisor = declared.get(
            var.name, [lower.get(var.name, 0), upper.get(var.name, -1), 1]
        )
        dims[var] = SymbolicDim(name, low, None if high < 0 else high, divisor)
    return dims


def source_line(call: relax.Expr) -> str:
    """The line of the user's model that made a call, as ``file:line``; empty if unknown."""
    span = getattr(call, "span", None)
    if span is None or not hasattr(span, "line"):
        return ""
    return f"{span.source_name.name}:{span.line}"


def is_kernel_call(value: relax.Expr) -> bool:
    """Whether a binding's value is the call of a kernel."""
    return (
        isinstance(value, relax.Call)
        and isinstance(value.op, tvm.ir.Op)
        and value.op.name in KERNEL_CALLS
    )


def bindings_of(func: relax.Function) -> list[relax.Binding]:
    """Return all bindings of a straight-line function."""
    if not isinstance(func.body, relax.SeqExpr):
        raise NotPlannableError("the function's body is not in normal form")
    return [binding for block in func.body.blocks for binding in block.bindings]


class FunctionReader:
    """Walks the bindings of one function and fills a `FunctionTable`."""

    def __init__(self, mod: tvm.IRModule, name: str, func: relax.Function) -> None:
        self.mod = mod
        self.func = func
        self.table = FunctionTable(name, function_dims(func))
        self._values = self.table.values
        self._constants: dict[Any, int] = {}
        self._parts: dict[tuple[int, int], int] = {}

    def read(self) -> FunctionTable:
        """Walk the function.

        Raises `NotPlannableError`: it has control flow, calls of other functions, or shapes known
        only while it runs.
        """
        for index, param in enumerate(self.func.params):
            self.table.parameter_given[index] = len(self.table.given)
            self._values[param] = self._parameter(param, param.ty)
        for binding in bindings_of(self.func):
            self._bind(binding)
        self.table.result = self._value(self.func.body.body)
        late_inputs, _ = halves(self.func)
        for param in self.func.params[len(self.func.params) - late_inputs :]:
            self.table.late.add(self.table.views[self._values[param]].buffer)
        counted = dict((self.func.attrs or {}).get("relax_disc.counted") or {})
        self.table.counted = counted_dims(self.table, [str(name) for name in counted])
        self.table.count_checks = self._count_checks(counted)
        order_behind_counts(self.table)
        for index in (self.func.attrs or {}).get("relax_disc.recomputable") or ():
            self.table.kernels[int(index)].may_rerun = True
        return self.table

    def _count_checks(self, counted: Mapping[Any, Any]) -> tuple[CountCheck, ...]:
        dims = self.table.dims.values()
        nonempty = [("1", "<=", str(name), _NEEDS_ONE) for name, n in counted.items() if int(n)]
        others = (self.func.attrs or {}).get("relax_disc.count_checks") or ()
        return tuple(
            CountCheck(
                SymbolicExpr.parse(str(size), dims),
                str(relation),
                SymbolicExpr.parse(str(limit), dims),
                str(message),
            )
            for size, relation, limit, message in (*nonempty, *others)
        )

    def _parameter(self, expr: relax.Expr, kind: Any) -> Any:
        if isinstance(kind, relax.TensorType):
            index = len(self.table.given)
            self.table.given.append(expr)
            name = getattr(expr, "name", f"given{index}")
            return self.table.add_buffer(name, kind, storage=Storage.GIVEN, given=index)
        if isinstance(kind, relax.TupleType):
            parts = enumerate(kind.fields)
            return tuple(self._parameter(relax.TupleGetItem(expr, i), part) for i, part in parts)
        return expr

    def _bind(self, binding: relax.Binding) -> None:
        value = binding.value
        if isinstance(binding, relax.MatchCast):
            self._values[binding.var] = self._match_cast(binding)
        elif isinstance(value, relax.Call):
            self._values[binding.var] = self._call(binding.var, value)
        elif isinstance(value, relax.If | relax.Function | relax.SeqExpr):
            raise NotPlannableError(f"{self.table.name}: control flow at {binding.var.name}")
        else:
            self._values[binding.var] = self._value(value)

    def _match_cast(self, binding: relax.MatchCast) -> Any:
        value, kind = self._value(binding.value), binding.ty
        if not isinstance(kind, relax.TensorType) or not isinstance(value, int):
            return value
        known = self.table.views[value]
        if isinstance(kind.shape, relax.ShapeExpr):
            for extent, size in zip(kind.shape.values, known.shape, strict=True):
                if isinstance(extent, tirx.Var) and extent not in self.table.meanings:
                    self.table.meanings[extent] = size
        return value

    def _value(self, expr: relax.Expr) -> Any:
        if isinstance(expr, relax.Var):
            return self._values.get(expr, expr)  # dims are variables too
        if isinstance(expr, relax.Tuple):
            return tuple(self._value(part) for part in expr.fields)
        if isinstance(expr, relax.TupleGetItem):
            return self._value(expr.tuple_value)[expr.index]
        if isinstance(getattr(expr, "ty", None), relax.TensorType) and not isinstance(
            expr, relax.Call
        ):
            return self._constant(expr)
        return expr

    def _constant(self, expr: relax.Expr) -> int:
        key = getattr(expr, "value", expr)
        if key not in self._constants:
            index = len(self.table.given)
            self.table.given.append(expr)
            self._constants[key] = self.table.add_buffer(
                f"constant{index}", expr.ty, storage=Storage.GIVEN, given=index
            )
        return self._constants[key]

    def _call(self, var: relax.Var, call: relax.Call) -> Any:
        name = call.op.name if isinstance(call.op, tvm.ir.Op) else ""
        if name in ALIASES:
            return self._alias(name, var, call)
        if name in KERNEL_CALLS:
            return self._kernel(name, var, call)
        raise NotPlannableError(
            f"{self.table.name}: {var.name} is a call of {call.op}, which is no kernel"
        )

    def _alias(self, name: str, var: relax.Var, call: relax.Call) -> Any:
        source = self._value(call.args[0])
        if name == "relax_disc.join_rows":
            return Joined(source)
        if name == "relax_disc.rows":
            return self._rows(source, int(call.attrs["begin"]), var.ty)
        buffer = self.table.views[source].buffer
        if name == "relax_disc.evict":
            self.table.candidates.add(buffer)
            return source
        shape = [self.table.expr(extent) for extent in var.ty.shape.values]
        return self.table.view(buffer, dtype_name(var.ty), shape)

    def _rows(self, source: int, begin: int, kind: Any) -> int:
        """View of some rows of a given tensor, as a buffer of their own in its place."""
        view = self.table.views[source]
        whole = self.table.buffers[view.buffer]
        if whole.storage is not Storage.GIVEN:
            raise NotPlannableError(f"{self.table.name}: rows of {whole.name}, which is not given")
        row = itemsize(view.dtype)
        for extent in view.shape[1:]:
            row *= extent.as_int()
        key = (whole.given, begin * row)
        if key not in self._parts:
            self._parts[key] = self.table.add_buffer(
                f"{whole.name}[{begin}:]",
                kind,
                storage=Storage.GIVEN,
                given=whole.given,
                begin=begin * row,
            )
        return self._parts[key]

    def _kernel(self, name: str, var: relax.Var, call: relax.Call) -> Any:
        arguments: list[tuple[str, Any]] = []
        for operand in call.args[1].fields[:]:
            arguments += self._argument(operand)
        for extra in call.args[2:]:  # integers passed beside the tensors
            values = extra.values if isinstance(extra, relax.ShapeExpr) else [extra]
            arguments += [("integer", self.table.expr(value)) for value in values]
        inputs = [self.table.views[value].buffer for kind, value in arguments if kind == "view"]
        kinds = call.ty_args[0]
        many = isinstance(kinds, relax.TupleType)
        outputs = [
            self.table.add_buffer(f"{var.name}.{i}" if many else var.name, kind)
            for i, kind in enumerate(kinds.fields if many else [kinds])
        ]
        callee = call.args[0]
        kernel = KernelCall(
            name=callee.name_hint if isinstance(callee, tvm.ir.GlobalVar) else callee.global_symbol,
            callee=callee,
            arguments=arguments,
            inputs=list(dict.fromkeys(inputs)),
            outputs=[self.table.views[view].buffer for view in outputs],
            source=source_line(call) or source_line(var),
        )
        replaced: set[int] = set()
        if name == "relax.call_tir_inplace":
            attrs: Any = call.attrs
            for output, argument in enumerate(int(i) for i in attrs.inplace_indices):
                if argument < 0:
                    continue
                kind, source = arguments[argument]
                target = outputs[output]
                kernel.copies.append((source, target))
                kernel.inplace.append(
                    (self.table.views[source].buffer, self.table.views[target].buffer)
                )
                arguments[argument] = (kind, target)
                replaced.add(output)
        kernel.arguments += [("view", v) for i, v in enumerate(outputs) if i not in replaced]
        self.table.kernels.append(kernel)
        return tuple(outputs) if many else outputs[0]

    def _argument(self, operand: relax.Expr) -> list[tuple[str, Any]]:
        value = self._value(operand)
        if isinstance(value, int):
            return [("view", value)]
        if isinstance(value, tuple):
            return [part for item in operand.fields for part in self._argument(item)]
        if isinstance(value, relax.ShapeExpr):
            return [("shape", tuple(self.table.expr(extent) for extent in value.values))]
        if isinstance(value, tvm.ir.StringImm):
            return [("text", str(value.value))]
        if isinstance(value, tirx.FloatImm):
            return [("float", float(value.value))]
        if isinstance(value, tvm.ir.GenericConst):
            return [("dtype", str(value.value))]
        return [("integer", self.table.expr(value))]


def read_function(mod: tvm.IRModule, name: str) -> FunctionTable:
    """Read one function of a module; see `FunctionReader.read`."""
    return FunctionReader(mod, name, mod[name]).read()


def halves(func: relax.Function) -> tuple[int, int]:
    """Return how many of the last parameters and results belong to a function's second half."""
    inputs, outputs = (func.attrs or {}).get("relax_disc.second_half") or (0, 0)
    return int(inputs), int(outputs)


def whole_gradients(func: relax.Function) -> tuple[tuple[str, int, str], ...]:
    """Return the attribute ``relax_disc.whole_gradients``, which `SplitGradients` makes."""
    entries = (func.attrs or {}).get("relax_disc.whole_gradients") or ()
    return tuple((str(name), int(place), str(why)) for name, place, why in entries)


def inplace_pairs(func: relax.Function) -> Mapping[int, int]:
    """Return output index -> parameter index of the attribute ``relax_disc.inplace_pairs``."""
    attrs = func.attrs or {}
    return {int(out): int(param) for out, param in attrs.get("relax_disc.inplace_pairs") or ()}
