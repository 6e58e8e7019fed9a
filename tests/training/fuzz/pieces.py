"""Random layers of training programs: from ``[batch, WIDTH]`` and ids ``[batch, 3]``."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

WIDTH, CLASSES, LARGEST, LONGEST = 6, 5, 9, 7


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


def linear() -> nn.Module:
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
    "linear": _layer(linear),
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
    "attention": ([linear, linear], _attention),
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
    "einsum": ([linear], lambda h, ids, f: torch.einsum("bi,bj->bj", h, f(h))),
    "outer": _simple(lambda h: (h[:, :, None] * h[:, None, :]).logsumexp(2)),
    "pad": _simple(lambda h: F.pad(h, (1, 1))[:, 1:-1] + F.pad(h, (0, 1))[:, 1:]),
    "unbind": _simple(lambda h: torch.stack(h.unbind(1)[::-1], 1)),
    "chunk": _simple(lambda h: torch.cat([part.exp() for part in h.chunk(2, 1)], 1).log1p()),
    "batch mean": _simple(lambda h: h - h.mean(0)),
    "batch share": _simple(lambda h: h / (1 + h.abs().sum(0))),
    "variance": _simple(lambda h: h * h.var(1, keepdim=True)),
    "detach": ([linear], lambda h, ids, f: f(h) + h.detach()),
    "residual": ([linear, linear], lambda h, ids, f, g: h + g(F.relu(f(h)))),
    "weight norm": _layer(lambda: nn.utils.parametrizations.weight_norm(linear())),
    "relu6": _simple(F.relu6),
    "hardshrink": _simple(F.hardshrink),
    "threshold": _simple(lambda h: F.threshold(h, 0.1, 0.2)),
    "softmin": _simple(lambda h: F.softmin(h, 1)),
    "no dropout": _layer(lambda: nn.Dropout(0.0)),
    "identity": _layer(nn.Identity),
    "spectral norm": _layer(lambda: nn.utils.parametrizations.spectral_norm(linear())),
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
        [linear],
        lambda h, ids, f: (h.bfloat16() @ f.weight.bfloat16()).to(h) / 4 + f(h),
    ),
    "float64": (
        [linear],
        lambda h, ids, f: (h.double().cumsum(1) @ f.weight.double()).to(h) + f(h),
    ),
    "half": _simple(lambda h: h + h.half().to(h)),
    "autocast": ([linear], _autocast),
    "fourier": _simple(lambda h: torch.fft.rfft(h).abs().repeat(1, 2)[:, :WIDTH]),
    "complex": _simple(
        lambda h: torch.view_as_real(torch.view_as_complex(h.reshape(-1, 3, 2)).exp()).reshape(
            -1, WIDTH
        )
    ),
    "solve": (
        [linear],
        lambda h, ids, f: torch.linalg.solve(f.weight + 3 * torch.eye(WIDTH), h.T).T,
    ),
    "matrix exp": ([linear], lambda h, ids, f: h @ torch.linalg.matrix_exp(f.weight)),
    "determinant": _simple(lambda h: h + torch.linalg.det(h[:, :4].reshape(-1, 2, 2))[:, None]),
    "checkpoint": (
        [linear, linear],
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
    "shared": ([linear], lambda h, ids, f: f(f(h).relu())),
    "scaled by a number": ([lambda: Knob()], lambda h, ids, f: f(h)),
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
