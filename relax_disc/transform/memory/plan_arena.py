"""Lower Relax functions to straight calls of the run time, which plans memory at entry.

Takes the place of `CallTIRRewrite`, `StaticPlanBlockMemory` and `KillAfterLastUse`.  A function
becomes::

    session = main__session()                       # the kernel table, parsed once
    frame = relax_disc.enter(session, R.shape([batch, seq]), x, w, ...)
    relax_disc.kernel(frame, 0, fused_add)
    relax_disc.regenerate_before(frame, 1)          # where a recomputation may be needed
    relax_disc.kernel(frame, 1, fused_mul)
    out = relax_disc.output(frame, 0)
    relax_disc.leave(frame)

Results that replace a parameter are in the parameter's memory when the call ends and are left out
of what it returns; a single result that is left is returned by itself.

Limits: functions with control flow or with shapes known only while they run are left as they are,
for the stock passes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import tvm
from tvm import relax

from relax_disc.analysis.program.extraction import Extraction, extract, machine_of
from relax_disc.analysis.program.table import NotPlannableError
from relax_disc.analysis.symbolic.from_tirx import to_tirx
from relax_disc.transform.functions import copy_module, program_functions

_logger = logging.getLogger(__name__)

_ANY = relax.AnyType()
_NOTHING = relax.TupleType([])


def _extern(name: Any) -> Any:
    return relax.ExternFunc(name)


def session_name(function: str) -> str:
    """Name of the generated function that returns a function's session."""
    return f"{function}__session"


@tvm.transform.module_pass(opt_level=0, name="PlanArena")
class PlanArena:
    """Make every function that can be planned run in one arena."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Lower the module's functions."""
        del ctx
        result = copy_module(mod)
        for variable, _ in program_functions(mod):
            name = variable.name_hint
            try:
                extraction = extract(mod, name)
            except NotPlannableError as reason:
                _logger.info("%s is lowered without an arena: %s", name, reason)
                continue
            _Lowering(result, variable, extraction).lower()
        return result


class _Lowering:
    def __init__(
        self, mod: tvm.IRModule, variable: tvm.ir.GlobalVar, extraction: Extraction
    ) -> None:
        self._mod = mod
        self._variable = variable
        self._extraction = extraction
        self._builder = relax.BlockBuilder(mod)
        self._bindings: list[relax.Binding] = []

    def lower(self) -> None:
        name = self._variable.name_hint
        session = self._add_session_function(session_name(name))
        function = self._mod[self._variable]
        body = self._body(session)
        attrs = function.attrs
        lowered = relax.Function(
            function.params,
            relax.SeqExpr([relax.BindingBlock(self._bindings)], body),
            body.ty,
            is_pure=False,
            attrs=attrs,
        )
        if attrs and "relax.force_pure" in attrs:
            lowered = lowered.without_attr("relax.force_pure")
        self._mod.update_func(self._variable, lowered)
        for overlaid in self._overlaid():
            kernel = self._mod[overlaid]
            if kernel.attrs and "tirx.noalias" in kernel.attrs:
                self._mod.update_func(overlaid, kernel.without_attr("tirx.noalias"))

    def _add_session_function(self, name: str) -> tvm.ir.GlobalVar:
        machine = machine_of(tvm.target.Target.current(allow_none=True))
        text = tvm.ir.StringImm(self._extraction.metadata(machine).to_json())
        opened = relax.Var("session", _ANY)
        arguments = relax.Tuple([text])
        call = relax.Call(
            tvm.ir.Op.get("relax.call_builtin_with_ctx"),
            [_extern("relax_disc.open"), arguments],
            ty_args=[_ANY],
        )
        binding = relax.VarBinding(opened, self._builder.normalize(call))
        function = relax.Function(
            [],
            relax.SeqExpr([relax.BindingBlock([binding])], opened),
            _ANY,
            is_pure=False,
            attrs=tvm.ir.make_node("ir.DictAttrs", global_symbol=name),
        )
        variable = tvm.ir.GlobalVar(name)
        relax.expr._update_type(variable, relax.FuncType([], _ANY, purity=False))
        self._mod.update_func(variable, function)
        return variable

    def _body(self, session_function: tvm.ir.GlobalVar) -> relax.Expr:
        table = self._extraction.table
        session = self._bind("session", relax.Call(session_function, []), _ANY)
        given = [self._operand(expr) for expr in table.given]
        dims = relax.ShapeExpr(list(self._extraction.variables))
        frame = self._call("frame", "relax_disc.enter", [session, dims, *given], _ANY)
        regenerated = self._extraction.needs_regenerate()
        for index, kernel in enumerate(self._extraction.kernels):
            position = relax.prim_value(index)
            if regenerated[index]:
                self._call("_", "relax_disc.regenerate_before", [frame, position], _NOTHING)
            arguments = [frame, position, kernel.callee]
            self._call("_", "relax_disc.kernel", arguments, _NOTHING)
        outputs: dict[int, relax.Expr] = {}
        for index, view in enumerate(self._extraction.result_views()):
            kind = self._view_type(view)
            arguments = [frame, relax.prim_value(index)]
            outputs[view] = self._call("output", "relax_disc.output", arguments, kind)
        self._call("_", "relax_disc.leave", [frame], _NOTHING)
        result = self._structure(self._extraction.returned, outputs)
        if not isinstance(result, relax.Var):
            result = self._bind("result", result, result.ty)
        return result

    def _operand(self, expr: relax.Expr) -> relax.Expr:
        """A parameter, a constant, or an element of a tuple parameter bound to a variable."""
        if isinstance(expr, relax.TupleGetItem):
            inner = self._operand(expr.tuple_value)
            element = self._builder.normalize(relax.TupleGetItem(inner, expr.index))
            return self._bind("element", element, element.ty)
        return expr

    def _structure(self, structure: Any, outputs: dict[int, relax.Expr]) -> relax.Expr:
        if isinstance(structure, tuple):
            parts = [self._structure(part, outputs) for part in structure]
            return self._builder.normalize(relax.Tuple(parts))
        return outputs[structure] if isinstance(structure, int) else structure

    def _view_type(self, view: int) -> relax.TensorType:
        entry = self._extraction.table.views[view]
        names = {dim.name: var for var, dim in self._extraction.table.dims.items()}
        return relax.TensorType([to_tirx(extent, names) for extent in entry.shape], entry.dtype)

    def _call(self, name: str, function: str, args: list[Any], kind: Any) -> relax.Var:
        return self._bind(name, relax.Call(_extern(function), args, ty_args=[kind]), kind)

    def _bind(self, name: str, value: relax.Expr, kind: Any) -> relax.Var:
        variable = relax.Var(name, kind)
        self._bindings.append(relax.VarBinding(variable, self._builder.normalize(value)))
        return variable

    def _overlaid(self) -> Iterator[tvm.ir.GlobalVar]:
        """PrimFuncs that may get one buffer as input and output."""
        seen = set()
        for kernel in self._extraction.kernels:
            if isinstance(kernel.callee, tvm.ir.GlobalVar) and kernel.callee not in seen:
                seen.add(kernel.callee)
                yield kernel.callee
