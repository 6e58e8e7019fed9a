"""`Legalize` gives the kernels of TVM's `LegalizeOps`, and asks the rules less often."""

import re

import numpy as np
import pytest
import tvm
from tvm import ir, relax, tirx

from relax_disc.transform.fusion import legalize
from relax_disc.transform.fusion.legalize import Legalize

N, M = (tirx.Var(name, "int64") for name in "nm")


def module(write, *shapes):
    params = [relax.Var(f"x{k}", relax.TensorType(s, "float32")) for k, s in enumerate(shapes)]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            outs = [builder.emit_output(out) for out in write(builder.emit, *params)]
        builder.emit_func_output(relax.Tuple(outs))
    return builder.get()


def alike(emit, x, y, z):
    """Calls that differ in one thing each from an earlier one: operands, dims, axes, numbers."""
    one, two = relax.const(np.float32(1)), relax.const(np.float32(2))
    a = emit(relax.op.add(x, y))
    b = emit(relax.op.add(y, a))
    c = emit(relax.op.add(a, a))
    d = emit(relax.op.add(emit(relax.op.add(b, one)), emit(relax.op.add(c, two))))
    e = emit(relax.op.concat([a, b, a], axis=0))
    f = emit(relax.op.concat([c, d, d], axis=0))
    g = emit(relax.op.concat([c, d, b], axis=1))
    h = emit(relax.op.sum(e, axis=[0])), emit(relax.op.sum(f, axis=[0]))
    i = emit(relax.op.sum(f, axis=[1])), emit(relax.op.add(z, z))
    j = emit(relax.op.reshape(a, [M * N])), emit(relax.op.reshape(b, [M * N]))
    k = emit(relax.op.full([N, M], one, "float32")), emit(relax.op.split(g, 3, axis=1)[0])
    return [*h, *i, *j, *k]


def test_kernels_and_calls_are_those_of_legalize_ops():
    mod = module(alike, [N, M], [N, M], [M, N])
    ir.assert_structural_equal(Legalize()(mod), relax.transform.LegalizeOps()(mod), True)


def test_a_rule_is_asked_once_for_calls_that_are_alike(monkeypatch):
    asked = []
    plain = legalize._once

    def counted(rule, known):
        def noting(builder, call):
            asked.append(call.op.name)
            return rule(builder, call)

        return plain(noting, known)

    monkeypatch.setattr(legalize, "_once", counted)
    mod = module(alike, [N, M], [N, M], [M, N])
    Legalize()(mod)
    # x + y, a + a, b + 1, c + 2 and z + z
    assert asked.count("relax.add") == 5
    assert asked.count("relax.concat") == 3
    assert asked.count("relax.sum") == 2


def depth(kernel):
    """How deep choices are nested in the text of a kernel."""
    deepest, opened = 0, []
    for token in re.findall(r"[\w.]*\(|\)", kernel.script(show_meta=False)):
        if token == ")":
            opened.pop()
        else:
            opened.append(token == "T.if_then_else(")
            deepest = max(deepest, sum(opened))
    return deepest


@pytest.mark.parametrize(("join", "axis"), [("concat", 0), ("concat", 1), ("stack", -1)])
def test_many_tensors_are_joined_by_halves(join, axis):
    # Unequal parts in one direction, of a size that is known when the program runs in the other.
    rows = [[N, 1 + k % 3 if (join, axis) == ("concat", 1) else 2] for k in range(75)]

    def write(emit, *tensors):
        return [emit(getattr(relax.op, join)(list(tensors), axis=axis))]

    mod = Legalize()(module(write, *rows))
    (kernel,) = [f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc)]
    assert depth(kernel) == 7  # 2**6 < 75 <= 2**7
    parts = [np.random.default_rng(k).random([3, r[1]], "float32") for k, r in enumerate(rows)]
    machine = relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
    found = machine["main"](*map(tvm.runtime.tensor, parts))[0].numpy()
    wanted = np.concatenate(parts, axis) if join == "concat" else np.stack(parts, axis)
    np.testing.assert_array_equal(found, wanted)


def test_few_tensors_are_joined_as_by_legalize_ops():
    mod = module(lambda emit, *x: [emit(relax.op.concat(list(x), axis=0))], *[[N, M]] * 32)
    ir.assert_structural_equal(Legalize()(mod), relax.transform.LegalizeOps()(mod), True)
