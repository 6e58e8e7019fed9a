"""Failures in the middle of a step: the error of the contract, no leak, nothing half done."""

import copy
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
import tvm_ffi

import relax_disc
from relax_disc.errors import OutOfMemoryError, ReentrantCallError, StepTornError
from relax_disc.vm_builtins.libraries.install import install
from tests.frontend.models import Llama, dims, token_batch

# A kernel before the first write of a parameter, and one after it.
EARLY, LATE = "relax_disc.cpu.packed_attention", "relax_disc.cpu.embedding_backward"


class Trap:
    """Takes the place of a library function until the test ends; `spring` runs at one call."""

    def __init__(self, name):
        install("llvm")
        self.name = name
        self.original = tvm_ffi.get_global_func(name)
        self.spring = None
        tvm_ffi.register_global_func(name, self, override=True)

    def __call__(self, *arguments):
        spring, self.spring = self.spring, None
        if spring is not None:
            spring()
        self.original(*arguments)

    def remove(self):
        tvm_ffi.register_global_func(self.name, self.original, override=True)


def compile_llama(seed=0, tied=False):
    torch.manual_seed(seed)
    model = Llama(layers=2, tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    b, s = dims()
    step = relax_disc.compile(
        model, optimizer, token_batch(3, 12), dynamic_shapes=({0: b, 1: s}, {0: b, 1: s})
    )
    return model, optimizer, step


@pytest.fixture(scope="module")
def trapped():
    """A step whose early and late kernels can be made to fail, and its state after one step."""
    traps = {name: Trap(name) for name in (EARLY, LATE)}
    model, optimizer, step = compile_llama()
    step(*token_batch(2, 5))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    yield model, optimizer, step, traps, saved
    for trap in traps.values():
        trap.remove()


@pytest.fixture
def fresh(trapped):
    """The same, back in that state."""
    model, optimizer, _, traps, saved = trapped
    for trap in traps.values():
        trap.spring = None
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(copy.deepcopy(saved[1]))
    return trapped[:4]


def state_of(model, optimizer):
    tensors = [p.detach().clone() for p in model.parameters()]
    for state in optimizer.state_dict()["state"].values():
        tensors += [value.clone() for value in state.values()]
    return tensors


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def reload(model, optimizer, saved):
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(copy.deepcopy(saved[1]))


def fail():
    raise RuntimeError("the kernel gives up")


def allocated():
    return tvm_ffi.get_global_func("relax_disc.allocated_bytes")()


@pytest.mark.parametrize("countdown", [0, 1])
def test_refused_memory_changes_nothing(fresh, countdown):
    model, optimizer, step, _ = fresh
    step.session.release()
    before, held = state_of(model, optimizer), allocated()
    refuse = tvm_ffi.get_global_func("relax_disc.fail_allocation")
    refuse(countdown)  # arena, result
    try:
        with pytest.raises(OutOfMemoryError, match="nothing was changed"):
            step(*token_batch(8, 48))
    finally:
        refuse(-1)
    assert same(before, state_of(model, optimizer))
    step.session.release()
    assert allocated() == held
    step(*token_batch(8, 48))
    assert not same(before, state_of(model, optimizer))


def test_failure_before_the_first_write_changes_nothing(fresh):
    model, optimizer, step, traps = fresh
    for rows in (4, 1, 8):
        before, held = state_of(model, optimizer), allocated()
        traps[EARLY].spring = fail
        with pytest.raises(RuntimeError, match="gives up") as caught:
            step(*token_batch(rows, 20))
        assert not isinstance(caught.value, StepTornError)
        assert same(before, state_of(model, optimizer))
        step.session.release()
        assert allocated() <= held
        assert torch.isfinite(step(*token_batch(rows, 20)))


def test_failure_after_a_write_tears_the_step_until_it_is_loaded(fresh, trapped):
    model, optimizer, step, traps = fresh
    saved = trapped[-1]
    loss = step(*token_batch(4, 20))
    expected = state_of(model, optimizer)
    reload(model, optimizer, saved)
    before = state_of(model, optimizer)
    traps[LATE].spring = fail
    with pytest.raises(StepTornError, match="gives up"):
        step(*token_batch(4, 20))
    assert not same(before, state_of(model, optimizer))
    for _ in range(2):
        with pytest.raises(StepTornError, match="loaded again"):
            step(*token_batch(4, 20))
    model.load_state_dict(saved[0])
    with pytest.raises(StepTornError, match="exp_avg"):
        step(*token_batch(4, 20))
    reload(model, optimizer, saved)
    assert torch.equal(step(*token_batch(4, 20)), loss)
    assert same(expected, state_of(model, optimizer))


@pytest.mark.parametrize("name", [EARLY, LATE])
def test_interrupt_in_a_kernel_waits_until_all_is_written(fresh, trapped, name):
    model, optimizer, step, traps = fresh
    step(*token_batch(4, 20))
    expected = state_of(model, optimizer)
    reload(model, optimizer, trapped[-1])
    traps[name].spring = lambda: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        step(*token_batch(4, 20))
    assert same(expected, state_of(model, optimizer))
    assert step.memory_report().finished
    assert torch.isfinite(step(*token_batch(4, 20)))


def test_a_call_from_inside_is_refused_and_the_outer_one_goes_on(fresh, trapped):
    model, optimizer, step, traps = fresh
    loss = step(*token_batch(4, 20))
    expected = state_of(model, optimizer)
    reload(model, optimizer, trapped[-1])
    seen = []

    def call_again():
        with pytest.raises(ReentrantCallError, match="running already"):
            step(*token_batch(2, 5))
        seen.append(True)

    traps[EARLY].spring = call_again
    assert torch.equal(step(*token_batch(4, 20)), loss)
    assert seen == [True]
    assert same(expected, state_of(model, optimizer))


def test_results_end_with_their_last_user(fresh):
    _, _, step, _ = fresh
    step.session.release()
    held = allocated()
    loss = step(*token_batch(4, 20))
    step.session.release()
    assert allocated() == held + 64
    del loss
    assert allocated() == held


def test_steps_in_two_threads_do_not_touch_each_other():
    pairs = [compile_llama(seed) for seed in (1, 2)]
    batches = [token_batch(1 + k % 4, 4 + 5 * k % 40, seed=k) for k in range(12)]
    saved = [copy.deepcopy((m.state_dict(), o.state_dict())) for m, o, _ in pairs]

    def train(step, losses, start=None):
        if start is not None:
            start.wait()
        losses += [step(*batch).item() for batch in batches]

    alone, together = [], []
    for _, _, step in pairs:
        train(step, losses := [])
        alone.append(losses)
    states = [state_of(m, o) for m, o, _ in pairs]
    for (model, optimizer, _), state in zip(pairs, saved, strict=True):
        reload(model, optimizer, state)
    start = threading.Barrier(len(pairs))
    together = [[] for _ in pairs]
    threads = [
        threading.Thread(target=train, args=(step, losses, start))
        for (_, _, step), losses in zip(pairs, together, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone
    for (model, optimizer, _), state in zip(pairs, states, strict=True):
        assert same(state, state_of(model, optimizer))


LIMITED = """
import resource, torch
from relax_disc.errors import OutOfMemoryError
from tests.training.memory.test_faults import compile_llama, same, state_of, token_batch

model, optimizer, step = compile_llama()
step(*token_batch(1, 2))
before = state_of(model, optimizer)
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + 100_000, resource.RLIM_INFINITY))
try:
    step(*token_batch(8, 48))
except OutOfMemoryError as error:
    print("refused:", error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert same(before, state_of(model, optimizer))
print("then", bool(torch.isfinite(step(*token_batch(8, 48)))))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_system_itself_refuses(repository):
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    result = subprocess.run(
        [sys.executable, "-c", LIMITED],
        cwd=repository,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "refused: the system has no" in result.stdout
    assert "then True" in result.stdout
