"""Types that the operators of `relax_disc.ops` infer, and that attributes survive passes."""

import importlib

import pytest
import tvm
from tvm import relax, tirx

from relax_disc import ops


def tensor(name, shape, dtype="float32"):
    return relax.Var(name, relax.TensorType(shape, dtype))


def inferred(call):
    return relax.BlockBuilder().normalize(call).ty


@pytest.fixture
def dims():
    return tirx.Var("b", "int64"), tirx.Var("t", "int64")


def test_attention_with_grouped_heads(dims):
    b, t = dims
    q, k, v = tensor("q", [b, 8, t, 16]), tensor("k", [b, 2, t, 16]), tensor("v", [b, 2, t, 32])
    kind = inferred(ops.attention(q, k, v, scale=0.25, is_causal=True))
    assert str(kind.fields[0]) == 'R.Tensor((b, 8, t, 32), dtype="float32")'
    assert str(kind.fields[1]) == 'R.Tensor((b, 8, t), dtype="float32")'
    out, lse = tensor("out", [b, 8, t, 32]), tensor("lse", [b, 8, t])
    back = inferred(ops.attention_backward(out, q, k, v, out, lse, scale=0.25, is_causal=True))
    assert [str(x) for x in back.fields] == [str(x.ty) for x in (q, k, v)]


def test_grouped_products(dims):
    b, _ = dims
    rows, weights, ends = tensor("x", [b, 8]), tensor("w", [3, 8, 16]), tensor("e", [3], "int32")
    out = inferred(ops.grouped_matmul(rows, weights, ends))
    assert str(out) == 'R.Tensor((b, 16), dtype="float32")'
    grad = tensor("g", [b, 16])
    assert str(inferred(ops.grouped_matmul(grad, weights, ends, transposed=True))) == str(rows.ty)
    assert str(inferred(ops.grouped_outer(rows, grad, ends))) == str(weights.ty)


def test_cross_entropy(dims):
    n, _ = dims
    logits, target = tensor("logits", [n * 2, 100], "bfloat16"), tensor("target", [n * 2], "int64")
    options = {"ignore_index": -100, "label_smoothing": 0.0, "reduction": "mean"}
    kind = inferred(ops.cross_entropy(logits, target, **options))
    assert str(kind.fields[0]) == 'R.Tensor((), dtype="bfloat16")'
    assert str(kind.fields[1]) == 'R.Tensor((b * 2,), dtype="float32")'
    loss, lse, count = tensor("g", [], "bfloat16"), tensor("lse", [n * 2]), tensor("count", [])
    back = inferred(ops.cross_entropy_backward(loss, logits, target, lse, count, **options))
    assert str(back) == str(logits.ty)
    with pytest.raises(ValueError, match="reduction"):
        ops.cross_entropy(logits, target, **{**options, "reduction": "max"})


def test_logsumexp(dims):
    n, _ = dims
    x = tensor("x", [n * 2, 100], "bfloat16")
    assert str(inferred(ops.logsumexp(x))) == 'R.Tensor((b * 2,), dtype="float32")'
    grad, lse = tensor("grad", [n * 2]), tensor("lse", [n * 2])
    assert str(inferred(ops.logsumexp_backward(grad, x, lse))) == str(x.ty)
    with pytest.raises(TypeError, match="x must have rank 2"):
        inferred(ops.logsumexp(tensor("x", [n])))


def test_embedding_backward(dims):
    b, t = dims
    grad, ids = tensor("grad", [b, t, 64]), tensor("ids", [b, t], "int64")
    kind = inferred(ops.embedding_backward(grad, ids, num_embeddings=1000))
    assert str(kind) == 'R.Tensor((1000, 64), dtype="float32")'


def test_recurrence(dims):
    b, t = dims
    projected, state = tensor("projected", [b, t, 32]), tensor("state", [2, b, 8])
    weight, bias = tensor("weight", [32, 8]), tensor("bias", [32])
    options = {"kind": "lstm", "batch_first": True, "reverse": False}
    kind = inferred(ops.recurrence(projected, state, weight, bias, **options))
    assert str(kind.fields[0]) == 'R.Tensor((b, t, 8), dtype="float32")'
    assert str(kind.fields[1]) == str(state.ty)
    assert str(kind.fields[2]) == 'R.Tensor((b, t, 40), dtype="float32")'
    out, reserve = tensor("out", [b, t, 8]), tensor("reserve", [b, t, 40])
    back = inferred(ops.recurrence_backward(out, state, state, weight, out, reserve, **options))
    assert [str(x) for x in back.fields] == [str(projected.ty), str(state.ty)]
    with pytest.raises(ValueError, match="kind"):
        ops.recurrence(projected, state, weight, bias, **{**options, "kind": "lstmp"})


def test_marks_are_the_identity(dims):
    x = tensor("x", list(dims))
    assert str(inferred(ops.evict(x))) == str(x.ty)
    assert str(inferred(ops.regenerate(x))) == str(x.ty)


def test_wrong_rank_is_refused(dims):
    q = tensor("q", list(dims))
    with pytest.raises(TypeError, match="rank 4"):
        inferred(ops.attention(q, q, q, scale=1.0, is_causal=False))


def test_attributes_and_spans_survive_passes(dims):
    b, t = dims
    q = tensor("q", [b, 8, t, 16])
    builder = relax.BlockBuilder()
    with builder.function("main", [q]):
        with builder.dataflow():
            pair = builder.emit(ops.attention(q, q, q, scale=0.25, is_causal=True))
            out = builder.emit_output(pair[0])
        builder.emit_func_output(out)
    passes = [
        relax.transform.EliminateCommonSubexpr(),
        relax.transform.CanonicalizeBindings(),
        relax.transform.DeadCodeElimination(),
    ]
    module = tvm.transform.Sequential(passes)(builder.get())
    call = module["main"].body.blocks[0].bindings[0].value
    assert call.op.name == "relax_disc.attention"
    assert call.attrs["scale"] == 0.25
    assert call.attrs["is_causal"] is True


def test_importing_twice_is_harmless():
    importlib.reload(importlib.import_module("relax_disc.ops.attention"))
