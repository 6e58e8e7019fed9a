"""Cheap kernels over parameters repeated for late readers: the same values, less kept."""

from functools import partial

import pytest
import torch
import tvm
from torch.export import Dim
from tvm import relax

import relax_disc
from relax_disc.analysis.memory.peak import live_trace
from relax_disc.analysis.program.extraction import extract
from relax_disc.pipeline import PipelineOptions
from relax_disc.transform import FuseKernels, RepeatForLateReaders, ScheduleOps
from tests.kernel_programs import kernels_before, tensor

op = relax.op
N = tvm.tirx.Var("n", "int64")
LONG = 40  # products between the first reader and the last
WIDTH = 256
PARAMS = [
    tensor("x", [N, WIDTH]),
    tensor("w", [WIDTH, WIDTH]),
    tensor("packed", [3 * WIDTH, WIDTH]),
]

program = partial(kernels_before, "FuseKernels", PipelineOptions(inline_producers=False))


def kernels(mod):
    return extract(ScheduleOps()(FuseKernels()(mod)), "main").graph().at({"n": 10})


def twice(make, products=LONG):
    """Read what ``make(emit, x, packed)`` makes first and last."""

    def body(emit, x, w, packed):
        made = make(emit, x, packed)
        x = emit(op.matmul(x, made))
        for _ in range(products):
            x = emit(op.matmul(x, w))
        return (emit(op.matmul(x, made)),)

    return program(PARAMS, body)


def part(emit, x, packed):
    return emit(op.strided_slice(packed, [0], [WIDTH], [2 * WIDTH], assume_inbound=True))


def test_a_part_of_a_parameter_is_not_kept():
    mod = twice(part)
    before, after = kernels(mod), kernels(RepeatForLateReaders()(mod))
    assert len(after.kernels) == len(before.kernels) + 1
    middle = [live_trace(graph)[LONG // 2] for graph in (before, after)]
    assert middle[0] - middle[1] == WIDTH * WIDTH * 4


def computed(emit, x, packed):
    """Of an activation."""
    return emit(op.matmul(emit(op.permute_dims(x)), x))


@pytest.mark.parametrize(("make", "products"), [(part, 8), (computed, LONG)])
def test_what_is_near_or_made_of_activations_stays(make, products):
    mod = twice(make, products)
    assert RepeatForLateReaders()(mod).same_as(mod)


class Packed(torch.nn.Module):
    """Attention to another sequence, whose weights are parts of one, and a normed weight."""

    def __init__(self):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(192, 2, batch_first=True)
        self.norm = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(192, 192))
        self.between = torch.nn.Sequential(*(torch.nn.Linear(192, 192) for _ in range(4)))

    def forward(self, x, y):
        out = self.attention(x, y, y, need_weights=False)[0]
        return self.between(self.norm(out)).square().mean()


def test_steps_are_right_and_bit_identical_at_every_budget():
    shapes = {0: Dim("batch", min=1, max=16), 1: Dim("length", min=1, max=64)}
    results = []
    for budget in (None, 0.97):
        torch.manual_seed(0)
        model = Packed()
        exact = Packed()
        exact.load_state_dict(model.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        peer = torch.optim.SGD(exact.parameters(), lr=0.1)
        batches = [(torch.randn(b, n, 192), torch.randn(b, n, 192)) for b, n in BATCHES]
        step = relax_disc.compile(
            model, optimizer, batches[0], dynamic_shapes={"x": shapes, "y": shapes}
        )
        for x, y in batches:
            if budget is not None:
                step.memory_budget = None
                whole = step.plan(batch=x.shape[0], length=x.shape[1]).peak_bytes
                step.memory_budget = max(int(budget * whole), least_bytes(step, x))
            found = step(x, y)
            loss = exact(x, y)
            loss.backward()
            peer.step()
            peer.zero_grad()
            torch.testing.assert_close(found, loss.detach(), rtol=1e-4, atol=1e-6)
            report = step.memory_report()
            assert report.peak_bytes == report.planned_peak_bytes
        for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


BATCHES = [(3, 17), (1, 1), (16, 64)]


def least_bytes(step, x):
    """Return the least budget that the planner finds for a batch."""
    try:
        step.memory_budget = 1
        return step.plan(batch=x.shape[0], length=x.shape[1]).peak_bytes
    except relax_disc.MemoryBudgetError as error:
        return error.least_bytes
