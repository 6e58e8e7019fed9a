"""Replaces the operators of `relax_disc.ops` by plain Relax operators, so that TVM alone can build.

The tests judge the capture with it, whatever the package's own kernels do.
"""

import tvm
from tvm import relax, te, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_disc.ops.registry import DISPATCH
from relax_disc.vm_builtins.libraries.install import install

op = relax.op
install("cpu")


class _Library:
    """Stands for the place of a call that the library computes."""

    family = "relax_disc.cpu"

    def __init__(self, original):
        self.original = original

    def call(self, name, arguments, result):
        values = [relax.prim_value(x) if isinstance(x, int) else x for x in arguments]
        return relax.call_dps_packed(f"{self.family}.{name}", values, result)


@mutator
class _Plain(PyExprMutator):
    def __init__(self, mod):
        super().__init__(mod)
        self.rules = {
            "relax_disc.attention": self.attention,
            "relax_disc.attention_backward": self.attention_backward,
            "relax_disc.cross_entropy": self.cross_entropy,
            "relax_disc.cross_entropy_backward": self.cross_entropy_backward,
            "relax_disc.embedding_backward": self.embedding_backward,
        }

    def visit_call_(self, call):
        call = self.visit_expr_post_order(call)
        name = getattr(call.op, "name", "")
        if name.startswith("relax_disc.convolution"):  # nobody else has all its forms
            return DISPATCH[name][0](call, _Library(call))
        if name.startswith("relax_disc.attention") and call.attrs["dropout"] > 0:
            return call.op.get_attr("FLegalize")(self.builder_, call)  # it draws numbers
        rule = self.rules.get(name)
        if not rule:
            return call
        result = rule(call.attrs, *(self.wide(arg) for arg in call.args))
        return self.narrow(self.builder_.normalize(result), call.ty)

    def wide(self, x):
        half = str(x.ty.dtype.dtype) in ("bfloat16", "float16")
        return self.emit(op.astype(x, "float32")) if half else x

    def narrow(self, x, kind):
        if isinstance(kind, relax.TupleType):
            fields = (
                x.fields if isinstance(x, relax.Tuple) else [x[k] for k in range(len(kind.fields))]
            )
            return relax.Tuple(
                [self.emit(self.narrow(f, t)) for f, t in zip(fields, kind.fields, strict=True)]
            )
        wanted = str(kind.dtype.dtype)
        return x if str(x.ty.dtype.dtype) == wanted else op.astype(self.emit(x), wanted)

    def emit(self, expr):
        return self.builder_.emit(expr)

    def shape(self, x):
        return list(x.ty.shape.values)

    def scores(self, q, k, mask, attrs):
        e, dtype = self.emit, q.ty.dtype.dtype
        repeats = int(self.shape(q)[1]) // int(self.shape(k)[1])
        keys = e(op.repeat(k, repeats, 1))
        product = e(op.matmul(q, e(op.permute_dims(keys, [0, 1, 3, 2]))))
        scores = e(op.multiply(product, relax.const(attrs["scale"], dtype)))
        low = relax.const(float("-inf"), dtype)
        if attrs["is_causal"]:
            rows, columns = self.shape(q)[2], self.shape(k)[2]
            seen = self.builder_.emit_te(
                lambda n, m: te.compute((n, m), lambda i, j: j <= i, name="causal"), rows, columns
            )
            scores = e(op.where(seen, scores, low))
        if mask is not None and str(mask.ty.dtype.dtype) == "bool":
            scores = e(op.where(mask, scores, low))
        elif mask is not None:
            scores = e(op.add(scores, mask))
        return scores, keys, repeats

    def weights(self, scores, lse):
        e = self.emit
        weights = e(op.exp(e(op.subtract(scores, e(op.expand_dims(lse, -1))))))
        zero = relax.const(0, weights.ty.dtype.dtype)
        return e(op.where(e(op.isnan(weights)), zero, weights))

    def attention(self, attrs, q, k, v, mask=None):
        e = self.emit
        scores, _, repeats = self.scores(q, k, mask, attrs)
        top = e(op.max(scores, [-1], keepdims=True))
        total = e(op.sum(e(op.exp(e(op.subtract(scores, top)))), [-1], keepdims=True))
        lse = e(op.squeeze(e(op.add(top, e(op.log(total)))), [-1]))
        out = e(op.matmul(self.weights(scores, lse), e(op.repeat(v, repeats, 1))))
        return relax.Tuple([out, lse])

    def attention_backward(self, attrs, grad, q, k, v, out, lse, mask=None):
        e = self.emit
        scores, keys, repeats = self.scores(q, k, mask, attrs)
        weights = self.weights(scores, lse)
        values = e(op.repeat(v, repeats, 1))
        flipped = [0, 1, 3, 2]
        dots = e(op.sum(e(op.multiply(grad, out)), [-1], keepdims=True))
        inner = e(op.matmul(grad, e(op.permute_dims(values, flipped))))
        dscores = e(op.multiply(weights, e(op.subtract(inner, dots))))
        dscores = e(op.multiply(dscores, relax.const(attrs["scale"], q.ty.dtype.dtype)))
        dq = e(op.matmul(dscores, keys))
        dk = e(op.matmul(e(op.permute_dims(dscores, flipped)), q))
        dv = e(op.matmul(e(op.permute_dims(weights, flipped)), grad))
        return relax.Tuple([dq, self.fold(dk, k, repeats), self.fold(dv, v, repeats)])

    def fold(self, x, like, repeats):
        b, h, t, d = self.shape(like)
        return self.emit(op.sum(self.emit(op.reshape(x, [b, h, repeats, t, d])), [2]))

    def cross_entropy(self, attrs, logits, target, weight=None):
        e, dtype = self.emit, logits.ty.dtype.dtype
        assert str(dtype) in ("float32", "float64")
        top = e(op.max(logits, [-1], keepdims=True))
        total = e(op.sum(e(op.exp(e(op.subtract(logits, top)))), [-1], keepdims=True))
        lse = e(op.squeeze(e(op.add(top, e(op.log(total)))), [-1]))
        goal, factor = self.goal(attrs, logits, target, weight)
        centred = e(op.subtract(e(op.expand_dims(lse, -1)), logits))
        rows = e(op.sum(e(op.multiply(goal, centred)), [-1]))
        count = e(op.sum(factor))
        loss = rows if attrs["reduction"] == "none" else e(op.sum(rows))
        if attrs["reduction"] == "mean":
            loss = e(op.divide(loss, count))
        return relax.Tuple([loss, lse, count])

    def goal(self, attrs, logits, target, weight):
        dtype = str(logits.ty.dtype.dtype)
        smooth, ignore = attrs["label_smoothing"], attrs["ignore_index"]

        def factors(x, t, *w):
            n, v = x.shape
            weight = (lambda j: w[0](j)) if w else (lambda j: tirx.const(1, dtype))
            zero = tirx.const(0, dtype)

            def goal(i, j):
                hot = tirx.Select(t(i) == j, tirx.const(1 - smooth, dtype), zero)
                value = (hot + tirx.const(smooth, dtype) / v.astype(dtype)) * weight(j)
                return tirx.Select(t(i) != ignore, value, zero)

            def factor(i):
                place = tirx.Select(t(i) != ignore, t(i), tirx.const(0, "int64"))
                return tirx.Select(t(i) != ignore, weight(place), zero)

            return [te.compute((n, v), goal, name="goal"), te.compute((n,), factor, name="factor")]

        both = self.builder_.emit_te(factors, logits, target, *([weight] if weight else []))
        return self.emit(both[0]), self.emit(both[1])

    def cross_entropy_backward(self, attrs, grad, logits, target, lse, count, weight=None):
        e = self.emit
        goal, _ = self.goal(attrs, logits, target, weight)
        shares = e(op.exp(e(op.subtract(logits, e(op.expand_dims(lse, -1))))))
        rows = e(op.sum(goal, [-1], keepdims=True))
        dlogits = e(op.subtract(e(op.multiply(shares, rows)), goal))
        if attrs["reduction"] == "mean":
            grad = e(op.divide(grad, count))
        elif attrs["reduction"] == "none":
            grad = e(op.expand_dims(grad, -1))
        return op.multiply(dlogits, grad)

    def embedding_backward(self, attrs, grad, ids):
        count, pad = attrs["num_embeddings"], attrs["padding_idx"]
        dtype = str(grad.ty.dtype.dtype)

        def table(g, ids):
            axes = [te.reduce_axis((0, n), f"k{d}") for d, n in enumerate(ids.shape)]

            def element(r, c):
                hit = tirx.all(ids(*axes) == r, r != pad)
                term = tirx.if_then_else(hit, g(*axes, c), tirx.const(0, dtype))
                return te.sum(term, axis=axes)

            return te.compute((count, g.shape[-1]), element, name="table")

        call = self.builder_.call_te(table, grad, ids)
        return call


@tvm.transform.module_pass(opt_level=0, name="PlainOps")
def plain_ops(mod, _context):
    """Rewrite all Relax functions."""
    rewriter = _Plain(mod)
    for where, function in mod.functions.items():
        if isinstance(function, relax.Function):
            rewriter.builder_.update_func(where, rewriter.visit_expr(function))
    return rewriter.builder_.get()
