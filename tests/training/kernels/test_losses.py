"""Losses of torch.nn: values and gradients against float64 at several shapes, one build."""

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

from tests.training.kernels.test_operators import check

SIZES = [(4, 6), (1, 5), (7, 12), (3, 9)]
CLASSES = 5

# Each gets trained scores z [n, m, 5] and x, y [n, m], fixed goals g [n, m] in (0, 1), classes c
# [n, m] with some ignored ones, and signs s [n, m] of 1 and -1.
weights = torch.tensor([0.5, 1.0, 2.0, 1.5, 0.25])
LOSSES = {
    "cross-entropy": lambda z, c: F.cross_entropy(z.flatten(0, 1), c.flatten()),
    "class weights": lambda z, c: F.cross_entropy(z.transpose(1, 2), c, weights.to(z.dtype)),
    "label smoothing": lambda z, c: F.cross_entropy(z.transpose(1, 2), c, label_smoothing=0.1),
    "ignored classes": lambda z, c: F.cross_entropy(z.transpose(1, 2), c, ignore_index=2),
    "all of them, summed": lambda z, c: F.cross_entropy(
        z.transpose(1, 2),
        c,
        weights.to(z.dtype),
        ignore_index=2,
        label_smoothing=0.2,
        reduction="sum",
    ),
    "without reduction": lambda z, c: (
        F.cross_entropy(z.transpose(1, 2), c, reduction="none").square().mean()
    ),
    "class probabilities": lambda z, g: F.cross_entropy(
        z.flatten(0, 1), torch.softmax(g.flatten()[:, None] * weights.to(g.dtype), 1)
    ),
    # As question answering: an answer beyond the text counts nowhere.
    "a size is ignored": lambda x, c: F.cross_entropy(
        x, (2 * c[:, 0]).clamp(0, x.shape[1]), ignore_index=x.shape[1], reduction="sum"
    ),
    "nll": lambda z, c: F.nll_loss(
        torch.log_softmax(z.flatten(0, 1), 1), c.flatten(), weights.to(z.dtype), ignore_index=1
    ),
    "bce": lambda x, g: F.binary_cross_entropy(torch.sigmoid(x), g),
    "bce with logits": lambda x, g: F.binary_cross_entropy_with_logits(x, g),
    "bce, pos_weight and weight": lambda z, g: F.binary_cross_entropy_with_logits(
        z, g[..., None].expand(-1, -1, 5), weights.to(z.dtype), pos_weight=weights.to(z.dtype) + 1
    ),
    "mse": lambda x, g: F.mse_loss(x, g),
    "l1": lambda x, g: F.l1_loss(x, g, reduction="sum"),
    "smooth l1": lambda x, g: F.smooth_l1_loss(x, g, beta=0.5),
    "huber": lambda x, g: F.huber_loss(x, g, delta=0.7),
    "kl": lambda z, g: F.kl_div(
        torch.log_softmax(z, -1),
        torch.softmax(g[..., None] * weights.to(g.dtype), -1),
        reduction="batchmean",
    ),
    "kl of logs": lambda x, g: F.kl_div(
        torch.log_softmax(x, 1), torch.log_softmax(g, 1), log_target=True, reduction="sum"
    ),
    "cosine embedding": lambda x, y, s: F.cosine_embedding_loss(x, y, s[:, 0], margin=0.1),
    "margin ranking": lambda x, y, s: F.margin_ranking_loss(x, y, s, margin=0.2),
    "hinge embedding": lambda x, s: F.hinge_embedding_loss(x, s),
    "soft margin": lambda x, s: F.soft_margin_loss(x, s),
    "multi margin": lambda z, c: F.multi_margin_loss(z.flatten(0, 1), c.flatten()),
    "multilabel soft margin": lambda x, g: F.multilabel_soft_margin_loss(x, (g > 0.5).to(x.dtype)),
    "triplet": lambda x, y, g: F.triplet_margin_loss(x, y, g, margin=1.0, swap=True),
    "triplet by a distance": lambda x, y, g: F.triplet_margin_with_distance_loss(
        x, y, g, distance_function=lambda a, b: 1 - F.cosine_similarity(a, b)
    ),
    "gaussian nll": lambda x, y, g: F.gaussian_nll_loss(x, g, F.softplus(y), full=True),
    "poisson nll": lambda x, g: F.poisson_nll_loss(x, g * 5),
    "poisson nll, full": lambda x, g: F.poisson_nll_loss(
        x.exp(), (g * 5).round(), log_input=False, full=True
    ),
    "focal": lambda x, g: (
        (1 - torch.exp(-F.binary_cross_entropy_with_logits(x, g, reduction="none"))) ** 2
        * F.binary_cross_entropy_with_logits(x, g, reduction="none")
    ).mean(),
    "info nce": lambda z: F.cross_entropy(
        F.normalize(z[:, 0], dim=-1) @ F.normalize(z[:, 1], dim=-1).t() / 0.1,
        torch.arange(z.shape[0]),
    ),
}


class Losses(nn.Module):
    """The given losses, each over scores with parameters of its own."""

    def __init__(self, functions):
        super().__init__()
        self.functions = functions
        generator = torch.Generator().manual_seed(5)
        self.scales = nn.ParameterList()
        for _ in functions:
            self.scales.append(nn.Parameter(1 + 0.1 * torch.randn(3, 13, 5, generator=generator)))

    def forward(self, z, x, y, g, c, s):
        values = []
        for function, scale in zip(self.functions, self.scales, strict=True):
            rows = scale[:, : x.shape[1]]
            given = {"z": z * rows[0], "x": x * rows[1, :, 0], "y": y * rows[2, :, 0]}
            given |= {"g": g, "c": c, "s": s}
            names = function.__code__.co_varnames[: function.__code__.co_argcount]
            values.append(function(*(given[name] for name in names)))
        return sum(values), *values


def data(n, m):
    generator = torch.Generator().manual_seed(31 * n + m)
    return (
        torch.randn(n, m, CLASSES, generator=generator),
        torch.randn(n, m, generator=generator),
        torch.randn(n, m, generator=generator),
        torch.rand(n, m, generator=generator) * 0.9 + 0.05,
        torch.randint(0, CLASSES, (n, m), generator=generator),
        torch.randint(0, 2, (n, m), generator=generator) * 2.0 - 1,
    )


FAST = ["all of them, summed", "bce, pos_weight and weight", "huber", "kl", "triplet"]
REST = [name for name in LOSSES if name not in FAST]


@pytest.mark.parametrize(
    "names",
    [FAST, *(pytest.param(REST[k::2], marks=pytest.mark.slow) for k in range(2))],
    ids=["some", "others", "the rest"],
)
def test_gradients_against_float64(names):
    n, m = Dim("n", min=1, max=7), Dim("m", min=5, max=12)
    model = Losses([LOSSES[name] for name in names])
    batches = [data(*size) for size in SIZES]
    check(model, names, batches, ({0: n, 1: m},) * 6)
