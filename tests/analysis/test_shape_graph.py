"""The shape graph: what each operator teaches, calls, contradictions, unknown shapes."""

import pytest
from tvm import relax, tirx
from tvm.ir import PrimType
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from relax_disc.analysis.symbolic.comparison.compare import Order
from relax_disc.analysis.symbolic.dim import SymbolicDim
from relax_disc.analysis.symbolic.expr import SymbolicExpr
from relax_disc.analysis.symbolic.shape_graph.graph import SymbolicShapeGraph
from relax_disc.errors import GraphError


def graph_of(parameters, emit, attrs=None):
    """Build a module of one function; parameters are (name, shape, dtype)."""
    builder = relax.BlockBuilder()
    variables = [
        relax.Var(name, relax.TensorType(shape, dtype)) for name, shape, dtype in parameters
    ]
    with builder.function("main", variables, attrs=attrs or {}):
        with builder.dataflow():
            result = builder.emit_output(emit(builder, *variables))
        builder.emit_func_output(result)
    return SymbolicShapeGraph.from_module(builder.get())


def dims(*names):
    return [tirx.Var(name, "int64") for name in names]


def test_the_example_of_the_article():
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor(("S0",), "float32"), y: R.Tensor(("S1", 11008), "float32")):
            S0, S1 = T.int64(), T.int64()
            with R.dataflow():
                rows = R.reshape(x, (12, S1))
                wide = R.broadcast_to(R.reshape(x, (S0, 1)), (S0, 1024))
                R.output(rows, wide)
            return wide

    graph = SymbolicShapeGraph.from_module(Module)
    assert [dim.name for dim in graph.dims] == ["S1"]
    assert str(graph.equalities["S0"]) == "12*S1"
    assert graph.compare("11008*S1", "1024*S0").order is Order.LESS
    assert graph.bytes("wide") == graph.canonical("4*12*1024*S1")
    assert graph.compare(Module["main"].params[1], "1024*4*S0").order is Order.LESS
    assert "S0 == 12*S1  from main: rows = relax.reshape" in str(graph)


N, M, K, J = dims("n", "m", "k", "j")


@pytest.mark.parametrize(
    ("parameters", "emit", "equal"),
    [
        (
            [("x", (N, K), "float32"), ("y", (M, K), "float32")],
            lambda b, x, y: relax.op.add(x, y),
            [("n", "m")],
        ),
        (
            [("x", (N, K), "float32"), ("y", (M, J), "float32")],
            lambda b, x, y: relax.op.concat([x, y], axis=0),
            [("k", "j")],
        ),
        (
            [("x", (N, K), "float32"), ("y", (J, M), "float32")],
            lambda b, x, y: relax.op.matmul(x, y),
            [("k", "j")],
        ),
        (
            [("x", (N, 3, K), "float32"), ("y", (M, J, 5), "float32")],
            lambda b, x, y: relax.op.matmul(x, y),
            [("n", "m"), ("k", "j")],
        ),
        (
            [("x", (N, 12), "float32"), ("y", (M, K), "float32")],
            lambda b, x, y: b.match_cast(x, relax.TensorType((M, K), "float32")),
            [("n", "m"), ("k", "12")],
        ),
        (
            [("x", (N, 1), "float32"), ("y", (M, K), "float32")],
            lambda b, x, y: relax.op.broadcast_to(x, (M, K)),
            [("n", "m")],
        ),
        (
            [("x", (N, K), "float32"), ("w", (J,), "float32")],
            lambda b, x, w: relax.op.nn.rms_norm(x, w, axes=[-1]),
            [("k", "j")],
        ),
        (
            [("x", (N, 12), "float32"), ("y", (M, 8), "float32")],
            lambda b, x, y: relax.op.reshape(x, (M, 8)),
            [("3*n", "2*m")],
        ),
        (
            [("x", (N, M), "float32"), ("y", (K, J), "float32")],
            lambda b, x, y: relax.op.reshape(x, (K, J)),
            [("n*m", "k*j"), ("n*m*m", "k*j*m")],
        ),
        (
            [("x", (N,), "float32")],
            lambda b, x: relax.op.reshape(x, (12, -1)),
            [("12*(n//12)", "n"), ("n % 12", "0")],
        ),
        (
            [("x", (N, 4), "float32"), ("y", (M, 4), "float32"), ("z", (K, 4), "float32")],
            lambda b, x, y, z: relax.op.add(b.emit(relax.op.concat([x, y])), z),
            [("n + m", "k")],
        ),
        (
            [("x", (N,), "float32"), ("y", (M,), "float32")],
            lambda b, x, y: relax.op.strided_slice(
                b.emit(relax.op.add(x, y)), axes=[0], begin=[0], end=[M]
            ),
            [("n", "m")],
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_what_operators_teach(parameters, emit, equal):
    graph = graph_of(parameters, emit)
    for left, right in equal:
        assert graph.compare(left, right).order is Order.EQUAL


def test_a_shape_that_relax_cannot_infer_is_inferred_again():
    graph = graph_of(
        [("x", (N, K), "float32"), ("y", (M, K), "float32"), ("w", (K, 7), "float32")],
        lambda b, x, y, w: relax.op.matmul(b.emit(relax.op.add(x, y), "total"), w),
    )
    assert graph.shape("total") == (graph.canonical("n"), graph.canonical("k"))
    assert graph.bytes("total") == graph.canonical("4*m*k")


def test_a_dim_that_may_be_one_is_not_taken_for_equal():
    attrs = {"relax_disc.dims": {"n": [1, 64, 1], "m": [1, 64, 1]}}
    parameters = [("x", (N,), "float32"), ("y", (M,), "float32")]
    with pytest.raises(GraphError, match=r"main: \w+ = relax.add.*match_cast.*lower bound of 2"):
        graph_of(parameters, lambda b, x, y: relax.op.add(x, y), attrs)
    attrs = {"relax_disc.dims": {"n": [2, 64, 2], "m": [4, 100, 3]}}
    graph = graph_of(parameters, lambda b, x, y: relax.op.add(x, y), attrs)
    (dim,) = graph.dims
    assert (dim.first, dim.last, dim.divisor) == (6, 60, 6)


def test_ranges_follow_equalities():
    attrs = {"tir_var_lower_bound": {"n": 10}, "tir_var_upper_bound": {"n": 100}}
    graph = graph_of(
        [("x", (N,), "float32"), ("y", (M, 8), "float32")],
        lambda b, x, y: relax.op.reshape(x, (M, 8)),
        attrs,
    )
    assert graph.dims == (SymbolicDim("m", 2, 12),)
    graph = graph_of(
        [("x", (N,), "float32"), ("y", (M, K), "float32")],
        lambda b, x, y: relax.op.reshape(x, (M, K)),
        attrs,
    )
    assert [dim.upper for dim in graph.dims] == [100, 100]


def test_a_size_is_not_negative():
    graph = graph_of(
        [("x", (N,), "float32"), ("y", (N - 5,), "float32")], lambda b, x, y: relax.op.exp(y)
    )
    assert graph.dims[0].lower == 5


def test_derived_dims_come_in_as_shapes():
    builder = relax.BlockBuilder()
    base = tirx.Var("base", "int64")
    sizes = relax.Var("sizes", relax.ShapeType([base]))
    x = relax.Var("x", relax.TensorType((8 * base,), "float16"))
    with builder.function("main", [sizes, x]):
        builder.emit_func_output(builder.emit(relax.op.reshape(x, (4, base * 2))))
    graph = SymbolicShapeGraph.from_module(builder.get())
    assert str(graph.bytes("x")) == "16*base"


def test_integer_parameters_are_dims():
    builder = relax.BlockBuilder()
    count = relax.Var("count", PrimType("int64"))
    x = relax.Var("x", relax.TensorType((count * 8,), "float32"))
    attrs = {"relax_disc.dims": {"count": [2, 9, 1]}}
    with builder.function("main", [count, x], attrs=attrs):
        builder.emit_func_output(builder.emit(relax.op.reshape(x, (8, count)), "rows"))
    graph = SymbolicShapeGraph.from_module(builder.get())
    assert graph.dims == (SymbolicDim("count", 2, 9),)
    assert graph.compare(count, 10).order is Order.LESS
    assert graph.compare(x, graph.canonical(count * 32)).order is Order.EQUAL


def test_branches_teach_nothing():
    @I.ir_module
    class Module:
        @R.function
        def main(
            flag: R.Tensor((), "bool"),
            x: R.Tensor(("n",), "float32"),
            y: R.Tensor(("m",), "float32"),
        ) -> R.Tensor(("n",), "float32"):
            n = T.int64()
            if flag:
                same = R.match_cast(y, R.Tensor((n,), "float32"))
                out = R.add(x, same)
            else:
                out = R.exp(x)
            return out

    graph = SymbolicShapeGraph.from_module(Module)
    assert graph.canonical("n") != graph.canonical("m")
    assert {dim.name for dim in graph.dims} == {"n", "m"}


@I.ir_module
class Calls:
    @R.function
    def main(x: R.Tensor(("a", "b"), "float32"), y: R.Tensor(("c", "d"), "float32")):
        cls = Calls
        one = cls.double(x)
        two = cls.double(y)
        three = cls.joined(one, two)
        return three

    @R.function
    def double(x: R.Tensor(("p", "q"), "float32")) -> R.Tensor(("p", "q"), "float32"):
        return R.add(x, x)

    @R.function
    def joined(x: R.Tensor(("p", "q"), "float32"), y: R.Tensor(("p", "r"), "float32")) -> R.Tensor(
        ("p", "q + r"), "float32"
    ):
        R.func_attr({"relax_disc.dims": {"p": [1, 64, 1], "q": [2, 128, 2]}})
        return R.concat([x, y], axis=1)


def test_calls():
    graph = SymbolicShapeGraph.from_module(Calls)
    assert graph.compare("a", "c").order is Order.EQUAL
    assert graph.compare("b", "d").order is Order.INCOMPARABLE
    # One caller: one dim.  Two callers with different shapes: its own dims.
    p, q = Calls["joined"].params[0].ty.shape.values
    assert graph.canonical(p) == graph.canonical("a")
    assert graph.canonical(q).free_dims[0].upper == 128
    assert str(graph.canonical(q)) == str(graph.canonical("b"))
    own = graph.canonical(Calls["double"].params[0].ty.shape.values[1])
    assert own not in (graph.canonical("b"), graph.canonical("d"))
    assert str(graph.bytes("three")) == "4*a*b + 4*a*d"


def test_kernels_take_the_dims_of_their_callers():
    n = tirx.Var("n", "int64")
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((n, 12), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            flat = builder.emit(relax.op.reshape(x, (n * 12,)))
            result = builder.emit_output(relax.op.add(flat, flat))
        builder.emit_func_output(result)
    lowered = relax.transform.LegalizeOps()(builder.get())
    graph = SymbolicShapeGraph.from_module(lowered)
    for kernel in ("add", "reshape"):
        assert graph.canonical(lowered[kernel].params[0].ty.shape[0], kernel) in (
            graph.canonical("n"),
            graph.canonical("12*n"),
        )
        for param in lowered[kernel].params:
            for size in getattr(param.ty, "shape", ()):
                assert set(graph.canonical(size, kernel).free_dims) <= set(graph.dims)
    assert str(graph.bytes(result)) == "48*n"


@pytest.mark.parametrize(
    ("parameters", "emit", "attrs", "message"),
    [
        (
            [("x", (N, 4), "float32"), ("y", (N, 5), "float32")],
            lambda b, x, y: relax.op.reshape(x, (N, 5)),
            {},
            r"main: \w+ = relax.reshape\(\.\.\.\).*: 4\*n and 5\*n have to be equal",
        ),
        (
            [("x", (N, 4), "float32"), ("y", (M, 5), "float32")],
            lambda b, x, y: b.match_cast(x, relax.TensorType((N + 1, 4), "float32")),
            {},
            r"n and n \+ 1 have to be equal, but the first is always less",
        ),
        (
            [("x", (N,), "float32"), ("y", (M, 8), "float32")],
            lambda b, x, y: relax.op.reshape(x, (M, 8)),
            {"relax_disc.dims": {"n": [17, 23, 1]}},
            r"relax.reshape.*no multiple of|relax.reshape.*contradict",
        ),
        (
            [("x", (N,), "float32"), ("y", (M,), "float32")],
            lambda b, x, y: b.match_cast(x, relax.TensorType((M,), "float32")),
            {"relax_disc.dims": {"n": [1, 10, 1], "m": [11, 20, 1]}},
            r"n and m have to be equal, but the first is always less \(m in 11 .. 20; n in 1",
        ),
        (
            [("x", (N,), "float32")],
            lambda b, x: relax.op.exp(x),
            {"relax_disc.dims": {"n": [5, 4, 1]}},
            r"main: Dim n: no multiple of 1 lies in 5 .. 4",
        ),
        (
            [("x", (N - 9,), "float32")],
            lambda b, x: relax.op.exp(x),
            {"relax_disc.dims": {"n": [1, 8, 1]}},
            r"not negative",
        ),
    ],
)
def test_contradictions_name_the_binding(parameters, emit, attrs, message):
    with pytest.raises(GraphError, match=message):
        graph_of(parameters, emit, attrs)


def test_unknown_shapes_name_the_binding():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((N,), "float32"))
    with builder.function("main", [x]):
        found = builder.emit(relax.op.nonzero(x), "found")
        builder.emit_func_output(found)
    with pytest.raises(GraphError, match=r"main: found = relax.nonzero.*R.match_cast"):
        SymbolicShapeGraph.from_module(builder.get())
    unknown = relax.Var("x", relax.TensorType(dtype="float32", ndim=2))
    builder = relax.BlockBuilder()
    with builder.function("main", [unknown]):
        builder.emit_func_output(unknown)
    with pytest.raises(GraphError, match="main: parameter x: the shape is unknown"):
        SymbolicShapeGraph.from_module(builder.get())


def test_questions_that_the_module_cannot_answer():
    graph = graph_of([("x", (N,), "float32")], lambda b, x: relax.op.exp(x))
    with pytest.raises(GraphError, match="no such variable"):
        graph.bytes("nothing")
    with pytest.raises(GraphError, match="stands for 0 dims"):
        graph.canonical(tirx.Var("n", "int64"))
    assert graph.canonical(SymbolicExpr.parse("3*other")) == SymbolicExpr.parse("3*other")
