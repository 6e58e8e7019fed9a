"""The run time: results, memory figures, failures, budgets, concurrency."""

import gc
import pickle
import threading

import hypothesis.strategies as st
import pytest
import torch
import tvm
import tvm_ffi
from hypothesis import given

from relax_disc.errors import MemoryBudgetError
from relax_disc.vm_builtins.session import Session
from tests.placement import check_placement, run_program
from tests.relax_programs import Program, call, compile_program, draw_program

CHAIN = Program(
    1,
    1,
    [("matmul", [0, 1], 0), ("scale", [2], 2.0), ("matmul", [3, 1], 0), ("add", [4, 2], 0)],
    [5],
)


def run_and_compare(program, machine, sizes=(3, 1, 8, 0, 2)):
    """Run at several shapes; results and overwritten inputs must be what torch computes."""
    session = Session.of(machine)
    replaced = dict(program.pairs)
    for n in sizes:
        tensors = program.arguments(n)
        expected = program.expected(tensors)
        outputs = call(machine, tensors)
        kept = [value for i, value in enumerate(expected) if i not in replaced]
        assert len(outputs) == len(kept)
        for output, value in zip(outputs, kept, strict=True):
            torch.testing.assert_close(output, value, rtol=0, atol=0)
        for position, weight in replaced.items():
            torch.testing.assert_close(tensors[weight], expected[position], rtol=0, atol=0)
        report = session.report()
        assert report.finished and report.dims == (n,)
        assert report.peak_bytes == report.planned_peak_bytes
        check_placement(session, [n])


def test_chain():
    run_and_compare(CHAIN, compile_program(CHAIN.module()))


@given(st.data())
def test_random_functions_equal_torch(data):
    program = draw_program(data, st)
    run_and_compare(program, compile_program(program.module()), sizes=(3, 1))


def test_results_of_one_call_survive_the_next():
    machine = compile_program(CHAIN.module())
    first_arguments = CHAIN.arguments(4)
    (first,) = call(machine, first_arguments)
    kept = first.clone()
    call(machine, CHAIN.arguments(9))
    assert torch.equal(first, kept)


def test_two_weights_that_swap_values():
    program = Program(1, 2, [], [0, 2, 1], [[1, 1], [2, 2]])
    run_and_compare(program, compile_program(program.module()), sizes=(2,))


def test_old_value_is_read_after_its_update_in_program_order():
    steps = [("add", [1, 1], 0), ("matmul", [0, 1], 0)]
    program = Program(1, 1, steps, [3, 2], [[1, 1]])
    run_and_compare(program, compile_program(program.module()), sizes=(2, 5))


def test_old_value_needed_together_with_the_new_one():
    steps = [("add", [1, 1], 0), ("matmul", [0, 2], 0), ("matmul", [3, 1], 0)]
    program = Program(1, 1, steps, [4, 2], [[1, 1]])
    run_and_compare(program, compile_program(program.module()), sizes=(2, 5))


def test_returned_constants_are_copies():
    program = Program(1, 1, [("constant", [], 7.0)], [2])
    machine = compile_program(program.module())
    (first,) = call(machine, program.arguments(1))
    first.zero_()
    (second,) = call(machine, program.arguments(1))
    assert torch.equal(second, torch.full((8, 8), 7.0))


def test_arena_serves_all_lengths_and_grows_only_with_the_largest():
    machine = compile_program(CHAIN.module())
    session = Session.of(machine)
    largest = 0
    for n in (10, 200, 30, 100, 7):
        call(machine, CHAIN.arguments(n))
        largest = max(largest, session.report().arena_bytes)
        assert session.report().held_bytes == largest
    assert session.counters().held_bytes == largest
    session.release()
    assert session.counters().held_bytes == 0
    run_and_compare(CHAIN, machine)


def test_memory_is_given_back_when_short_calls_go_on():
    machine = compile_program(CHAIN.module())
    session = Session.of(machine)
    call(machine, CHAIN.arguments(400))
    large = session.report().arena_bytes
    for _ in range(63):
        call(machine, CHAIN.arguments(40))
    assert session.report().held_bytes == large
    call(machine, CHAIN.arguments(100))
    assert session.report().held_bytes == session.report().arena_bytes < large
    for _ in range(63):
        call(machine, CHAIN.arguments(40))
    call(machine, CHAIN.arguments(90))  # more than half: the count begins anew
    call(machine, CHAIN.arguments(40))
    assert session.report().held_bytes == session.plan([100]).arena_bytes


def test_a_lower_budget_gives_memory_back_at_once():
    machine = compile_program(CHAIN.module())
    session = Session.of(machine)
    call(machine, CHAIN.arguments(400))
    assert session.counters().held_bytes > 0
    session.memory_budget = session.report().peak_bytes
    assert session.counters().held_bytes > 0
    session.memory_budget = session.report().peak_bytes - 1
    assert session.counters().held_bytes == 0
    call(machine, CHAIN.arguments(40))
    session.memory_budget = None
    run_and_compare(CHAIN, machine)


def test_budget_refuses_before_any_kernel_and_names_the_least():
    program = Program(1, 1, [("fail", [0], 0)], [2])
    machine = compile_program(program.module())
    session = Session.of(machine)
    session.memory_budget = 100
    with pytest.raises(MemoryBudgetError) as caught:
        call(machine, program.arguments(4))
    assert caught.value.least_bytes == session.plan([4]).peak_bytes
    facts = session.plan([4], 100)
    assert caught.value.least_bytes == facts.least_bytes
    assert 0 < caught.value.lower_bound_bytes == facts.lower_bound_bytes <= facts.least_bytes
    assert (
        f"n=4 does not fit into the memory budget of 100 bytes: the least found feasible is "
        f"{facts.least_bytes} bytes" in str(caught.value)
    )
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (copied.least_bytes, str(copied)) == (facts.least_bytes, str(caught.value))
    assert not session.torn


def test_least_budget_is_feasible_and_held_memory_shrinks_into_it():
    machine = compile_program(CHAIN.module())
    session = Session.of(machine)
    call(machine, CHAIN.arguments(500))
    session.memory_budget = 1
    with pytest.raises(MemoryBudgetError) as caught:
        call(machine, CHAIN.arguments(5))
    session.memory_budget = caught.value.least_bytes
    call(machine, CHAIN.arguments(5))
    report = session.report()
    assert report.peak_bytes <= caught.value.least_bytes
    assert report.resident_bytes + report.escaping_bytes + report.held_bytes <= report.budget_bytes
    session.memory_budget = None
    assert session.memory_budget is None


def test_failing_kernel_leaves_the_session_usable():
    steps = [("scale", [0], 2.0), ("fail", [2], 0)]
    program = Program(1, 1, steps, [3])
    machine = compile_program(program.module())
    session = Session.of(machine)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="always fails"):
            call(machine, program.arguments(4))
        assert not session.torn
    assert session.counters().failures == 3


def test_failure_after_a_write_is_reported_as_torn():
    steps = [("add", [1, 1], 0), ("scale", [0], 2.0), ("fail", [3], 0)]
    program = Program(1, 1, steps, [4, 2], [[1, 1]])
    machine = compile_program(program.module())
    session = Session.of(machine)
    with pytest.raises(RuntimeError, match="always fails"):
        call(machine, program.arguments(4))
    torn = session.torn
    session.clear_torn()
    assert torn != (session.metadata.kernels[-1].name == "relax_disc.copy")
    assert not session.torn


@pytest.mark.parametrize("countdown", [0, 1])
def test_refused_allocation_changes_nothing(countdown):
    fail = tvm_ffi.get_global_func("relax_disc.fail_allocation")
    machine = compile_program(CHAIN.module())
    before = tvm_ffi.get_global_func("relax_disc.allocated_bytes")()
    fail(countdown)
    try:
        with pytest.raises(MemoryError, match="nothing was changed"):
            call(machine, CHAIN.arguments(50))
    finally:
        fail(-1)
    assert Session.of(machine).counters().failures <= 1
    run_and_compare(CHAIN, machine)
    Session.of(machine).release()
    assert tvm_ffi.get_global_func("relax_disc.allocated_bytes")() <= before + 64 * 8 * 4


def test_two_machines_share_nothing():
    executable = tvm.relax.build(
        CHAIN.module(), tvm.target.Target("llvm"), relax_pipeline="relax_disc"
    )
    first, second = (tvm.relax.VirtualMachine(executable, tvm.cpu()) for _ in range(2))
    Session.of(first).memory_budget = 12345678
    assert Session.of(second).memory_budget is None
    call(first, CHAIN.arguments(5))
    assert Session.of(second).counters().calls == 0


def test_memory_ends_with_the_machine():
    allocated = tvm_ffi.get_global_func("relax_disc.allocated_bytes")
    gc.collect()  # machines of other tests, else collected while this one runs
    before = allocated()
    machine = compile_program(CHAIN.module())
    call(machine, CHAIN.arguments(1000))
    assert allocated() > before
    del machine
    assert allocated() == before


def test_interleaved_calls_have_arenas_of_their_own():
    """TVM's machine is not re-entrant, so two calls of one session are driven by hand."""
    machine = compile_program(CHAIN.module())
    session = Session.of(machine)
    enter, kernel, output, leave = (
        tvm_ffi.get_global_func(f"relax_disc.{name}")
        for name in ("enter", "kernel", "output", "leave")
    )
    functions = [tvm_ffi.get_global_func(name) for name in session.kernel_names]
    calls = [CHAIN.arguments(6, seed=1), CHAIN.arguments(6, seed=2), CHAIN.arguments(3)]
    frames = [
        enter(
            session._handle,
            tvm_ffi.Shape([tensors[0].shape[0]]),
            *(tvm.runtime.from_dlpack(tensor) for tensor in tensors),
        )
        for tensors in calls
    ]
    for k, function in enumerate(functions):
        for frame in frames:
            kernel(frame, k, function)
    for frame, tensors in zip(frames, calls, strict=True):
        assert torch.equal(torch.from_dlpack(output(frame, 0)), CHAIN.expected(tensors)[0])
        leave(frame)
    assert session.counters().failures == 0
    run_and_compare(CHAIN, machine)


def test_machines_in_threads():
    executable = tvm.relax.build(
        CHAIN.module(), tvm.target.Target("llvm"), relax_pipeline="relax_disc"
    )
    errors = []

    def work(seed):
        try:
            machine = tvm.relax.VirtualMachine(executable, tvm.cpu())
            for n in (3, 50, 7, 20):
                tensors = CHAIN.arguments(n, seed)
                (result,) = call(machine, tensors)
                assert torch.equal(result, CHAIN.expected(tensors)[0])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_dry_run_counts_terabytes_without_touching_them():
    machine = compile_program(CHAIN.module())
    session = Session.of(machine)
    reserve = tvm_ffi.get_global_func("relax_disc.reserve")
    n = 2**33
    with session.dry_run():
        machine["main"](
            reserve(tvm_ffi.Shape([n, 8]), "float32"), reserve(tvm_ffi.Shape([8, 8]), "float32")
        )
    report = session.report()
    assert report.peak_bytes == report.planned_peak_bytes > 10**12
    run_and_compare(CHAIN, machine)


def test_memory_of_any_size_is_measured_without_inputs():
    machine = compile_program(CHAIN.module())
    session = Session.of(machine)
    for n in (1, 50, 2**33):
        report = session.measure([n])
        assert report.peak_bytes == report.planned_peak_bytes == session.plan([n]).peak_bytes
    run_and_compare(CHAIN, machine)


def test_plans_are_remembered_least_recently_used_first_out():
    machine = compile_program(CHAIN.module())
    session = Session.of(machine)
    session.set_plan_limit(2)
    for n in (1, 2, 1, 3, 1):
        call(machine, CHAIN.arguments(n))
    counters = session.counters()
    assert (counters.hits, counters.misses, counters.plans) == (2, 3, 2)
    assert counters.evicted_plans == 1


def test_profile_counts_every_kernel():
    machine = compile_program(CHAIN.module())
    session = Session.of(machine)
    with session.profile():
        call(machine, CHAIN.arguments(5))
        call(machine, CHAIN.arguments(6))
    assert [runs for runs, _ in session.kernel_times()] == [2] * len(session.kernel_names)
    assert all(time > 0 for _, time in session.kernel_times())


@pytest.mark.parametrize("figures", [(100.0, 10.0, 3000.0), (3.0, 0.5, 10.0), (0.001, 1e3, 0.0)])
def test_times_follow_the_machines_figures(figures):
    session = Session.of(compile_program(CHAIN.module()))
    session.set_machine(*figures)
    flops_per_ns, bytes_per_ns, overhead_ns = figures
    metadata, total = session.metadata, 0
    for kernel in metadata.kernels:
        flops, moved = (
            run_program(metadata.programs[program], [700])
            for program in (kernel.flops, kernel.moved_bytes)
        )
        total += int(max(flops / flops_per_ns, moved / bytes_per_ns) + overhead_ns) + 1
    plan = session.plan([700])
    assert plan.base_time_ns == plan.time_ns == total
    session.set_kernel_times([2.0] * len(metadata.kernels), [5.0] * len(metadata.kernels))
    assert session.plan([700]).time_ns != total
    session.set_kernel_times([], [])
    assert session.plan([700]).time_ns == total


def test_sessions_that_share_an_arena_take_turns_in_it():
    gc.collect()
    allocated = tvm_ffi.get_global_func("relax_disc.allocated_bytes")
    other = Program(1, 2, [("matmul", [0, 1], 0), ("add", [3, 3], 0)], [4])
    machines = [compile_program(program.module()) for program in (CHAIN, other)]
    first, second = (Session.of(machine) for machine in machines)
    call(machines[0], CHAIN.arguments(50))
    call(machines[1], other.arguments(2))
    before = allocated() - first.counters().held_bytes - second.counters().held_bytes
    held = first.counters().held_bytes
    second.share_arena(first)
    second.share_arena(first)
    assert second.counters().held_bytes == held
    assert allocated() == before + held
    for _ in range(2):
        run_and_compare(CHAIN, machines[0], sizes=(50, 3))
        run_and_compare(other, machines[1], sizes=(2, 90))
    assert first.counters().held_bytes == second.counters().held_bytes
    second.memory_budget = second.plan([2]).peak_bytes
    run_and_compare(other, machines[1], sizes=(2,))
    assert first.counters().held_bytes == second.plan([2]).arena_bytes
    run_and_compare(CHAIN, machines[0], sizes=(50,))
    first.release()
    assert allocated() == before
    run_and_compare(other, machines[1], sizes=(2,))


def test_a_budget_can_be_checked_without_running():
    machine = compile_program(CHAIN.module())
    session = Session.of(machine)
    session.check_budget([50])
    session.memory_budget = session.plan([50]).resident_bytes + 1
    with pytest.raises(MemoryBudgetError) as checked:
        session.check_budget([50])
    with pytest.raises(MemoryBudgetError) as called:
        call(machine, CHAIN.arguments(50))
    assert str(checked.value) == str(called.value)
    assert session.counters().failures == 0
