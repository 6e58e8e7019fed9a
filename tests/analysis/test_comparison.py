"""Orders of sizes against brute force over every shape, which shares no code with the package."""

from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.comparison import measure, summary
from relax_disc.analysis.symbolic.comparison.compare import Order, compare
from relax_disc.analysis.symbolic.dim import SymbolicDim
from relax_disc.analysis.symbolic.expr import SymbolicExpr
from relax_disc.errors import GraphError

SCOPE = {"min": min, "max": max}
CERTAIN = {
    frozenset("<"): {Order.LESS},
    frozenset("="): {Order.EQUAL},
    frozenset(">"): {Order.GREATER},
    frozenset("<="): {Order.LESS_EQUAL},
    frozenset("=>"): {Order.GREATER_EQUAL},
}
LOOSE = {
    Order.LESS_EQUAL: "<=",
    Order.GREATER_EQUAL: ">=",
}


def brute_force(left, right, dims):
    """Return which of < = > occur, by Python's own arithmetic."""
    names = [dim.name for dim in dims]
    ranges = [
        [size for size in range(dim.lower, dim.upper + 1) if size % dim.divisor == 0]
        for dim in dims
    ]
    codes = compile(left, "left", "eval"), compile(right, "right", "eval")
    seen = set()
    for sizes in product(*ranges):
        shape = dict(zip(names, sizes, strict=True))
        x, y = (eval(code, SCOPE, shape) for code in codes)
        seen.add("<" if x < y else ">" if x > y else "=")
    return seen


def check(left, right, dims, *, complete=False):
    """Compare, judge, and return the order."""
    table = {dim.name: dim for dim in dims}
    answer = compare(SymbolicExpr.parse(left, table), SymbolicExpr.parse(right, table))
    seen = brute_force(left, right, dims)
    if answer.order is Order.INCOMPARABLE:
        for witness, sign in ((answer.witness_less, "<"), (answer.witness_greater, ">")):
            shape = {dim.name: witness.get(dim.name, dim.first) for dim in dims}
            assert all(shape[dim.name] in dim for dim in dims)
            assert brute_force(left, right, [SymbolicDim(n, s, s) for n, s in shape.items()]) == {
                sign
            }
        return answer.order
    assert answer.witness_less is None
    assert answer.witness_greater is None
    if answer.order is Order.UNKNOWN:
        assert not complete, (left, right, dims, seen)
    elif answer.order in LOOSE:
        # "=" and strict alone are better answers; what is claimed must hold.
        assert seen <= set(LOOSE[answer.order]), (left, right, dims, answer, seen)
    else:
        assert answer.order in CERTAIN[frozenset(seen)], (left, right, dims, answer, seen)
    return answer.order


@st.composite
def dims(draw):
    result = []
    for name in "xyz":
        lower = draw(st.integers(0, 9))
        upper = lower + draw(st.integers(0, 8))
        divisor = draw(st.sampled_from([1, 1, 2, 3]))
        first = -(-lower // divisor) * divisor
        result.append(SymbolicDim(name, lower, max(upper, first), divisor))
    return tuple(result)


MONOMIALS = ["1", *("*".join(m) for n in (1, 2, 3) for m in product("xyz", repeat=n))]
POLYNOMIALS = st.lists(
    st.tuples(st.integers(-6, 6), st.sampled_from(MONOMIALS)), min_size=1, max_size=5
).map(lambda terms: " + ".join(f"({c})*{m}" for c, m in terms))


@given(POLYNOMIALS, POLYNOMIALS, dims())
def test_small_ranges_are_always_decided(left, right, box):
    check(left, right, box, complete=True)


@given(POLYNOMIALS, POLYNOMIALS, st.integers(2, 200), dims())
@example(
    "x*y", "x*z", 10**30, (SymbolicDim("x", 1, 9), SymbolicDim("y", 1, 9), SymbolicDim("z", 9, 9))
)
def test_numbers_beyond_floats(left, right, factor, box):
    big = factor**12 + 1
    check(f"({left})*{big} + 1", f"({right})*{big}", box)


ATOMS = st.one_of(
    st.builds(
        "(({0}) {1} {2})".format, POLYNOMIALS, st.sampled_from(["//", "%"]), st.integers(2, 9)
    ),
    st.builds("{1}({0}, {2})".format, POLYNOMIALS, st.sampled_from(["min", "max"]), POLYNOMIALS),
    st.builds("(({0}) {1} (x + 1))".format, POLYNOMIALS, st.sampled_from(["//", "%"])),
)
MIXED = st.builds("{0} + ({1})*{2} + {3}".format, POLYNOMIALS, st.integers(-3, 3), ATOMS, ATOMS)


@given(MIXED, st.one_of(POLYNOMIALS, MIXED), dims())
def test_atoms(left, right, box):
    check(left, right, box)


@given(MIXED, st.one_of(POLYNOMIALS, MIXED), dims())
def test_atoms_without_looking_at_every_shape(monkeypatch_module, left, right, box):
    check(left, right, box)


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("relax_disc.analysis.symbolic.comparison.atom_signs.SMALL_BOX", 0)
        patch.setattr("relax_disc.analysis.symbolic.comparison.atom_signs.LARGE_BOX", 0)
        yield


REALISTIC = {
    "batch": SymbolicDim("batch", 1, 64),
    "seq": SymbolicDim("seq", 1, 4096),
    "vocab": SymbolicDim("vocab", 1),
    "even": SymbolicDim("even", 2, 4096, 2),
    "free": SymbolicDim("free", 0),
    "any": SymbolicDim("any", 1),
}


@pytest.mark.parametrize(
    ("left", "right", "order"),
    [
        ("11008*seq", "1024*12*seq", Order.LESS),
        ("4*batch*seq*seq", "4*batch*seq", Order.GREATER_EQUAL),
        ("4*batch*seq*seq + 1", "4*batch*seq", Order.GREATER),
        ("seq*seq*vocab", "seq*vocab", Order.GREATER_EQUAL),
        ("32*seq*vocab**2", "4096*seq*vocab", Order.INCOMPARABLE),
        ("free*any", "free", Order.GREATER_EQUAL),
        ("free*free", "free", Order.GREATER_EQUAL),
        ("vocab", "1000000", Order.INCOMPARABLE),
        ("vocab", "10**12", Order.INCOMPARABLE),
        ("vocab**2 + 10**6", "1999*vocab", Order.GREATER),
        ("vocab**2 + 10**6", "2000*vocab", Order.GREATER_EQUAL),
        ("vocab**2 + 10**6", "2001*vocab", Order.INCOMPARABLE),
        # Between integers the difference changes its sign, at integers it does not.
        ("4*seq*seq + 3", "8*seq", Order.INCOMPARABLE),
        ("seq*seq + 2", "3*seq", Order.GREATER_EQUAL),
        ("4*seq*seq + 120", "44*seq", Order.GREATER_EQUAL),
        ("4*seq*seq + 121", "44*seq", Order.GREATER),
        ("even*even + 3", "4*even", Order.INCOMPARABLE),
        ("even*even + 15", "8*even", Order.INCOMPARABLE),
        ("even*even + 35", "12*even", Order.INCOMPARABLE),
        ("even*even + 24", "10*even", Order.GREATER_EQUAL),
        ("even // 2 * 2", "even", Order.EQUAL),
        ("(seq + 63) // 64 * 64", "seq", Order.GREATER_EQUAL),
        ("(seq + 63) // 64 * 64", "seq + 64", Order.LESS),
        ("(seq + 63) // 64 * 64", "seq + 63", Order.LESS_EQUAL),
        ("seq - seq % 16", "16 * (seq // 16)", Order.EQUAL),
        ("(vocab + 63) // 64 * 64", "vocab + 63", Order.LESS_EQUAL),
        ("min(seq, vocab)", "vocab", Order.LESS_EQUAL),
        ("min(seq, batch)*vocab", "vocab*seq + 1", Order.LESS),
        ("max(seq, vocab) + min(seq, vocab)", "seq + vocab", Order.EQUAL),
        ("max(seq, batch)", "batch + seq", Order.LESS),
        ("vocab // batch", "vocab", Order.LESS_EQUAL),
        ("seq % batch", "batch", Order.LESS),
    ],
)
def test_known_answers(left, right, order):
    answer = compare(*(SymbolicExpr.parse(text, REALISTIC) for text in (left, right)))
    assert answer.order is order
    mirrored = {
        Order.LESS: Order.GREATER,
        Order.GREATER: Order.LESS,
        Order.LESS_EQUAL: Order.GREATER_EQUAL,
        Order.GREATER_EQUAL: Order.LESS_EQUAL,
    }
    opposite = compare(*(SymbolicExpr.parse(text, REALISTIC) for text in (right, left)))
    assert opposite.order is mirrored.get(order, order)


def test_huge_ranges_and_numbers():
    x = SymbolicExpr.dim(SymbolicDim("x", 1, 2**51, 2**30))
    y = SymbolicExpr.dim(SymbolicDim("y", 1, 10**30))
    answer = compare(x * x, y * y * y)
    assert answer.order is Order.INCOMPARABLE
    for witness, less in ((answer.witness_less, True), (answer.witness_greater, False)):
        assert witness["x"] in SymbolicDim("x", 1, 2**51, 2**30)
        assert (witness["x"] ** 2 < witness["y"] ** 3) == less
    assert compare(x, 2**60).order in (Order.LESS, Order.UNKNOWN)
    assert compare(y * 10**400, y * y).order is Order.UNKNOWN
    assert compare(y * 10**400, y).order is Order.GREATER
    far = SymbolicExpr.dim(SymbolicDim("far", 2**45, 2**46))
    assert compare(far, x).order in (Order.UNKNOWN, Order.INCOMPARABLE)
    assert compare(far * far, far).order in (Order.UNKNOWN, Order.GREATER)


def test_witnesses_hold_all_dims():
    left = SymbolicExpr.parse("seq*batch - 100*batch + vocab", REALISTIC)
    right = SymbolicExpr.parse("vocab", REALISTIC)
    answer = compare(left, right)
    assert answer.order is Order.INCOMPARABLE
    assert left.evaluate(answer.witness_less) < right.evaluate(answer.witness_less)
    assert left.evaluate(answer.witness_greater) > right.evaluate(answer.witness_greater)


def test_declarations_given_apart():
    left, right = SymbolicExpr.parse("n*n"), SymbolicExpr.parse("8*n")
    assert compare(left, right).order is Order.INCOMPARABLE
    assert compare(left, right, [SymbolicDim("n", 9)]).order is Order.GREATER
    assert compare(left, right, {"n": SymbolicDim("n", 8, 64)}).order is Order.GREATER_EQUAL
    with pytest.raises(GraphError, match="contradict"):
        compare(SymbolicExpr.dim(SymbolicDim("n", 1, 5)), 3, [SymbolicDim("n", 6)])


def test_integers_and_dims_compare_directly():
    batch = SymbolicDim("batch", 1, 64)
    assert compare(batch, 65).order is Order.LESS
    assert compare(1, batch).order is Order.LESS_EQUAL
    assert compare(3, 3).order is Order.EQUAL
    assert compare(3, 4).order is Order.LESS


@pytest.mark.parametrize("kind", ["small", "realistic"])
def test_random_pairs(kind):
    figures = summary(list(measure(kind, 300, seed=1)))
    assert figures["wrong"] == 0
    assert figures["undecided_percent"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["small", "realistic"])
def test_ten_thousand_random_pairs(kind):
    figures = summary(list(measure(kind, 5000)))
    assert figures["wrong"] == 0
    assert figures["undecided_percent"] <= 1
    # Twice the targets, because tests share the machine; benchmarks/comparison.py measures.
    assert figures["median_us"] <= 100
    assert figures["worst_ms"] <= 40
