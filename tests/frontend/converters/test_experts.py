"""Grouped products and histograms: against PyTorch, empty groups and rows of none included."""

import copy

import pytest
import torch
from torch import nn
from torch.export import Dim

from relax_disc import compile
from relax_disc.frontend import capture_forward, capture_step
from relax_disc.vm_builtins.libraries import install
from tests.frontend.running import Runner, check_gradients


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 16) / 3)

    def forward(self, x, offsets):
        x = torch.ops.transformers.grouped_mm_fallback(torch.tanh(x), self.weight, offsets)
        return x.square().mean()


def batch(rows, seed=0):
    generator = torch.Generator().manual_seed(rows + seed)
    ends = torch.randint(0, rows + 1, (3,), generator=generator).sort().values
    ends[-1] = rows
    return torch.randn(rows, 8, generator=generator), ends.to(torch.int32)


def test_gradients_of_grouped_products():
    pytest.importorskip("transformers.integrations.moe")
    torch.manual_seed(0)
    model = Experts()
    shapes = ({0: Dim("rows", min=1, max=40)}, None)
    captured = capture_step(model, None, batch(8), dynamic_shapes=shapes)
    check_gradients(captured, model, [batch(rows) for rows in (1, 2, 40, 13)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_of_the_library(dtype):
    pytest.importorskip("transformers.integrations.moe")
    torch.manual_seed(0)
    model = Experts().to(dtype)
    eager = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, eager)]
    shapes = ({0: Dim("rows", min=1, max=40)}, None)
    values, ends = batch(8)
    step = compile(model, optimizers[0], (values.to(dtype), ends), dynamic_shapes=shapes)
    calls = {kernel.name for kernel in step.session.metadata.kernels}
    assert {"relax_disc.cpu.grouped_matmul", "relax_disc.cpu.grouped_outer"} <= calls
    tolerance = {} if dtype is torch.float32 else {"rtol": 0.03, "atol": 0.01}
    for rows in (1, 2, 40, 13):
        values, ends = batch(rows)
        eager.load_state_dict(model.state_dict())
        optimizers[1].zero_grad()
        loss = eager(values.to(dtype), ends)
        loss.backward()
        optimizers[1].step()
        torch.testing.assert_close(step(values.to(dtype), ends), loss.detach(), **tolerance)
        torch.testing.assert_close(model.weight, eager.weight, **tolerance)


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 16, 8) / 3)

    def forward(self, x, offsets):
        weight = self.weight.transpose(1, 2)
        x = torch.ops.transformers.grouped_mm_fallback(torch.tanh(x), weight, offsets)
        return x.square().mean()


def test_transposed_matrices_and_their_gradients_are_as_stored():
    pytest.importorskip("transformers.integrations.moe")
    torch.manual_seed(0)
    model = Transposed()
    eager, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.5)
    shapes = ({0: Dim("rows", min=1, max=40)}, None)
    step = compile(model, optimizer, batch(8), dynamic_shapes=shapes)
    names = [kernel.name for kernel in step.session.metadata.kernels]
    assert "relax_disc.cpu.grouped_outer" in names
    assert not any("transpose" in name for name in names)
    for rows in (1, 40, 13):
        eager.load_state_dict(model.state_dict())
        loss = eager(*batch(rows))
        (grad,) = torch.autograd.grad(loss, [eager.weight])
        torch.testing.assert_close(step(*batch(rows)), loss.detach())
        torch.testing.assert_close(model.weight, eager.weight - 0.5 * grad)


class Counts(nn.Module):
    def __init__(self, *limits):
        super().__init__()
        self.limits = limits

    def forward(self, x):
        return torch.histc(x, 5, *self.limits)


def test_histogram():
    shapes = ({0: Dim("rows", min=1, max=99)},)
    install.install("llvm")  # PyTorch's own kernel
    model = Counts(0, 4)
    captured = capture_forward(model, (torch.ones(3),), dynamic_shapes=shapes)
    run = Runner(captured)
    for rows in (1, 99):
        generator = torch.Generator().manual_seed(rows)
        for x in (
            torch.randint(0, 5, (rows,), generator=generator).float(),
            4 * torch.randn(rows, generator=generator),
        ):
            assert torch.equal(run(model, None, (x,))["extra"][0][1], model(x))
    run = Runner(capture_forward(Counts(), (torch.ones(3),), dynamic_shapes=shapes))
    x = torch.randn(17)
    assert torch.equal(run(Counts(), None, (x,))["extra"][0][1], Counts()(x))
