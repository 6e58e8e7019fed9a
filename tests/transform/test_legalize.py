"""`Legalize` gives the kernels of TVM's `LegalizeOps`, and asks the rules less often."""

import numpy as np
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
