"""Attention that a model writes out becomes one operator, with the numbers of what is written."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.export import Dim

import relax_disc
from relax_disc.frontend import capture_step

LEAST = torch.finfo(torch.float32).min


def added(scores, seen):
    return scores + torch.where(seen, torch.zeros(()), LEAST).to(scores.dtype)


def filled(scores, seen):
    return scores.masked_fill(~seen, float("-inf"))


def with_numbers(scores, seen):
    return scores.masked_fill(~seen, LEAST)


def weakly(scores, seen):
    return scores + (1 - seen.to(scores.dtype)) * -1e9


class Written(nn.Module):
    def __init__(self, hide, returns=False):
        super().__init__()
        self.hide, self.returns = hide, returns
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x, seen):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(8)
        weights = torch.softmax(self.hide(scores, seen[:, None, None]), -1)
        y = self.out(torch.matmul(weights, v).transpose(1, 2).flatten(2))
        loss = y.square().mean() + y.sin().sum()
        return (loss, weights) if self.returns else loss


def example(hidden=()):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 7, 16, generator=generator)
    seen = torch.rand(3, 7, generator=generator) < 0.7
    seen[:, 2] = True
    for row in hidden:
        seen[row] = False
    return x, seen


def shapes():
    shape = {0: Dim("batch", min=1, max=8), 1: Dim("length", min=1, max=16)}
    return shape, shape


def is_one(model):
    captured = capture_step(model, None, example(), dynamic_shapes=shapes())
    return "relax_disc.attention" in str(captured.module)


@pytest.mark.parametrize(("hide", "blind"), [(added, [1]), (filled, [])])
def test_gradients_are_those_of_what_is_written(hide, blind):
    """A position that sees nothing takes the mean of all, where numbers hide."""
    torch.manual_seed(0)
    model = Written(hide)
    exact = copy.deepcopy(model).double()
    assert is_one(model)
    x, seen = example(blind)
    step = relax_disc.compile(model, None, (x, seen), dynamic_shapes=shapes())
    loss = step(x, seen, update=False)
    wanted = exact(x.double(), seen)
    wanted.backward()
    torch.testing.assert_close(loss.double(), wanted.detach(), rtol=1e-5, atol=1e-5)
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        assert float((p.grad.double() - q.grad).abs().max()) < 3e-6 * float(q.grad.abs().max())


class Biased(nn.Module):
    """Adds a trained bias by distance before the mask; ``hides``: what else it adds."""

    def __init__(self, merged=False, hides=0.0):
        super().__init__()
        self.qkv, self.table = nn.Linear(16, 48), nn.Embedding(33, 2)
        self.merged, self.hides = merged, hides

    def forward(self, x, seen):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        places = torch.arange(t)
        bias = self.table(places[None] - places[:, None] + 16).permute(2, 0, 1)
        if self.merged:  # as BLOOM and Falcon do
            q, k, v = (part.reshape(b * 2, t, 8) for part in (q, k, v))
            far = bias.expand(b, 2, t, t).reshape(b * 2, t, t)
            scores = far.baddbmm(q, k.transpose(1, 2), beta=1.0, alpha=0.3).view(b, 2, t, t) * 1.2
            weights = torch.softmax(added(scores, seen[:, None, None]), -1)
            out = torch.bmm(weights.view(b * 2, t, t), v).view(b, 2, t, 8)
        else:
            scores = (torch.matmul(q, k.transpose(-1, -2)) + bias) / 3
            scores = scores + self.hides if self.hides else scores
            out = torch.matmul(torch.softmax(added(scores, seen[:, None, None]), -1), v)
        return out.square().mean() + out.sin().sum()


@pytest.mark.parametrize("merged", [False, True])
def test_gradients_of_biases_are_those_of_what_is_written(merged):
    """A position that sees nothing has a part in the gradient of a bias, too."""
    torch.manual_seed(0)
    model = Biased(merged)
    exact = copy.deepcopy(model).double()
    assert is_one(model)
    step = relax_disc.compile(model, None, example(), dynamic_shapes=shapes())
    for x, seen in (example(), example([1]), example([0, 1, 2])):
        model.zero_grad()
        exact.zero_grad()
        loss, wanted = step(x, seen, update=False), exact(x.double(), seen)
        wanted.backward()
        torch.testing.assert_close(loss.double(), wanted.detach(), rtol=1e-5, atol=1e-5)
        top = max(float(q.grad.abs().max()) for q in exact.parameters())
        for p, q in zip(model.parameters(), exact.parameters(), strict=True):
            assert float((p.grad.double() - q.grad).abs().max()) < 3e-6 * top


class Wide(nn.Module):
    """Heads that no library takes."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 3 * 392)

    def forward(self, x, seen):
        heads = self.qkv(x).unflatten(-1, (3, 1, 392)).permute(2, 0, 3, 1, 4)
        mask = added(torch.zeros((), dtype=x.dtype), seen[:, None, None])
        return nn.functional.scaled_dot_product_attention(*heads, mask).square().mean()


def test_gradients_of_plain_attention_are_those_of_the_mean():
    torch.manual_seed(0)
    model, (x, seen) = Wide(), example([1])
    exact = copy.deepcopy(model).double()
    step = relax_disc.compile(model, None, (x, seen), dynamic_shapes=shapes())
    step(x, seen, update=False)
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        loss = exact(x.double(), seen)
    loss.backward()
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        assert float((p.grad.double() - q.grad).abs().max()) < 3e-6 * float(q.grad.abs().max())


@pytest.mark.parametrize(
    "model",
    [Written(weakly), Written(with_numbers), Written(added, returns=True), Biased(hides=-1e9)],
)
def test_anything_else_stays_as_it_is_written(model):
    assert not is_one(model)
