"""Losses and gradients of whole models against float64, at several shapes from one build."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.export import Dim

from relax_disc.compiler import build, compile
from relax_disc.frontend import capture_step
from relax_disc.training.compiled_function import CompiledFunction
from tests.frontend.models import (
    MLP,
    Llama,
    dims,
    hugging_face_llama,
    mlp_batch,
    token_batch,
)

SHAPES = [(1, 1), (8, 48), (3, 17), (1, 48), (5, 2)]


def gradients(model, args, dtype):
    """Loss and gradients by name, in PyTorch and a type."""
    twin = copy.deepcopy(model).to(dtype)
    output = twin(*[a.to(dtype) if a.is_floating_point() else a for a in args])
    loss = output if isinstance(output, torch.Tensor) else output.loss
    loss.backward()
    grads = {n: p.grad.double() for n, p in twin.named_parameters() if p.grad is not None}
    return loss.item(), grads


def error(grads, exact):
    """Norm of the difference over the norm, all gradients together."""
    difference = sum(float((grads[n].double() - g).pow(2).sum()) for n, g in exact.items())
    return (difference / sum(float(g.pow(2).sum()) for g in exact.values())) ** 0.5


def root_mean_square(values):
    return (sum(value**2 for value in values) / len(values)) ** 0.5


def llama_with_labels():
    model = hugging_face_llama(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )

    class WithLabels(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids, labels):
            first = torch.arange(labels.shape[0])[:, None] == 0
            mask = (~(first & (labels == -100))).long()  # one row is padded
            return self.model(input_ids=ids, attention_mask=mask, labels=labels).loss

    return WithLabels()


MODELS = {
    "mlp": (MLP, mlp_batch),
    "llama": (lambda: Llama(tied=False), token_batch),
    "llama, attention by hand, tied": (lambda: Llama(whole=False, tied=True), token_batch),
    "llama of hugging face": (llama_with_labels, token_batch),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_as_good_as_torch_in_float32(name):
    make, batch = MODELS[name]
    torch.manual_seed(0)
    model = make().train()
    low = 2 if "hugging" in name else 1  # its loss shifts the labels by one
    b, s = dims(low=low)
    captured = capture_step(model, None, batch(3, 12), dynamic_shapes=({0: b, 1: s}, {0: b, 1: s}))
    function = CompiledFunction(captured, build(captured.module, "llvm"), model, None)
    for rows, length in SHAPES:
        args = batch(rows, max(low, length))
        found = function.run(args)
        exact_loss, exact = gradients(model, args, torch.float64)
        _, theirs = gradients(model, args, torch.float32)
        assert found[0].item() == pytest.approx(exact_loss, rel=2e-6)
        names = [out.name for out in captured.outputs]
        mine = dict(zip(names, found, strict=True))
        assert set(exact) <= set(mine)
        ours = error({n: mine[n] for n in exact}, exact)
        assert ours <= max(2 * error(theirs, exact), 1e-7), (rows, length)
        assert ours <= 2e-6
        report = function.memory_report()
        assert report.peak_bytes == report.planned_peak_bytes


class BatchNorms(torch.nn.Module):
    """Two batch norms, of values whose mean is not zero."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.BatchNorm2d(3)
        self.second = torch.nn.BatchNorm2d(3)

    def forward(self, x, y):
        return (torch.tanh(self.second(torch.tanh(self.first(x)) + 1.0)) * y).mean()


def test_batch_norm_sums_a_million_pixels_as_well_as_torch():
    """Over several batches: of one, the rounding of three numbers is luck."""
    torch.manual_seed(0)
    model = BatchNorms().train()
    n, side = Dim("n", min=2, max=64), Dim("side", min=2, max=256)
    axes = {0: n, 2: side, 3: side}

    def batch(rows, side):
        return [torch.randn(rows, 3, side, side) + shift for shift in (5.0, 1.0)]

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    step = compile(model, optimizer, tuple(batch(4, 8)), dynamic_shapes=(axes, axes))
    for draws, *sizes in [(6, 32, 192), (16, 16, 112), (48, 3, 5)]:
        ours, torchs = {}, {}
        for _ in range(draws):
            args = batch(*sizes)
            exact, theirs = (copy.deepcopy(model).to(t) for t in (torch.float64, torch.float32))
            exact(*[a.double() for a in args]).backward()
            theirs(*args).backward()
            for state in optimizer.state.values():
                state["momentum_buffer"].zero_()
            step(*args)
            found = {n: optimizer.state[p]["momentum_buffer"] for n, p in model.named_parameters()}
            found |= dict(model.named_buffers())
            own = {n: p.grad for n, p in theirs.named_parameters()} | dict(theirs.named_buffers())
            right = {n: p.grad for n, p in exact.named_parameters()} | dict(exact.named_buffers())
            for name, value in right.items():
                if value.is_floating_point():
                    ours.setdefault(name, []).append(error(found, {name: value}))
                    torchs.setdefault(name, []).append(error(own, {name: value}))
        for name, errors in ours.items():
            bound = max(2 * root_mean_square(torchs[name]), 2e-7)
            assert root_mean_square(errors) <= bound, (sizes, name)


def test_batch_norm_averages_over_all_batches():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4, momentum=None))
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compile(
        *(model, optimizer, (torch.randn(3, 4),)),
        dynamic_shapes=({0: Dim("n", min=2, max=64)},),
        loss_fn=lambda model, x: model(x).pow(3).mean(),
    )
    for rows in (3, 20, 2, 7):
        x = torch.randn(rows, 4)
        eager.load_state_dict(model.state_dict())
        loss = eager(x).pow(3).mean()
        torch.testing.assert_close(step(x), loss.detach(), rtol=1e-4, atol=1e-5)
        for mine, own in zip(model.buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(mine, own)
    assert model[1].num_batches_tracked == 4


class NormalizedTokens(nn.Module):
    """Pixels as tokens behind a batch norm, as RT-DETR joins its levels."""

    def __init__(self, norm):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 1, bias=False), norm

    def forward(self, x):
        tokens = self.norm(self.first(x)).flatten(2).transpose(1, 2)
        weights = torch.linspace(0, 1, tokens.shape[1], dtype=x.dtype)
        return (tokens.tanh().square() * weights[None, :, None]).mean()


class Written(nn.BatchNorm2d):
    """Batch norm by its formula, whose gradient is that of means and products."""

    def forward(self, x):
        mean = x.mean((0, 2, 3), keepdim=True)
        rstd = ((x - mean).square().mean((0, 2, 3), keepdim=True) + self.eps).rsqrt()
        weight, bias = (p.view(1, -1, 1, 1) for p in (self.weight, self.bias))
        return (x - mean) * rstd * weight + bias


def test_batch_norm_of_one_sample_has_the_gradient_of_its_formula():
    """PyTorch's own has not, where the gradient comes with its channels last."""
    torch.manual_seed(0)
    model = NormalizedTokens(nn.BatchNorm2d(8)).double()
    written = NormalizedTokens(Written(8)).double()
    written.load_state_dict(model.state_dict())
    rows = {0: torch.export.Dim("rows", min=1, max=8)}
    step = compile(model, None, (torch.randn(3, 3, 6, 5).double(),), dynamic_shapes=(rows,))
    for count in (1, 2, 3):
        x = torch.randn(count, 3, 6, 5).double()
        model.zero_grad()
        step(x, update=False)
        gradients = torch.autograd.grad(written(x), list(written.parameters()))
        for parameter, expected in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, expected)


def test_the_signs_of_sums_of_zeros_are_eagers():
    """An angle, `atan2(0, (a * b).sum())`, is 0 or pi by the sign of a sum that is zero."""

    class Angles(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, a, b):
            one = torch.ones(())
            sums = (a * b).sum(-1), (a * b).mean(0), 0.0 - a, a.double().sum(-1).float()
            return self.weight * 2, [torch.copysign(one, each) for each in sums]

    model = Angles()
    rows = Dim("rows", min=1, max=8)
    zeros = torch.tensor([[0.0, -0.0, 0.0, -0.0], [-0.0] * 4, [0.0] * 4])
    a, b = zeros, torch.tensor([[1.0, 2.0, -3.0, 4.0], [1.0] * 4, [-1.0] * 4])
    step = compile(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        (a, b),
        dynamic_shapes=({0: rows}, {0: rows}),
    )
    for some in (slice(None), slice(1, 2), slice(2, 3)):
        _, found = step(a[some], b[some])
        _, expected = model(a[some], b[some])
        torch.testing.assert_close(list(found[0]), expected, rtol=0, atol=0)
