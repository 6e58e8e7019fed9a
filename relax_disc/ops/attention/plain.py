"""Attention and its gradient as plain operators, where no library takes them.

These hold a matrix of scores, length by length; the library kernels do not.  Half precision is
computed in float32.
"""

from __future__ import annotations

from typing import Any

from tvm import relax, te, tirx

from relax_disc.ops import registry
from relax_disc.ops.attention import optional_operands
from relax_disc.ops.philox import draw, keeps

_OP = relax.op


class _Heads:
    """Tensors of one call, query heads grouped by key head: ``[B, Hk, G, T, D]``."""

    def __init__(
        self, builder: relax.BlockBuilder, attrs: Any, q: relax.Expr, k: relax.Expr
    ) -> None:
        self.builder, self._attrs = builder, attrs
        batch, heads, self.rows, _ = registry.extents(q.ty)
        _, key_heads, self.columns, _ = registry.extents(k.ty)
        self.outer = [batch, key_heads, _quotient(heads, key_heads)]
        self.heads = heads
        self.dtype = registry.statistics_dtype(q.ty)
        self.scale = relax.const(float(attrs["scale"]), self.dtype)
        self.is_causal = bool(attrs["is_causal"])
        self.hidden = relax.const(float("-inf"), self.dtype)
        self.zero = relax.const(0.0, self.dtype)

    def emit(self, expr: relax.Expr) -> relax.Var:
        return self.builder.emit(expr)

    def wide(self, expr: relax.Expr) -> relax.Expr:
        same = registry.dtype_name(expr.ty) == self.dtype
        return expr if same else self.emit(_OP.astype(expr, self.dtype))

    def queries(self, expr: relax.Expr) -> relax.Var:
        """``[B, H, T, D]`` to ``[B, Hk, G, T, D]``."""
        last = registry.extents(expr.ty)[2:]
        return self.emit(_OP.reshape(self.wide(expr), relax.ShapeExpr([*self.outer, *last])))

    def keys(self, expr: relax.Expr) -> relax.Var:
        """``[B, Hk, T, D]`` to ``[B, Hk, 1, T, D]``."""
        return self.emit(_OP.expand_dims(self.wide(expr), 2))

    def statistics(self, expr: relax.Expr) -> relax.Var:
        """``[B, H, T]`` to ``[B, Hk, G, T, 1]``."""
        shape = relax.ShapeExpr([*self.outer, self.rows, tirx.IntImm("int64", 1)])
        return self.emit(_OP.reshape(self.wide(expr), shape))

    def merged(self, expr: relax.Expr, *last: Any) -> relax.Var:
        """``[B, Hk, G, ...]`` to ``[B, H, ...]``."""
        return self.emit(_OP.reshape(expr, relax.ShapeExpr([self.outer[0], self.heads, *last])))

    def product(self, a: relax.Expr, b: relax.Expr) -> relax.Var:
        return self.emit(_OP.matmul(a, b))

    def swapped(self, expr: relax.Expr) -> relax.Var:
        return self.emit(_OP.permute_dims(expr, [0, 1, 2, 4, 3]))

    def scores(self, q: relax.Expr, k: relax.Expr, mask: list[relax.Expr]) -> relax.Expr:
        """Scores ``[B, Hk, G, Tq, Tk]``; what is hidden is -inf."""
        scores = self.emit(_OP.multiply(self.product(q, self.swapped(k)), self.scale))
        for extra in mask:
            scores = self._masked(scores, extra)
        if self.is_causal:
            scores = self.builder.emit_te(_hide_later_columns, scores)
        return scores

    def _masked(self, scores: relax.Expr, mask: relax.Expr) -> relax.Var:
        extents = registry.extents(mask.ty)
        one = isinstance(extents[1], tirx.IntImm) and int(extents[1]) == 1
        heads = [extents[1], extents[1]] if one else self.outer[1:]
        shape = relax.ShapeExpr([extents[0], *heads, *extents[2:]])
        if registry.dtype_name(mask.ty) == "bool":
            seen = self.emit(_OP.reshape(mask, shape))
            return self.emit(_OP.where(seen, scores, self.hidden))
        return self.emit(_OP.add(scores, self.emit(_OP.reshape(self.wide(mask), shape))))

    def weights(self, scores: relax.Expr, shift: relax.Expr) -> relax.Var:
        """Exponentials of shifted scores: exactly 0 where hidden, and in rows shifted by -inf."""
        empty = self.emit(_OP.equal(shift, self.hidden))
        safe = self.emit(_OP.where(empty, self.zero, shift))
        powers = self.emit(_OP.exp(self.emit(_OP.subtract(scores, safe))))
        hidden = self.emit(_OP.equal(scores, self.hidden))
        nothing = self.emit(_OP.logical_or(hidden, empty))
        return self.emit(_OP.where(nothing, self.zero, powers))

    def dropped(self, weights: relax.Expr, rng: list[relax.Expr]) -> relax.Expr:
        """Weights, or their gradients, by what dropout does with them."""
        if not rng:
            return weights
        p, shape = float(self._attrs["dropout"]), registry.extents(weights.ty)
        count: Any = tirx.IntImm("int64", 1)
        for extent in shape:
            count = count * extent
        kernel = self.builder.add_func(draw(int(self._attrs["stream"]), "bool", keeps(p)), "draw")
        drawn = relax.call_tir(kernel, rng, relax.TensorType([count], "bool"))
        kept = self.emit(_OP.reshape(self.emit(drawn), relax.ShapeExpr(shape)))
        grown = self.emit(_OP.multiply(weights, relax.const(1.0 / (1.0 - p), self.dtype)))
        return self.emit(_OP.where(kept, grown, self.zero))

    def narrow(self, expr: relax.Expr, like: relax.Expr) -> relax.Expr:
        dtype = registry.dtype_name(like.ty)
        return expr if dtype == self.dtype else self.emit(_OP.astype(expr, dtype))


def _attention(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    q, k, v = call.args[:3]
    mask, rng = optional_operands(call, 3)
    heads = _Heads(builder, call.attrs, q, k)
    scores = heads.scores(heads.queries(q), heads.keys(k), mask)
    top = heads.emit(_OP.max(scores, -1, keepdims=True))
    weights = heads.weights(scores, top)
    total = heads.emit(_OP.sum(weights, -1, keepdims=True))
    empty = heads.emit(_OP.equal(total, heads.zero))
    one = relax.const(1.0, heads.dtype)
    divisor = heads.emit(_OP.where(empty, one, total))
    shares = heads.emit(_OP.divide(weights, divisor))
    out = heads.product(heads.dropped(shares, rng), heads.keys(v))
    lse = heads.emit(_OP.add(top, heads.emit(_OP.log(divisor))))
    lse = heads.emit(_OP.where(empty, heads.hidden, lse))
    merged = heads.merged(out, heads.rows, registry.extents(v.ty)[3])
    return relax.Tuple([heads.narrow(merged, q), heads.merged(lse, heads.rows)])


def _attention_backward(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    grad, q, k, v, out, lse = call.args[:6]
    mask, rng = optional_operands(call, 6)
    heads = _Heads(builder, call.attrs, q, k)
    queries, keys, grads = heads.queries(q), heads.keys(k), heads.queries(grad)
    weights = _weights_again(heads, heads.scores(queries, keys, mask), lse, mask)
    product = heads.emit(_OP.multiply(grads, heads.queries(out)))
    delta = heads.emit(_OP.sum(product, -1, keepdims=True))
    by_weight = heads.dropped(heads.product(grads, heads.swapped(heads.keys(v))), rng)
    difference = heads.emit(_OP.subtract(by_weight, delta))
    by_sum = heads.emit(_OP.multiply(weights, difference))
    by_score = heads.emit(_OP.multiply(by_sum, heads.scale))
    dq = heads.merged(heads.product(by_score, keys), heads.rows, registry.extents(q.ty)[3])
    used = heads.dropped(weights, rng)
    dk, dv = (
        heads.emit(_OP.sum(heads.product(heads.swapped(left), right), 2))
        for left, right in ((by_score, queries), (used, grads))
    )
    results = [(dq, q), (dk, k), (dv, v)]
    if call.op.name.endswith("_trained"):
        results.append((heads.merged(by_sum, heads.rows, heads.columns), mask[0]))
    return relax.Tuple([heads.narrow(x, like) for x, like in results])


def _weights_again(
    heads: _Heads, scores: relax.Expr, lse: relax.Expr, mask: list[relax.Expr]
) -> relax.Expr:
    """Weights from the log of their sums, or where that is lost beside numbers of a mask, anew."""
    if not mask or registry.dtype_name(mask[0].ty) == "bool":
        return heads.weights(scores, heads.statistics(lse))
    weights = heads.weights(scores, heads.emit(_OP.max(scores, -1, keepdims=True)))
    total = heads.emit(_OP.sum(weights, -1, keepdims=True))
    empty = heads.emit(_OP.equal(total, heads.zero))
    one = relax.const(1.0, heads.dtype)
    return heads.emit(_OP.divide(weights, heads.emit(_OP.where(empty, one, total))))


def _hide_later_columns(scores: te.Tensor) -> te.Tensor:
    def element(*index: Any) -> Any:
        hidden = tirx.const(float("-inf"), scores.dtype)
        return tirx.if_then_else(index[-1] <= index[-2], scores(*index), hidden)

    return te.compute(scores.shape, element, name="causal")


def _quotient(heads: Any, key_heads: Any) -> Any:
    if isinstance(heads, tirx.IntImm) and isinstance(key_heads, tirx.IntImm):
        return tirx.IntImm("int64", int(heads) // int(key_heads))
    return tirx.floordiv(heads, key_heads)


registry.register_legalization("relax_disc.attention", _attention)
registry.register_legalization("relax_disc.attention_backward", _attention_backward)
registry.register_legalization("relax_disc.attention_backward_trained", _attention_backward)
