"""Log of the sum of exponentials of each row, and its gradient, without the exponentials.

Rows of minus infinity alone give minus infinity, as in PyTorch.
"""

from __future__ import annotations

from typing import Any

from tvm import relax, te, tirx

from relax_disc.ops import registry


def logsumexp(x: relax.Expr) -> relax.Call:
    """Build ``relax_disc.logsumexp``.

    Parameters
    ----------
    x : relax.Expr
        ``[N, V]``.

    Returns
    -------
    relax.Call
        ``[N]``, in float32, float64 for float64.
    """
    return registry.call("relax_disc.logsumexp", [x], {})


def logsumexp_backward(grad: relax.Expr, x: relax.Expr, lse: relax.Expr) -> relax.Call:
    """Build ``relax_disc.logsumexp_backward``: the gradient of x, ``grad * exp(x - lse)``.

    Parameters
    ----------
    grad : relax.Expr
        ``[N]``, gradient of the result of :func:`logsumexp`, in its type.
    x, lse : relax.Expr
        Argument and result of :func:`logsumexp`.

    Returns
    -------
    relax.Call
        ``[N, V]``, of x's type.
    """
    return registry.call("relax_disc.logsumexp_backward", [grad, x, lse], {})


def _infer_logsumexp(call: relax.Call, builder: relax.BlockBuilder) -> relax.TensorType:
    kind = registry.tensor_type(call.args[0], "relax_disc.logsumexp: x", 2)
    return relax.TensorType(registry.extents(kind)[:1], registry.statistics_dtype(kind))


def _infer_logsumexp_backward(call: relax.Call, builder: relax.BlockBuilder) -> relax.TensorType:
    return registry.tensor_type(call.args[1], "relax_disc.logsumexp_backward: x", 2)


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


registry.register("relax_disc.logsumexp", _infer_logsumexp, "Log of the sum of exponentials.")
registry.register(
    "relax_disc.logsumexp_backward",
    _infer_logsumexp_backward,
    "Gradient of the log of the sum of exponentials.",
)
registry.register_legalization("relax_disc.logsumexp", _legalize)
registry.register_legalization("relax_disc.logsumexp_backward", _legalize_backward)
