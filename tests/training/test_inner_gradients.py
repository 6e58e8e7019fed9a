"""Losses that contain gradients: penalties, differential equations, adversarial examples."""

import copy

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import relax_disc
from relax_disc.errors import UnsupportedOperatorError


def penalty(model, x):
    """Of Wasserstein GANs with gradient penalty (Gulrajani and others, 2017)."""
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return model(x).mean() + 10 * (slope.flatten(1).norm(dim=1) - 1).square().mean()


def heat_equation(model, points):
    """Physics-informed: u_t = u_xx, by gradients of a gradient."""
    points = points[:, :2].clone().requires_grad_(True)
    u = model(F.pad(points, (0, 14)))
    (first,) = torch.autograd.grad(u, points, torch.ones_like(u), create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)
    return (first[:, 1] - second[:, 0]).square().mean() + u.square().mean()


def adversarial(model, x):
    """Fast gradient sign (Goodfellow and others, 2015): the gradient is a constant."""
    with torch.enable_grad():
        moved = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(moved).square().sum(), moved)
    return model(x + 0.1 * slope.sign()).square().mean()


def of_weights(model, x):
    """The norm of the loss's gradient by two of the model's own parameters, one of them unused."""
    first = next(model.parameters())
    spare = x.new_zeros(3, requires_grad=True)
    loss = model(x).square().mean()
    found = torch.autograd.grad(loss, [first, spare], create_graph=True, allow_unused=True)
    assert found[1] is None
    return loss + found[0].square().sum()


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.last = nn.Linear(16, 1)

    def forward(self, x):
        return self.last(self.inner(x[:, None] + torch.arange(3.0)[:, None])).mean((1, 2))


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.down = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2)
        self.up = nn.ConvTranspose2d(6, 3, 2, stride=2)
        self.last = nn.Linear(3, 1)

    def forward(self, x):
        x = F.softplus(self.norm(self.first(x.reshape(-1, 1, 4, 4))))
        x = F.leaky_relu(self.up(torch.sin(self.down(x))))
        return self.last(F.avg_pool2d(x, 4).flatten(1))


MODELS = {
    "tanh": lambda: nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 1)),
    "norm": lambda: nn.Sequential(
        nn.Linear(16, 24), nn.LayerNorm(24), nn.SiLU(), nn.Linear(24, 8), nn.GELU(), nn.Linear(8, 1)
    ),
    "attention": Attending,
    "images": Images,
}


@pytest.mark.parametrize(
    ("model", "loss_fn"),
    [
        ("tanh", penalty),
        ("norm", penalty),
        pytest.param("attention", penalty, marks=pytest.mark.slow),
        ("images", penalty),
        ("tanh", heat_equation),
        ("tanh", adversarial),
        ("images", adversarial),
        ("norm", of_weights),
    ],
)
def test_trains_as_eager_pytorch(model, loss_fn):
    torch.manual_seed(0)
    ours = MODELS[model]()
    theirs = copy.deepcopy(ours)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05) for net in (ours, theirs)]
    rows = {0: Dim("rows", min=2, max=40)}
    step = relax_disc.compile(
        ours, optimizers[0], (torch.randn(5, 16),), dynamic_shapes=(rows,), loss_fn=loss_fn
    )
    for count in (2, 7, 40):
        x = torch.randn(count, 16)
        loss = step(x)
        with sdpa_kernel(SDPBackend.MATH):  # PyTorch's other ones have one gradient
            expected = loss_fn(theirs, x)
            expected.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
        state, wanted = ours.state_dict(), theirs.state_dict()
        torch.testing.assert_close(state, wanted, rtol=1e-5, atol=2e-6)
        assert step.memory_report().peak_bytes == step.plan(rows=count).peak_bytes
    step.memory_budget = step.plan(rows=40).least_bytes
    before = copy.deepcopy(ours.state_dict())
    loss = step(x)
    ours.load_state_dict(before)
    step.memory_budget = None
    assert torch.equal(loss, step(x))


def test_a_forward_pass_takes_gradients_too():
    class Slope(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = MODELS["norm"]()

        def forward(self, x):
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                return torch.autograd.grad(self.net(x).sum(), x)[0]

    torch.manual_seed(0)
    model = Slope()
    rows = {0: Dim("rows", min=1, max=40)}
    slope = relax_disc.compile_forward(model, (torch.randn(5, 16),), dynamic_shapes=(rows,))
    for count in (1, 9, 40):
        x = torch.randn(count, 16)
        torch.testing.assert_close(slope(x), model(x))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, x):
        return self.last(self.inner(x.reshape(-1, 4, 4))[0].mean(1))


def batched(model, x):
    x = x.detach().requires_grad_()
    y = model(x)
    (slopes,) = torch.autograd.grad(y, x, torch.eye(5)[:, :, None], is_grads_batched=True)
    return slopes.square().sum()


def backward(model, x):
    model(x).sum().backward()
    return model(x).mean()


@pytest.mark.parametrize(
    ("make", "loss_fn", "told"),
    [
        (Recurrent, penalty, r"test_inner_gradients.py:\d+: .*the gradient of recurrence has none"),
        (MODELS["tanh"], batched, r"test_inner_gradients.py:\d+: .*is_grads_batched=True"),
        (MODELS["tanh"], backward, r"test_inner_gradients.py:\d+: .*a backward pass inside"),
    ],
)
def test_what_cannot_be_differentiated_is_refused(make, loss_fn, told):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.raises(UnsupportedOperatorError, match=told):
        relax_disc.compile(
            model,
            optimizer,
            (torch.randn(5, 16),),
            dynamic_shapes=({0: Dim("rows", min=1, max=9)},),
            loss_fn=loss_fn,
        )
