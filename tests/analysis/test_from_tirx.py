"""TVM integer expressions to symbolic ones and back."""

import pytest
from tvm import tirx
from tvm.sym import Analyzer

from relax_disc.analysis.symbolic.dim import SymbolicDim
from relax_disc.analysis.symbolic.from_tirx import from_tirx, to_tirx
from relax_disc.errors import GraphError

N = tirx.Var("n", "int64")
M = tirx.Var("m", "int64")


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (N * 12 + M * N - 4, "m*n + 12*n - 4"),
        (tirx.floordiv(N + 63, 64) * 64, "64*((n + 63) // 64)"),
        (tirx.floormod(N, 3), "(n % 3)"),
        (tirx.FloorMod(N, tirx.IntImm("int64", -4)), "-((3*n) % 4)"),
        (tirx.max(N, M) - tirx.min(N, M), "max(m, n) - min(m, n)"),
        (tirx.truncdiv(N + 1, 2), "((n + 1) // 2)"),
        (tirx.Cast("int64", tirx.Var("k", "int32")), "k"),
        (tirx.const(7, "int64"), "7"),
        (5, "5"),
    ],
)
def test_vocabulary_and_round_trip(expr, text):
    expected = from_tirx(expr)
    assert str(expected) == text
    names = {"n": N, "m": M, "k": tirx.Var("k", "int64")}
    back = to_tirx(expected, names)
    assert from_tirx(back) == expected
    if not isinstance(expr, int) and text != "k":
        analyzer = Analyzer()
        for var in (N, M):  # sizes are never negative
            analyzer.bind(var, tirx.const(3, "int64") if var is N else tirx.const(5, "int64"))
        assert int(analyzer.simplify(back)) == int(analyzer.simplify(expr))


def test_variables_take_their_declaration():
    seq = SymbolicDim("seq", 16, 1896, 8)
    assert from_tirx(N * 2, {N: seq}).free_dims == (seq,)
    assert from_tirx(N * 2, {"n": seq}).free_dims == (seq,)
    with pytest.raises(GraphError, match="no TVM variable"):
        to_tirx(seq, {})


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (tirx.if_then_else(N < 0, N + M, N), "n"),
        (tirx.Select(N >= 1, N, M), "n"),
        (tirx.if_then_else(N * M <= N - 1, N, M), "m"),
        (tirx.if_then_else(N == N + 1, N, M), "m"),
    ],
)
def test_choices_that_the_ranges_decide(expr, text):
    assert str(from_tirx(expr)) == text


@pytest.mark.parametrize(
    "expr",
    [
        tirx.Select(N > 1, N, M),
        tirx.if_then_else(N > M, N, M * 2),
        tirx.Select(tirx.And(N > 0, M > 0), N, M),
        tirx.truncdiv(N - 5, 2),
        tirx.const(1.5, "float32"),
        tirx.Var("x", "float32"),
        N > 1,
    ],
)
def test_what_is_no_size_is_refused(expr):
    with pytest.raises(GraphError, match="cannot be analysed"):
        from_tirx(expr)
