"""Symbolic expressions against Python's own arithmetic on the same text."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_disc.analysis.symbolic.dim import SymbolicDim
from relax_disc.analysis.symbolic.expr import SymbolicExpr
from relax_disc.errors import GraphError

DIMS = {
    "a": SymbolicDim("a", 0, 9),
    "b": SymbolicDim("b", 1, 40, divisor=4),
    "c": SymbolicDim("c", 2),
}
SIZES = st.fixed_dictionaries(
    {
        "a": st.integers(0, 9),
        "b": st.integers(1, 10).map(lambda k: 4 * k),
        "c": st.integers(2, 10**6),
    }
)


def _combine(children):
    pair = st.tuples(children, children)
    return st.one_of(
        st.builds("({0[0]} {1} {0[1]})".format, pair, st.sampled_from("+-*")),
        st.builds(
            "({0} {1} {2})".format, children, st.sampled_from(["//", "%"]), st.integers(1, 9)
        ),
        st.builds("({0} {1} c)".format, children, st.sampled_from(["//", "%"])),
        st.builds("{1}({0[0]}, {0[1]})".format, pair, st.sampled_from(["min", "max"])),
    )


TEXTS = st.recursive(
    st.one_of(st.sampled_from("abc"), st.integers(-9, 9).map(str)), _combine, max_leaves=8
)


def _run(code, dims):
    """Interpret postfix code as the documentation describes it; shares nothing with the package."""
    stack, at = [], 0
    operations = {
        2: lambda x, y: x + y,
        3: lambda x, y: x - y,
        4: lambda x, y: x * y,
        5: lambda x, y: x // y,
        6: lambda x, y: x % y,
        7: min,
        8: max,
    }
    while at < len(code):
        if code[at] < 2:
            stack.append(code[at + 1] if code[at] == 0 else dims[code[at + 1]])
            at += 2
        else:
            right, left = stack.pop(), stack.pop()
            stack.append(operations[code[at]](left, right))
            at += 1
    (result,) = stack
    return result


@given(TEXTS, SIZES)
def test_every_form_has_the_value_of_the_text(text, sizes):
    expr = SymbolicExpr.parse(text, DIMS)
    expected = eval(text, {"min": min, "max": max}, dict(sizes))
    assert expr.evaluate(sizes) == expected
    assert eval(str(expr), {"min": min, "max": max}, dict(sizes)) == expected
    assert SymbolicExpr.parse(str(expr), DIMS) == expr
    lower, upper = expr.bounds()
    assert lower is None or lower <= expected
    assert upper is None or upper >= expected
    assert _run(expr.program(["a", "b", "c"]), [sizes["a"], sizes["b"], sizes["c"]]) == expected


@given(TEXTS, TEXTS, SIZES)
def test_arithmetic_and_substitution(left, right, sizes):
    scope = {"min": min, "max": max}
    first, second = SymbolicExpr.parse(left, DIMS), SymbolicExpr.parse(right, DIMS)
    x, y = eval(left, scope, dict(sizes)), eval(right, scope, dict(sizes))
    assert (first + second).evaluate(sizes) == x + y
    assert (first - second).evaluate(sizes) == x - y
    assert (first * second).evaluate(sizes) == x * y
    assert first.minimum(second).evaluate(sizes) == min(x, y)
    assert first.maximum(second).evaluate(sizes) == max(x, y)
    assert first - first == 0
    moved = first.substitute({"a": SymbolicExpr.parse("2*d + 1", [SymbolicDim("d", 0, 3)])})
    assert moved.evaluate({**sizes, "d": 2}) == eval(left, scope, {**sizes, "a": 5})


@given(TEXTS)
def test_arrays_equal_single_shapes(text):
    expr = SymbolicExpr.parse(text, DIMS)
    sizes = {
        "a": np.arange(6),
        "b": np.array([4, 8, 12, 16, 20, 40]),
        "c": np.array([2, 3, 5, 1000, 4097, 10**6]),
    }
    expected = [expr.evaluate({name: int(v[i]) for name, v in sizes.items()}) for i in range(6)]
    if max(map(abs, expected)) < 2**63:
        values = expr.evaluate(sizes)
        assert values.dtype == np.int64
        assert values.tolist() == expected
    else:
        with pytest.raises(OverflowError):
            expr.evaluate(sizes)


def test_arrays_broadcast_and_never_wrap():
    expr = SymbolicExpr.parse("x**3*y - x**3*y + x*y")
    big = np.array([2**31, 2**31 - 1])
    assert expr.evaluate({"x": big, "y": np.array([[1], [2]])}).tolist() == [
        [2**31, 2**31 - 1],
        [2**32, 2**32 - 2],
    ]
    cancelling = SymbolicExpr.parse("x*x*x*y - x*x*x*y*1 + z") + SymbolicExpr.parse("x**2 - x*y")
    assert cancelling.evaluate({"x": big, "y": big, "z": big}).tolist() == big.tolist()
    with pytest.raises(OverflowError, match="64 bits"):
        SymbolicExpr.parse("x**3").evaluate({"x": big})


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("4*(b + 1) - 4", "4*b"),
        ("(8*c + 17) // 8", "c + 2"),
        ("(4*c + 3) // 8", "(c // 2)"),
        ("(c // 4) // 8", "(c // 32)"),
        ("(12*a*c) // (4*c)", "3*a"),
        ("(c*c + 2*c + 1) // (c + 1)", "c + 1"),
        ("b % 4", "0"),
        ("a // 10", "0"),
        ("min(a, 9)", "a"),
        ("max(min(a, b), min(b, a))", "min(a, b)"),
        ("min(c, min(a, b), c + 1)", "min(a, b, c)"),
        ("seq*batch*seq*12", "12*batch*seq**2"),
        ("-(a) + 5", "-a + 5"),
    ],
)
def test_canonical_text(text, canonical):
    assert str(SymbolicExpr.parse(text, DIMS)) == canonical


def test_hash_equality_and_copies():
    batch = SymbolicExpr.dim(SymbolicDim("batch", 1, 64))
    assert {batch * 2: "x"}[2 * batch] == "x"
    assert SymbolicExpr.constant(3) == 3
    assert hash(SymbolicExpr.constant(3)) == hash(3)
    assert np.int64(3) * batch == batch * 3
    for twin in (copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        assert twin == batch
        assert twin.free_dims == batch.free_dims
    with pytest.raises(AttributeError):
        batch.terms = {}
    with pytest.raises(TypeError):
        batch * 0.5


def test_declarations_of_one_name_hold_together():
    wide = SymbolicExpr.dim(SymbolicDim("n", 0, 100, 2))
    narrow = SymbolicExpr.dim(SymbolicDim("n", 10, None, 3))
    assert (wide + narrow).free_dims == (SymbolicDim("n", 10, 100, 6),)
    with pytest.raises(GraphError, match="contradict"):
        wide + SymbolicExpr.dim(SymbolicDim("n", 101))


@pytest.mark.parametrize(
    "arguments", [("n", -1), ("n", 5, 4), ("n", 3, 5, 7), ("two words",), ("n", 1, 4, 0)]
)
def test_dims_that_cannot_be(arguments):
    with pytest.raises(GraphError):
        SymbolicDim(*arguments)


@pytest.mark.parametrize(
    "text", ["1.5*a", "a.b", "f(a)", "a if b else c", "", "a +", "a**b", "a/2"]
)
def test_text_that_is_no_size(text):
    with pytest.raises(GraphError, match="Cannot read"):
        SymbolicExpr.parse(text)


def test_errors_name_what_is_missing():
    expr = SymbolicExpr.parse("a*b // 7")
    with pytest.raises(GraphError, match="dim b was given no size"):
        expr.evaluate({"a": 1})
    with pytest.raises(GraphError, match="dim b is not among a"):
        expr.program(["a"])
    with pytest.raises(GraphError, match="does not fit 64 bits"):
        SymbolicExpr.constant(2**63).program([])
    with pytest.raises(GraphError, match="division by zero"):
        expr // 0
    with pytest.raises(GraphError, match="depends on a, b"):
        expr.as_int()
