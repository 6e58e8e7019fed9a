"""Mixtures of experts with top-k routing, as models write them."""

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

from tests.training.kernels.test_operators import check

SIZES = [(3, 7), (1, 2), (4, 12), (2, 5)]


class Experts(nn.Module):
    """Each token goes to two of four experts; how it gets there is the subclasses' part."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.up, self.down = (nn.Parameter(0.3 * torch.randn(4, *s)) for s in ((8, 6), (6, 8)))

    def route(self, x):
        scores = torch.softmax(self.gate(x), -1)
        share, chosen = torch.topk(scores, 2, -1)
        return share / share.sum(-1, keepdim=True), chosen, scores

    def forward(self, x):
        tokens = x.reshape(-1, 8)
        share, chosen, scores = self.route(tokens)
        out = self.mix(tokens, share, chosen)
        used = F.one_hot(chosen, 4).to(x.dtype).mean((0, 1))
        balance = (used * scores.mean(0)).sum()
        return (out.square().mean() + 0.1 * balance,) * 2


class Dense(Experts):
    def mix(self, x, share, chosen):
        weights = torch.zeros(x.shape[0], 4, dtype=x.dtype).scatter(1, chosen, share)
        hidden = F.silu(torch.einsum("td,edh->teh", x, self.up))
        return torch.einsum("teh,ehd,te->td", hidden, self.down, weights)


class Sorted(Experts):
    """Tokens sorted by expert, the results added back at their places."""

    def mix(self, x, share, chosen):
        order = torch.argsort(chosen.flatten(), stable=True)
        token = order // 2
        expert = chosen.flatten()[order]
        hidden = F.silu(torch.einsum("td,tdh->th", x[token], self.up[expert]))
        out = torch.einsum("th,thd->td", hidden, self.down[expert])
        out = out * share.flatten()[order][:, None]
        return torch.zeros_like(x).index_add(0, token, out)


class Gathered(Experts):
    """One expert after the other picks its tokens, as many as there happen to be."""

    def mix(self, x, share, chosen):
        out = torch.zeros_like(x)
        for expert in range(4):
            token, place = torch.where(chosen == expert)
            hidden = F.silu(x[token] @ self.up[expert])
            out = out.index_add(0, token, hidden @ self.down[expert] * share[token, place, None])
        return out


def batch(rows, length):
    generator = torch.Generator().manual_seed(rows * 100 + length)
    return (torch.randn(rows, length, 8, generator=generator),)


SHAPES = ({0: Dim("b", min=1, max=4), 1: Dim("t", min=2, max=12)},)


@pytest.mark.parametrize("kind", [pytest.param(Dense, marks=pytest.mark.slow), Sorted, Gathered])
def test_gradients_against_float64(kind):
    torch.manual_seed(0)
    model = kind()
    names = dict.fromkeys(model.state_dict())
    check(model, list(names)[:1], [batch(*size) for size in SIZES], SHAPES)
