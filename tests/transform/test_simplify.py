"""Golden tests of the graph clean-up: before and after."""

import pytest
import tvm
from tvm import relax
from tvm.ir import SourceName, Span
from tvm.script import ir as I
from tvm.script import relax as R

from relax_disc.transform.simplify.simplify import Simplify

op = relax.op


def function(params, build):
    """Make a module with one function of one dataflow block."""
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(build(builder.emit, *params))
        builder.emit_func_output(out)
    return builder.get()


def tensor(name, shape, dtype="float32"):
    return relax.Var(name, relax.TensorType(list(shape), dtype))


def operators(mod):
    """List the operators of the function in order; a result that is a parameter needs none."""
    names = []
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            if isinstance(binding.value, relax.Call):
                names.append(binding.value.op.name.removeprefix("relax."))
    return names


N = tvm.tirx.Var("n", "int64")
X = tensor("x", [N, 4, 8])
HALF = tensor("h", [N], "float16")
ROW = tensor("r", [1, 4, 8])

# name: (parameters, what is built, operators that are left)
CASES = {
    "permutations that cancel": (
        [X],
        lambda emit, x: op.permute_dims(emit(op.permute_dims(x, [1, 2, 0])), [2, 0, 1]),
        [],
    ),
    "two permutations": (
        [X],
        lambda emit, x: op.permute_dims(emit(op.permute_dims(x, [1, 0, 2])), [2, 0, 1]),
        ["permute_dims"],
    ),
    "permutation of an axis of extent 1": (
        [tensor("x", [1, N, 8])],
        lambda emit, x: op.permute_dims(x, [1, 0, 2]),
        ["reshape"],
    ),
    "views become one reshape": (
        [X],
        lambda emit, x: op.squeeze(emit(op.expand_dims(emit(op.flatten(x)), 0)), [0]),
        ["reshape"],
    ),
    "reshape and back": (
        [X],
        lambda emit, x: op.reshape(emit(op.reshape(x, (N, 32))), (N, 4, 8)),
        [],
    ),
    "broadcast to the same shape": ([X], lambda emit, x: op.broadcast_to(x, (N, 4, 8)), []),
    "broadcast that the operator does": (
        [X, ROW],
        lambda emit, x, r: op.add(x, emit(op.broadcast_to(r, (N, 4, 8)))),
        ["add"],
    ),
    "scalar arithmetic before a broadcast": (
        [X, ROW],
        lambda emit, x, r: op.add(
            emit(op.divide(emit(op.broadcast_to(r, (N, 4, 8))), relax.const(2.0))), x
        ),
        ["divide", "add"],
    ),
    "times one": ([X], lambda emit, x: op.multiply(relax.const(1.0), x), []),
    "plus zero": ([X], lambda emit, x: op.add(x, relax.const(0.0)), []),
    "plus zero that widens": (
        [ROW],
        lambda emit, r: op.add(r, emit(op.zeros((2, 4, 8), "float32"))),
        ["zeros", "add"],
    ),
    "power 1": ([X], lambda emit, x: op.power(x, relax.const(1.0)), []),
    "power 2": ([X], lambda emit, x: op.power(x, relax.const(2.0)), ["multiply"]),
    "power 3": ([X], lambda emit, x: op.power(x, relax.const(3.0)), ["multiply", "multiply"]),
    "power 0.5": ([X], lambda emit, x: op.power(x, relax.const(0.5)), ["sqrt"]),
    "power -0.5": ([X], lambda emit, x: op.power(x, relax.const(-0.5)), ["rsqrt"]),
    "power -1": ([X], lambda emit, x: op.power(x, relax.const(-1.0)), ["divide"]),
    "power 2.5 stays": ([X], lambda emit, x: op.power(x, relax.const(2.5)), ["power"]),
    "lossless cast and back": (
        [HALF],
        lambda emit, h: op.astype(emit(op.astype(h, "float32")), "float16"),
        [],
    ),
    "lossy cast stays": (
        [tensor("x", [N])],
        lambda emit, x: op.astype(emit(op.astype(x, "float16")), "float32"),
        ["astype", "astype"],
    ),
    "full": (
        [],
        lambda emit: op.full((2, 3), relax.const(1.5, "float32"), "float32"),
        ["broadcast_to"],
    ),
    "full of another type": (
        [],
        lambda emit: op.full((2, 3), relax.const(1, "int64"), "float32"),
        ["astype", "broadcast_to"],
    ),
    "equal reshapes": (
        [X],
        lambda emit, x: op.add(emit(op.reshape(x, (N, 32))), emit(op.reshape(x, (N, 32)))),
        ["reshape", "add"],
    ),
    "equal arithmetic stays": (
        [X],
        lambda emit, x: op.add(emit(op.exp(x)), emit(op.exp(x))),
        ["exp", "exp", "add"],
    ),
    "concatenation of one": (
        [X],
        lambda emit, x: op.concat(emit(relax.Tuple([x])), 0),
        [],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_left(name):
    params, build, expected = CASES[name]
    mod = Simplify()(function(params, build))
    relax.analysis.well_formed(mod)
    assert operators(mod) == expected


def test_golden():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor(("n", 4), "float32"), w: R.Tensor((8, 4), "float32")):
            with R.dataflow():
                a = R.power(x, R.const(2.0))
                b = R.permute_dims(w, [1, 0])
                c = R.permute_dims(b, [1, 0])
                d = R.expand_dims(a, 0)
                e = R.squeeze(d, [0])
                f = R.matmul(e, R.permute_dims(c, [1, 0]))
                g = R.exp(x)  # noqa: F841
                R.output(f)
            return f

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor(("n", 4), "float32"), w: R.Tensor((8, 4), "float32")):
            with R.dataflow():
                a = R.multiply(x, x)
                b = R.permute_dims(w, [1, 0])
                f = R.matmul(a, b)
                R.output(f)
            return f

    tvm.ir.assert_structural_equal(Simplify()(Before), Expected)


def test_source_lines_stay_and_new_values_get_them():
    line = Span(SourceName("model.py"), 12, 12, 1, 1)
    x = tensor("x", [N])
    call = op.power(x, relax.const(3.0))
    call = relax.BlockBuilder().normalize(relax.Call(call.op, call.args, call.attrs, span=line))
    var = relax.DataflowVar("cube", call.ty, line)
    out = relax.Var("out", relax.TupleType([call.ty]))
    block = relax.DataflowBlock(
        [relax.VarBinding(var, call, line), relax.VarBinding(out, relax.Tuple([var]))]
    )
    func = relax.Function([x], relax.SeqExpr([block], out), out.ty)
    func = func.with_attr("global_symbol", "main")
    mod = Simplify()(tvm.IRModule({"main": func}))
    bindings = mod["main"].body.blocks[0].bindings
    assert [binding.value.span.line for binding in bindings[:-1]] == [12, 12]


def test_attributes_and_input_module_stay():
    before = function([X], lambda emit, x: op.power(x, relax.const(2.0)))
    var = before.get_global_var("main")
    before.update_func(var, before["main"].with_attr("relax_disc.inplace_pairs", [[0, 0]]))
    text = before.script()
    after = Simplify()(before)
    assert before.script() == text
    assert after["main"].attrs["relax_disc.inplace_pairs"] == [[0, 0]]


def test_a_long_chain_that_nothing_uses_goes_at_once(monkeypatch):
    def unused(emit, x):
        value = x
        for _ in range(50):
            value = emit(op.exp(value))
        return emit(op.sin(x))

    monkeypatch.delattr(relax.transform, "DeadCodeElimination")  # its time grows with the square
    assert operators(Simplify()(function([X], unused))) == ["sin"]
