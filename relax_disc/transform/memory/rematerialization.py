"""Mark the tensors that a plan may give up and compute again: visible calls, decided at run time.

After the pass a function reads like an explanation::

    lv3 = R.call_tir(fused_mul, (lv1, w), ...)
    lv3_evicted = relax_disc.evict(lv3)             # from here its memory may be used otherwise
    ...
    lv3_again = relax_disc.regenerate(lv3_evicted)  # there again, recomputed if it was given up
    lv9 = R.call_tir(fused_grad, (lv8, lv3_again), ...)

Both are the identity on values: a module with marks computes what it did without.  Which of them
take effect, and where a recomputation happens, is up to the plan of each shape.

`LowerRematerialization` turns the marks into the function attribute ``relax_disc.recomputable``: in
program order, the kernels that compute a marked tensor and all that those depend on, as far as
running them twice gives the same.  `PlanArena` calls `relax_disc.regenerate_before` in front of the
kernels that read what such kernels make, and the plan of each shape says what is run there.

Limits: functions that `extract` can read; the others are left as they are.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from relax_disc.analysis.memory.candidates import find_candidates
from relax_disc.analysis.program.extraction import Extraction, extract
from relax_disc.analysis.program.reader import bindings_of, is_kernel_call, read_function
from relax_disc.analysis.program.table import NotPlannableError
from relax_disc.ops import evict, regenerate
from relax_disc.transform.functions import copy_module, program_functions, with_blocks

_MARKS = ("relax_disc.evict", "relax_disc.regenerate")


@tvm.transform.module_pass(opt_level=0, name="InsertRematerialization")
class InsertRematerialization:
    """Insert `relax_disc.evict` and `relax_disc.regenerate` around the far uses of candidates."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with marks."""
        del ctx
        result = copy_module(mod)
        for variable, function in program_functions(mod):
            try:
                extraction = extract(mod, variable.name_hint)
            except NotPlannableError:
                continue
            marker = _Marker(function, extraction)
            if marker.found:
                result.update_func(variable, marker.run())
        return relax.transform.Normalize()(result)


class _Marker:
    def __init__(self, function: relax.Function, extraction: Extraction) -> None:
        self._function = function
        self._values = extraction.table.values
        self._views = extraction.table.views
        self._builder = relax.BlockBuilder()
        bindings = bindings_of(function)
        self._defined = {binding.var: i for i, binding in enumerate(bindings)}
        kernels = [i for i, binding in enumerate(bindings) if is_kernel_call(binding.value)]
        self._evicted_after: dict[int, list[relax.Var]] = {}
        self._regenerated_before: dict[int, list[relax.Var]] = {}
        for candidate in find_candidates(extraction.graph()):
            gap = sorted(extraction.order[k] for k in (candidate.last_use, candidate.next_use))
            if gap[1] >= len(kernels):
                continue  # a copy that is still to come
            last, following = (kernels[k] for k in gap)
            used = self._operand(bindings[following].value, candidate.tensor)
            if used is not None:
                place = max(last, self._defined.get(used, -1))
                self._evicted_after.setdefault(place, []).append(used)
                self._regenerated_before.setdefault(following, []).append(used)

    @property
    def found(self) -> bool:
        """Whether there is anything to mark."""
        return bool(self._evicted_after)

    def run(self) -> relax.Function:
        """Return the function with marks."""
        blocks, index = [], 0
        renamed: dict[relax.Var, relax.Var] = {}
        evicted: dict[relax.Var, relax.Var] = {}
        for block in self._function.body.blocks:
            marked: list[relax.Binding] = []
            kind = relax.DataflowVar if isinstance(block, relax.DataflowBlock) else relax.Var
            for binding in block.bindings:
                for used in self._regenerated_before.get(index, ()):
                    call = regenerate(evicted[used])
                    renamed[used] = self._bind(marked, kind, f"{used.name}_again", call)
                marked.append(self._rename(binding, renamed))
                for used in self._evicted_after.get(index, ()):
                    call = evict(used)
                    evicted[used] = self._bind(marked, kind, f"{used.name}_evicted", call)
                index += 1
            blocks.append(type(block)(marked))
        return with_blocks(self._function, blocks)

    def _operand(self, call: relax.Call, buffer: int) -> relax.Var | None:
        """The first operand of a kernel that stands for a buffer."""
        for operand in call.args[1].fields:
            value = self._values.get(operand) if isinstance(operand, relax.Var) else None
            if isinstance(value, int) and self._views[value].buffer == buffer:
                return operand
        return None

    def _bind(
        self, bindings: list[relax.Binding], kind: type[relax.Var], name: str, call: relax.Call
    ) -> relax.Var:
        value = self._builder.normalize(call)
        variable = kind(name, value.ty)
        bindings.append(relax.VarBinding(variable, value))
        return variable

    def _rename(self, binding: relax.Binding, renamed: dict[relax.Var, relax.Var]) -> relax.Binding:
        call = binding.value
        if not renamed or not is_kernel_call(call):
            return binding
        operands: list[Any] = [
            renamed.get(operand, operand) if isinstance(operand, relax.Var) else operand
            for operand in call.args[1].fields
        ]
        arguments = [call.args[0], relax.Tuple(operands), *list(call.args)[2:]]
        value = relax.Call(call.op, arguments, call.attrs, call.ty_args, call.span)
        return relax.VarBinding(binding.var, self._builder.normalize(value))


@tvm.transform.module_pass(opt_level=0, name="LowerRematerialization")
class LowerRematerialization:
    """Replace marks by the attribute ``relax_disc.recomputable``."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module without marks."""
        del ctx
        result = copy_module(mod)
        for variable, function in program_functions(mod):
            if not any(_is_mark(binding.value) for binding in _bindings(function)):
                continue
            lowered = _MarkRemover(function).run()
            try:
                kernels = recomputable_kernels(mod, variable.name_hint)
            except NotPlannableError:
                kernels = []
            if kernels:
                lowered = lowered.with_attr("relax_disc.recomputable", kernels)
            result.update_func(variable, lowered)
        return relax.transform.Normalize()(result)


def recomputable_kernels(mod: tvm.IRModule, name: str) -> list[int]:
    """Kernels, in program order, that make the marked tensors of a function from what stays."""
    table = read_function(mod, name)
    makers = {b: k for k, kernel in enumerate(table.kernels) for b in kernel.outputs}
    found: set[int] = set()
    waiting = [makers[buffer] for buffer in sorted(table.candidates) if buffer in makers]
    while waiting:
        k = waiting.pop()
        if k not in found and table.kernels[k].recomputable:
            found.add(k)
            waiting += [makers[b] for b in table.kernels[k].inputs if b in makers]
    return sorted(found)


def _bindings(function: relax.Function) -> list[relax.Binding]:
    return bindings_of(function) if isinstance(function.body, relax.SeqExpr) else []


def _is_mark(value: relax.Expr) -> bool:
    return (
        isinstance(value, relax.Call)
        and isinstance(value.op, tvm.ir.Op)
        and value.op.name in _MARKS
    )


@relax.expr_functor.mutator
class _MarkRemover(relax.PyExprMutator):
    """Put the argument of a mark in the place of the mark's variable."""

    def __init__(self, function: relax.Function) -> None:
        super().__init__()
        self._function = function

    def run(self) -> Any:
        return self.visit_expr(self._function)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if _is_mark(binding.value):
            kept: Any = self.visit_expr(binding.value.args[0])
            self.set_var_remap(binding.var, kept)
        else:
            super().visit_var_binding_(binding)
