"""The one pool of threads: PyTorch's, its number of threads, and what it must leave alone."""

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
import tvm
import tvm_ffi
from torch import nn
from torch.export import Dim
from torch.utils.data import DataLoader
from tvm.script import tirx as T

import relax_disc
from tests.thread_count import threads
from tests.vm_builtins.library_calls import call


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        return self.layers(x).square().mean()


def compiled(seed=0):
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    shapes = ({0: Dim("rows", min=2, max=4096)},)
    return relax_disc.compile(model, optimizer, (torch.ones(4, 64),), dynamic_shapes=shapes)


def batch(rows):
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))


WATCH = """
import json, os, threading, torch
def now():  # Python's threads do not count: tqdm has one
    tasks = len(os.listdir("/proc/self/task")) - threading.active_count() + 1
    return [tasks, sorted(os.sched_getaffinity(0))]
found = {"start": now()}
torch.set_num_threads(4)
# Its builds for CUDA start threads for gradients, a GPU or none.
torch.ones(1 << 20, requires_grad=True).sin().sum().backward()
found["pytorch"] = now()
import relax_disc
found["import"] = now()
from tests.vm_builtins.test_threads import batch, compiled
step = compiled()
found["compile"] = now()
for _ in range(3):
    step(batch(512))
found["steps"] = now()
print(json.dumps(found))
"""


@pytest.mark.skipif(shutil.which("taskset") is None, reason="no taskset")
def test_starts_no_threads_and_sets_no_affinity(repository):
    core = max(os.sched_getaffinity(0))
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(repository)}
    command = ["taskset", "-c", str(core), sys.executable, "-c", WATCH]
    done = subprocess.run(
        command, cwd=repository, env=environment, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(affinity == [core] for _, affinity in found.values()), found
    assert found["steps"][0] == found["pytorch"][0]


@pytest.mark.parametrize(("variable", "count"), [("OMP_NUM_THREADS", "1"), ("", "")])
def test_as_many_threads_as_pytorch_has(repository, variable, count):
    program = """
import torch, numpy as np, tvm_ffi
from tests.vm_builtins.test_threads import parallel_tasks
print(torch.get_num_threads(), parallel_tasks())
"""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    environment["PYTHONPATH"] = str(repository)
    if variable:
        environment[variable] = count
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=repository, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    of_pytorch, ours = done.stdout.split()
    assert of_pytorch == ours == (count or of_pytorch)


SMALL = """
import os, torch
from torch import nn
from torch.export import Dim
import relax_disc
tasks = lambda: len(os.listdir("/proc/self/task"))
torch.set_num_threads(3)
model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4), nn.LogSoftmax(1))
step = relax_disc.compile(
    model, torch.optim.AdamW(model.parameters()), (torch.ones(4, 8), torch.zeros(4).long()),
    dynamic_shapes=({0: Dim("rows", min=2, max=65536)},) * 2, loss_fn=nn.functional.nll_loss,
)
before = tasks()
for rows in (8, 65536):
    step(torch.ones(rows, 8), torch.zeros(rows).long())
    print(tasks() - before)
"""


def test_small_kernels_wake_no_other_thread(repository):
    environment = {**os.environ, "PYTHONPATH": str(repository), "RELAX_DISC_PRODUCTS": "own"}
    done = subprocess.run(
        [sys.executable, "-c", SMALL],
        cwd=repository, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["0", "2"]


def parallel_tasks():
    """Threads that take part in a parallel loop of TVM's code generator."""

    @T.prim_func(s_tir=True)
    def note(a: T.Buffer((64,), "int32")):
        for i in T.parallel(64):
            T.evaluate(T.call_packed("relax_disc_test.note"))
            a[i] = i

    seen = set()
    noted = functools.partial(_note, seen)
    tvm_ffi.register_global_func("relax_disc_test.note", noted, override=True)
    a = np.zeros(64, "int32")
    tvm.compile(note, target="llvm")(tvm_ffi.from_dlpack(a))
    assert a.tolist() == list(range(64))
    return len(seen)


def _note(seen):
    seen.add(threading.get_native_id())


def test_follows_set_num_threads():
    for count in (1, 3, 2, 5):
        with threads(count):
            assert parallel_tasks() == count


def test_a_plan_is_for_its_number_of_threads():
    """Its workspace is: a plan for 1 thread would be too small for 5, one for 5 wastes memory."""
    step, alone = compiled(), []
    for count in (1, 5, 2, 5, 1):
        with threads(count):
            planned = step.session.plan([512])
            loss = step(batch(512))
            report = step.session.report()
            assert report.planned_peak_bytes == report.peak_bytes == planned.peak_bytes
            assert report.workspace_bytes == planned.workspace_bytes
            assert report.cache_hit
        alone.append((count, planned.workspace_bytes, planned.peak_bytes))
        assert torch.isfinite(loss)
    sizes = {count: size for count, size, _ in alone}
    assert sizes[1] < sizes[2] < sizes[5]
    assert len(set(alone)) == 3
    assert step.session.counters().plans == 3


def test_times_are_modelled_by_what_was_measured_on_as_many_threads():
    step = compiled()
    with threads(2):
        guessed = step.session.plan([512]).base_time_ns
    with threads(1):
        step.calibrate(batch(512), repeats=1)
        measured = step.session.plan([512]).base_time_ns
    assert measured != guessed
    with threads(2):
        assert step.session.plan([512]).base_time_ns == guessed
        step.calibrate(batch(512), repeats=1)
        assert step.session.plan([512]).base_time_ns != guessed
    with threads(1):
        assert step.session.plan([512]).base_time_ns == measured
    assert [each.threads for each in step.calibration.of("main")] == [1, 2]


@pytest.mark.parametrize("count", [1, 4])
def test_errors_of_other_threads_reach_the_caller(count):
    @T.prim_func(s_tir=True)
    def check(a: T.Buffer((64,), "int32")):
        for i in T.parallel(64):
            T.evaluate(T.call_packed("relax_disc_test.check", a[i]))

    tvm_ffi.register_global_func("relax_disc_test.check", _refuse_seven, override=True)
    function = tvm.compile(check, target="llvm")
    good, bad = np.zeros(64, "int32"), np.arange(64, dtype="int32")[::-1].copy()
    with threads(count):
        for _ in range(20):
            with pytest.raises(ValueError, match="seven"):
                function(tvm_ffi.from_dlpack(bad))
            function(tvm_ffi.from_dlpack(good))


def _refuse_seven(value):
    if value == 7:
        raise ValueError("seven")


def test_regions_inside_regions_are_serial():
    inside = []

    def multiply():
        c = np.empty((300, 300), "float32")
        call("native", "matmul", ones, ones, 1, 1, 0, 0, c)
        inside.append(c)

    @T.prim_func(s_tir=True)
    def outer(a: T.Buffer((8,), "int32")):
        for i in T.parallel(8):
            T.evaluate(T.call_packed("relax_disc_test.multiply"))
            a[i] = i

    ones = np.ones((300, 300), "float32")
    tvm_ffi.register_global_func("relax_disc_test.multiply", multiply, override=True)
    function = tvm.compile(outer, target="llvm")
    with threads(4):
        function(tvm_ffi.from_dlpack(np.zeros(8, "int32")))
    assert len(inside) == 8
    assert all((c == 300).all() for c in inside)


def test_threads_wait_for_each_other_inside_a_region():
    @T.prim_func(s_tir=True)
    def turn(a: T.Buffer((4096,), "int32"), b: T.Buffer((4096,), "int32")):
        with T.attr(0, "pragma_parallel_launch_point", 1):
            with T.attr(0, "pragma_parallel_barrier_when_finish", 1):
                for i in T.parallel(4096):
                    a[i] = i
            for j in T.parallel(4096):
                b[j] = a[4095 - j]

    function = tvm.compile(turn, target="llvm")
    assert "TVMBackendParallelBarrier" in function.mod.inspect_source("ll")
    for count in (1, 2, 4):
        with threads(count):
            for _ in range(50):
                a, b = np.zeros(4096, "int32"), np.zeros(4096, "int32")
                function(tvm_ffi.from_dlpack(a), tvm_ffi.from_dlpack(b))
                np.testing.assert_array_equal(b, np.arange(4096)[::-1])


class Lengths(torch.utils.data.Dataset):
    """Makes its items by a product of matrices, so that workers use the pool of threads too."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        x = np.full((64, 64), index + 1, "float32")
        c = np.empty((64, 64), "float32")
        call("native", "matmul", x, np.eye(64, dtype="float32"), 1, 1, 0, 0, c)
        return torch.from_numpy(c)


# Python 3.12 warns of every fork of a process that has threads.
forks = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@forks
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_a_data_loader(context):
    """They are forked between steps, while the threads of the pool wait for work."""
    step, alone = compiled(), compiled()
    loader = DataLoader(
        Lengths(), batch_size=None, num_workers=2, multiprocessing_context=context, timeout=600
    )
    with threads(3):
        step(batch(64)), alone(batch(64))
        for epoch in range(2 if context == "fork" else 1):
            for x in loader:
                assert torch.equal(step(x), alone(x.clone())), epoch


@forks
def test_a_forked_child_computes_in_parallel():
    step = compiled()
    with threads(3):
        step(batch(512))
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                signal.alarm(60)  # a team without threads would wait for ever
                result = json.dumps([parallel_tasks(), step(batch(512)).item()])
                os.write(write, result.encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            tasks, loss = json.loads(pipe.read() or "[0, 0]")
        os.waitpid(child, 0)
        assert (tasks, loss) == (3, step(batch(512)).item())
        assert parallel_tasks() == 3
