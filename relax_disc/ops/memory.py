"""Marks for the planner: where a tensor may be given up, where it is needed again, what comes late.

And rows of a parameter, which are read and written where they are.  The marks are the identity on
values and types.  ``InsertRematerialization`` places the first two, so that
a printed module shows what may happen; the plan of each shape decides at run time what does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tvm import relax, tirx

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


def rows(tensor: relax.Expr, begin: int, count: int) -> relax.Call:
    """Build ``relax_disc.rows``: so many rows of a parameter of the function, from one on."""
    return registry.call("relax_disc.rows", [tensor], {"begin": int(begin), "count": int(count)})


def join_rows(parts: Sequence[relax.Expr]) -> relax.Call:
    """Build ``relax_disc.join_rows``: new values of all rows of a parameter, which are a result."""
    return registry.call("relax_disc.join_rows", [relax.Tuple(list(parts))], {})


def _infer_rows(call: relax.Call, builder: relax.BlockBuilder) -> relax.TensorType:
    kind = registry.tensor_type(call.args[0], "relax_disc.rows")
    count = tirx.IntImm("int64", int(registry.attribute(call, "count")))
    return relax.TensorType([count, *registry.extents(kind)[1:]], registry.dtype_name(kind))


def _infer_join_rows(call: relax.Call, builder: relax.BlockBuilder) -> relax.TensorType:
    kinds = [registry.tensor_type(part, "relax_disc.join_rows") for part in call.args[0].fields]
    count = sum(int(registry.extents(kind)[0]) for kind in kinds)
    first = kinds[0]
    rest = registry.extents(first)[1:]
    return relax.TensorType([tirx.IntImm("int64", count), *rest], registry.dtype_name(first))


def _infer(call: relax.Call, builder: relax.BlockBuilder) -> relax.TensorType:
    return registry.tensor_type(call.args[0], "a mark of the planner")


registry.register("relax_disc.evict", _infer, "The tensor may be given up from here on.")
registry.register("relax_disc.rows", _infer_rows, "Some rows of a parameter, in its place.")
registry.register("relax_disc.join_rows", _infer_join_rows, "All rows of a parameter, made apart.")
registry.register("relax_disc.regenerate", _infer, "The tensor is needed again from here on.")
registry.traced(
    "await_gradient(Tensor gradient, Tensor[] results) -> Tensor",
    lambda gradient, results: torch.empty_like(gradient),
    build=await_gradient,
)
registry.register("relax_disc.await_gradient", _infer, "The caller gives this after the results.")
