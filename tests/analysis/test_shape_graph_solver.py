"""The solver of size equalities, judged at shapes at which all equalities hold."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_disc.analysis.symbolic.comparison.compare import Order, compare
from relax_disc.analysis.symbolic.dim import SymbolicDim
from relax_disc.analysis.symbolic.expr import SymbolicExpr
from relax_disc.analysis.symbolic.shape_graph.solver import ShapeConstraints
from relax_disc.errors import GraphError

BASES = ("u", "v", "w")
SIDE = st.lists(st.integers(0, 5), min_size=1, max_size=3)


@st.composite
def systems(draw):
    """Dims that are products of hidden bases, and equalities that follow from that."""
    makeup = [
        (draw(st.integers(1, 6)), draw(st.lists(st.sampled_from(BASES), min_size=1, max_size=2)))
        for _ in range(6)
    ]
    equalities = []
    for _ in range(draw(st.integers(1, 5))):
        left, right = draw(SIDE), draw(SIDE)
        first = sorted(base for index in left for base in makeup[index][1])
        second = sorted(base for index in right for base in makeup[index][1])
        if first == second:
            factors = [prod(makeup[index][0] for index in side) for side in (left, right)]
            equalities.append((factors[1], left, factors[0], right))
    return makeup, equalities


def sizes_of(makeup, bases):
    return {f"d{i}": c * prod(bases[b] for b in used) for i, (c, used) in enumerate(makeup)}


def extended(system, sizes):
    """Give the dims that the solver made (``d1_over_3``) their sizes."""
    sizes = dict(sizes)
    for name in system.dims:  # in the order in which they were made
        if name not in sizes:
            base, _, divisor = name.rstrip("_").rpartition("_over_")
            assert sizes[base] % int(divisor) == 0
            sizes[name] = sizes[base] // int(divisor)
    return sizes


@given(systems(), st.fixed_dictionaries({base: st.integers(1, 9) for base in BASES}))
def test_canonical_forms_keep_their_values(drawn, bases):
    makeup, equalities = drawn
    sizes = sizes_of(makeup, bases)
    system = ShapeConstraints()
    dims = [system.declare(SymbolicDim(name, 1, 2 * size)) for name, size in sizes.items()]
    for left_factor, left, right_factor, right in equalities:
        system.require_equal(
            prod((dims[i] for i in left), start=SymbolicExpr.constant(left_factor)),
            prod((dims[i] for i in right), start=SymbolicExpr.constant(right_factor)),
            "test",
        )
    system.close()
    known = extended(system, sizes)
    assert all(known[dim.name] in dim for dim in system.free)
    for dim in dims:
        for other in dims:
            expr = dim * other + dim * 3
            form = system.canonical(expr)
            assert form.evaluate(known) == expr.evaluate(sizes)
            assert system.canonical(form) == form
    for left_factor, left, right_factor, right in equalities:
        first = prod((dims[i] for i in left), start=SymbolicExpr.constant(left_factor))
        second = prod((dims[i] for i in right), start=SymbolicExpr.constant(right_factor))
        answer = compare(system.canonical(first), system.canonical(second), system.dims)
        assert answer.order in (Order.EQUAL, Order.UNKNOWN, Order.INCOMPARABLE)


def test_of_two_equal_dims_the_wanted_one_stays():
    system = ShapeConstraints()
    inner = system.declare(SymbolicDim("inner"), keep=0)
    outer = system.declare(SymbolicDim("outer"), keep=1)
    system.require_equal(outer, inner, "test")
    system.close()
    assert [dim.name for dim in system.free] == ["outer"]


def test_products_that_cancel():
    system = ShapeConstraints()
    a, b, c = (system.declare(SymbolicDim(name)) for name in "abc")
    system.require_equal(a * b * 6, c * b * 4, "test")
    system.close()
    assert str(system.canonical(a)) == "2*a_over_2"
    assert system.canonical(a * 3) == system.canonical(c * 2)


def test_a_factor_that_may_be_zero_does_not_cancel():
    system = ShapeConstraints()
    a, c = (system.declare(SymbolicDim(name)) for name in "ac")
    zero = system.declare(SymbolicDim("zero", 0))
    system.require_equal(a * zero, c * zero, "test")
    system.close()
    assert system.canonical(a) != system.canonical(c)
    assert system.canonical(a * zero) == system.canonical(c * zero)


@pytest.mark.parametrize(
    ("left", "right", "message"),
    [
        ("a", "a + 1", "have to be equal"),
        ("a*b", "a*b + 4", "have to be equal"),
        ("4*a", "7*b + 2*b", "have to be equal"),
        ("4*a", "30", "multiple of 2"),
        ("4*a*b + 6*c", "151", "multiple of 2"),
        ("4*a", "3*b", "contradict|no multiple"),
        ("a*b", "c", "contradict|have to be equal"),
        ("3*a", "40", "have to be equal"),
    ],
)
def test_contradictions(left, right, message):
    dims = {
        "a": SymbolicDim("a", 5, 8),
        "b": SymbolicDim("b", 5, 7),
        "c": SymbolicDim("c", 1, 24),
    }
    system = ShapeConstraints()
    for dim in dims.values():
        system.declare(dim)
    with pytest.raises(GraphError, match=f"origin: .*({message})"):
        system.require_equal(
            SymbolicExpr.parse(left, dims), SymbolicExpr.parse(right, dims), "origin"
        )
        system.close()
