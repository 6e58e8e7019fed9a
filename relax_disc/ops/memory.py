"""Marks for the planner: where a tensor may be given up, and where it is needed again.

Both are the identity on values and types.  ``InsertRematerialization`` places them, so that a
printed module shows what may happen; the plan of each shape decides at run time what does.
"""

from __future__ import annotations

from tvm import relax

from relax_disc.ops import registry


def evict(tensor: relax.Expr) -> relax.Call:
    """Build ``relax_disc.evict``: from here on the planner may reuse the tensor's memory."""
    return registry.call("relax_disc.evict", [tensor], {})


def regenerate(tensor: relax.Expr) -> relax.Call:
    """Build ``relax_disc.regenerate``: the tensor is there again, recomputed if it was gone."""
    return registry.call("relax_disc.regenerate", [tensor], {})


def _infer(call: relax.Call, builder: relax.BlockBuilder) -> relax.TensorType:
    return registry.tensor_type(call.args[0], "relax_disc.evict or relax_disc.regenerate")


registry.register("relax_disc.evict", _infer, "The tensor may be given up from here on.")
registry.register("relax_disc.regenerate", _infer, "The tensor is needed again from here on.")
