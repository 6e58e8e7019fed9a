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

A function with the attribute ``relax_disc.second_half`` (how many of its last parameters the caller
has only after the first results, as PyTorch's autograd has the gradients of a model's outputs; how
many of its last results need those) becomes two, planned as one::

    results, frame = main(x, w)
    late results = main__backward(frame, gradients)

Between the calls the frame holds the arena; dropping it gives that back.

A dim that the function counts itself (attribute ``relax_disc.counted``) is entered with its bound,
or with what `CountAtEntry`'s function counted, for which the arena is planned; the kernel that
counts it returns its size, and views that are made of it get that size where they are.

Limits: functions with control flow or with other shapes known only while they run are left as they
are, for the stock passes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import tvm
from tvm import relax

from relax_disc.analysis.program.extraction import Extraction, extract, machine_of
from relax_disc.analysis.program.reader import halves
from relax_disc.analysis.program.table import NotPlannableError, leaves
from relax_disc.analysis.symbolic.from_tirx import to_tirx
from relax_disc.errors import UnsupportedOperatorError
from relax_disc.transform.functions import copy_module, program_functions

_logger = logging.getLogger(__name__)

_ANY = relax.AnyType()
_NOTHING = relax.TupleType([])


def _extern(name: Any) -> Any:
    return relax.ExternFunc(name)


def backward_name(function: str) -> str:
    """Name of the generated function that runs a function's second half."""
    return f"{function}__backward"


def session_name(function: str) -> str:
    """Name of the generated function that returns a function's session."""
    return f"{function}__session"


def _unsized(kind: relax.TensorType) -> relax.TensorType:
    return relax.TensorType(dtype=kind.dtype, ndim=kind.ndim)


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
                if "relax_disc.counted" in (mod[variable].attrs or {}):  # others cannot lower it
                    raise UnsupportedOperatorError(
                        f"Sizes that depend on data cannot be used so: {reason}."
                    ) from reason
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
        _, self._late_results = halves(mod[variable])

    def lower(self) -> None:
        name = self._variable.name_hint
        session = self._add_session_function(session_name(name))
        function = self._mod[self._variable]
        late, _ = halves(function)
        attrs = function.attrs
        body, parameters = self._body(session), function.params
        if late:
            parameters = parameters[: len(parameters) - late]
        lowered = self._function(parameters, body, attrs)
        if attrs and "relax.force_pure" in attrs:
            lowered = lowered.without_attr("relax.force_pure")
        self._mod.update_func(self._variable, lowered)
        if late:
            self._add_second_half(backward_name(name), function.params[len(parameters) :])
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
        return self._add(name, function)

    def _add(self, name: str, function: relax.Function) -> tvm.ir.GlobalVar:
        variable = tvm.ir.GlobalVar(name)
        kinds = [param.ty for param in function.params]
        type_ = relax.FuncType(kinds, function.ret_ty, purity=False)
        relax.expr._update_type(variable, type_)
        self._mod.update_func(variable, function)
        return variable

    def _function(self, parameters: Any, body: relax.Expr, attrs: Any) -> relax.Function:
        """Make a function of what has been bound."""
        block = relax.BindingBlock(self._bindings)
        self._bindings = []
        return relax.Function(
            parameters, relax.SeqExpr([block], body), body.ty, is_pure=False, attrs=attrs
        )

    def _body(self, session_function: tvm.ir.GlobalVar) -> relax.Expr:
        table = self._extraction.table
        late = {table.buffers[buffer].given for buffer in table.late}
        session = self._bind("session", relax.Call(session_function, []), _ANY)
        given = [
            relax.prim_value(0) if place in late else self._operand(expr)
            for place, expr in enumerate(table.given)
        ]
        dims = relax.ShapeExpr(list(self._extraction.variables))
        frame = self._call("frame", "relax_disc.enter", [session, dims, *given], _ANY)
        returned = self._extraction.returned
        if not late:
            self._kernels(frame, 0, len(self._extraction.kernels))
            return self._result(frame, returned, leave=True)
        self._kernels(frame, 0, self._extraction.first_late_kernel())
        self._call("_", "relax_disc.pause", [frame], _NOTHING)
        return self._result(frame, returned[: len(returned) - self._late_results], leave=False)

    def _add_second_half(self, name: str, gradients: Sequence[relax.Var]) -> None:
        extraction = self._extraction
        frame = relax.Var("frame", _ANY)
        # Of sizes the frame knows; here they would have to be solved from shapes such as 2 * n.
        parameters = [relax.Var(g.name, _unsized(g.ty)) for g in gradients]
        table = extraction.table
        by_given = {table.given[table.buffers[b].given]: table.buffers[b].given for b in table.late}
        for old, new in zip(gradients, parameters, strict=True):
            arguments = [frame, relax.prim_value(by_given[old]), new]
            self._call("_", "relax_disc.supply", arguments, _NOTHING)
        self._kernels(frame, extraction.first_late_kernel(), len(extraction.kernels))
        returned = extraction.returned[len(extraction.returned) - self._late_results :]
        body = self._result(frame, returned, leave=True)
        attrs = tvm.ir.make_node("ir.DictAttrs", global_symbol=name)
        self._add(name, self._function([frame, *parameters], body, attrs))

    def _kernels(self, frame: relax.Var, first: int, end: int) -> None:
        regenerated, kernels = self._extraction.needs_regenerate(), self._extraction.kernels
        for index in range(first, end):
            position = relax.prim_value(index)
            if regenerated[index]:
                self._call("_", "relax_disc.regenerate_before", [frame, position], _NOTHING)
            arguments = [frame, position, kernels[index].callee]
            self._call("_", "relax_disc.kernel", arguments, _NOTHING)

    def _result(self, frame: relax.Var, returned: Any, *, leave: bool) -> relax.Expr:
        """Bind what is returned; with the frame where the call does not end."""
        wanted = {x for x in leaves(returned) if isinstance(x, int)}
        halved = bool(self._extraction.table.late)
        outputs: dict[int, relax.Expr] = {}
        for index, view in enumerate(self._extraction.result_views()):
            if view not in wanted:
                continue
            kind = self._view_type(view)
            arguments = [frame, relax.prim_value(index)]
            kind = _unsized(kind) if halved or self._is_counted(view) else kind
            outputs[view] = self._call("output", "relax_disc.output", arguments, kind)
        if leave:
            self._call("_", "relax_disc.leave", [frame], _NOTHING)
        result = self._structure(returned, outputs)
        if not leave:
            result = self._builder.normalize(relax.Tuple([*result.fields, frame]))
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

    def _is_counted(self, view: int) -> bool:
        """Whether a tensor's shape is known only when the function has run."""
        shape = self._extraction.table.views[view].shape
        counted = self._extraction.table.counted
        return any(dim.name in counted for extent in shape for dim in extent.free_dims)

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
