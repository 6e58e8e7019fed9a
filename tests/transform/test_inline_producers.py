"""Cheap values computed by their readers: the same results, fewer bytes moved, no more kept."""

from functools import partial

import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax

from relax_disc.analysis.memory.peak import peak_bytes
from relax_disc.analysis.program.extraction import extract
from relax_disc.pipeline import PipelineOptions
from relax_disc.transform import FuseKernels, InlineProducers
from tests.kernel_programs import kernels_before, tensor

op = relax.op
N = tvm.tirx.Var("n", "int64")


program = partial(kernels_before, "InlineProducers", PipelineOptions())


def kernels(mod):
    return extract(FuseKernels()(mod), "main").graph()


def gate(emit, x, y, w):
    """A gated product, and one more reader of the gate after a matrix product."""
    silu = emit(op.multiply(x, emit(op.sigmoid(x))))
    late = emit(op.matmul(emit(op.multiply(silu, y)), w))
    return (emit(op.multiply(silu, late)),)


GATE = [tensor("x", [N, 64]), tensor("y", [N, 64]), tensor("w", [64, 64])]


def test_a_gate_is_computed_by_its_readers():
    mod = program(GATE, gate)
    before, after = kernels(mod).at({"n": 100}), kernels(InlineProducers()(mod)).at({"n": 100})
    assert len(after.kernels) == len(before.kernels) - 1
    saved = peak_bytes(before) - peak_bytes(after)
    assert saved == 100 * 64 * 4
    moved = [sum(k.moved_bytes for k in graph.kernels) for graph in (before, after)]
    # Written once and read twice before; its operand is read once by either.
    assert moved[0] - moved[1] == 2 * saved


def padded_gate(emit, x, y, w, _):
    """As `gate`, of sizes that kernels are told: none of their operands has an extent n."""
    silu = emit(op.multiply(x, emit(op.nn.relu(x))))
    late = emit(op.matmul(emit(op.where(emit(op.less_equal(silu, ZERO)), ZERO, y)), w))
    return (emit(op.multiply(silu, late)),)


ZERO = relax.const(0.0, "float32")


def test_kernels_that_are_told_a_dim_or_a_constant():
    rows = [tensor(name, [N * 4 - 1, 64]) for name in "xy"]
    mod = program([*rows, GATE[2], tensor("sizes", [N])], padded_gate)
    before, after = kernels(mod).at({"n": 100}), kernels(InlineProducers()(mod)).at({"n": 100})
    assert len(after.kernels) == len(before.kernels) - 1
    assert peak_bytes(before) - peak_bytes(after) == 399 * 64 * 4


@pytest.mark.parametrize("compare", [op.equal, op.less_equal, op.greater])
def test_what_is_compared_with_another_tensor_is_computed_once(compare):
    """Its readers would round it as their loops are made."""

    def peak(emit, x, y, w):
        largest = emit(op.add(x, emit(op.sigmoid(x))))
        is_found = emit(op.astype(emit(compare(largest, y)), "float32"))
        late = emit(op.matmul(is_found, w))
        return (emit(op.multiply(largest, late)),)

    mod = program(GATE, peak)
    before, after = kernels(mod).at({"n": 100}), kernels(InlineProducers()(mod)).at({"n": 100})
    assert len(after.kernels) == len(before.kernels)


def positions(emit, x, y, table):
    """The first rows of a table, added to more rows than it has, before and after a product."""
    rows = emit(op.strided_slice(table, [0], [0], [N], assume_inbound=True))
    first = emit(op.add(x, emit(op.expand_dims(rows, 0))))
    late = emit(op.matmul(first, y))
    return (emit(op.multiply(late, emit(op.expand_dims(rows, 0)))),)


def test_rows_of_a_table_are_read_from_the_table():
    params = [tensor("x", [8, N, 64]), tensor("y", [64, 64]), tensor("table", [512, 64])]
    mod = program(params, positions)
    before, after = kernels(mod).at({"n": 100}), kernels(InlineProducers()(mod)).at({"n": 100})
    assert len(after.kernels) == len(before.kernels) - 1
    assert peak_bytes(before) - peak_bytes(after) == 100 * 64 * 4


def scaled(kind, emit, x, y, w):
    """Two readers of a value that is better written; see `KEPT`."""
    late = emit(op.matmul(emit(op.add(y, y)), w))
    match kind:
        case "read by a library":
            value = emit(op.sigmoid(x))
            return emit(op.matmul(value, w)), emit(op.add(value, late)), emit(op.add(x, late))
        case "returned":
            value = emit(op.sigmoid(x))
            return value, emit(op.add(value, late)), emit(op.add(value, y))
        case "costly":
            value = x
            for _ in range(8):
                value = emit(op.sigmoid(value))
            return emit(op.multiply(value, y)), emit(op.add(value, late)), emit(op.add(x, late))
        case "smaller than its operand":
            narrow = emit(op.astype(emit(op.matmul(x, w)), "float16"))
            wide = emit(op.astype(narrow, "float16"))
            half = emit(op.astype(late, "float16"))
            other = emit(op.astype(y, "float16"))
            return emit(op.multiply(wide, other)), emit(op.add(wide, half))
        case "spread over a larger one":
            row = emit(op.sigmoid(emit(op.matmul(x, emit(op.sum(w, [1], True))))))
            return emit(op.multiply(row, y)), emit(op.add(row, late)), emit(op.add(row, x))
        case "a view":
            value = emit(op.reshape(x, [N * 2, 32]))
            other = emit(op.reshape(late, [N * 2, 32]))
            return emit(op.sigmoid(value)), emit(op.multiply(value, other))
    raise AssertionError(kind)


KEPT = [
    "read by a library",
    "returned",
    "costly",
    "smaller than its operand",
    "spread over a larger one",
    "a view",
]


def masked(steps, emit, x, y, w):
    """What a product reads, and a mask of it after more products; its operand is read later."""
    value = emit(op.nn.relu(emit(op.negative(x))))
    late = emit(op.matmul(value, w))
    for _ in range(steps):
        late = emit(op.matmul(late, w))
    zero = relax.const(0.0, "float32")
    gradient = emit(op.where(emit(op.less_equal(value, zero)), zero, late))
    return (emit(op.multiply(gradient, x)),)


@pytest.mark.parametrize(("steps", "given"), [(2, False), (40, True)])
def test_a_mask_long_after_is_computed_from_what_is_kept(steps, given):
    mod = program(GATE, partial(masked, steps))
    before, after = kernels(mod).at({"n": 100}), kernels(InlineProducers()(mod)).at({"n": 100})
    assert len(after.kernels) == len(before.kernels)
    assert peak_bytes(before) - peak_bytes(after) == given * 100 * 64 * 4
    moved = [sum(k.moved_bytes for k in graph.kernels) for graph in (before, after)]
    assert moved[1] <= moved[0]


@pytest.mark.parametrize("kind", KEPT)
def test_is_written_as_before(kind):
    mod = program(GATE, partial(scaled, kind))
    values = {k.name for k in kernels(mod).kernels}
    assert {k.name for k in kernels(InlineProducers()(mod)).kernels} == values


def test_equal_operators_are_told_apart():
    """Fusion gives two equal values to different kernels; a group may name either of them."""

    def write(emit, x, y, w):
        del x, w
        square = emit(op.multiply(y, y))
        one, two = emit(op.multiply(square, square)), emit(op.multiply(square, square))
        high = emit(op.multiply(two, two))
        product = emit(op.multiply(high, one))
        return product, emit(op.multiply(product, high))

    mod = program(GATE, write)
    after = InlineProducers()(mod)
    relax.analysis.well_formed(after)
    assert expanded(after) == expanded(mod)


def expanded(mod):
    """What the results are computed from, without regard of which variables are shared."""
    function = mod["main"]
    values = {p: ("parameter", i) for i, p in enumerate(function.params)}

    def of(expr):
        if isinstance(expr, relax.Var):
            return values[expr]
        if isinstance(expr, relax.Call):
            return expr.op.name, tuple(map(of, expr.args))
        if isinstance(expr, relax.Tuple):
            return tuple(map(of, expr.fields))
        return str(expr)

    for block in function.body.blocks:
        for binding in block.bindings:
            values[binding.var] = of(binding.value)
    return of(function.body.body)


ELEMENTWISE = (
    lambda x, y: op.multiply(x, y),
    lambda x, y: op.add(x, y),
    lambda x, y: op.subtract(x, op.sigmoid(y)),
    lambda x, y: op.multiply(x, op.exp(x)),
    lambda x, y: op.add(x, op.sum(y, [1], True)),
    lambda x, y: op.multiply(op.permute_dims(op.permute_dims(x, [1, 0]), [1, 0]), y),
)


@st.composite
def programs(draw):
    """Random straight-line programs of element-wise operators, sums and matrix products."""
    steps = draw(
        st.lists(
            st.tuples(st.integers(0, len(ELEMENTWISE) + 1), st.integers(0, 5), st.integers(0, 5)),
            min_size=4,
            max_size=10,
        )
    )

    def write(emit, x, y, w):
        values = [x, y]
        for kind, left, right in steps:
            a, b = values[-1 - left % len(values)], values[-1 - right % len(values)]
            if kind < len(ELEMENTWISE):
                values.append(emit(ELEMENTWISE[kind](a, b)))
            else:
                values.append(emit(op.matmul(a, w)))
        return values[-2:]

    return program(GATE, write)


@given(mod=programs(), rows=st.integers(1, 3000))
def test_no_worse_on_random_programs(mod, rows):
    after = InlineProducers()(mod)
    relax.analysis.well_formed(after)
    assert expanded(after) == expanded(mod)
    old, new = kernels(mod).at({"n": rows}), kernels(after).at({"n": rows})
    assert len(new.kernels) <= len(old.kernels)
    # Sums of rows are small beside the values: kept longer, or read by one more kernel, they do
    # not count.
    sums = rows * 4 * len(new.kernels)
    moved = [sum(k.moved_bytes for k in graph.kernels) for graph in (old, new)]
    assert moved[1] <= moved[0] + sums
    assert peak_bytes(new) <= peak_bytes(old) + sums
