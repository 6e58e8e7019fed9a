"""Kernels that read the same values become one, and make again what they can: the same results."""

from functools import partial

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax

from relax_disc.analysis import schedule_ops
from relax_disc.analysis.memory.peak import peak_bytes
from relax_disc.analysis.program.extraction import extract
from relax_disc.pipeline import PipelineOptions, alias_passes
from relax_disc.transform import FuseKernels, ScheduleKernels
from tests.kernel_programs import kernels_before, tensor

op = relax.op
N = tvm.tirx.Var("n", "int64")
ROW = 64 * 4  # bytes of a row of the values below
PARAMETERS = [tensor("x", [N, 64]), tensor("w", [64, 64])]
program = partial(
    kernels_before, "FuseKernels", PipelineOptions(inline_producers=False), PARAMETERS
)


def graphs(mod, rows):
    """Kernels without joins, and with them."""
    apart, joined = (FuseKernels(join)(mod) for join in (False, True))
    relax.analysis.well_formed(joined)
    return [extract(each, "main").graph().at({"n": rows}) for each in (apart, joined)]


def least_peak(mod, join, rows):
    """Peak in the best order, results written over operands where that can be."""
    loops = ScheduleKernels(tvm.target.Target("llvm"))
    mod = tvm.transform.Sequential([FuseKernels(join), *alias_passes(), loops])(mod)
    graph = extract(mod, "main").graph().at({"n": rows})
    return peak_bytes(graph.reordered(schedule_ops(graph).order))


def outcome(mod, rows):
    """Results of a fused program on the same numbers."""
    draw = np.random.default_rng(rows)
    arrays = [draw.standard_normal((rows, 64)), draw.standard_normal((64, 64)) / 8]
    vm = relax.VirtualMachine(relax.build(mod, "llvm"), tvm.cpu())
    results = vm["main"](*(tvm.runtime.tensor(a.astype("float32")) for a in arrays))
    return [result.numpy() for result in results]


def feed_forward(kind, emit, x, w):
    """A gated feed-forward layer and its gradients; `kind` names what differs from it."""
    gate, up = emit(op.matmul(x, w)), emit(op.matmul(emit(op.exp(x)), w))
    silu = emit(op.multiply(gate, emit(op.sigmoid(gate))))
    for _ in range(9 * (kind == "costly")):
        silu = emit(op.sigmoid(silu))
    hidden = emit(op.multiply(silu, up))
    other = emit(op.matmul(x, w)) if kind == "freed" else x
    out = emit(op.add(emit(op.matmul(hidden, w)), other))
    for _ in range(0 if kind == "near" else 9):
        out = emit(op.matmul(out, w))
    d_hidden = emit(op.matmul(out, w))
    d_up = emit(op.multiply(d_hidden, emit(op.tanh(gate))))
    source = {"dependent": d_up, "later": emit(op.matmul(d_hidden, w))}.get(kind, d_hidden)
    d_gate = emit(op.multiply(emit(op.multiply(source, up)), emit(op.exp(gate))))
    other = out if kind == "read before" else other
    late = emit(op.sum(emit(op.multiply(hidden, other)), [1]))
    d_x = emit(op.add(emit(op.matmul(d_up, w)), emit(op.matmul(d_gate, w))))
    kept = {"returned": [hidden], "read later": [emit(op.multiply(gate, d_x))]}
    return [d_x, late, *kept.get(kind, [])]


def test_gradients_of_a_gate_are_one_kernel_that_makes_the_product_again():
    mod = program(partial(feed_forward, ""))
    apart, joined = graphs(mod, 100)
    assert len(joined.kernels) == len(apart.kernels) - 1
    moved = [sum(k.moved_bytes for k in graph.kernels) for graph in (apart, joined)]
    # Gate and gradient are read once, not twice; the product is written once more.
    assert moved[0] - moved[1] == (2 - 1) * 100 * ROW
    assert peak_bytes(apart) - peak_bytes(joined) == 100 * ROW


@pytest.mark.parametrize("kind", ["", "costly", "near", "later", "freed", "returned"])
@pytest.mark.parametrize("rows", [1, 37])
def test_results_are_the_same(kind, rows):
    mod = program(partial(feed_forward, kind))
    apart, joined = (outcome(FuseKernels(join)(mod), rows) for join in (False, True))
    for a, b in zip(apart, joined, strict=True):
        np.testing.assert_array_equal(a, b)


COPIES = {
    "": 1,
    "read before": 1,
    "costly": 0,
    "near": 0,
    "freed": 0,
    "returned": 0,
    "read later": 0,
}


@pytest.mark.parametrize("kind", COPIES)
def test_a_value_is_made_again_only_where_that_saves_memory(kind):
    apart, joined = graphs(program(partial(feed_forward, kind)), 100)
    written = [sum(len(k.outputs) for k in graph.kernels) for graph in (apart, joined)]
    assert written[1] - written[0] == COPIES[kind]


@pytest.mark.parametrize("kind", [*COPIES, "dependent", "later"])
def test_no_more_memory_is_needed(kind):
    mod = program(partial(feed_forward, kind))
    apart, joined = (least_peak(mod, join, 1000) for join in (False, True))
    assert joined <= apart
    assert kind or joined < apart


@pytest.mark.parametrize(
    ("kind", "fewer"), [("", 1), ("dependent", 0), ("later", 0), ("read later", 1)]
)
def test_what_would_wait_for_another_stays_apart(kind, fewer):
    apart, joined = graphs(program(partial(feed_forward, kind)), 100)
    assert len(apart.kernels) - len(joined.kernels) == fewer


STEPS = (
    lambda emit, a, b, w: emit(op.multiply(a, b)),
    lambda emit, a, b, w: emit(op.add(a, b)),
    lambda emit, a, b, w: emit(op.subtract(a, emit(op.sigmoid(b)))),
    lambda emit, a, b, w: emit(op.add(a, emit(op.sum(b, [1], True)))),
    lambda emit, a, b, w: emit(op.matmul(a, w)),
    lambda emit, a, b, w: emit(op.tanh(emit(op.matmul(b, w)))),
    lambda emit, a, b, w: emit(op.reshape(emit(op.reshape(a, [N * 2, 32])), [N, 64])),
)


@st.composite
def programs(draw):
    """Random programs in which values are read at any distance."""
    step = st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 12), st.integers(0, 12))
    steps = draw(st.lists(step, min_size=8, max_size=24))

    def write(emit, x, w):
        values = [x]
        for kind, left, right in steps:
            a, b = values[-1 - left % len(values)], values[-1 - right % len(values)]
            values.append(STEPS[kind](emit, a, b, w))
        return values[-2:]

    return program(write)


@given(mod=programs(), rows=st.integers(1, 40))
def test_random_programs_give_the_same_and_move_no_more(mod, rows):
    apart, joined = graphs(mod, rows)
    copies = sum(len(k.outputs) for k in joined.kernels) - sum(
        len(k.outputs) for k in apart.kernels
    )
    assert 0 <= copies
    moved = [sum(k.moved_bytes for k in graph.kernels) for graph in (apart, joined)]
    assert moved[1] <= moved[0] + copies * rows * ROW
    if len(joined.kernels) < len(apart.kernels) or copies:
        # Sums of rows are small beside the values: what is made again may read them later.
        sums = rows * 4 * len(joined.kernels)
        assert least_peak(mod, True, rows) <= least_peak(mod, False, rows) + sums
        for a, b in zip(*(outcome(FuseKernels(j)(mod), rows) for j in (False, True)), strict=True):
            np.testing.assert_array_equal(a, b)
