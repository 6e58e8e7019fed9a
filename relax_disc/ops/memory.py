"""Marks for the planner: where a tensor may be given up, where it is needed again, what comes late.

All are the identity on values and types.  ``InsertRematerialization`` places the first two, so that
a printed module shows what may happen; the plan of each shape decides at run time what does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tvm import relax

from relax_disc.ops import registry


def evict(tensor: relax.Expr) -> relax.Call:
    """Build ``relax_disc.evict``: from here on the planner may reuse the tensor's memory."""
    return registry.call("relax_disc.evict", [tensor], {})


def regenerate(tensor: relax.Expr) -> relax.Call:
    """Build ``relax_disc.regenerate``: the tensor is there again, recomputed if it was gone."""
    return registry.call("relax_disc.regenerate", [tensor], {})


def await_gradient(gradient: relax.Expr, results: Sequence[relax.Expr]) -> relax.Call:
    """Build ``relax_disc.await_gradient``: a parameter that the caller knows after some results.

    A function with such marks runs in two calls: see `relax_disc.transform.memory.plan_arena`.
    """
    return registry.call("relax_disc.await_gradient", [gradient, relax.Tuple(list(results))], {})


def _infer(call: relax.Call, builder: relax.BlockBuilder) -> relax.TensorType:
    return registry.tensor_type(call.args[0], "a mark of the planner")


registry.register("relax_disc.evict", _infer, "The tensor may be given up from here on.")
registry.register("relax_disc.regenerate", _infer, "The tensor is needed again from here on.")
registry.traced(
    "await_gradient(Tensor gradient, Tensor[] results) -> Tensor",
    lambda gradient, results: torch.empty_like(gradient),
    build=await_gradient,
)
registry.register("relax_disc.await_gradient", _infer, "The caller gives this after the results.")
