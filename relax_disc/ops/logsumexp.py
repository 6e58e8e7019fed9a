"""Log of the sum of exponentials of each row, and its gradient, without the exponentials.

Rows of minus infinity alone give minus infinity, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tvm import relax, te, tirx

from relax_disc.ops import registry


def _rows(x: Any) -> Any:
    wide = "float64" if str(x.dtype) == "float64" else "float32"
    rows, columns = x.shape
    column, other = (te.reduce_axis((0, columns), "column") for _ in range(2))
    largest = te.compute(
        (rows,), lambda row: te.max(x[row, column].astype(wide), axis=column), name="row_max"
    )

    def top(row: Any) -> Any:
        infinite = tirx.isinf(largest[row])
        return tirx.Select(infinite, tirx.const(0.0, wide), largest[row])

    total = te.compute(
        (rows,),
        lambda row: te.sum(tirx.exp(x[row, other].astype(wide) - top(row)), axis=other),
        name="row_sum",
    )
    return te.compute((rows,), lambda row: top(row) + tirx.log(total[row]), name="lse")


def _gradient(grad: Any, x: Any, lse: Any) -> Any:
    def element(row: Any, column: Any) -> Any:
        probability = tirx.exp(x[row, column].astype(str(lse.dtype)) - lse[row])
        return (probability * grad[row]).astype(str(x.dtype))

    return te.compute(x.shape, element, name="logsumexp_gradient")


def _legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return builder.call_te(_rows, *call.args, primfunc_name_hint="logsumexp_rows")


def _legalize_backward(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return builder.call_te(_gradient, *call.args, primfunc_name_hint="logsumexp_gradient")


logsumexp_backward = registry.operator(
    "logsumexp_backward(Tensor grad, Tensor x:2, Tensor lse) -> Tensor",
    """Gradient of the log of the sum of exponentials by x, ``grad * exp(x - lse)``, in x's type.

    ``grad``, ``[N]``: gradient of the result of :func:`logsumexp`, in its type; ``x`` and ``lse``
    are its argument and its result.
    """,
    lambda grad, x, lse: [x],
)


@registry.kept(torch.ops.aten.logsumexp.default)
def keep_logsumexp(x: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor | None:
    """Keep ``logsumexp`` over the last axis, as rows of a matrix."""
    last = x.dim() - 1
    if last < 1 or [axis % x.dim() for axis in dim] != [last] or not x.is_floating_point():
        return None
    rows = torch.ops.relax_disc.logsumexp(x.reshape(-1, x.shape[-1])).to(x.dtype)
    shape = [*x.shape[:-1], 1] if keepdim else x.shape[:-1]
    return rows.reshape(shape)


def _save_logsumexp(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _logsumexp_gradient(ctx: Any, grad: Tensor) -> Tensor:
    return torch.ops.relax_disc.logsumexp_backward(grad, *ctx.saved_tensors)


logsumexp = registry.operator(
    "logsumexp(Tensor x:2) -> Tensor",
    """Log of the sum of exponentials of each row.

    ``x`` is ``[N, V]``, the result ``[N]``, in float32, float64 for float64.
    """,
    lambda x: [(x.shape[:1], x.statistics)],
    gradient=(_logsumexp_gradient, _save_logsumexp),
)
registry.register_legalization("relax_disc.logsumexp", _legalize)
registry.register_legalization("relax_disc.logsumexp_backward", _legalize_backward)
