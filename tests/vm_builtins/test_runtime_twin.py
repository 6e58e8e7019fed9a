"""The Python run time against the C++ one: same plans, figures, results and errors."""

import os
import subprocess
import sys

import hypothesis.strategies as st
import pytest
import torch
import tvm
import tvm_ffi
from hypothesis import assume, given, settings

from relax_disc.errors import MemoryBudgetError
from relax_disc.vm_builtins import runtime, runtime_twin
from relax_disc.vm_builtins.session import Session
from tests.relax_programs import Program, call, compile_program, draw_program


@pytest.fixture(autouse=True)
def native():
    if not runtime.load():
        pytest.skip("the native library is switched off or cannot be built")


def run_twin(session, tensors, functions):
    """Drive the Python run time through one call, as compiled code would."""
    dims = [tensors[0].shape[0]]
    arguments = [tvm.runtime.from_dlpack(tensor) for tensor in tensors]
    frame = runtime_twin.enter(session, dims, *arguments)
    for k, function in enumerate(functions):
        runtime_twin.regenerate_before(frame, k)
        runtime_twin.kernel(frame, k, function)
    outputs = [
        torch.from_dlpack(runtime_twin.output(frame, i)).clone()
        for i in range(len(session.metadata.outputs))
    ]
    runtime_twin.leave(frame)
    return outputs


def same_facts(session, twin, dims, budget):
    """Plans of both, without what differs by nature (times of planning)."""
    native = session.plan(dims, budget)
    python = dict(runtime_twin.plan_facts(twin, dims, -1 if budget is None else budget))
    for name in ("feasible", "peak_bytes", "arena_bytes", "live_peak_bytes", "resident_bytes"):
        assert python[name] == getattr(native, name), name
    for name in ("escaping_bytes", "least_bytes", "lower_bound_bytes", "time_ns", "base_time_ns"):
        assert python[name] == getattr(native, name), name
    assert tuple(python["sequence"]) == native.sequence
    flat = [x for v in native.versions for x in (v.tensor, v.created, v.last_use, v.offset)]
    assert list(python["versions"]) == flat
    return native


@settings(max_examples=30)
@given(st.data())
def test_plans_and_results_are_equal(data):
    program = draw_program(data, st, most=18, constants=False)
    program.pairs = []
    machine = compile_program(program.module())
    session = Session.of(machine)
    assume(all(name.startswith("test.") for name in session.kernel_names))
    twin = runtime_twin.TwinSession(session.metadata.to_json())
    functions = [tvm_ffi.get_global_func(name) for name in session.kernel_names]
    for n in (1, 9):
        unlimited = same_facts(session, twin, [n], None)
        for part in (2, 3):
            budget = unlimited.peak_bytes - unlimited.arena_bytes // part
            facts = same_facts(session, twin, [n], budget)
            session.memory_budget, twin.budget = budget, budget
            tensors = program.arguments(n)
            if not facts.feasible:
                with pytest.raises(MemoryBudgetError) as theirs:
                    call(machine, tensors)
                with pytest.raises(MemoryBudgetError) as ours:
                    run_twin(twin, tensors, functions)
                assert str(ours.value) == str(theirs.value)
                assert ours.value.least_bytes == theirs.value.least_bytes
                continue
            outputs = run_twin(twin, tensors, functions)
            expected = call(machine, tensors)
            assert all(any(torch.equal(a, b) for b in outputs) for a in expected)
            ours, theirs = twin.last, session.report()
            for name in ("peak_bytes", "planned_peak_bytes", "arena_bytes", "resident_bytes"):
                assert ours[name] == getattr(theirs, name)
            assert ours["recomputations"] == theirs.recomputations
        session.memory_budget, twin.budget = None, -1


def test_a_budget_too_small_is_refused_in_the_same_words():
    program = Program(1, 1, [("matmul", [0, 1], 0), ("scale", [2], 2.0)], [3])
    machine = compile_program(program.module())
    session = Session.of(machine)
    twin = runtime_twin.TwinSession(session.metadata.to_json())
    session.memory_budget = twin.budget = 10
    with pytest.raises(MemoryBudgetError) as theirs:
        call(machine, program.arguments(4))
    with pytest.raises(MemoryBudgetError) as ours:
        run_twin(twin, program.arguments(4), [])
    assert str(ours.value) == str(theirs.value)
    assert ours.value.lower_bound_bytes == theirs.value.lower_bound_bytes


@pytest.mark.slow
def test_the_tests_of_the_run_time_pass_without_native_code(repository):
    environment = {**os.environ, "RELAX_DISC_NATIVE": "0"}
    folders = ["tests/vm_builtins/test_runtime.py", "tests/transform/test_rematerialization.py"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *folders],
        cwd=repository,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:]
