"""A step whose products PyTorch multiplies: right, repeatable, the same bits at every budget."""

import copy

import pytest
import torch
import tvm_ffi
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

import relax_disc

SHAPES = [(1, 1), (2, 9), (4, 70)]


class Block(nn.Module):
    """Bias, residual, a gate that is evicted under a budget, a batched product."""

    def __init__(self):
        super().__init__()
        self.up, self.gate = nn.Linear(48, 640), nn.Linear(48, 640, bias=False)
        self.down, self.head = nn.Linear(640, 48), nn.Linear(48, 20)

    def forward(self, x, labels):
        for _ in range(2):
            x = x + self.down(F.silu(self.gate(x)) * self.up(x))
            x = x + torch.matmul(torch.matmul(x, x.transpose(1, 2)) / 500, x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


@pytest.fixture(params=["own", "pytorch"])
def pinned(request, monkeypatch):
    library = tvm_ffi.get_global_func
    if not library("relax_disc.cpu.has_other_products")():
        pytest.skip("this build of torch has no MKL")
    monkeypatch.setenv("RELAX_DISC_PRODUCTS", request.param)
    yield request.param
    library("relax_disc.cpu.force_products")(0)  # as tests/conftest.py has it


def test_gradients_and_bits(pinned):
    torch.manual_seed(0)
    model = Block()
    exact = copy.deepcopy(model).double()
    b, t = Dim("b", min=1, max=16), Dim("t", min=1, max=128)
    example = torch.randn(3, 12, 48), torch.randint(0, 20, (3, 12))
    step = relax_disc.compile(model, None, example, dynamic_shapes=({0: b, 1: t}, {0: b, 1: t}))
    for rows, length in SHAPES:
        x, labels = torch.randn(rows, length, 48), torch.randint(0, 20, (rows, length))
        exact.zero_grad()
        exact(x.double(), labels).backward()
        step.memory_budget = None
        least = step.plan(b=rows, t=length).least_bytes
        peak = step.plan(b=rows, t=length).peak_bytes
        runs = []
        for budget in (None, peak, (peak + least) // 2, least):
            step.memory_budget = budget
            model.zero_grad()
            step(x, labels, update=False)
            runs.append(gradients(model))
            report = step.memory_report()
            assert report.peak_bytes == report.planned_peak_bytes <= (budget or peak)
        for found in runs[1:]:
            assert all(torch.equal(*pair) for pair in zip(found, runs[0], strict=True))
        for found, wanted in zip(runs[0], gradients(exact), strict=True):
            assert (found - wanted).norm() <= 2e-6 * wanted.norm() + 1e-9
    assert least < peak, pinned  # the last budgets asked for recomputation
