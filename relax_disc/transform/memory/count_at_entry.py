"""Count before a call is planned what the batch alone tells, in a function of its own.

A size that a kernel of `main` counts (attribute ``relax_disc.counted``) is planned at its bound.
Where its mask is made of the batch, a labels' mask say, `main__counts` makes the same mask and
counts it, so that `main` can be entered with the size: it takes the shape and the batch of `main`,
in this order, and finds each such dim as `main` does.

A dim is left to `main` where any mask that it counts depends on parameters, or on what takes more
than a pass over the batch: products, convolutions, calls of libraries.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, tirx
from tvm.relax.utils import copy_with_new_vars

from relax_disc.analysis.program.reader import bindings_of
from relax_disc.analysis.program.table import NotPlannableError
from relax_disc.analysis.symbolic.expr import SymbolicExpr
from relax_disc.ops.counted import COUNTING, COUNTING_KERNELS
from relax_disc.ops.operand_views import is_call_of, operands_of
from relax_disc.transform.functions import program_functions

_AT_ENTRY = ("shape", "batch", "packing")
_OF_DIMS = ("relax_disc.dims", "tir_var_lower_bound", "tir_var_upper_bound")
_LONG = ("matmul", "conv")


def counts_name(function: str) -> str:
    """Name of the generated function that counts what the batch of a function tells."""
    return f"{function}__counts"


@tvm.transform.module_pass(opt_level=0, name="CountAtEntry")
class CountAtEntry:
    """Add a function that counts beside each whose batch tells sizes."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with the added functions."""
        del ctx
        builder = relax.BlockBuilder(mod)
        for variable, function in program_functions(mod):
            made = _counting_function(function)
            if made is not None:
                name = counts_name(variable.name_hint)
                builder.add_func(made.with_attr("global_symbol", name), name)
        functions = dict(builder.get().functions_items())
        return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _counting_function(function: relax.Function) -> relax.Function | None:
    attrs: Any = function.attrs or {}
    counted, kinds = attrs.get("relax_disc.counted"), attrs.get("relax_disc.param_kinds")
    if not counted or not kinds:
        return None
    try:
        bindings = bindings_of(function)
    except NotPlannableError:  # control flow: nothing is planned
        return None
    kept = [k for k, kind in enumerate(kinds) if kind in _AT_ENTRY]
    parameters = [function.params[k] for k in kept]
    calls = {binding.var: dim for binding in bindings if (dim := _counted_by(binding))}
    left: set[str] = set()
    while True:
        known = _known(bindings, parameters, left)
        later = {dim for variable, dim in calls.items() if variable not in known}
        if later <= left:
            break
        left |= later
    found = [variable for variable, dim in calls.items() if dim not in left]
    if not found:
        return None
    counts = relax.Var("counts", relax.TupleType([variable.ty for variable in found]))
    needed = [*_needed(bindings, found), relax.VarBinding(counts, relax.Tuple(found))]
    body = relax.SeqExpr([relax.DataflowBlock(needed)], counts)
    mine = {str(name): least for name, least in counted.items() if str(name) not in left}
    checks = [
        check
        for check in attrs.get("relax_disc.count_checks") or ()
        if left.isdisjoint(_dims_of(check[0]) | _dims_of(check[2]))
    ]
    own = {
        **{name: attrs[name] for name in _OF_DIMS if name in attrs},
        "relax_disc.counted": mine,
        **({"relax_disc.count_checks": checks} if checks else {}),
        "relax_disc.param_kinds": [kinds[k] for k in kept],
    }
    return copy_with_new_vars(relax.Function(parameters, body, counts.ty)).with_attrs(own)


def _dims_of(size: Any) -> set[str]:
    return {dim.name for dim in SymbolicExpr.parse(str(size)).free_dims}


def _counted_by(binding: relax.Binding) -> str | None:
    """Return the dim that a call counts; None for all else."""
    value: Any = binding.value
    if not isinstance(value, relax.Call) or _operation(value) not in COUNTING | COUNTING_KERNELS:
        return None
    kind: Any = binding.var.ty
    first = kind.fields[0] if isinstance(kind, relax.TupleType) else kind
    return str(first.shape.values[0])


def _operation(call: Any) -> str:
    """Name the operator that is called, or the function of a library."""
    if is_call_of(call, "relax.call_dps_packed"):
        return str(call.args[0].global_symbol)
    return str(getattr(call.op, "name", ""))


def _known(
    bindings: list[relax.Binding], parameters: list[relax.Var], left: set[str]
) -> set[relax.Var]:
    """Find what is made of the batch alone in little time, and mentions no dim that is left."""
    known = set(parameters)
    for binding in bindings:
        if (
            known.issuperset(operands_of(binding.value))
            and _is_short(binding.value)
            and left.isdisjoint(_dims_in(binding))
        ):
            known.add(binding.var)
    return known


def _is_short(value: Any) -> bool:
    if not isinstance(value, relax.Call):
        return True
    if is_call_of(value, "relax.call_dps_packed"):
        return _operation(value) in COUNTING_KERNELS
    return not any(word in _operation(value) for word in _LONG)


def _dims_in(binding: relax.Binding) -> set[str]:
    found: set[str] = set()

    def visit(node: Any) -> None:
        if isinstance(node, relax.Var | tirx.Var) and isinstance(node.ty, tvm.ir.PrimType):
            found.add(node.name)

    relax.analysis.post_order_visit(binding.value, visit)
    relax.analysis.post_order_visit(binding.var, visit)
    return found


def _needed(bindings: list[relax.Binding], found: list[relax.Var]) -> list[relax.Binding]:
    """Return the bindings that some variables need."""
    wanted, kept = set(found), []
    for binding in reversed(bindings):
        if binding.var in wanted:
            wanted.update(operands_of(binding.value))
            kept.append(binding)
    return kept[::-1]
