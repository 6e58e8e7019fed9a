"""Whole training steps for CUDA, executed: numbers as on the CPU, no defect, no waiting."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
import tvm
from torch import nn
from torch.export import Dim

import relax_disc
from relax_disc.tir_kernels.target import cuda_target
from tests.cuda.emulator import Emulator
from tests.cuda.stand_in import ENTRY_WAITS, WaitsRecorded, cuda_stand_in
from tests.frontend.models import Llama, dims, token_batch

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


class Network(nn.Module):
    """Convolutions, batch norm, pooling and a linear head."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(12, 5),
        )

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.body(x), labels)


def llama_step(model, target):
    b, s = dims()
    shape = {0: b, 1: s}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return relax_disc.compile(
        model, optimizer, token_batch(3, 12), dynamic_shapes=(shape, shape), target=target
    )


def images(rows, size):
    return torch.randn(rows, 3, size, size), torch.arange(rows) % 5


def network_step(model, target):
    rows = Dim("rows", min=1, max=64)
    high, wide = (Dim(name, min=8, max=64) for name in ("high", "wide"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    shapes = ({0: rows, 2: high, 3: wide}, {0: rows})
    return relax_disc.compile(model, optimizer, images(3, 8), dynamic_shapes=shapes, target=target)


MODELS = {
    "Llama": (Llama, llama_step, [(3, 12), (1, 5), (2, 40)], token_batch),
    "CNN": (Network, network_step, [(3, 8), (1, 9), (5, 20)], images),
}


@pytest.fixture(scope="module", params=MODELS)
def trained(request):
    """Losses and parameters after steps on the CPU and on the emulator, and what happened there."""
    make, compile_step, shapes, batch = MODELS[request.param]
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model)
    batches = [batch(*shape) for shape in shapes]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the products are tiny
    step = compile_step(model, "llvm")
    losses = [float(step(*each)) for each in batches]
    emulator = Emulator.load()
    emulator.take_findings()
    steps = []
    with cuda_stand_in(emulator), pytest.MonkeyPatch.context() as environment:
        environment.setenv("RELAX_DISC_COMPILE_CACHE", "0")
        step = compile_step(twin, cuda_target("sm_90"))
        found = []
        for each in batches:
            emulator.forget()
            emulator.seed += 1
            with WaitsRecorded(emulator):
                loss = step(*each)
            found.append(float(loss))
            steps.append((list(emulator.events), list(emulator.calls), step.memory_report()))
    torch.set_num_threads(threads)
    return (model, losses), (twin, found), steps, emulator.take_findings()


def test_a_step_is_right_and_runs_without_waiting(trained):
    (model, losses), (twin, found), steps, findings = trained
    assert not findings, "\n".join(map(str, findings))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=2e-6, atol=0)
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-4, atol=1e-5, msg=name)
    for events, _, report in steps[1:]:
        assert report.peak_bytes == report.planned_peak_bytes
        assert events.count("allocate") <= 2, "memory beside the arena and the loss"
        assert "synchronise" not in events
        waits = {event for event in events if event.startswith("wait")}
        assert waits <= ENTRY_WAITS
        assert sum("batch.py" in event for event in events) <= 1


def test_the_order_on_the_stream_is_the_plans(trained):
    """What a step launches does not depend on the shape."""
    _, _, steps, _ = trained
    orders = []
    for events, _, _ in steps[1:]:
        orders.append([event for event in events if event.startswith(("launch", "library"))])
    assert len(orders[0]) > 20
    assert orders[0] == orders[1]


class Perceptron(nn.Module):
    """Products in half precision, a norm and a loss in float32."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype
        self.first, self.norm, self.second = nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x, labels):
        with torch.autocast("cpu", self.dtype):
            y = self.second(torch.tanh(self.norm(self.first(x))))
        return nn.functional.cross_entropy(y.float(), labels)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_trains_as_on_the_cpu(dtype, monkeypatch):
    """Parameters stay float32; with float16 the loss is scaled, an update that overflows left out.

    The third batch, of one row, overflows with the first scale, so that step updates nothing.
    """
    monkeypatch.setenv("RELAX_DISC_COMPILE_CACHE", "0")
    rows = Dim("rows", min=1, max=64)

    def batch(count):
        torch.manual_seed(count)
        return torch.randn(count, 6), torch.arange(count) % 5

    def train(model, target):
        scaled = dtype is torch.float16
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17, enabled=scaled)
        step = relax_disc.compile(
            *(model, torch.optim.AdamW(model.parameters(), lr=1e-2), batch(3)),
            dynamic_shapes=({0: rows}, {0: rows}),
            target=target,
            scaler=scaler,
        )
        losses = [float(step(*batch(count))) for count in (3, 7, 1, 20)]
        return losses, step.skipped_updates, scaler.get_scale()

    torch.manual_seed(0)
    model = Perceptron(dtype)
    twin = copy.deepcopy(model)
    wanted = train(model, "llvm")
    emulator = Emulator.load()
    emulator.take_findings()
    with cuda_stand_in(emulator):
        found = train(twin, cuda_target("sm_90"))
    assert not emulator.take_findings()
    assert found[1:] == wanted[1:]
    assert found[1] == (1 if dtype is torch.float16 else 0)
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(wanted[0]), rtol=1e-2, atol=0)
    for name, value in twin.state_dict().items():
        assert value.dtype is torch.float32
        torch.testing.assert_close(value, model.state_dict()[name], rtol=2e-2, atol=2e-2)


def test_a_product_is_rounded_before_it_is_added_to():
    """As cuBLAS does; PyTorch's product of few rows on a CPU is not what a GPU's is."""
    torch.manual_seed(0)
    emulator = Emulator.load()
    left, right, addend = 0.1 * torch.randn(3, 64), 0.02 * torch.randn(64, 32), torch.randn(3, 32)
    result = torch.empty(3, 32)
    with cuda_stand_in(emulator):
        tensors = map(emulator.tensor, (left, right, addend))
        matmul_add = tvm.get_global_func("relax_disc.cuda.matmul_add")
        matmul_add(*tensors, 1, 1, 0, 0, emulator.tensor(result))
    exact = addend.double() + left.double() @ right.double()
    assert (result - exact).norm() < 5e-8 * exact.norm()


class Decaying(nn.Module):
    """A loop over the length, which PyTorch's operators run, step by step, with scratch memory."""

    def __init__(self):
        super().__init__()
        self.rate = nn.Parameter(torch.linspace(-1, 1, 8))

    def forward(self, x):
        state, states = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = state * self.rate.sigmoid() + x[:, t]
            states.append(state)
        return torch.stack(states, 1).square().mean()


def test_a_loop_of_pytorchs_operators_takes_memory_beside_the_arena(monkeypatch):
    monkeypatch.setenv("RELAX_DISC_COMPILE_CACHE", "0")
    torch.manual_seed(0)
    model, emulator = Decaying(), Emulator.load()
    shape = {0: Dim("rows", min=1, max=64), 1: Dim("length", min=2, max=64)}
    with cuda_stand_in(emulator):
        step = relax_disc.compile(
            model, None, (torch.randn(3, 5, 8),), dynamic_shapes=(shape,),
            target=cuda_target("sm_90"),
        )  # fmt: skip
        for rows, length in [(3, 5), (1, 2), (7, 30)]:
            x = torch.randn(rows, length, 8)
            wanted = model(x)
            (gradient,) = torch.autograd.grad(wanted, [model.rate])
            model.zero_grad()
            torch.testing.assert_close(step(x, update=False), wanted.detach())
            torch.testing.assert_close(model.rate.grad, gradient)
    assert "library aten.loop" in emulator.events
    assert not emulator.take_findings()
