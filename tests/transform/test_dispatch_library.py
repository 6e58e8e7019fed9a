"""Operators become library calls, with copies of operands folded into strides."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from relax_disc import ops
from relax_disc.analysis.program.extraction import extract
from relax_disc.ops import matmul
from relax_disc.ops.cross_entropy import cross_entropy, cross_entropy_backward
from relax_disc.tir_kernels.target import cuda_target
from relax_disc.transform.libraries.dispatch_library import DispatchLibrary
from tests.tiers import every

LLVM = tvm.target.Target("llvm")


def library_calls(mod):
    """Names and constant arguments of the library calls of main, and other operators' names."""
    calls, others = [], []
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            value = binding.value
            if not isinstance(value, relax.Call):
                continue
            if value.op.name == "relax.call_dps_packed":
                fields = value.args[1].fields
                numbers = [int(x) for x in fields if isinstance(x, tvm.tirx.IntImm)]
                calls.append((value.args[0].global_symbol.removeprefix("relax_disc.cpu."), numbers))
            else:
                others.append(value.op.name.removeprefix("relax."))
    return calls, others


def run(mod, *arrays, target="llvm"):
    machine = relax.VirtualMachine(relax.build(mod, target), tvm.cpu())
    result = machine["main"](*[tvm.runtime.tensor(array) for array in arrays])
    return [x.numpy() for x in result] if not hasattr(result, "numpy") else [result.numpy()]


def agrees(mod, shapes, rtol=1e-5):
    generator = np.random.default_rng(0)
    dtypes = [str(x.ty.dtype.dtype) for x in mod["main"].params]
    arrays = [
        generator.standard_normal(shape).astype(dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    dispatched = run(DispatchLibrary(LLVM)(mod), *arrays)
    for ours, theirs in zip(dispatched, run(mod, *arrays), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=rtol * np.abs(theirs).max())


@I.ir_module
class Projections:
    @R.function
    def main(
        x: R.Tensor(("b", "t", 8), "float32"),
        w: R.Tensor((6, 8), "float32"),
        bias: R.Tensor((6,), "float32"),
        residual: R.Tensor(("b", "t", 6), "float32"),
    ):
        b = T.int64()
        t = T.int64()
        with R.dataflow():
            flat = R.reshape(x, R.shape([b * t, 8]))
            y = R.reshape(R.matmul(flat, R.permute_dims(w)), R.shape([b, t, 6]))
            biased = R.add(R.matmul(x, R.permute_dims(w)), bias)
            z = R.add(residual, y)
            dw = R.matmul(R.permute_dims(R.reshape(biased, R.shape([b * t, 6]))), flat)
            R.output(biased, z, dw)
        return (biased, z, dw)


def test_projections_fold_transpositions_reshapes_and_additions():
    calls, others = library_calls(DispatchLibrary(LLVM)(Projections))
    assert calls == [
        ("matmul_add", [2, 1, 0, 1]),
        ("matmul_add", [2, 1, 0, 1]),
        ("matmul", [2, 2, 1, 0]),
    ]
    assert others == []
    agrees(Projections, [(2, 3, 8), (6, 8), (6,), (2, 3, 6)])


def test_a_sum_may_lie_over_its_addend():
    b = tvm.tirx.Var("b", "int64")
    x = relax.Var("x", relax.TensorType([b, 8], "float32"))
    w = relax.Var("w", relax.TensorType([8, 8], "float32"))
    bias = relax.Var("bias", relax.TensorType([8], "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w, bias]):
        with builder.dataflow():
            first = builder.emit(relax.op.matmul(x, w))
            second = builder.emit(relax.op.add(first, builder.emit(relax.op.matmul(x, w))))
            third = builder.emit(relax.op.add(builder.emit(relax.op.matmul(second, w)), bias))
            out = builder.emit_output(third)
        builder.emit_func_output(out)
    mod = relax.transform.ToNonDataflow()(DispatchLibrary(LLVM)(builder.get()))
    kernels = extract(mod, "main").graph().kernels
    assert [kernel.name for kernel in kernels] == [
        "relax_disc.cpu.matmul",
        "relax_disc.cpu.matmul_add",
        "relax_disc.cpu.matmul_add",
    ]
    pairs = [kernel.inplace for kernel in kernels]
    assert pairs[0] == () and len(pairs[1]) == 1 and pairs[2] == ()
    assert pairs[1][0] == (kernels[0].outputs[0], kernels[1].outputs[0])


@I.ir_module
class ByHand:
    @R.function
    def main(x: R.Tensor(("b", "t", 4, 16), "float32")):
        with R.dataflow():
            q = R.permute_dims(x, [0, 2, 1, 3])
            scores = R.matmul(q, R.permute_dims(q, [0, 1, 3, 2]))
            out = R.permute_dims(R.matmul(R.nn.softmax(scores), q), [0, 2, 1, 3])
            R.output(out)
        return out


def test_attention_by_hand_needs_no_copies():
    calls, others = library_calls(DispatchLibrary(LLVM)(ByHand))
    assert [name for name, _ in calls] == ["batch_matmul", "batch_matmul"]
    assert others == ["relax_disc.softmax"]
    agrees(ByHand, [(2, 5, 4, 16)])


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((3, 4), (4, 5)),
        ((4,), (4, 5)),
        ((3, 4), (4,)),
        ((2, 3, 4), (4, 5)),
        ((2, 3, 4), (2, 4, 5)),
        ((3, 4), (2, 4, 5)),
        ((2, 1, 3, 4), (5, 4, 2)),
        ((1, 1), (1, 1)),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_every_rank_of_operands(left, right, dtype):
    a = relax.Var("a", relax.TensorType(left, dtype))
    b = relax.Var("b", relax.TensorType(right, dtype))
    builder = relax.BlockBuilder()
    with builder.function("main", [a, b]):
        with builder.dataflow():
            out = builder.emit_output(relax.op.matmul(a, b))
        builder.emit_func_output(out)
    mod = builder.get()
    calls, _ = library_calls(DispatchLibrary(LLVM)(mod))
    assert len(calls) == 1
    agrees(mod, [left, right], rtol=2e-3 if dtype == "float16" else 1e-5)


def short_products(rounded="bfloat16", addend="bfloat16"):
    """Products as captured: operands widened, or not, and the sum rounded where PyTorch does."""

    n = tvm.tirx.Var("n", "int64")
    kinds = {"x": ([n, 8], "bfloat16"), "w": ([6, 8], "bfloat16"), "bias": ([6], addend)}
    x, w, bias = (relax.Var(name, relax.TensorType(*kind)) for name, kind in kinds.items())
    builder, op = relax.BlockBuilder(), relax.op
    with builder.function("main", [x, w, bias]):
        with builder.dataflow():
            weight = builder.emit(op.astype(builder.emit(op.permute_dims(w)), "float32"))
            product = builder.emit(op.matmul(builder.emit(op.astype(x, "float32")), weight))
            row = bias if addend == "float32" else builder.emit(op.astype(bias, "float32"))
            y = builder.emit(op.astype(builder.emit(op.add(product, row)), rounded))
            square = op.matmul(builder.emit(op.permute_dims(x)), x, out_dtype="float32")
            z = builder.emit(op.astype(builder.emit(square), rounded))
            result = builder.emit_output(relax.Tuple([y, z]))
        builder.emit_func_output(result)
    return builder.get()


@pytest.mark.parametrize("multiplies", [True, False])
def test_short_floats_are_multiplied_as_such_where_the_processor_can(monkeypatch, multiplies):
    monkeypatch.setattr(matmul, "_multiplies", lambda dtype: multiplies)
    calls, others = library_calls(DispatchLibrary(LLVM)(short_products()))
    prefix = "aten_" if multiplies else ""
    assert calls == [(f"{prefix}matmul_add", [1, 1, 0, 1]), (f"{prefix}matmul", [1, 1, 1, 0])]
    assert ("astype" in others) != multiplies
    assert "permute_dims" not in others


def test_sums_that_are_not_rounded_are_of_wide_products(monkeypatch):
    monkeypatch.setattr(matmul, "_multiplies", lambda dtype: True)
    for module in (short_products(rounded="float16"), short_products(rounded="float64")):
        calls, _ = library_calls(DispatchLibrary(LLVM)(module))
        assert [name for name, _ in calls] == ["matmul_add", "matmul"]
    calls, _ = library_calls(DispatchLibrary(LLVM)(short_products(addend="float32")))
    assert [name for name, _ in calls] == ["matmul_add", "aten_matmul"]


def test_a_gpu_multiplies_short_floats_as_such():
    calls, others = library_calls(DispatchLibrary(cuda_target("sm_90"))(short_products()))
    names = [name.removeprefix("relax_disc.cuda.") for name, _ in calls]
    assert names == ["matmul_add", "matmul"]
    assert "astype" not in others and "matmul" not in others


def short_losses(returned):
    """A loss of short logits and its gradient, which read a copy in float32."""
    n = tvm.tirx.Var("n", "int64")
    logits = relax.Var("logits", relax.TensorType([n, 6], "bfloat16"))
    target = relax.Var("target", relax.TensorType([n], "int64"))
    builder, op = relax.BlockBuilder(), relax.op
    options = {"ignore_index": -100, "label_smoothing": 0.0, "reduction": "mean"}
    with builder.function("main", [logits, target]):
        with builder.dataflow():
            wide = builder.emit(op.astype(logits, "float32"))
            whole = builder.emit(cross_entropy(wide, target, **options))
            loss, lse, count = (builder.emit(relax.TupleGetItem(whole, k)) for k in range(3))
            gradient = cross_entropy_backward(
                relax.const(1.0, "float32"), wide, target, lse, count, **options
            )
            short = builder.emit(op.astype(builder.emit(gradient), "bfloat16"))
            results = builder.emit_output(relax.Tuple([loss, short, *([wide] * returned)]))
        builder.emit_func_output(results)
    return builder.get()


@pytest.mark.parametrize("returned", [False, True])
def test_losses_read_short_logits_unless_their_copy_is_needed(returned):
    _, others = library_calls(DispatchLibrary(LLVM)(short_losses(returned)))
    assert others.count("astype") == 1 + returned  # the gradient's


def test_integers_are_not_ours():
    a = relax.Var("a", relax.TensorType((3, 4), "int32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [a]):
        with builder.dataflow():
            out = builder.emit_output(relax.op.matmul(a, relax.op.permute_dims(a)))
        builder.emit_func_output(out)
    calls, others = library_calls(DispatchLibrary(LLVM)(builder.get()))
    assert calls == [] and others == ["permute_dims", "matmul"]


def attention_module(*, masked=False, dtype="float32", dim=16, by_length=False):
    """Make attention and its gradients; `masked` is False, True or "trained".

    Operands are stored ``[b, t, heads, dim]``; `by_length`: ``[t, b, heads, dim]``.
    """
    trained = masked == "trained"
    b, t = tvm.tirx.Var("b", "int64"), tvm.tirx.Var("t", "int64")
    rows = [t, b] if by_length else [b, t]
    split_axes, merged_axes = ([1, 2, 0, 3], [2, 0, 1, 3]) if by_length else ([0, 2, 1, 3],) * 2
    q = relax.Var("q", relax.TensorType([*rows, 4, dim], dtype))
    k, v = (relax.Var(name, relax.TensorType([*rows, 2, dim], dtype)) for name in "kv")
    grad = relax.Var("grad", relax.TensorType([*rows, 4 * dim], dtype))
    heads_of_mask, kind = (4, dtype) if trained else (1, "float32")
    shape = [b, heads_of_mask, t, t]
    mask = [relax.Var("mask", relax.TensorType(shape, kind))] if masked else []
    backward = ops.attention_backward_trained if trained else ops.attention_backward
    options = {"scale": 0.3, "is_causal": not masked}
    builder = relax.BlockBuilder()
    with builder.function("main", [q, k, v, grad, *mask]):
        with builder.dataflow():
            heads = [builder.emit(relax.op.permute_dims(x, split_axes)) for x in (q, k, v)]
            pair = builder.emit(ops.attention(*heads, *mask, **options))
            out = builder.emit(relax.TupleGetItem(pair, 0))
            lse = builder.emit(relax.TupleGetItem(pair, 1))
            merged = builder.emit(
                relax.op.reshape(
                    relax.op.permute_dims(out, merged_axes), relax.ShapeExpr([*rows, 4 * dim])
                )
            )
            split = builder.emit(
                relax.op.permute_dims(
                    relax.op.reshape(grad, relax.ShapeExpr([*rows, 4, dim])), split_axes
                )
            )
            grads = builder.emit(backward(split, *heads, out, lse, *mask, **options))
            gradients = [
                builder.emit(relax.op.permute_dims(relax.TupleGetItem(grads, i), merged_axes))
                for i in range(3)
            ]
            if trained:
                gradients.append(builder.emit(relax.TupleGetItem(grads, 3)))
            results = builder.emit_output(relax.Tuple([merged, lse, *gradients]))
        builder.emit_func_output(results)
    return builder.get()


def reference_attention(q, k, v, grad, *mask):
    """Attention and its gradients by the matrices themselves, in float64."""
    q, k, v = (x.astype("float64").transpose(0, 2, 1, 3) for x in (q, k, v))
    batch, heads, length, dim = q.shape
    grad = grad.astype("float64").reshape(batch, length, heads, dim).transpose(0, 2, 1, 3)
    group = heads // k.shape[1]
    keys, values = (x.repeat(group, 1) for x in (k, v))
    scores = 0.3 * q @ keys.swapaxes(2, 3)
    scores = scores + mask[0] if mask else np.where(np.tri(length) > 0, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    lse = top + np.log(np.exp(scores - top).sum(-1, keepdims=True))
    p = np.exp(scores - lse)
    out = p @ values
    dmask = p * (grad @ values.swapaxes(2, 3) - (grad * out).sum(-1, keepdims=True))
    ds = dmask * 0.3
    dk, dv = (
        x.reshape(batch, heads // group, group, length, dim).sum(2)
        for x in (ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ grad)
    )
    merged = out.transpose(0, 2, 1, 3).reshape(batch, length, heads * dim)
    gradients = [x.transpose(0, 2, 1, 3) for x in (ds @ keys, dk, dv)]
    return [merged, lse[..., 0], *gradients, dmask]


def attention_arrays(masked, dtype):
    """Make what a module of `attention_module` reads."""
    shapes = [(2, 7, 4, 16), (2, 7, 2, 16), (2, 7, 2, 16), (2, 7, 64)]
    generator = np.random.default_rng(0)
    arrays = [generator.standard_normal(shape).astype(dtype) for shape in shapes]
    if masked:
        shape, kind = ((2, 4, 7, 7), dtype) if masked == "trained" else ((2, 1, 7, 7), "float32")
        arrays.append(generator.standard_normal(shape).astype(kind))
    return arrays


def assert_attention(results, arrays, masked, dtype):
    """Compare results with the reference, whose last is the gradient of a trained mask."""
    tolerance = 5e-3 if dtype == "float16" else 1e-5
    exact = reference_attention(*arrays)[: 6 if masked == "trained" else 5]
    for ours, wanted in zip(results, exact, strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=tolerance, atol=tolerance * 4)


@pytest.mark.parametrize("masked", [False, True, "trained"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_attention_reads_and_writes_permuted_tensors(masked, dtype):
    mod = attention_module(masked=masked, dtype=dtype)
    dispatched = DispatchLibrary(LLVM)(mod)
    calls, others = library_calls(dispatched)
    forward = "_masked" if masked else ""
    backward = "_trained" if masked == "trained" else forward
    assert [name for name, _ in calls] == [f"attention{forward}", f"attention_backward{backward}"]
    if dtype == "float32":
        assert set(others) == {"reshape"}
        assert calls[0][1][-1] == 0b1111 and calls[1][1][-1] == 0b11111111
    arrays = attention_arrays(masked, dtype)
    assert_attention(run(dispatched, *arrays), arrays, masked, dtype)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_with_the_length_before_the_batch_needs_no_copies(masked):
    """As in `torch.nn.MultiheadAttention`: its result would be kept in both orders."""
    dispatched = DispatchLibrary(LLVM)(attention_module(masked=masked, by_length=True))
    calls, others = library_calls(dispatched)
    assert set(others) == {"reshape"}
    assert [call[-1] for _, call in calls] == [0b1111 << 8, 0b11111111 << 8]
    arrays = attention_arrays(masked, "float32")
    moved = [np.ascontiguousarray(x.swapaxes(0, 1)) for x in arrays[:4]]
    found = run(dispatched, *moved, *arrays[4:])
    results = [x if place == 1 else x.swapaxes(0, 1) for place, x in enumerate(found)]
    assert_attention(results, arrays, masked, "float32")


@pytest.mark.parametrize("masked", [False, True, "trained"])
@pytest.mark.parametrize("dtype", every(2, ["float32", "float16"]))
def test_attention_without_a_library_is_plain_operators(masked, dtype):
    mod = attention_module(masked=masked, dtype=dtype)
    arrays = attention_arrays(masked, dtype)
    assert_attention(run(mod, *arrays), arrays, masked, dtype)


def test_heads_wider_than_the_kernels_are_plain_operators():
    mod = attention_module(dim=400)
    calls, others = library_calls(DispatchLibrary(LLVM)(mod))
    assert calls == [] and {"relax_disc.attention", "relax_disc.attention_backward"} < set(others)


def embedding_module(is_tied=False):
    b = tvm.tirx.Var("b", "int64")
    grad = relax.Var("grad", relax.TensorType([b, 8], "float32"))
    ids = relax.Var("ids", relax.TensorType([b], "int64"))
    other = relax.Var("other", relax.TensorType([5, 8], "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [grad, ids, *([other] if is_tied else [])]):
        with builder.dataflow():
            call = ops.embedding_backward(grad, ids, num_embeddings=5, padding_idx=1)
            if is_tied:
                call = relax.op.add(relax.op.negative(other), builder.emit(call))
            out = builder.emit_output(call)
        builder.emit_func_output(out)
    return builder.get()


@pytest.mark.parametrize("is_dispatched", [True, False])
def test_embedding_gradient(is_dispatched):
    mod = embedding_module()
    dispatched = DispatchLibrary(LLVM)(mod) if is_dispatched else mod
    values = np.arange(32, dtype="float32").reshape(4, 8)
    (table,) = run(dispatched, values, np.array([3, 1, 3, 0]))
    expected = np.zeros((5, 8), "float32")
    expected[3], expected[0] = values[0] + values[2], values[3]
    np.testing.assert_array_equal(table, expected)


@pytest.mark.parametrize("is_dispatched", [True, False])
def test_gradient_of_a_tied_table(is_dispatched):
    mod = embedding_module(is_tied=True)
    dispatched = DispatchLibrary(LLVM)(mod) if is_dispatched else mod
    assert library_calls(dispatched)[0] == ([("embedding_backward_add", [1])] * is_dispatched)
    values = np.arange(32, dtype="float32").reshape(4, 8)
    other = np.ones((5, 8), "float32")
    (table,) = run(dispatched, values, np.array([3, 1, 3, 0]), other)
    expected = -other
    expected[3] += values[0] + values[2]
    expected[0] += values[3]
    np.testing.assert_array_equal(table, expected)


def test_other_targets_are_left_alone():
    mod = DispatchLibrary(tvm.target.Target({"kind": "metal"}))(ByHand)
    assert library_calls(mod)[0] == []


def test_cuda_gets_its_own_functions():
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90"})
    dispatched = DispatchLibrary(target)(attention_module())
    names = [
        binding.value.args[0].global_symbol
        for block in dispatched["main"].body.blocks
        for binding in block.bindings
        if isinstance(binding.value, relax.Call)
        and binding.value.op.name == "relax.call_dps_packed"
    ]
    assert names == ["relax_disc.cuda.attention", "relax_disc.cuda.attention_backward"]
