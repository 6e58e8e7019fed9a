"""Cross-entropy of class indices and its gradient, without the log-probabilities.

The loss keeps one number a row, the log of the sum of exponentials; the gradient is
``softmax(logits) - one_hot(target)``, computed from the logits in one pass, which may write over
them.  With class weights ``w`` and label smoothing ``s`` over ``V`` classes the loss of a row is::

    (1 - s) w_t (lse - x_t) + s / V * sum_c w_c (lse - x_c)

Half-precision logits are computed in float32.  Where logits are a copy in float32 of shorter ones,
as under autocast, the kernels read those: the copy, the largest tensor of a step, need not exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tvm import relax, te, tirx

from relax_disc.ops import registry
from relax_disc.ops.operand_views import is_call_of
from relax_disc.ops.registry import Kind

if TYPE_CHECKING:
    from relax_disc.transform.libraries.dispatch_library import Site

REDUCTIONS = ("mean", "sum", "none")
_MEAN, _SUM, _NONE = REDUCTIONS
_READERS = "relax_disc.cross_entropy", "relax_disc.cross_entropy_backward"
_DTYPE = "dtype"
"""Attribute: type of the loss and of the gradient, where it is not the logits'."""


_OPTIONS = "SymInt ignore_index, float label_smoothing, str reduction"


def _results(logits: Kind, *_: Kind, **attrs: Any) -> list[tuple[Any, str]]:
    rows, dtype = logits.shape[:1], str(attrs.get(_DTYPE, logits.dtype))
    loss = rows if attrs["reduction"] == _NONE else ()
    return [(loss, dtype), (rows, logits.statistics), ((), logits.statistics)]


cross_entropy_backward = registry.operator(
    "cross_entropy_backward(Tensor grad_loss, Tensor logits:2, Tensor target, Tensor lse,"
    f" Tensor count, Tensor? weight, {_OPTIONS}) -> Tensor",
    """Gradient of the cross-entropy of class indices by the logits.

    ``grad_loss``: gradient of the loss, a scalar (``[N]`` for ``"none"``). ``lse``, ``count``:
    results of :func:`cross_entropy`. All else is as given to it; the result has the logits' type.
    """,
    lambda grad_loss, logits, *_, **attrs: [(logits.shape, str(attrs.get(_DTYPE, logits.dtype)))],
    choices={"reduction": REDUCTIONS},
)


def _result_dtype(call: relax.Call, logits: relax.TensorType) -> str:
    attrs: Any = call.attrs
    return str(attrs[_DTYPE]) if _DTYPE in attrs.keys() else registry.dtype_name(logits)


_IGNORED = -100  # PyTorch's own choice; a label of no class


@registry.kept(torch.ops.aten.cross_entropy_loss.default)
def keep_cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Keep ``cross_entropy_loss`` with class indices; classes move to the last axis of two."""
    if target.is_floating_point() or logits.dim() < 2:
        return None
    classes, shape = logits.shape[1], target.shape
    if not isinstance(ignore_index, int):
        # A size of the batch, as for answers that lie beyond a text: another number stands for it.
        target, ignore_index = torch.where(target == ignore_index, _IGNORED, target), _IGNORED
    if logits.dim() > 2:
        # As it lies in memory asks nothing of the sizes.
        logits = logits.movedim(1, -1).contiguous().view(-1, classes)
        target = target.reshape(-1)
    loss = torch.ops.relax_disc.cross_entropy(
        logits, target, weight, ignore_index, label_smoothing, ("none", "mean", "sum")[reduction]
    )[0]
    return loss.reshape(shape) if reduction == 0 else loss


def _save_cross_entropy(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    logits, target, weight, *ctx.options = inputs
    _, lse, count = output
    ctx.mark_non_differentiable(lse, count)
    ctx.save_for_backward(logits, target, lse, count, weight)


def _cross_entropy_gradient(
    ctx: Any, grad_loss: Tensor, _grad_lse: Tensor, _grad_count: Tensor
) -> Any:
    logits, target, lse, count, weight = ctx.saved_tensors
    grad = torch.ops.relax_disc.cross_entropy_backward(
        grad_loss, logits, target, lse, count, weight, *ctx.options
    )
    return grad, None, None, None, None, None


cross_entropy = registry.operator(
    f"cross_entropy(Tensor logits:2, Tensor target:1, Tensor? weight, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor)",
    """Cross-entropy of class indices.

    ``logits`` are ``[N, V]``, ``target`` is ``[N]``, int64 class indices; rows whose index is
    ``ignore_index`` do not count (PyTorch's default is -100).  ``weight``, ``[V]``, has a factor
    for each class.  ``label_smoothing``: share of the target spread evenly over the classes.
    ``reduction``: ``"mean"`` divides by the sum of the weights of the counted rows, as PyTorch
    does: NaN when there is none; or ``"sum"`` or ``"none"``.

    Of type ``Tuple(loss, lse [N], count [])``: the loss is a scalar (``[N]`` for ``"none"``) in the
    logits' type; ``lse`` and ``count`` (what ``"mean"`` divides by) are float32, float64 for
    float64 logits.
    """,
    _results,
    choices={"reduction": REDUCTIONS},
    gradient=(_cross_entropy_gradient, _save_cross_entropy),
)


@registry.dispatches(*_READERS)
def read_short_logits(call: relax.Call, site: Site) -> relax.Expr | None:
    """Read the short floats that logits are a copy of, if nothing else reads the copy."""
    place = int(call.op.name.endswith("_backward"))
    logits, original = call.args[place], site.original.args[place]
    is_moved = is_call_of(value := site.definition(logits), "relax.reshape")
    copy = site.definition(value.args[0]) if is_moved else value
    if not is_call_of(copy, "relax.astype") or not isinstance(original, relax.Var):
        return None
    (source,) = copy.args
    readers = [user for _, user in site.uses.users_of(original)]
    if is_moved:
        whole = site.uses.definitions[original].args[0]
        readers += [user for name, user in site.uses.users_of(whole) if not original.same_as(name)]
    is_short = registry.dtype_name(source.ty) in ("float16", "bfloat16")
    if not is_short or not all(any(is_call_of(x, name) for name in _READERS) for x in readers):
        return None
    if is_moved:
        source = site.builder.emit(relax.op.reshape(source, logits.ty.shape))
    args = [*call.args[:place], source, *call.args[place + 1 :]]
    attrs = {**dict(call.attrs.items()), _DTYPE: registry.dtype_name(logits.ty)}
    return registry.call(call.op.name, args, attrs)


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
    dtype = _result_dtype(call, logits_type)
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
        (parts.rows,), lambda row: te.max(parts.logit(row, column), axis=column), name="row_max"
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
    dtype = _result_dtype(call, logits_type)
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
