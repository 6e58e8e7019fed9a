"""Random training programs, run by eager PyTorch and compiled, step by step.

A program is a module of random pieces, a loss, an optimizer, and what a training loop does between
its steps: other batches, other learning rates, writes into the model, odd values.  Every step must
equal eager's, or end in one of the package's errors with nothing written.

``python tests/training/fuzz_programs.py SEED`` runs one program and prints what it does.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.utils import _pytree as pytree

import relax_disc
from relax_disc.errors import RelaxDiscError, RelaxDiscWarning

WIDTH, CLASSES, LARGEST, LONGEST = 6, 5, 9, 7
HABITS_A_PROGRAM = 5


class Piece(nn.Module):
    """A layer from ``[batch, WIDTH]`` and ids ``[batch, 3]`` to ``[batch, WIDTH]``."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        makers, self._apply_piece = (PIECES | READERS)[name]
        self.layers = nn.ModuleList(make() for make in makers)

    def forward(self, h: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self._apply_piece(h, ids, *self.layers)

    def extra_repr(self) -> str:
        return self.name


def _linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def _embedding() -> nn.Module:
    return nn.Embedding(CLASSES, WIDTH)


def _attention(h, ids, one, two):
    q, k, v = (f(h).reshape(-1, 1, 2, 3) for f in (one, two, one))
    return F.scaled_dot_product_attention(q, k, v).reshape(-1, WIDTH)


class _SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(2, 1, batch_first=True)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.attention(h, h, h, need_weights=False)[0]


class Knob(nn.Module):
    """Numbers and a plain tensor that a loop may change; one number decides."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.power, self.shift = 0.5, 2, torch.zeros(WIDTH)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.scale + h.abs().pow(self.power) * 0.1 + self.shift


class _Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        ctx.save_for_backward(h)
        return h * 2

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0] * 2 * ctx.saved_tensors[0].sign()


def _autocast(h, ids, f):
    with torch.autocast("cpu", torch.bfloat16):
        return f(h).to(h)


def _written_slice(h):
    out = torch.zeros_like(h)
    out[:, ::2] = h[:, :3] * 2
    out[:, 1] += h[:, 0]
    return out + h


def _simple(function: Callable) -> tuple:
    return [], lambda h, ids: function(h)


def _layer(make: Callable, before=lambda h: h, after=lambda h: h) -> tuple:
    return [make], lambda h, ids, layer: after(layer(before(h)))


def _row(h):
    return h[:, None]


def _picture(h):
    return h.reshape(-1, 1, 2, 3)


def _flat(h):
    return h.reshape(h.shape[0], -1)[:, :WIDTH]


PIECES: dict[str, tuple] = {
    "linear": _layer(_linear),
    "no bias": _layer(lambda: nn.Linear(WIDTH, WIDTH, bias=False)),
    "bilinear": (
        [lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH)],
        lambda h, ids, layer: layer(h, h.tanh()),
    ),
    "relu": _simple(F.relu),
    "gelu": _simple(F.gelu),
    "tanh gelu": _simple(lambda h: F.gelu(h, approximate="tanh")),
    "silu": _simple(F.silu),
    "elu": _simple(F.elu),
    "selu": _simple(F.selu),
    "celu": _simple(F.celu),
    "leaky": _simple(F.leaky_relu),
    "softplus": _simple(F.softplus),
    "mish": _simple(F.mish),
    "hardswish": _simple(F.hardswish),
    "hardtanh": _simple(F.hardtanh),
    "hardsigmoid": _simple(F.hardsigmoid),
    "softshrink": _simple(F.softshrink),
    "tanhshrink": _simple(F.tanhshrink),
    "logsigmoid": _simple(F.logsigmoid),
    "softsign": _simple(F.softsign),
    "glu": _simple(lambda h: F.glu(torch.cat([h, h.sin()], 1))),
    "prelu": _layer(nn.PReLU),
    "softmax": _simple(lambda h: F.softmax(h, -1)),
    "log softmax": _simple(lambda h: F.log_softmax(h, 1)),
    "normalize": _simple(F.normalize),
    "batch norm": _layer(lambda: nn.BatchNorm1d(WIDTH)),
    "plain batch norm": _layer(lambda: nn.BatchNorm1d(WIDTH, affine=False, momentum=0.3)),
    "batch norm 2d": _layer(lambda: nn.BatchNorm2d(1), _picture, _flat),
    "layer norm": _layer(lambda: nn.LayerNorm(WIDTH)),
    "rms norm": _layer(lambda: nn.RMSNorm(WIDTH)),
    "group norm": _layer(lambda: nn.GroupNorm(2, WIDTH)),
    "instance norm": _layer(
        lambda: nn.InstanceNorm1d(2, affine=True), lambda h: h.reshape(-1, 2, 3), _flat
    ),
    "conv1d": _layer(lambda: nn.Conv1d(1, 2, 3, padding=1), _row, lambda h: h.mean(1)),
    "strided conv1d": _layer(
        lambda: nn.Conv1d(1, 2, 2, stride=2), _row, lambda h: h.reshape(-1, WIDTH)
    ),
    "conv2d": _layer(lambda: nn.Conv2d(1, 2, 3, padding=1), _picture, _flat),
    "grouped conv": _layer(
        lambda: nn.Conv1d(2, 4, 3, padding=1, groups=2), lambda h: h.reshape(-1, 2, 3), _flat
    ),
    "transposed conv": _layer(
        lambda: nn.ConvTranspose1d(1, 1, 3, padding=1), _row, lambda h: h[:, 0]
    ),
    "average pool": _layer(lambda: nn.AvgPool1d(3, 1, 1), _row, lambda h: h[:, 0]),
    "max pool": _layer(lambda: nn.MaxPool1d(3, 1, 1), _row, lambda h: h[:, 0]),
    "adaptive pool": _layer(lambda: nn.AdaptiveAvgPool1d(WIDTH), _row, lambda h: h[:, 0]),
    "gru": _layer(
        lambda: nn.GRU(2, WIDTH, batch_first=True),
        lambda h: h.reshape(-1, 3, 2),
        lambda out: out[0][:, -1],
    ),
    "lstm": _layer(
        lambda: nn.LSTM(2, WIDTH, batch_first=True),
        lambda h: h.reshape(-1, 3, 2),
        lambda out: out[0].mean(1),
    ),
    "encoder": _layer(
        lambda: nn.TransformerEncoderLayer(2, 1, 4, dropout=0.0, batch_first=True),
        lambda h: h.reshape(-1, 3, 2),
        _flat,
    ),
    "attention": ([_linear, _linear], _attention),
    "embedding": ([_embedding], lambda h, ids, e: h + e(ids[:, 0])),
    "padded embedding": (
        [lambda: nn.Embedding(CLASSES, WIDTH, padding_idx=0)],
        lambda h, ids, e: h * e(ids[:, :2]).sum(1).sigmoid(),
    ),
    "bag": ([lambda: nn.EmbeddingBag(CLASSES, WIDTH)], lambda h, ids, e: h + e(ids)),
    "rows": ([_embedding], lambda h, ids, e: h + e.weight[ids[:, 1] - 1]),
    "computed rows": (
        [_embedding],
        lambda h, ids, e: h + e.weight[(h.detach().argmax(1) * 0 + ids[:, 2])],
    ),
    "index select": ([_embedding], lambda h, ids, e: h * e.weight.index_select(0, ids[:, 2])),
    "gather": ([], lambda h, ids: h + h.gather(1, ids[:, :1])),
    "scatter": ([], lambda h, ids: h.scatter(1, ids[:, 1:2], 0.5)),
    "scatter add": ([], lambda h, ids: h.scatter_add(1, ids[:, :2], h[:, :2] * 2)),
    "one hot": ([], lambda h, ids: h * (1 + F.one_hot(ids[:, 0], WIDTH).cumsum(1))),
    "cumsum": _simple(lambda h: h.cumsum(1) / 3),
    "sort": _simple(lambda h: h.sort(1).values),
    "topk": _simple(lambda h: h + h.topk(2, 1).values.sum(1, keepdim=True)),
    "extremes": _simple(lambda h: h - h.amax(1, keepdim=True) + h.min(1, keepdim=True).values),
    "flip": _simple(lambda h: h.flip(1) + h.roll(1, 1)),
    "where": _simple(lambda h: torch.where(h > 0, h, h * h)),
    "clamp": _simple(lambda h: h.clamp(-0.8, 0.9)),
    "einsum": ([_linear], lambda h, ids, f: torch.einsum("bi,bj->bj", h, f(h))),
    "outer": _simple(lambda h: (h[:, :, None] * h[:, None, :]).logsumexp(2)),
    "pad": _simple(lambda h: F.pad(h, (1, 1))[:, 1:-1] + F.pad(h, (0, 1))[:, 1:]),
    "unbind": _simple(lambda h: torch.stack(h.unbind(1)[::-1], 1)),
    "chunk": _simple(lambda h: torch.cat([part.exp() for part in h.chunk(2, 1)], 1).log1p()),
    "batch mean": _simple(lambda h: h - h.mean(0)),
    "batch share": _simple(lambda h: h / (1 + h.abs().sum(0))),
    "variance": _simple(lambda h: h * h.var(1, keepdim=True)),
    "detach": ([_linear], lambda h, ids, f: f(h) + h.detach()),
    "residual": ([_linear, _linear], lambda h, ids, f, g: h + g(F.relu(f(h)))),
    "weight norm": _layer(lambda: nn.utils.parametrizations.weight_norm(_linear())),
    "relu6": _simple(F.relu6),
    "hardshrink": _simple(F.hardshrink),
    "threshold": _simple(lambda h: F.threshold(h, 0.1, 0.2)),
    "softmin": _simple(lambda h: F.softmin(h, 1)),
    "no dropout": _layer(lambda: nn.Dropout(0.0)),
    "identity": _layer(nn.Identity),
    "spectral norm": _layer(lambda: nn.utils.parametrizations.spectral_norm(_linear())),
    "cumulative norm": _layer(lambda: nn.BatchNorm1d(WIDTH, momentum=None)),
    "untracked norm": _layer(lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False)),
    "tracked instance norm": _layer(
        lambda: nn.InstanceNorm1d(2, track_running_stats=True), lambda h: h.reshape(-1, 2, 3), _flat
    ),
    "local response": _layer(lambda: nn.LocalResponseNorm(2), _picture, _flat),
    "dilated conv": _layer(lambda: nn.Conv1d(1, 1, 3, padding=2, dilation=2), _row, _flat),
    "circular conv": _layer(
        lambda: nn.Conv1d(1, 1, 3, padding=1, padding_mode="circular"), _row, _flat
    ),
    "conv3d": _layer(
        lambda: nn.Conv3d(1, 2, 2, padding=1), lambda h: h.reshape(-1, 1, 1, 2, 3), _flat
    ),
    "strided transposed conv": _layer(
        lambda: nn.ConvTranspose2d(1, 1, 2, stride=2),
        _picture,
        lambda h: h.mean(3)[:, 0].repeat(1, 2)[:, :WIDTH],
    ),
    "max pool 2d": _layer(lambda: nn.MaxPool2d(2, 1, 1), _picture, _flat),
    "strided max pool": _layer(
        lambda: nn.MaxPool1d(2, 2, ceil_mode=True), _row, lambda h: h[:, 0].repeat(1, 2)
    ),
    "indices of max pool": _simple(
        lambda h: F.max_unpool1d(*F.max_pool1d(h[:, None], 2, return_indices=True), (2,))[:, 0]
    ),
    "adaptive max pool": _layer(
        lambda: nn.AdaptiveMaxPool1d(4), _row, lambda h: F.pad(h[:, 0], (1, 1))
    ),
    "power pool": _layer(lambda: nn.LPPool1d(2, 2), _row, lambda h: h[:, 0].repeat(1, 2)),
    "upsample": _layer(
        lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
        _picture,
        lambda h: h.amax(3).reshape(-1, 4).repeat(1, 2)[:, :WIDTH],
    ),
    "pixel shuffle": _layer(
        lambda: nn.PixelUnshuffle(2),
        lambda h: h[:, :4].reshape(-1, 1, 2, 2),
        lambda h: h.reshape(-1, 4).repeat(1, 2)[:, :WIDTH],
    ),
    "unfold": _simple(lambda h: F.fold(F.unfold(_picture(h), 2), (2, 3), 2).reshape(-1, WIDTH)),
    "windows": _simple(lambda h: F.pad(h.unfold(1, 2, 1).prod(2), (0, 1))),
    "mirrored": _simple(lambda h: F.pad(_row(h), (2, 1), mode="reflect")[:, 0, 1:-2]),
    "edges": _simple(lambda h: F.pad(_row(h), (2, 1), mode="replicate")[:, 0, :-3]),
    "rnn": _layer(
        lambda: nn.RNN(2, 3, bidirectional=True, batch_first=True),
        lambda h: h.reshape(-1, 3, 2),
        lambda out: out[0][:, 1],
    ),
    "deep lstm": _layer(
        lambda: nn.LSTM(2, 3, 2, bidirectional=True),
        lambda h: h.reshape(-1, 3, 2).transpose(0, 1),
        lambda out: out[1][0][-2:].transpose(0, 1).reshape(-1, WIDTH),
    ),
    "gru cell": _layer(lambda: nn.GRUCell(WIDTH, WIDTH)),
    "lstm cell": _layer(lambda: nn.LSTMCell(WIDTH, WIDTH), after=lambda out: out[0] + out[1]),
    "multihead": _layer(lambda: _SelfAttention(), lambda h: h.reshape(-1, 3, 2), _flat),
    "decoder": (
        [lambda: nn.TransformerDecoderLayer(2, 1, 4, dropout=0.0, batch_first=True)],
        lambda h, ids, f: _flat(f(h.reshape(-1, 3, 2), h.tanh().reshape(-1, 3, 2))),
    ),
    "causal": _simple(
        lambda h: F.scaled_dot_product_attention(
            *[h.reshape(-1, 1, 3, 2)] * 3, is_causal=True
        ).reshape(-1, WIDTH)
    ),
    "largest bag": (
        [lambda: nn.EmbeddingBag(CLASSES, WIDTH, mode="max")],
        lambda h, ids, e: h + e(ids),
    ),
    "masked": ([], lambda h, ids: h.masked_fill(ids[:, :1] > 2, -1.0)),
    "masked softmax": (
        [],
        lambda h, ids: h.masked_fill(F.one_hot(ids[:, 0], WIDTH) > 0, -torch.inf).softmax(1),
    ),
    "put": ([], lambda h, ids: h.index_put((torch.arange(h.shape[0]), ids[:, 0]), h[:, 5] * 2)),
    "put more": (
        [],
        lambda h, ids: h.new_zeros(CLASSES, WIDTH).index_put((ids[:, 1],), h, accumulate=True)[
            ids[:, 2]
        ],
    ),
    "index add": (
        [],
        lambda h, ids: h.new_zeros(CLASSES, WIDTH).index_add(0, ids[:, 0], h)[ids[:, 0]],
    ),
    "index copy": ([], lambda h, ids: h.index_copy(1, ids[0, :1], h[:, :1] * 3)),
    "reduced": ([], lambda h, ids: h.scatter_reduce(1, ids[:, :2], h[:, :2].cos(), "amax")),
    "along": ([], lambda h, ids: h.take_along_dim(ids.repeat(1, 2), 1)),
    "ids as numbers": (
        [],
        lambda h, ids: h + (ids.float().sum(1, keepdim=True) / 3).floor() + ids[:, :1] // 2,
    ),
    "remainders": ([], lambda h, ids: h * (1 + ids[:, 2:] % 2) + torch.remainder(h, 0.7)),
    "triangles": _simple(
        lambda h: (h[:, :, None] * h[:, None, :]).tril().sum(2) + h.diag_embed().triu(1).sum(1)
    ),
    "cumulative product": _simple(lambda h: h.cumprod(1)),
    "cumulative maximum": _simple(lambda h: h.cummax(1).values),
    "cumulative logsumexp": _simple(lambda h: h.logcumsumexp(1)),
    "kth": _simple(lambda h: h - h.kthvalue(3, 1, keepdim=True).values),
    "median": _simple(lambda h: h - h.median(1, keepdim=True).values),
    "deviation": _simple(lambda h: h / (1 + h.std(0, unbiased=False))),
    "norms": _simple(lambda h: h * h.norm(dim=1, keepdim=True) + h.norm(p=1, dim=1, keepdim=True)),
    "distances": _simple(lambda h: h + torch.cdist(h[:, None], h.sin()[:, None])[:, 0]),
    "pairs": _simple(
        lambda h: h + F.cosine_similarity(h[:, None], h[None], -1).mean(1, keepdim=True)
    ),
    "order": _simple(lambda h: h.gather(1, h.argsort(1))),
    "buckets": _simple(lambda h: h + torch.bucketize(h.detach(), torch.tensor([-0.5, 0.0, 0.5]))),
    "rounded": _simple(lambda h: h + (h * 4).round().detach() / 4),
    "bfloat16": (
        [_linear],
        lambda h, ids, f: (h.bfloat16() @ f.weight.bfloat16()).to(h) / 4 + f(h),
    ),
    "float64": (
        [_linear],
        lambda h, ids, f: (h.double().cumsum(1) @ f.weight.double()).to(h) + f(h),
    ),
    "half": _simple(lambda h: h + h.half().to(h)),
    "autocast": ([_linear], _autocast),
    "fourier": _simple(lambda h: torch.fft.rfft(h).abs().repeat(1, 2)[:, :WIDTH]),
    "complex": _simple(
        lambda h: torch.view_as_real(torch.view_as_complex(h.reshape(-1, 3, 2)).exp()).reshape(
            -1, WIDTH
        )
    ),
    "solve": (
        [_linear],
        lambda h, ids, f: torch.linalg.solve(f.weight + 3 * torch.eye(WIDTH), h.T).T,
    ),
    "matrix exp": ([_linear], lambda h, ids, f: h @ torch.linalg.matrix_exp(f.weight)),
    "determinant": _simple(lambda h: h + torch.linalg.det(h[:, :4].reshape(-1, 2, 2))[:, None]),
    "checkpoint": (
        [_linear, _linear],
        lambda h, ids, f, g: torch.utils.checkpoint.checkpoint(
            lambda t: g(f(t).tanh()), h, use_reentrant=False
        ),
    ),
    "own gradient": _simple(lambda h: _Doubling.apply(h)),
    "stretched": _simple(lambda h: h.repeat_interleave(2, 1)[:, ::2] + h.movedim(0, 1).T),
    "in place": _simple(lambda h: (h * 2).add_(1).mul_(h).clamp_(max=3)),
    "written slice": _simple(lambda h: _written_slice(h)),
    "special": _simple(
        lambda h: torch.special.expit(h) + torch.erf(h) + torch.special.i0e(h) + h.sinc()
    ),
    "powers": _simple(lambda h: (h.abs() + 0.1) ** 1.5 + 2.0**h + h.square().add(0.1).rsqrt()),
    "shared": ([_linear], lambda h, ids, f: f(f(h).relu())),
    "scaled by a number": ([lambda: Knob()], lambda h, ids, f: f(h)),
}


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


# From ``[batch, length, WIDTH]`` to ``[batch, WIDTH]``, for programs with a second dynamic axis.
READERS: dict[str, tuple] = {
    "mean": _simple(lambda x: x.mean(1)),
    "maximum": _simple(lambda x: x.amax(1)),
    "last": _simple(lambda x: x[:, -1] + x[:, 0]),
    "sum of squares": _simple(lambda x: x.square().sum(1).sqrt()),
    "weighed": _simple(lambda x: (x.softmax(1) * x).sum(1)),
    "causal rows": _simple(
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True).sum(1)
    ),
    "cumulative": _simple(lambda x: x.cumsum(1)[:, x.shape[1] // 2]),
    "sorted": _simple(lambda x: x.sort(1).values[:, 0]),
    "gru over rows": _layer(
        lambda: nn.GRU(WIDTH, WIDTH, batch_first=True), lambda x: x, lambda out: out[0][:, -1]
    ),
    "conv over rows": _layer(
        lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
        lambda x: x.transpose(1, 2),
        lambda h: h.amax(2),
    ),
    "positions": (
        [lambda: nn.Embedding(LONGEST - 1, WIDTH)],
        lambda x, ids, e: (x + e(torch.arange(x.shape[1]))).tanh().mean(1),
    ),
    "bag of rows": ([], lambda x, ids: torch.einsum("bli,bi->bi", x, x[:, 0])),
}


class Net(nn.Module):
    def __init__(
        self, names: list[str], loss: str, counts: bool, reader: str | None, returns: bool
    ) -> None:
        super().__init__()
        self.reader = None if reader is None else Piece(reader)
        self.first = _linear()
        self.pieces = nn.ModuleList(Piece(name) for name in names)
        if counts:
            self.pieces.append(CountedNorm())
        self.last = _linear()
        self.loss, self.returns = loss, returns

    def forward(self, x: torch.Tensor, ids: torch.Tensor, y: torch.Tensor) -> object:
        h = self.first(x if self.reader is None else self.reader(x, ids))
        for piece in self.pieces:
            h = piece(h, ids)
        h = self.last(h)
        loss = LOSSES[self.loss](h, ids, y)
        return (loss, h.detach()) if self.returns else loss


class Mismatch(AssertionError):
    """A step neither equals eager's nor was refused with nothing written."""


class Program:
    """One module and optimizer, compiled once; `habits` runs a random loop with it."""

    def __init__(self, seed: int) -> None:
        self.seed, self.log, self.has_summed = seed, [], False
        choose = random.Random(seed)
        torch.manual_seed(seed)
        names = choose.sample(sorted(PIECES), choose.randint(2, 4))
        self.shrinks = any("shrink" in name for name in names)
        loss, optimizer = choose.choice(sorted(LOSSES)), choose.choice(sorted(OPTIMIZERS))
        self.reader = choose.choice(sorted(READERS)) if choose.random() < 0.25 else None
        self.model = Net(names, loss, choose.random() < 0.3, self.reader, choose.random() < 0.5)
        self.model.train(choose.random() < 0.9)
        if choose.random() < 0.2:
            frozen = choose.choice(list(self.model.parameters()))
            frozen.requires_grad_(False)
        made = OPTIMIZERS[optimizer]([p for p in self.model.parameters() if p.requires_grad])
        self.optimizers = made if isinstance(made, list) else [made]
        self.note(
            f"{self.reader} {names}, {loss}, {optimizer}, training={self.model.training}, "
            f"returns={self.model.returns}"
        )
        batch = torch.export.Dim("batch", min=1, max=LARGEST)
        shapes = [{0: batch}, {0: batch}, {0: batch}]
        if self.reader is not None:
            shapes[0][1] = torch.export.Dim("length", min=1, max=LONGEST)
        example = tuple(self.batch(choose, 4))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RelaxDiscWarning)
            self.step = relax_disc.compile(self.model, made, example, dynamic_shapes=tuple(shapes))

    def groups(self) -> list[dict]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def saved(self) -> Callable:
        """Return what puts model and optimizers back to their values of now."""
        model = copy.deepcopy(self.model.state_dict())
        states = [copy.deepcopy(optimizer.state_dict()) for optimizer in self.optimizers]

        def put_back() -> None:
            self.model.load_state_dict(model)
            for optimizer, state in zip(self.optimizers, states, strict=True):
                optimizer.load_state_dict(state)

        return put_back

    def note(self, text: str) -> None:
        self.log.append(text)

    def batch(self, choose: random.Random, size: int | None = None) -> list[torch.Tensor]:
        size = choose.choice([1, 2, 3, 5, 8, LARGEST]) if size is None else size
        ids = torch.randint(0, CLASSES, (size, 3))
        inner = (WIDTH,) if self.reader is None else (choose.randint(1, LONGEST - 1), WIDTH)
        return [torch.randn(size, *inner), ids, torch.randn(size, WIDTH)]

    def tensors(self) -> dict[str, torch.Tensor]:
        found = _state(self.model, self.optimizers)
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                found[f"{name}.grad"] = parameter.grad
        return {name: tensor.detach().clone() for name, tensor in found.items()}

    def habits(self, seed: int) -> None:
        """Run a random loop.

        Raises
        ------
        Mismatch
            Names the step and what differs.
        """
        torch.manual_seed(seed)
        choose = random.Random(seed)
        self.note(f"habits {seed}")
        for _ in range(HABITS_A_PROGRAM):
            name = choose.choice(sorted(HABITS))
            batch = self.batch(choose)
            self.note(f"  {name}, batch of {len(batch[0])}")
            self.regions, self.call, self.alias = [], {}, None
            undo = HABITS[name](self, choose, batch)
            self._compare(batch, self.regions, self.call)
            if undo is not None:
                undo()

    def _compare(self, batch: list[torch.Tensor], regions: Sequence[Callable], call: dict) -> None:
        before = self.tensors()
        given = [torch.as_tensor(each).detach().clone() for each in batch]
        model, optimizers = copy.deepcopy((self.model, self.optimizers))
        before_step = copy.deepcopy((model, optimizers))
        failure = results = None
        try:
            with _all(regions):
                results = _train(model, optimizers, [tensor.clone() for tensor in given])
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            failure = error
        try:
            with _all(regions), warnings.catch_warnings():
                warnings.simplefilter("ignore", RelaxDiscWarning)
                found = self.step(*batch, **call)
        except RelaxDiscError as error:
            self.note(f"    refused: {type(error).__name__}: {str(error)[:100]}")
            after = self.tensors()
            for name in before.keys() | after.keys():
                same = name in before and name in after
                if not same or not _identical(before[name], after[name]):
                    raise Mismatch(self.report(f"{name} was written by a refused step")) from error
            return
        if failure is not None:
            raise Mismatch(self.report(f"eager raises {failure!r}, the step gives {found}"))
        for number, (tensor, was) in enumerate(zip(batch, given, strict=True)):
            if self.alias is not tensor and not _identical(torch.as_tensor(tensor).detach(), was):
                raise Mismatch(self.report(f"argument {number} of the batch was written"))
        if call.get("update") is False:
            for optimizer in self.optimizers:
                optimizer.step()
        results = pytree.tree_leaves(results)
        found = _named(pytree.tree_leaves(found)) | self.tensors()
        wanted = _named(results) | _state(model, optimizers)
        # PyTorch's own forms of a gradient then differ, those of softshrink by a tensor's size; and
        # here no decay of an infinite parameter is not a number (0 times infinity).
        odd, broken = (
            not all(tensor.isfinite().all() for tensor in tensors)
            for tensors in (given, before.values())
        )
        if not results[0].isfinite() or broken or (odd and self.shrinks):
            wanted = _named(results)
        slacks = _slacks(model, optimizers)
        off = [
            name
            for name, value in wanted.items()
            if not _close(found[name], value, 2e-4 + slacks.get(name, 0.0))
        ]
        if not off:
            return
        exact = self._in_float64(before_step, given)
        for name in off:
            error, usual = (
                (values[name].double() - exact[name]).abs().nan_to_num(0.0, posinf=0.0)
                for values in (found, wanted)
            )
            finite = wanted[name].isfinite()
            same = finite == found[name].isfinite()
            bound = 30 * usual.max() + slacks.get(name, 0.0)
            if not bool((same & ((error <= bound) | ~finite)).all()):
                text = f"{name} is {found[name]}, eager's {wanted[name]}, in float64 {exact[name]}"
                raise Mismatch(self.report(text))

    def _in_float64(self, before: tuple, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Eager's step once more, wide: what rounding explains is no mismatch."""
        model, optimizers = copy.deepcopy(before)
        model.double()
        for state in (state for o in optimizers for state in o.state.values()):
            state |= {k: v.double() for k, v in state.items() if torch.is_tensor(v) and v.dim()}
        wide = [t.double() if t.is_floating_point() else t for t in batch]
        results = _train(model, optimizers, wide)
        return _named(pytree.tree_leaves(results)) | _state(model, optimizers)

    def report(self, what: str) -> str:
        lines = "\n".join(self.log)
        return f"{what}\n{lines}\npython tests/training/fuzz_programs.py {self.seed}"


def _train(model: nn.Module, optimizers: list, batch: list[torch.Tensor]) -> object:
    """One step of eager PyTorch; its results are detached."""
    for parameter in model.parameters():
        parameter.grad = None
    results = model(*batch)
    pytree.tree_leaves(results)[0].backward()
    for optimizer in optimizers:
        optimizer.step()
    return pytree.tree_map(lambda t: t.detach(), results)


@contextlib.contextmanager
def _all(regions: Sequence[Callable]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for region in regions:
            stack.enter_context(region())
        yield


def _named(results: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"result {number}": tensor.detach() for number, tensor in enumerate(results)}


def _state(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    found = dict(model.state_dict())
    for owner, module in model.named_modules():
        found |= {f"{owner}.{k}": v for k, v in vars(module).items() if torch.is_tensor(v)}
    for number, optimizer in enumerate(optimizers):
        for place, parameter in enumerate(_parameters(optimizer)):
            state = optimizer.state.get(parameter, {})
            tensors = {k: v for k, v in state.items() if torch.is_tensor(v)}
            found |= {f"{number}.{place} {k}": v for k, v in tensors.items()}
    return found


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _slacks(model: nn.Module, optimizers: list) -> dict[str, torch.Tensor]:
    """How far a parameter may be off where its gradient is rounding alone.

    Optimizers that divide by the gradient's size make steps of the learning rate from it.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    slacks = {}
    for number, optimizer in enumerate(optimizers):
        if isinstance(optimizer, torch.optim.SGD | torch.optim.ASGD):
            continue
        by_sign = isinstance(optimizer, torch.optim.Rprop)
        for place, parameter in enumerate(_parameters(optimizer)):
            state = optimizer.state.get(parameter, {})
            if parameter.grad is None or parameter not in names:
                continue
            size = parameter.grad.abs()
            noise = size <= 1e-4 * size.max() + 1e-6
            rate = max(group["lr"] for group in optimizer.param_groups)
            slack = noise * (1e9 if by_sign else 3 * rate)
            slacks[names[parameter]] = slack
            if by_sign:
                slacks |= {f"{number}.{place} {key}": slack for key in state if key != "step"}
    return slacks


def _close(found: torch.Tensor, wanted: torch.Tensor, atol: float | torch.Tensor) -> bool:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    near = (found - wanted).abs() <= atol + 2e-3 * wanted.abs()
    return bool((near | (found == wanted) | (found.isnan() & wanted.isnan())).all())


def _identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and torch.equal(a.isnan(), b.isnan())
        and bool(((a == b) | a.isnan()).all())
    )


HABITS: dict[str, Callable] = {}


def habit(function: Callable) -> Callable:
    HABITS[function.__name__] = function
    return function


@habit
def nothing(program, choose, batch):
    pass


@habit
def another_rate(program, choose, batch):
    for group in program.groups():
        group["lr"] *= choose.choice([0.5, 0.9, 1.1])


@habit
def another_decay(program, choose, batch):
    program.groups()[0]["weight_decay"] = choose.choice([0.0, 0.02])


@habit
def scheduler(program, choose, batch):
    for optimizer in program.optimizers:
        torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)


@habit
def other_mode(program, choose, batch):
    was = program.model.training
    program.model.train(not was)
    return lambda: program.model.train(was)


@habit
def mode_of_a_part(program, choose, batch):
    part = choose.choice(list(program.model.modules()))
    was = part.training
    part.training = not was

    def undo():
        part.training = was

    return undo


@habit
def freeze(program, choose, batch):
    parameter = choose.choice(list(program.model.parameters()))
    was = parameter.requires_grad
    parameter.requires_grad_(not was)
    return lambda: parameter.requires_grad_(was)


@habit
def write_parameter(program, choose, batch):
    with torch.no_grad():
        choose.choice(list(program.model.parameters())).mul_(0.9)


@habit
def replace_data(program, choose, batch):
    parameter = choose.choice(list(program.model.parameters()))
    parameter.data = parameter.data.clone() * 0.95


@habit
def write_buffer(program, choose, batch):
    floats = [b for b in program.model.buffers() if b.is_floating_point()]
    if floats:
        choose.choice(floats).mul_(0.9)


@habit
def load_model(program, choose, batch):
    state = {k: v.clone() for k, v in program.model.state_dict().items()}
    program.model.load_state_dict(state)


@habit
def load_optimizer(program, choose, batch):
    for optimizer in program.optimizers:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@habit
def clear_gradients(program, choose, batch):
    program.model.zero_grad(set_to_none=choose.random() < 0.5)


@habit
def index_out_of_range(program, choose, batch):
    row, column = choose.randrange(len(batch[1])), choose.randrange(3)
    batch[1][row, column] = choose.choice([7, -1, -7, 10**8, -(10**15), CLASSES])


def odd_value(program, choose, batch, place):
    program.step.check_finite = choose.random() < 0.5
    values = batch[place].view(-1)
    for _ in range(choose.choice([1, 1, 5])):
        values[choose.randrange(len(values))] = choose.choice([torch.nan, torch.inf, -torch.inf])
    return None if program.step.check_finite else program.saved()


@habit
def not_a_number(program, choose, batch):
    return odd_value(program, choose, batch, 0)


@habit
def odd_target(program, choose, batch):
    return odd_value(program, choose, batch, 2)


@habit
def odd_parameter(program, choose, batch):
    program.step.check_finite = choose.random() < 0.5
    put_back = program.saved()
    with torch.no_grad():
        program.model.first.bias[choose.randrange(WIDTH)] = choose.choice([torch.nan, torch.inf])
    return put_back


@habit
def large_values(program, choose, batch):
    put_back = program.saved()
    batch[0].mul_(choose.choice([0.0, 1e-6, 30.0, 1e30]))
    return put_back


@habit
def strided_batch(program, choose, batch):
    batch[0] = torch.cat([batch[0], batch[0]], 1)[:, ::2]


@habit
def batch_wants_gradient(program, choose, batch):
    batch[0].requires_grad_()


@habit
def too_large(program, choose, batch):
    batch[:] = program.batch(choose, LARGEST + 3)


@habit
def empty(program, choose, batch):
    batch[:] = program.batch(choose, 0)


@habit
def other_type(program, choose, batch):
    place = choose.choice([0, 1])
    batch[place] = batch[place].to([torch.float64, torch.int32][place])


@habit
def sizes_that_differ(program, choose, batch):
    batch[2] = torch.randn(len(batch[0]) % LARGEST + 1, WIDTH)


@habit
def tight_budget(program, choose, batch):
    program.step.memory_budget = choose.choice([1000, 50_000, "1MiB"])

    def undo():
        program.step.memory_budget = None

    return undo


@habit
def report(program, choose, batch):
    program.step.memory_report()
    torch.manual_seed(choose.randrange(100))


@habit
def other_values(program, choose, batch):
    state = {
        k: v + 0.1 if v.is_floating_point() else v for k, v in program.model.state_dict().items()
    }
    program.model.load_state_dict(state)


@habit
def add_param_group(program, choose, batch):
    optimizer = choose.choice(program.optimizers)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    return optimizer.param_groups.pop


@habit
def other_setting(program, choose, batch):
    group = choose.choice(program.groups())
    implementation = {"capturable", "differentiable", "foreach", "fused"}
    name = choose.choice(sorted(set(group) - {"params", "lr", *implementation}))
    was = group[name]
    match was:
        case bool():
            group[name] = not was
        case float():
            group[name] = choose.choice([0.0, 0.5, 0.95, was * 1.1])
        case tuple():
            group[name] = tuple(value * 0.99 if value else value for value in was)
        case _:
            return None

    def undo():
        group[name] = was

    return undo


@habit
def other_attribute(program, choose, batch):
    module = choose.choice(list(program.model.modules()))
    numbers = sorted(
        k
        for k, v in vars(module).items()
        if isinstance(v, int | float) and k not in ("training", "returns") and k[0] != "_"
    )
    if not numbers:
        return None
    name = choose.choice(numbers)
    was = getattr(module, name)
    program.note(f"    {type(module).__name__}.{name}")
    setattr(module, name, not was if isinstance(was, bool) else was + 1)
    return lambda: setattr(module, name, was)


@habit
def knobs(program, choose, batch):
    for module in program.model.modules():
        if isinstance(module, Knob):
            module.scale *= 1.5
            module.shift = module.shift + 0.1
            module.shift.add_(0.1)


@habit
def another_layer(program, choose, batch):
    was, program.model.last = program.model.last, _linear()

    def undo():
        program.model.last = was

    return undo


@habit
def hook(program, choose, batch):
    trained = choose.choice(program.groups()[0]["params"])
    module = choose.choice(list(program.model.modules()))
    registered = choose.choice(
        [
            lambda: module.register_forward_hook(lambda *_: None),
            lambda: module.register_full_backward_hook(lambda *_: None),
            lambda: trained.register_hook(lambda g: g * 2),
            lambda: program.optimizers[0].register_step_pre_hook(lambda *_: None),
        ]
    )()
    return registered.remove


@habit
def region(program, choose, batch):
    program.regions.append(
        choose.choice(
            [
                lambda: torch.autocast("cpu", torch.bfloat16),
                torch.no_grad,
                torch.inference_mode,
                torch.enable_grad,
                torch.autograd.detect_anomaly,
            ]
        )
    )


@habit
def default_type(program, choose, batch):
    torch.set_default_dtype(torch.float64)
    return lambda: torch.set_default_dtype(torch.float32)


@habit
def keep_gradients(program, choose, batch):
    program.call["keep_gradients"] = choose.random() < 0.4
    return program.model.zero_grad


@habit
def own_update(program, choose, batch):
    if choose.random() < 0.4:
        program.model.zero_grad()
        program.call["update"], program.has_summed = False, True
    return program.model.zero_grad


@habit
def gradients_before(program, choose, batch):
    if not program.has_summed:  # gradients that follow a sum belong to it
        program.model.first.weight.grad = torch.ones(WIDTH, WIDTH)
    return program.model.zero_grad


@habit
def other_width(program, choose, batch):
    place = choose.choice([0, 2])
    batch[place] = choose.choice([lambda t: t[..., 1:], lambda t: t[None], lambda t: t.tolist()])(
        batch[place]
    )


@habit
def too_few(program, choose, batch):
    batch.pop()


@habit
def too_long(program, choose, batch):
    if program.reader is not None:
        length = choose.choice([0, LONGEST, LONGEST + 2])
        batch[0] = torch.randn(len(batch[0]), length, WIDTH)


@habit
def the_same_twice(program, choose, batch):
    if program.reader is None:
        batch[2] = batch[0]


@habit
def expanded(program, choose, batch):
    batch[0], batch[1] = batch[0][:1].expand_as(batch[0]), batch[1][:1].expand_as(batch[1])


@habit
def shifted(program, choose, batch):
    batch[:] = [torch.cat([tensor[:1], tensor])[1:] for tensor in batch]
    batch[2] = batch[2].T.contiguous().T


@habit
def memory_of_a_parameter(program, choose, batch):
    batch[2] = program.alias = program.model.first.weight.detach()
    batch[:2] = program.batch(choose, len(batch[2]))[:2]


@habit
def double_model(program, choose, batch):
    put_back = program.saved()
    program.model.double()

    def undo():
        program.model.float()
        put_back()

    return undo


@habit
def written_results(program, choose, batch):
    with contextlib.suppress(RelaxDiscError):
        for result in pytree.tree_leaves(program.step(*batch)):
            result.fill_(7.0)


@habit
def another_thread(program, choose, batch):
    thread = threading.Thread(target=program.model.state_dict)
    thread.start()
    thread.join()


@habit
def calibrate(program, choose, batch):
    if choose.random() < 0.1:
        with contextlib.suppress(RelaxDiscError):  # earlier values led to one value in each mean
            program.step.calibrate(*batch, repeats=1)


def run(seed: int, loops: int = 4) -> int:
    """Compile a program and run some loops with it; return how many were run.

    Raises
    ------
    Mismatch
        What differs, all that was done, and the command that does it again.
    """
    try:
        program = Program(seed)
    except RelaxDiscError as error:
        print(f"{seed}: not compiled: {str(error)[:300]}")
        return loops
    for loop in range(loops):
        program.habits(1000 * seed + loop)
    if __name__ == "__main__":
        print("\n".join(program.log))
    return loops


if __name__ == "__main__":
    for number in sys.argv[1:]:
        run(int(number))
