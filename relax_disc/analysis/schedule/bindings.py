"""The tensor graph of some bindings of a Relax function, at any stage of lowering.

Sizes come from the types.  Every call of an operator, a kernel or a function is a kernel; tuples,
their elements, variables and reshapes are free.  What comes from outside the bindings (parameters,
results of earlier blocks) is there from the start; what is used after them stays.

Where the function has the attribute ``relax_disc.inplace_pairs``, a call that makes such a result
and reads the parameter that it replaces writes over it, if the other readers come before it; they
then stay before it.

Limits: straight-line bindings whose types give all shapes, by the function's own dims.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import tvm
from tvm import relax

from relax_disc.analysis.program.reader import function_dims, inplace_pairs, source_line
from relax_disc.analysis.program.table import leaves
from relax_disc.analysis.program.tensor_graph import Kernel, Size, TensorGraph
from relax_disc.analysis.symbolic.expr import SymbolicDim, SymbolicExpr
from relax_disc.analysis.symbolic.from_tirx import from_tirx
from relax_disc.errors import GraphError
from relax_disc.ops.registry import dtype_name, itemsize

_VIEWS = frozenset(
    {
        "relax.reshape",
        "relax.memory.ensure_zero_offset",
        "relax.memory.view",
        "relax_disc.evict",
        "relax_disc.regenerate",
    }
)
_IN_PLACE = (tvm.ir.Op.get("relax.call_tir_inplace"),)


def is_movable(binding: relax.Binding) -> bool:
    """Whether a binding may change places: pure, not in place, no control flow, no new dim."""
    if not isinstance(binding, relax.VarBinding):
        return False
    if isinstance(binding.value, relax.If | relax.SeqExpr | relax.Function):
        return False
    if isinstance(binding.value, relax.Call) and binding.value.op in _IN_PLACE:
        return False
    return not relax.analysis.contains_impure_call(binding.value)


class BindingGraph:
    """Reads movable bindings into a `TensorGraph`.

    ``calls``: for each kernel of the graph the position of its binding.
    """

    def __init__(
        self,
        func: relax.Function,
        bindings: Sequence[relax.Binding],
        used_later: Iterable[relax.Var],
    ) -> None:
        self.calls: list[int] = []
        self._dims: dict[Any, SymbolicDim] = function_dims(func)
        self._values: dict[relax.Var, Any] = {}
        self._sizes: list[Size] = []
        self._names: list[str] = []
        self._outside: list[int] = []
        self._kernels: list[Kernel] = []
        for position, binding in enumerate(bindings):
            self._bind(position, binding.var, binding.value)
        outputs = [leaf for var in used_later if var in self._values for leaf in self._leaves(var)]
        self._outputs = list(dict.fromkeys(leaf for leaf in outputs if leaf not in self._outside))
        self._overwrite(func)

    def graph(self) -> TensorGraph:
        """Return the graph, symbolic in the function's dims."""
        return TensorGraph(
            dims=tuple(self._dims.values()),
            sizes=tuple(self._sizes),
            inputs=tuple(self._outside),
            outputs=tuple(self._outputs),
            kernels=tuple(self._kernels),
            tensor_names=tuple(self._names),
        )

    def _bind(self, position: int, var: relax.Var, value: relax.Expr) -> None:
        if not isinstance(value, relax.Call):
            self._values[var] = self._value(value)
            return
        name = value.op.name if isinstance(value.op, tvm.ir.Op) else ""
        if name in _VIEWS:
            self._values[var] = self._value(value.args[0])
            return
        read = [leaf for argument in value.args for leaf in leaves(self._value(argument))]
        made = self._make(var.name, var.ty)
        self._values[var] = made
        self._kernels.append(
            Kernel(
                name=_name_of(value),
                inputs=tuple(dict.fromkeys(read)),
                outputs=tuple(leaves(made)),
                source=source_line(value) or source_line(var),
            )
        )
        self.calls.append(position)

    def _value(self, expr: relax.Expr) -> Any:
        """Return the tensors of an expression as nested tuples."""
        if isinstance(expr, relax.Var):
            if expr not in self._values:
                self._values[expr] = made = self._make(expr.name, expr.ty)
                self._outside += leaves(made)
            return self._values[expr]
        if isinstance(expr, relax.Tuple):
            return tuple(self._value(part) for part in expr.fields)
        if isinstance(expr, relax.TupleGetItem):
            return self._value(expr.tuple_value)[expr.index]
        return ()  # a shape, a constant, a function

    def _leaves(self, var: relax.Var) -> list[int]:
        return list(leaves(self._values[var]))

    def _make(self, name: str, kind: Any) -> Any:
        """Return new tensors for a type."""
        if isinstance(kind, relax.TupleType):
            parts = enumerate(kind.fields)
            return tuple(self._make(f"{name}.{index}", part) for index, part in parts)
        if not isinstance(kind, relax.TensorType):
            return ()
        if not isinstance(kind.shape, relax.ShapeExpr):
            raise GraphError(f"the shape of {name} is not known")
        size = SymbolicExpr.constant(itemsize(dtype_name(kind)))
        for extent in kind.shape.values:
            size = size * from_tirx(extent, self._dims)
        self._sizes.append(size.as_int() if size.is_constant else size)
        self._names.append(name)
        return len(self._sizes) - 1

    def _overwrite(self, func: relax.Function) -> None:
        """Let the last writers of parameters write in place."""
        result = self._values.get(func.body.body) if isinstance(func.body.body, relax.Var) else None
        if result is None:
            return
        results = list(leaves(result))
        maker = {leaf: k for k, kernel in enumerate(self._kernels) for leaf in kernel.outputs}
        for output, param in inplace_pairs(func).items():
            old = self._values.get(func.params[param])
            new = results[output] if output < len(results) else None
            if isinstance(old, int) and isinstance(new, int) and new in maker:
                self._write_over(maker[new], old, new)

    def _write_over(self, writer: int, old: int, new: int) -> None:
        kernel = self._kernels[writer]
        taken = {tensor for pair in kernel.inplace for tensor in pair}
        if self._sizes[old] != self._sizes[new] or old not in kernel.inputs or {old, new} & taken:
            return
        readers = [
            k for k, other in enumerate(self._kernels) if old in other.inputs and k != writer
        ]
        if any(reader > writer for reader in readers):
            return
        self._kernels[writer] = replace(
            kernel,
            inplace=(*kernel.inplace, (old, new)),
            after=tuple(sorted({*kernel.after, *readers})),
        )


def _name_of(call: relax.Call) -> str:
    callee = call.args[0] if call.args else None
    if isinstance(callee, tvm.ir.GlobalVar):
        return callee.name_hint
    if isinstance(callee, relax.ExternFunc):
        return callee.global_symbol
    operator = call.op
    return operator.name if isinstance(operator, tvm.ir.Op) else str(operator)
