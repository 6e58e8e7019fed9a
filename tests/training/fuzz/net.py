"""The module of a random training program: layers and a loss; and its optimizer."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from tests.training.fuzz.pieces import WIDTH, Piece, linear


class CountedNorm(nn.Module):
    """Writes buffers of its own in every forward pass in training."""

    seen: torch.Tensor
    level: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("level", torch.zeros(WIDTH))

    def forward(self, h: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.add_(1)
            self.level.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return h - self.level


LOSSES: dict[str, Callable] = {
    "cross entropy": lambda h, ids, y: F.cross_entropy(h, ids[:, 0]),
    "smoothed": lambda h, ids, y: F.cross_entropy(h, ids[:, 1], label_smoothing=0.1),
    "nll": lambda h, ids, y: F.nll_loss(h.log_softmax(1), ids[:, 2]),
    "mse": lambda h, ids, y: F.mse_loss(h, y),
    "l1": lambda h, ids, y: F.smooth_l1_loss(h, y),
    "huber": lambda h, ids, y: F.huber_loss(h, y, reduction="sum"),
    "bce": lambda h, ids, y: F.binary_cross_entropy_with_logits(h, y.sigmoid()),
    "kl": lambda h, ids, y: F.kl_div(h.log_softmax(1), y.softmax(1), reduction="batchmean"),
    "cosine": lambda h, ids, y: F.cosine_similarity(h, y).mean(),
    "margin": lambda h, ids, y: F.multi_margin_loss(h, ids[:, 0]),
    "soft margin": lambda h, ids, y: F.soft_margin_loss(h, y.sign()),
    "poisson": lambda h, ids, y: F.poisson_nll_loss(h, y.exp()),
    "gaussian": lambda h, ids, y: F.gaussian_nll_loss(h, y, h.square() + 0.5),
    "weighted": lambda h, ids, y: F.cross_entropy(h, ids[:, 0], weight=torch.arange(1.0, 7)),
    "ignoring": lambda h, ids, y: F.cross_entropy(h, ids[:, 0], ignore_index=1),
    "sum": lambda h, ids, y: F.cross_entropy(h, ids[:, 0], reduction="none").sum() / h.shape[0],
    "soft labels": lambda h, ids, y: F.cross_entropy(h, y.softmax(1)),
    "triplet": lambda h, ids, y: F.triplet_margin_loss(h, y, y.flip(1)),
    "embedding": lambda h, ids, y: F.cosine_embedding_loss(h, y, ids[:, 0] % 2 * 2 - 1),
    "hinge": lambda h, ids, y: F.hinge_embedding_loss(h, y.sign()),
    "ranking": lambda h, ids, y: F.margin_ranking_loss(h[:, 0], h[:, 1], y[:, 0].sign(), 0.1),
    "many labels": lambda h, ids, y: F.multilabel_soft_margin_loss(h, (y > 0).float()),
    "many margins": lambda h, ids, y: F.multilabel_margin_loss(h, ids.repeat(1, 2)),
    "energy": lambda h, ids, y: torch.logsumexp(h - y, (0, 1)) + h.pow(2).mean(),
}

OPTIMIZERS: dict[str, Callable] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.8, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "ascent": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.5, dampening=0.1, maximize=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.02),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, lr_decay=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, weight_decay=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.02, t0=2.0),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "groups": lambda p: torch.optim.AdamW(
        [{"params": p[::2], "lr": 0.02, "betas": (0.8, 0.9)}, {"params": p[1::2]}], lr=0.005
    ),
    "two": lambda p: [torch.optim.Adam(p[::2], lr=0.01), torch.optim.SGD(p[1::2], lr=0.05)],
}


class Net(nn.Module):
    def __init__(
        self, names: list[str], loss: str, counts: bool, reader: str | None, returns: bool
    ) -> None:
        super().__init__()
        self.reader = None if reader is None else Piece(reader)
        self.first = linear()
        self.pieces = nn.ModuleList(Piece(name) for name in names)
        if counts:
            self.pieces.append(CountedNorm())
        self.last = linear()
        self.loss, self.returns = loss, returns

    def forward(self, x: torch.Tensor, ids: torch.Tensor, y: torch.Tensor) -> object:
        h = self.first(x if self.reader is None else self.reader(x, ids))
        for piece in self.pieces:
            h = piece(h, ids)
        h = self.last(h)
        loss = LOSSES[self.loss](h, ids, y)
        return (loss, h.detach()) if self.returns else loss
