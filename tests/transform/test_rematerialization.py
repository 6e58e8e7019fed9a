"""Giving up and computing again: marks, lowering, and exactness at every budget."""

import hypothesis.strategies as st
import pytest
import torch
import tvm
import tvm_ffi
from hypothesis import given
from tvm import relax, tirx

from relax_disc.errors import MemoryBudgetError
from relax_disc.transform.memory.rematerialization import (
    InsertRematerialization,
    LowerRematerialization,
)
from relax_disc.vm_builtins.session import Session
from tests.placement import check_placement
from tests.relax_programs import Program, call, compile_program, draw_program


def there_and_back(depth):
    """Layers forward, then backward uses of every activation, last first."""
    steps, activations, current, count = [], [], 0, 2
    for _ in range(depth):
        steps.append(("matmul", [current, 1], 0))
        activations.append(count)
        steps.append(("scale", [count], 0.5))
        current = count + 1
        count += 2
    for activation in reversed(activations):
        steps.append(("add", [current, activation], 0))
        current = count
        count += 1
    return Program(1, 1, steps, [current])


def ops_of(function):
    return [
        binding.value.op.name
        for block in function.body.blocks
        for binding in block.bindings
        if isinstance(binding.value, relax.Call) and isinstance(binding.value.op, tvm.ir.Op)
    ]


@pytest.mark.parametrize("dataflow", [True, False])
def test_marks_stand_around_the_far_uses(dataflow):
    module = there_and_back(4).module()
    if dataflow:
        module = relax.transform.ConvertToDataflow()(module)
    marked = InsertRematerialization()(module)
    ops = ops_of(marked["main"])
    assert ops.count("relax_disc.evict") == ops.count("relax_disc.regenerate") == 3
    assert max(i for i, op in enumerate(ops) if op.endswith("evict")) < min(
        i for i, op in enumerate(ops) if op.endswith("regenerate")
    )
    relax.analysis.well_formed(marked)
    assert "relax_disc.regenerate(" in marked["main"].script()


def test_lowering_leaves_the_program_and_a_list_of_kernels():
    module = there_and_back(4).module()
    lowered = LowerRematerialization()(InsertRematerialization()(module))
    assert list(lowered["main"].attrs["relax_disc.recomputable"]) == list(range(5))
    tvm.ir.assert_structural_equal(
        lowered["main"].without_attr("relax_disc.recomputable"), module["main"]
    )


def test_nothing_to_mark_changes_nothing():
    module = Program(1, 1, [("scale", [0], 2.0)], [2]).module()
    marked = LowerRematerialization()(InsertRematerialization()(module))
    tvm.ir.assert_structural_equal(marked, module)


def test_what_costs_more_memory_than_it_frees_is_no_candidate():
    """The total of a tensor is small; to compute it again the tensor would have to stay."""
    steps = [("matmul", [0, 1], 0), ("total", [2], 0), ("scale", [0], 2.0)]
    steps += [("scale", [4 + i], 2.0) for i in range(4)]
    program = Program(1, 1, steps, [3, 8])
    assert "relax_disc.evict" not in ops_of(InsertRematerialization()(program.module())["main"])


def run_at_budgets(program, machine, n, fractions):
    """Every budget: same bits as unlimited, peak as planned and inside, time monotone."""
    session = Session.of(machine)
    unlimited = session.plan([n])
    outside = unlimited.resident_bytes + unlimited.escaping_bytes
    tensors = program.arguments(n)
    expected = program.expected(tensors)
    replaced = dict(program.pairs)
    times = []
    for fraction in fractions:
        budget = outside + int(unlimited.arena_bytes * fraction)
        session.memory_budget = budget
        arguments = [tensor.clone() for tensor in tensors]
        facts = session.plan([n], budget)
        session.fill_memory(0xFF)  # NaN, for who reads what nobody wrote
        try:
            outputs = call(machine, arguments)
        except MemoryBudgetError as error:
            assert not facts.feasible
            assert error.lower_bound_bytes <= error.least_bytes
            assert error.least_bytes > budget
            assert session.plan([n], error.least_bytes).feasible
            assert all(map(torch.equal, arguments, tensors))
            continue
        assert facts.feasible and facts.peak_bytes <= budget
        kept = [value for i, value in enumerate(expected) if i not in replaced]
        assert all(map(torch.equal, outputs, kept))
        for position, weight in replaced.items():
            assert torch.equal(arguments[weight], expected[position])
        report = session.report()
        assert report.peak_bytes == report.planned_peak_bytes == facts.peak_bytes
        assert report.recomputations == len(facts.recomputed)
        check_placement(session, [n], budget)
        times.append(facts.time_ns)
    assert times == sorted(times)
    session.memory_budget = None


def test_half_the_memory_at_some_more_time():
    program = there_and_back(8)
    machine = compile_program(program.module())
    run_at_budgets(program, machine, 64, [1.0, 0.9, 0.7, 0.5, 0.4, 0.2, 0.1])
    session = Session.of(machine)
    unlimited = session.plan([64])
    outside = unlimited.resident_bytes + unlimited.escaping_bytes
    half = session.plan([64], outside + unlimited.arena_bytes // 2)
    assert half.feasible and half.recomputed and half.time_ratio < 1.6


def test_budgets_may_change_between_calls_and_come_back():
    program = there_and_back(6)
    machine = compile_program(program.module())
    session = Session.of(machine)
    unlimited = session.plan([16])
    tight = unlimited.peak_bytes - unlimited.arena_bytes // 3
    first = session.plan([16], tight)
    for budget in (tight, None, tight):
        session.memory_budget = budget
        (result,) = call(machine, program.arguments(16))
        assert torch.equal(result, program.expected(program.arguments(16))[0])
    assert session.plan([16], tight).sequence == first.sequence


@given(st.data())
def test_random_functions_at_every_budget(data):
    program = draw_program(data, st, most=20)
    machine = compile_program(program.module())
    for n in (1, 16):
        run_at_budgets(program, machine, n, [1.0, 0.8, 0.6, 0.4, 0.0])


def test_failing_recomputation_leaves_the_session_usable():
    program = there_and_back(6)
    runs = []

    def scale(x, factor, out):
        runs.append(1)
        if len(runs) == 7:
            raise RuntimeError("fails when it runs again")
        torch.from_dlpack(out).copy_(torch.from_dlpack(x) * factor)

    tvm_ffi.register_global_func("test.scale_once", scale, override=True)
    program.steps = [
        ("scale_once" if name == "scale" else name, operands, number)
        for name, operands, number in program.steps
    ]
    machine = compile_program(program.module())
    session = Session.of(machine)
    unlimited = session.plan([16])
    session.memory_budget = unlimited.peak_bytes - unlimited.arena_bytes // 3
    with pytest.raises(RuntimeError, match="runs again"):
        call(machine, program.arguments(16))
    assert not session.torn
    (result,) = call(machine, program.arguments(16))
    assert session.report().recomputations > 0
    assert torch.equal(result, program.expected(program.arguments(16))[0])


def test_generated_kernels_in_place_at_every_budget():
    """Compiled kernels write over their inputs where those die; the bits stay the same."""
    n = tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType([n, 32], "float32"))
    w = relax.Var("w", relax.TensorType([32, 32], "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w]):
        with builder.dataflow():
            current, saved = x, []
            for _ in range(6):
                product = builder.emit(relax.op.matmul(current, w))
                current = builder.emit(relax.op.tanh(builder.emit(relax.op.exp(product))))
                saved.append((product, current))
            for product, value in reversed(saved):
                slope = builder.emit(relax.op.subtract(current, value))
                current = builder.emit(
                    relax.op.add(relax.op.matmul(slope, w), relax.op.multiply(product, value))
                )
            out = builder.emit_output(current)
        builder.emit_func_output(out)
    machine = compile_program(builder.get())
    session = Session.of(machine)
    assert any(kernel.inplace for kernel in session.metadata.kernels)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(50, 32, generator=generator), torch.randn(32, 32) * 0.1]
    (expected,) = call(machine, tensors)
    unlimited = session.plan([50])
    recomputations = []
    for part in range(1, 10):
        budget = unlimited.peak_bytes - unlimited.arena_bytes * part // 10
        facts = session.plan([50], budget)
        session.memory_budget = budget if facts.feasible else facts.least_bytes
        (result,) = call(machine, tensors)
        assert torch.equal(result, expected)
        report = session.report()
        assert report.peak_bytes == report.planned_peak_bytes <= session.memory_budget
        recomputations.append(report.recomputations)
        check_placement(session, [50], session.memory_budget)
    assert max(recomputations) > 5
