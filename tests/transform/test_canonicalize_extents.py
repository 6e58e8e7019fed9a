"""Sums in extents are written in one way."""

from __future__ import annotations

import tvm
from tvm import relax, te, tirx

from relax_disc.transform.simplify.canonicalize_extents import CanonicalizeExtents


def kernel(extent):
    source = te.placeholder((extent,), "float32", name="x")
    result = te.compute((extent,), lambda i: source[i] + 2, name="y")
    return te.create_prim_func([source, result])


def has_unknown_buffer(kernel):
    """Whether a kernel reads what it neither gets nor makes; TVM shows that as declared there."""
    return " = T.Buffer(" in kernel.script()


def test_spellings_become_one():
    s = tirx.Var("s", "int64")
    one = tirx.IntImm("int64", 1)
    module = tvm.IRModule({"left": kernel(one + s), "right": kernel(s + one)})
    before = module["left"].params[0].shape[0]
    result = CanonicalizeExtents()(module)
    left, right = (result[name].params[0].shape[0] for name in ("left", "right"))
    assert str(left) == str(right) == str(s + one)
    assert str(module["left"].params[0].shape[0]) == str(before)  # the caller's module stays
    assert not has_unknown_buffer(result["left"])


def test_fusion_accepts_a_concatenation_of_one():
    s = tirx.Var("s", "int64")
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([s, 1], "float32"))
    y = relax.Var("y", relax.TensorType([s, s], "float32"))
    with builder.function("main", [x, y]):
        with builder.dataflow():
            joined = builder.emit(relax.op.concat([x, y], axis=1))
            moved = builder.emit_te(
                lambda a: te.compute((s, s), lambda i, j: a[i, j + 1], name="moved"), joined
            )
            result = builder.emit_output(relax.op.exp(relax.op.negative(moved)))
        builder.emit_func_output(result)
    steps = [
        relax.transform.LegalizeOps(),
        relax.transform.AnnotateTIROpPattern(),
        CanonicalizeExtents(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
    ]
    module = tvm.transform.Sequential(steps)(builder.get())
    assert any("fused" in variable.name_hint for variable in module.functions)


def test_fusion_accepts_what_libraries_make_of_a_concatenation():
    """Their results have the types that Relax infers; kernels are written in TVM's order."""
    s = tirx.Var("s", "int64")
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([5, 4], "float32"))
    y = relax.Var("y", relax.TensorType([s, 4], "float32"))
    mask = relax.Var("mask", relax.TensorType([s + 5, s + 5], "float32"))
    with builder.function("main", [x, y, mask]):
        with builder.dataflow():
            joined = builder.emit(relax.op.concat([x, y]))
            product = builder.emit(
                relax.call_dps_packed(
                    "product",
                    relax.Tuple([joined]),
                    relax.TensorType([joined.ty.shape[0]] * 2, "float32"),
                )
            )
            masked = builder.emit(relax.op.add(product, mask))
            result = builder.emit_output(relax.op.exp(masked))
        builder.emit_func_output(result)
    module = tvm.transform.Sequential(
        [
            relax.transform.LegalizeOps(),
            relax.transform.AnnotateTIROpPattern(),
            CanonicalizeExtents(),
            relax.transform.FuseOps(),
            relax.transform.FuseTIR(),
        ]
    )(builder.get())
    (fused,) = (f for name, f in module.functions_items() if "fused" in name.name_hint)
    assert not has_unknown_buffer(fused)
