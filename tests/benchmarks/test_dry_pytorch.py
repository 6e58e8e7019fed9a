"""PyTorch's peaks in a dry run, next to what malloc holds while the kernels run."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.dry_pytorch import CompiledStep, EagerStep
from benchmarks.dry_time import Machine
from benchmarks.malloc_counter import preload_environment
from tutorials._llama import Llama, LlamaSizes

SIZES = LlamaSizes(vocabulary=4000, layers=3, hidden=256, heads=4, feed_forward=688, longest=256)
SHAPES = [(4, 200), (3, 77)]
MACHINE = Machine(flops_per_ns=1000.0, bytes_per_ns=10.0, launch_ns=500.0)

MEASURED = """
import functools, json, sys
import torch
import torch._functorch.config
from torch.utils.checkpoint import checkpoint
from benchmarks.malloc_counter import MallocCounter
from tests.benchmarks.test_dry_pytorch import SHAPES, SIZES
from tutorials._llama import Llama

way = sys.argv[1]
torch.set_num_threads(1)
torch.backends.mkldnn.enabled = False
model = Llama(SIZES)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
run = model
if way == "checkpointing":
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
elif way != "eager":
    torch._functorch.config.activation_memory_budget = float(way)
    run = torch.compile(model, dynamic=True)
counter = MallocCounter()

def step(ids):
    loss = run(ids, ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

found = []
for shape in SHAPES * 2:
    ids = torch.ones(shape, dtype=torch.long)
    step(ids)
    base = counter.live_bytes()
    counter.reset_peak()
    step(ids)
    found.append(counter.peak_bytes() - base)
print(json.dumps(found[len(SHAPES):]))
"""


def measured(way, repository):
    """Peaks of steps above parameters, state and batch, by the shapes."""
    kept = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(repository)}
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, way],
        env={**kept, **preload_environment()}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def counted(step):
    """The same of a dry run."""
    held = 3 * sum(p.nbytes for p in Llama(SIZES).parameters())
    held += 2 * SIZES.longest * (SIZES.hidden // SIZES.heads) * 4  # the tables of angles
    return [step.count(*shape).peak_bytes - held - 2 * 8 * shape[0] * shape[1] for shape in SHAPES]


@pytest.mark.parametrize("way", ["eager", "checkpointing"])
def test_what_eager_steps_hold_is_counted_without_running_them(way, repository):
    found = counted(EagerStep(lambda: Llama(SIZES), MACHINE, checkpointed=way == "checkpointing"))
    assert found == pytest.approx(measured(way, repository), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1.0, 0.3])
def test_what_torch_compile_holds_is_counted_without_its_kernels(budget, repository):
    found = counted(CompiledStep(lambda: Llama(SIZES), MACHINE, *SHAPES[0], budget))
    assert found == pytest.approx(measured(str(budget), repository), rel=0.01)


def test_a_budget_and_checkpoints_hold_less():
    eager = EagerStep(lambda: Llama(SIZES), MACHINE).count(4, 200)
    again = EagerStep(lambda: Llama(SIZES), MACHINE, checkpointed=True).count(4, 200)
    assert again.peak_bytes < 0.8 * eager.peak_bytes
    assert again.nanoseconds > eager.nanoseconds
