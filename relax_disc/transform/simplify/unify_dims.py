"""Write the sizes of a module in the fewest dims, as its shape graph solves them.

A vector of `S0` numbers that is reshaped to 12 rows of `S1` has ``12*S1`` of them: where both dims
come in with parameters, every size that names `S0` is written in `S1`.  Then sizes compare, orders
are judged at shapes that exist, and a call whose shapes disagree is refused at entry.

Limits: functions with declared ranges (attribute ``relax_disc.dims``) are left alone: torch.export
has solved a captured step's.
"""

from __future__ import annotations

import logging

import tvm
from tvm import relax
from tvm.relax.analysis import tir_vars_in_type

from relax_disc.analysis.symbolic.from_tirx import to_tirx
from relax_disc.analysis.symbolic.shape_graph.graph import SymbolicShapeGraph
from relax_disc.errors import GraphError
from relax_disc.transform.functions import copy_module, program_functions

_logger = logging.getLogger(__name__)


@tvm.transform.module_pass(opt_level=0, name="UnifyDims")
class UnifyDims:
    """Replace dims of parameters by what they are in the others."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module in fewer dims."""
        del ctx
        variables = {
            variable: list(tir_vars_in_type(relax.TupleType([p.ty for p in function.params])))
            for variable, function in program_functions(mod)
            if "relax_disc.dims" not in (function.attrs or {})
        }
        variables = {name: dims for name, dims in variables.items() if len(dims) > 1}
        if not variables:
            return mod
        try:
            graph = SymbolicShapeGraph.from_module(mod)
        except GraphError as reason:
            _logger.info("dims stay as they are: %s", reason)
            return mod
        result = copy_module(mod)
        for name, dims in variables.items():
            sizes = {dim: graph.canonical(dim, name.name_hint) for dim in dims}
            free = {
                str(sizes[dim]): dim for dim in reversed(dims) if str(sizes[dim]).isidentifier()
            }
            solved = {
                dim: to_tirx(size, free)
                for dim, size in sizes.items()
                if free.get(str(size)) is not dim and all(d.name in free for d in size.free_dims)
            }
            if not solved:
                continue
            unified = mod[name].bind_symbolic_vars(solved)
            if relax.analysis.check_well_formed(unified):
                result.update_func(name, unified)
        return result
