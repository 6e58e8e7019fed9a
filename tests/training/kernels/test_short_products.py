"""Products of short floats in a step: as exact as PyTorch's, in planned memory, repeatable."""

import copy

import pytest
import torch
import tvm_ffi
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

import relax_disc

SHAPES = [(2, 9), (4, 33), (3, 70)]


class Mixer(nn.Module):
    """Linear layers with and without bias, and a batched product."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(48, 96)
        self.down = nn.Linear(96, 48, bias=False)
        self.head = nn.Linear(48, 20)

    def forward(self, x, labels):
        with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype == torch.float32):
            hidden = self.down(F.gelu(self.up(x)))
            mixed = torch.matmul(torch.matmul(hidden, hidden.transpose(1, 2)) / 50, hidden)
            logits = self.head(mixed + hidden)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class Exact(Mixer):
    """The same in float64."""

    def forward(self, x, labels):
        hidden = self.down(F.gelu(self.up(x)))
        mixed = torch.matmul(torch.matmul(hidden, hidden.transpose(1, 2)) / 50, hidden)
        return F.cross_entropy(self.head(mixed + hidden).flatten(0, 1), labels.flatten())


def batch(rows, length):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, length, 48, generator=generator)
    return x, torch.randint(0, 20, (rows, length), generator=generator)


def error(model, exact):
    found = torch.cat([p.grad.double().flatten() for p in model.parameters()])
    wanted = torch.cat([p.grad.flatten() for p in exact.parameters()])
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("kind", ["autocast", "parameters"])
def test_gradients_are_as_near_to_float64_as_those_of_pytorch(kind):
    torch.manual_seed(0)
    model = Mixer()
    if kind == "parameters":
        model = model.bfloat16()
    exact, eager = Exact().double(), copy.deepcopy(model)
    exact.load_state_dict(model.state_dict())
    b, t = Dim("b", min=2, max=16), Dim("t", min=2, max=128)

    def cast(x, labels):
        return (x.bfloat16() if kind == "parameters" else x), labels

    step = relax_disc.compile(
        model, None, cast(*batch(3, 12)), dynamic_shapes=({0: b, 1: t}, {0: b, 1: t})
    )
    errors = []
    for shape in SHAPES:
        x, labels = cast(*batch(*shape))
        for each, input_ in ((exact, x.double()), (eager, x)):
            each.zero_grad()
            each(input_, labels).backward()
        runs = []
        for _ in range(2):
            model.zero_grad()
            step(x, labels, update=False)
            runs.append([p.grad.clone() for p in model.parameters()])
            report = step.memory_report()
            assert report.peak_bytes == report.planned_peak_bytes
        assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))
        errors.append((error(model, exact), error(eager, exact)))
    # Both round at the same places; which sum falls on which side of a tie is chance.
    for ours, theirs in errors:
        assert 0 < ours <= 1.25 * theirs
    if tvm_ffi.get_global_func("relax_disc.cpu.multiplies")("bfloat16"):
        names = {kernel.name for kernel in step.session.metadata.kernels}
        assert "relax_disc.cpu.aten_matmul" in names
        assert "relax_disc.cpu.matmul" not in names
        assert "relax_disc.cpu.batch_matmul" not in names
