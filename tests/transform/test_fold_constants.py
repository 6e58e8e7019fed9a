"""Values that depend on no input are computed once, as TVM's own pass computes them."""

import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx

from relax_disc.transform.fusion import fold_constants
from relax_disc.transform.fusion.fold_constants import FoldConstants


def masked():
    """Chains of constants, what depends on a dim or an input, and what is large."""
    op, builder, n = relax.op, relax.BlockBuilder(), tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType([n, 8], "float32"))
    k = relax.Var("k", relax.TensorType([8], "int64"))

    def const(value, dtype):
        return relax.const(value, dtype)

    with builder.function("main", [x, k]):
        with builder.dataflow():
            emit = builder.emit
            positions = emit(op.arange(0, 8, 1, "int64"))
            row = emit(op.expand_dims(positions, [0]))
            column = emit(op.reshape(positions, [8, 1]))
            hidden = emit(op.less(emit(op.add(column, const(1, "int64"))), row))
            scale = emit(op.divide(emit(op.astype(row, "float32")), const(3.0, "float32")))
            weights = emit(op.where(hidden, const(0.0, "float32"), const(1.0, "float32")))
            mine = emit(op.astype(emit(op.add(positions, k)), "float32"))
            large = emit(op.zeros([5000], "int64"))
            total = emit(op.astype(emit(op.sum(large)), "float32"))
            y = emit(op.matmul(emit(op.multiply(x, scale)), weights))
            z = builder.emit_output(op.add(emit(op.add(y, mine)), total))
        builder.emit_func_output(z)
    return builder.get()


@pytest.fixture(scope="module")
def legalized():
    return relax.transform.LegalizeOps()(masked())


def calls_of(mod):
    found = []

    def note(node):
        if isinstance(node, relax.Call) and node.op.name == "relax.call_tir":
            found.append(str(node.args[0].name_hint))

    relax.analysis.post_order_visit(mod["main"], note)
    return found


def test_constants_are_those_of_tvms_pass(legalized):
    wanted = relax.transform.FoldConstant()(legalized)
    found = relax.transform.FoldConstant()(FoldConstants()(legalized))
    assert tvm_ffi.structural_equal(found["main"], wanted["main"], map_free_vars=True)
    assert len(calls_of(found)) < len(calls_of(legalized)) - 5


def test_all_kernels_are_compiled_at_once_and_nothing_is_left(legalized, monkeypatch):
    times = []
    compiled = tvm.compile

    def compile_once(mod, target):
        times.append(len(mod.functions))
        return compiled(mod, target)

    monkeypatch.setattr(tvm, "compile", compile_once)
    found = FoldConstants()(legalized)
    assert len(times) == 1 and times[0] > 5
    assert FoldConstants()(relax.transform.FoldConstant()(found)) is not None
    assert len(times) == 1


def test_what_is_large_or_depends_on_an_input_stays(legalized):
    left = calls_of(relax.transform.FoldConstant()(FoldConstants()(legalized)))
    assert any(name.startswith("zeros") for name in left)
    assert any(name.startswith("matmul") for name in left)


def test_a_kernel_without_code_leaves_all_to_tvms_pass(legalized, monkeypatch):
    def fails(*_):
        raise tvm.error.InternalError("no code")

    monkeypatch.setattr(fold_constants.tvm, "compile", fails)
    found = FoldConstants()(legalized)
    assert tvm_ffi.structural_equal(found, legalized)
