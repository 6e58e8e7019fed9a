"""Turn cross-entropy and its gradient into kernels that never hold log-probabilities.

Forward: one kernel over the rows (maximum, sum of exponentials, the row's loss), one that sums the
rows.  Backward: one element-wise kernel, which may write over the logits.

With class weights ``w`` and label smoothing ``s`` over ``V`` classes the loss of a row is::

    (1 - s) w_t (lse - x_t) + s / V * sum_c w_c (lse - x_c)

Half-precision logits are computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax, te, tirx

import relax_disc.ops.cross_entropy  # noqa: F401  registers the operators first
from relax_disc.ops import registry
from relax_disc.ops.cross_entropy import REDUCTIONS

_MEAN, _SUM, _NONE = REDUCTIONS


class _Rows:
    """The parts of a row's loss as TE expressions."""

    def __init__(self, logits: Any, target: Any, weight: Any | None, attrs: Any, wide: str) -> None:
        self.rows, self.classes = logits.shape
        self.wide = wide
        self.smoothing = float(attrs["label_smoothing"])
        self._logits = logits
        self._target = target
        self._weight = weight
        self._ignored = tirx.const(int(attrs["ignore_index"]), str(target.dtype))

    def const(self, value: float) -> Any:
        return tirx.const(value, self.wide)

    def class_count(self) -> Any:
        return self.classes.astype(self.wide)

    def logit(self, row: Any, column: Any) -> Any:
        return self._logits[row, column].astype(self.wide)

    def weight(self, column: Any) -> Any:
        if self._weight is None:
            return self.const(1.0)
        return self._weight[column].astype(self.wide)

    def counts(self, row: Any) -> Any:
        """Whether the row is not ignored."""
        return self._target[row] != self._ignored

    def is_target(self, row: Any, column: Any) -> Any:
        return self._target[row] == column.astype(str(self._target.dtype))

    def target(self, row: Any) -> Any:
        """Index of the row's class, inside the range even where the row is ignored."""
        index = self._target[row].astype("int64")
        return tirx.max(tirx.min(index, self.classes - 1), tirx.const(0, "int64"))

    def target_weight(self, row: Any) -> Any:
        if self._weight is None:
            return self.const(1.0)
        return self.weight(self.target(row))

    def counted_weight(self, row: Any) -> Any:
        return tirx.Select(self.counts(row), self.target_weight(row), self.const(0.0))

    def over_classes(self, value: Callable[[Any, Any], Any], name: str) -> Any:
        """Sum over the classes of each row."""
        column = te.reduce_axis((0, self.classes), "column")
        return te.compute(
            (self.rows,), lambda row: te.sum(value(row, column), axis=column), name=name
        )


def _legalize_forward(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    attrs = call.attrs
    logits_type = registry.tensor_type(call.args[0], "logits", 2)
    dtype = registry.dtype_name(logits_type)
    wide = registry.statistics_dtype(logits_type)
    reduction = str(attrs["reduction"])
    none = reduction == _NONE

    def row_losses(logits: Any, target: Any, weight: Any | None = None) -> list[Any]:
        return _row_losses(_Rows(logits, target, weight, attrs, wide), dtype if none else wide)

    rows = builder.emit_te(row_losses, *call.args, primfunc_name_hint="cross_entropy_rows")
    lse, losses = (builder.emit(relax.TupleGetItem(rows, index)) for index in range(2))

    def totals(losses: Any, logits: Any, target: Any, weight: Any | None = None) -> list[Any]:
        parts = _Rows(logits, target, weight, attrs, wide)
        return _totals(parts, losses, reduction, dtype)

    totals_args = [losses, *call.args]
    result = builder.emit_te(totals, *totals_args, primfunc_name_hint="cross_entropy_total")
    if none:
        return relax.Tuple([losses, lse, result])
    loss, count = (builder.emit(relax.TupleGetItem(result, index)) for index in range(2))
    return relax.Tuple([loss, lse, count])


def _row_losses(parts: _Rows, dtype: str) -> list[Any]:
    column = te.reduce_axis((0, parts.classes), "column")
    largest = te.compute(
        (parts.rows,),
        lambda row: te.max(parts.logit(row, column), axis=column),
        name="row_max",
    )
    total = parts.over_classes(
        lambda row, column: tirx.exp(parts.logit(row, column) - largest[row]), "row_sum"
    )
    lse = te.compute((parts.rows,), lambda row: largest[row] + tirx.log(total[row]), name="lse")
    smooth = None
    if parts.smoothing:
        smooth = parts.over_classes(
            lambda row, column: parts.weight(column) * (lse[row] - parts.logit(row, column)),
            "smooth",
        )

    def loss(row: Any) -> Any:
        distance = lse[row] - parts.logit(row, parts.target(row))
        value = distance * parts.target_weight(row)
        if smooth is not None:
            value = value * parts.const(1.0 - parts.smoothing)
            value = value + smooth[row] * (parts.const(parts.smoothing) / parts.class_count())
        return tirx.Select(parts.counts(row), value, parts.const(0.0)).astype(dtype)

    return [lse, te.compute((parts.rows,), loss, name="row_loss")]


def _totals(parts: _Rows, losses: Any, reduction: str, dtype: str) -> Any:
    row = te.reduce_axis((0, parts.rows), "row")
    count = te.compute((), lambda: te.sum(parts.counted_weight(row), axis=row), name="count")
    if reduction == _NONE:
        return count
    other = te.reduce_axis((0, parts.rows), "row")
    total = te.compute((), lambda: te.sum(losses[other], axis=other), name="total")
    if reduction == _MEAN:
        loss = te.compute((), lambda: (total[()] / count[()]).astype(dtype), name="loss")
    else:
        loss = te.compute((), lambda: total[()].astype(dtype), name="loss")
    return [loss, count]


def _legalize_backward(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    attrs = call.attrs
    grad_loss, logits, target, lse, count, *weight = call.args
    logits_type = registry.tensor_type(logits, "logits", 2)
    dtype = registry.dtype_name(logits_type)
    wide = registry.statistics_dtype(logits_type)
    weights = list(weight)
    if weights and float(attrs["label_smoothing"]):
        weights.append(
            builder.emit_te(
                lambda weight: _sum_of_weights(weight, wide),
                weights[0],
                primfunc_name_hint="cross_entropy_weights",
            )
        )

    def gradient(
        grad_loss: Any,
        logits: Any,
        target: Any,
        lse: Any,
        count: Any,
        weight: Any | None = None,
        total_weight: Any | None = None,
    ) -> Any:
        parts = _Rows(logits, target, weight, attrs, wide)
        scale = _scale(grad_loss, count, str(attrs["reduction"]), wide)
        return _gradient(parts, scale, lse, total_weight, dtype)

    args = [grad_loss, logits, target, lse, count, *weights]
    return builder.call_te(gradient, *args, primfunc_name_hint="cross_entropy_gradient")


def _sum_of_weights(weight: Any, wide: str) -> Any:
    column = te.reduce_axis((0, weight.shape[0]), "column")
    return te.compute((), lambda: te.sum(weight[column].astype(wide), axis=column), name="weights")


def _scale(grad_loss: Any, count: Any, reduction: str, wide: str) -> Callable[[Any], Any]:
    """Make the function from a row to the gradient of the loss by that row's loss."""
    if reduction == _NONE:
        return lambda row: grad_loss[row].astype(wide)
    if reduction == _SUM:
        return lambda row: grad_loss[()].astype(wide)
    return lambda row: grad_loss[()].astype(wide) / count[()].astype(wide)


def _gradient(
    parts: _Rows, scale: Callable[[Any], Any], lse: Any, total_weight: Any | None, dtype: str
) -> Any:
    def element(row: Any, column: Any) -> Any:
        probability = tirx.exp(parts.logit(row, column) - lse[row])
        hit = tirx.Select(parts.is_target(row, column), parts.const(1.0), parts.const(0.0))
        smoothing = parts.smoothing
        if not smoothing:
            value = (probability - hit) * parts.target_weight(row)
        else:
            spread = parts.const(smoothing) / parts.class_count()
            total = parts.class_count() if total_weight is None else total_weight[()]
            value = (probability - hit) * parts.target_weight(row) * parts.const(
                1.0 - smoothing
            ) + (probability * total - parts.weight(column)) * spread
        return tirx.Select(parts.counts(row), value * scale(row), parts.const(0.0)).astype(dtype)

    return te.compute((parts.rows, parts.classes), element, name="logits_gradient")


registry.register_legalization("relax_disc.cross_entropy", _legalize_forward)
registry.register_legalization("relax_disc.cross_entropy_backward", _legalize_backward)
