"""Every converter against PyTorch at several shapes; the table holds nothing that is not run."""

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

from relax_disc.frontend.capture import _build, _Wanted
from relax_disc.frontend.converters import TABLE
from relax_disc.frontend.export import export, wrap_forward
from relax_disc.frontend.importer import refuse_unknown
from relax_disc.frontend.trace import trace_forward
from tests.frontend.running import Runner

N, M = Dim("n", min=1, max=9), Dim("m", min=5, max=20)
SIZES = [(4, 6), (1, 5), (9, 20), (5, 9)]
aten = torch.ops.aten

# Each function gets float tensors x, y [n, m], p [n, m] > 0.1, integers i [n, m] in [0, 2),
# j [n, m] in [-5, 5), booleans b [n, m].  What they use is written in their argument names.
FAMILIES = {
    "arithmetic": [
        lambda x, y: x + y,
        lambda x: aten.add.Scalar(x, 2, 3),
        lambda x, y: torch.add(x, y, alpha=0.5),
        lambda x: 3 - x,
        lambda x, y: torch.sub(x, y, alpha=2),
        lambda x, y: torch.rsub(x, y),
        lambda x: aten.sub.Scalar(x, 2),
        lambda x, y: x * y,
        lambda x: aten.mul.Scalar(x, 2.5),
        lambda x, p: x / p,
        lambda j: j / 2,
        lambda x: aten.div.Scalar(x, 3),
        lambda x, p: torch.div(x, p, rounding_mode="floor"),
        lambda x, p: torch.div(x, p, rounding_mode="trunc"),
        lambda j: torch.div(j, 2, rounding_mode="trunc"),
        lambda j: j // 2,
        lambda j: torch.div(j, 3, rounding_mode="floor"),
        lambda x, p: torch.remainder(x, p),
        lambda j: j % 3,
        lambda x, p: torch.fmod(x, p),
        lambda j: torch.fmod(j, 3),
        lambda x, y: torch.maximum(x, y),
        lambda x, y: torch.minimum(x, y),
        lambda x, i: x * i,
        lambda i, b: i + b,
        lambda x: x * x.shape[0],
        lambda x: x / x.numel(),
        lambda x: x + x.shape[0] / x.shape[1],
        lambda x: x * x.shape[0] ** 0.5,
        lambda x, y: torch.atan2(x, y),
    ],
    "powers": [
        *[lambda x, e=e: x.double() ** e for e in (0, 1, 2, 3, 4, -1, -2)],
        *[lambda p, e=e: p**e for e in (0.5, -0.5, 1.7)],
        lambda p, x: p**x,
        lambda x: 2.0**x,
        lambda j: j**2,
        lambda p: torch.reciprocal(p),
    ],
    "unary": [
        *[
            lambda x, f=f: f(x)
            for f in (torch.neg, torch.sign, torch.floor, torch.ceil, torch.round, torch.trunc)
        ],
        *[lambda x, f=f: f(x) for f in (torch.relu, torch.square, torch.abs, torch.exp)],
        *[lambda x, f=f: f(x) for f in (torch.sin, torch.cos, torch.tan, torch.tanh)],
        *[lambda x, f=f: f(x) for f in (torch.sigmoid, torch.erf, torch.sinh, torch.cosh)],
        *[lambda x, f=f: f(x) for f in (torch.atan, torch.asinh, torch.expm1)],
        *[lambda x, f=f: f(torch.tanh(x) * 0.9) for f in (torch.asin, torch.acos, torch.atanh)],
        *[lambda p, f=f: f(p) for f in (torch.log, torch.sqrt, torch.rsqrt, torch.log1p)],
        *[lambda p, f=f: f(p) for f in (torch.log2, torch.log10)],
        lambda p: torch.acosh(p + 1),
        lambda x: torch.expm1(x * 1e-4),
        lambda x: torch.log1p(x.abs() * 1e-6),
        lambda j: torch.abs(j),
        lambda j: torch.neg(j),
        lambda i: torch.exp(i),
        lambda x: F.gelu(x),
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: F.leaky_relu(x, 0.2),
        lambda x: F.silu(x),
        lambda x: F.softplus(x),
        lambda x: F.elu(x),
        lambda x: F.hardswish(x),
        lambda x: F.mish(x),
        lambda x: F.logsigmoid(x),
        lambda x: F.hardtanh(x),
        lambda x: aten.square(x),
    ],
    "comparisons": [
        *[
            lambda x, y, f=f: f(x, y)
            for f in (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge)
        ],
        *[
            lambda x, f=f: f(x, 0.25)
            for f in (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge)
        ],
        lambda x: x.clamp(-0.5, 0.5),
        lambda x: x.clamp(min=0.1),
        lambda x: x.clamp(max=0.1),
        lambda x, y: torch.clamp(x, y, y + 1),
        lambda b, x, y: torch.where(b, x, y),
        lambda b, x: torch.where(b, x, 0.0),
        lambda b, x: torch.where(b, 1.0, x),
        lambda b: ~b,
        lambda j: ~j,
        lambda x: torch.logical_not(x > 0),
        lambda x, j: torch.logical_and(x > 0, j),
        lambda x, j: torch.logical_or(x > 0, j),
        lambda x, j: torch.logical_xor(x > 0, j),
        lambda b, x: b & (x > 0),
        lambda b, x: b | (x > 0),
        lambda b, x: b ^ (x > 0),
        lambda i, j: i & j,
        lambda i, j: i | j,
        lambda i, j: i ^ j,
        lambda i: aten.bitwise_and.Scalar(i, 1),
        lambda i: aten.bitwise_or.Scalar(i, 6),
        lambda i: aten.bitwise_xor.Scalar(i, 3),
        lambda x: torch.isnan(torch.log(x)),
        lambda x: torch.isinf(x / 0),
        lambda i: torch.isnan(i),
        lambda x: torch.masked_fill(x, x > 0, -1.0),
        lambda x: x.to(torch.int64),
        lambda x: x.double(),
        lambda x: x.bfloat16() * 1.1,
        lambda x: (x.half() + 0.1).exp(),
        lambda b: b.float(),
        lambda x: torch.ops.prims.convert_element_type(x, torch.float64),
    ],
    "nan": [
        lambda x, y: torch.maximum(torch.log(x), y),
        lambda x, y: torch.minimum(x, torch.log(y)),
        lambda x: torch.log(x).clamp(0, 1),
        lambda x: torch.relu(torch.log(x)),
    ],
    "views": [
        lambda x: x.reshape(-1),
        lambda x: x.view(x.shape[0], 1, x.shape[1]),
        lambda x: aten._unsafe_view(x, [x.shape[1], x.shape[0]]),
        lambda x: x[:, None],
        lambda x: x[:, None].squeeze(1),
        lambda x: x[None, :, None].squeeze((0, 2)),
        lambda x: aten.squeeze.default(x.sum().reshape(1)),
        lambda x: x[:, None].expand(-1, 3, -1),
        lambda x: x.t(),
        lambda x: aten.t(x),
        lambda x: x.transpose(0, 1),
        lambda x: x[None].permute(2, 0, 1),
        lambda x: aten.transpose.int(x, 0, 1),
        lambda x: aten.reshape(x, [x.numel()]),
        lambda x: aten.detach(x),
        lambda x: x.clone(),
        lambda x, i: aten.copy(x, i[:1]),
        lambda x: aten.alias(x),
        lambda x: aten.lift_fresh(x),
        lambda x: aten.lift_fresh_copy(x),
    ],
    "slices": [
        lambda x: x[:, 1:],
        lambda x: x[:, :-1],
        lambda x: x[:, -2:],
        lambda x: x[:, ::2],
        lambda x: x[:, 1::2],
        lambda x: x[:, :1],
        lambda x: x[:, : x.shape[1] // 2],
        lambda x: x[:, x.shape[1] // 2 :],
        lambda x: x[0],
        lambda x: x[:, -1],
        lambda x, y: torch.cat([x, y], 1),
        lambda x, i: torch.cat([x, i], 0),
        lambda x, y: torch.stack([x, y], 1),
        lambda x: aten.split_with_sizes(x, [1, x.shape[1] - 1], 1)[1],
        lambda x, i: aten.split.Tensor(torch.cat([x[:, :2], x[:, :2]], 1), 2, 1)[1],
        lambda x: torch.flip(x, [1]),
        lambda x: torch.roll(x, 1, 1),
        lambda x: x.repeat(2, 1, 3),
        lambda x: x.repeat_interleave(2, 1),
        lambda x: F.pad(x, (1, 2)),
        lambda x: F.pad(x, (1, 0, 0, 2), value=7.0),
        lambda x: F.pad(x, (0, -1)),
        lambda x: torch.slice_scatter(x, x[:, :1] * 2, 1, 0, 1),
        lambda x: torch.slice_scatter(x, x[:, 1::2] * 2, 1, 1, None, 2),
        lambda x: torch.select_scatter(x, x[:, 0] * 2, 1, -1),
        lambda x: aten.slice_backward(x[:, 1:], x.shape, 1, 1, 2**63 - 1, 1),
        lambda x: aten.slice_backward(x[:, ::2], x.shape, 1, 0, 2**63 - 1, 2),
        lambda x: aten.select_backward(x[:, 1], x.shape, 1, 1),
        lambda x: aten.select_backward(x[:, 1], x.shape, 1, -1),
        lambda x: x.unfold(1, 3, 2),
        lambda x: aten.unfold_backward(x.unfold(1, 3, 2), x.shape, 1, 3, 2),
    ],
    "reductions": [
        lambda x: x.sum(),
        lambda x: x.sum(1),
        lambda x: x.sum((0, 1), keepdim=True),
        lambda b: b.sum(1),
        lambda x: x.mean(),
        lambda x: x.mean(-1, keepdim=True),
        lambda x: x.bfloat16().sum(1),
        lambda x: x.amax(1),
        lambda x: x.amin((0, 1)),
        lambda x: x.max(),
        lambda x: x.min(),
        lambda b: b.any(),
        lambda b: b.any(1),
        lambda b: b.all(),
        lambda b: b.all(1, keepdim=True),
        lambda x: aten.any.dims(x > 0, [0, 1]),
        lambda x: aten.all.dims(x > 0, [0, 1]),
        lambda x: x.var(1),
        lambda x: x.std(1, correction=0),
        lambda x: torch.var_mean(x, 1, correction=0)[0],
        lambda x: torch.var_mean(x, (0, 1), keepdim=True)[1],
        lambda x: torch.softmax(x, 1),
        lambda x: torch.softmax(x, 0),
        lambda x: torch.softmax(x.bfloat16(), 1),
        lambda x: aten._safe_softmax(torch.where(x > 5, x, float("-inf")), 1),
        lambda x: torch.log_softmax(x, 1),
        lambda x: x.cumsum(1),
        lambda i: i.cumsum(0),
        lambda x: x.argmax(1),
        lambda x: x.argmin(-1, keepdim=True),
        lambda x: x.argmax(),
        lambda x: torch.logsumexp(x, 1),
        lambda x: x.norm(),
        lambda x: F.layer_norm(x[:, None].expand(-1, 3, -1).reshape(-1, 3), (3,)),
        lambda x, y: F.mse_loss(x, y),
        lambda x, y: F.l1_loss(x, y),
        lambda x, y: F.smooth_l1_loss(x, y),
        lambda x, p: F.binary_cross_entropy_with_logits(x, torch.sigmoid(p)),
        lambda x, p: F.binary_cross_entropy(torch.sigmoid(x), torch.sigmoid(p)),
        lambda x, p: F.kl_div(torch.log_softmax(x, 1), torch.softmax(p, 1), reduction="batchmean"),
        lambda x, y: F.cosine_similarity(x, y),
        lambda x: torch.prod(torch.tanh(x), 1),
    ],
    "ranks": [
        lambda x: torch.max(x, 1)[0],
        lambda x: torch.max(x, 1)[1],
        lambda x: torch.min(x, 0, keepdim=True)[1],
        lambda x: torch.searchsorted(torch.arange(-2.0, 2.0), x),
        lambda j: torch.bucketize(j, torch.arange(-2, 2), right=True, out_int32=True),
        lambda x: torch.cumprod(x, 1),
        lambda i: torch.cumprod(i, 0),
        lambda x, y: torch.ops.relax_disc.cumprod_backward(y, x, torch.cumprod(x, 1), 1),
        lambda x: x.prod(),
        *[
            lambda x, i, y, r=r: x.scatter_reduce(1, i, y, r)
            for r in ("sum", "mean", "prod", "amax", "amin")
        ],
        *[
            lambda x, i, y, r=r: x.scatter_reduce(1, i, y, r, include_self=False)
            for r in ("sum", "mean", "prod", "amax", "amin")
        ],
        lambda j, i: j.scatter_reduce(1, i, j, "amax", include_self=False),
    ],
    "pools": [
        lambda x: F.adaptive_avg_pool2d(x[None], (2, 3)),
        lambda x: aten._adaptive_avg_pool2d_backward(torch.ones(1, 2, 3), x[None]),
        lambda x: F.adaptive_avg_pool3d(x[None, :, :, None], (2, 3, 1)),
        lambda x: aten._adaptive_avg_pool3d_backward(torch.ones(1, 2, 3, 1), x[None, :, :, None]),
        lambda x: F.adaptive_max_pool2d(x[None], (2, 3)),
        lambda x: F.adaptive_max_pool3d(x[None, :, :, None], (2, 3, 1)),
        lambda x: aten.adaptive_max_pool2d_backward(
            torch.ones(1, 2, 3), x[None], aten.adaptive_max_pool2d(x[None], [2, 3])[1]
        ),
        lambda x: aten.adaptive_max_pool3d_backward(
            torch.ones(1, 2, 3, 1),
            x[None, :, :, None],
            aten.adaptive_max_pool3d(x[None, :, :, None], [2, 3, 1])[1],
        ),
        lambda x: F.max_pool3d(x[None, None, None], (1, 1, 2)),
        lambda x: F.avg_pool3d(x[None, None, None], (1, 1, 2)),
        lambda x: aten.max_pool3d_with_indices_backward(
            torch.ones_like(x)[None, :, :, None],
            x[None, :, :, None],
            [1, 1, 1],
            [1, 1, 1],
            [0, 0, 0],
            [1, 1, 1],
            False,
            aten.max_pool3d_with_indices(x[None, :, :, None], [1, 1, 1])[1],
        ),
        lambda x: aten.avg_pool3d_backward(
            x[None, :, :, None], x[None, :, :, None], [1, 1, 1], [], [0], False, True, None
        ),
    ],
    "diagonals": [
        lambda x: torch.diagonal(x[:, None] * x[:, :, None], 1, 1, 2),
        lambda x: torch.diagonal_scatter(x[:, None] * x[:, :, None], x[:, 1:] + 1, -1, 2, 1),
        lambda x: x[0, torch.tril_indices(3, 5, 1)[1]],
        lambda x: x[0, torch.triu_indices(3, 5)[1]],
        lambda x: torch.where(x < 9, x, x.new_empty_strided(x.shape, (x.shape[1], 1))),
        lambda x: torch.exp2(x),
    ],
    "matrices": [
        lambda x, y: x @ y.t(),
        lambda x, y: torch.bmm(x[:, None], y[:, :, None]),
        lambda x, y: x.double() @ y.double().t(),
        lambda x, y: torch.mv(x, y[0]),
        lambda x, y: torch.dot(x[0], y[0]),
        lambda x, y: torch.einsum("nm,km->nk", x, y),
        lambda x, y: torch.addmm(x[:, :1], x, y.t(), beta=0.5, alpha=2),
        lambda x, y: torch.baddbmm(x[:, :1, None], x[:, None], y[:, :, None]),
        lambda x, y: torch.outer(x[0], y[0]),
    ],
    "indexing": [
        lambda x, i: F.embedding(i, torch.cat([x, x])[:, :3]),
        lambda x, i: torch.gather(x, 1, i),
        lambda x, i: torch.gather(x, 1, i[:, :1]),
        lambda x, i: torch.zeros_like(x).scatter(1, i[:, :1], x[:, :1]),
        lambda x, i: torch.zeros_like(x).scatter(1, i, 2.5),
        lambda x, i, y: x.scatter(1, i, y),
        lambda x, i, y: x.scatter_add(1, i, y),
        lambda x, i: x[:, i[0]],
        lambda x, i: x[i[:, 0] * 0, i[:, 1]],
        lambda x, i: x[:, None, :, None][:, 0, i[0], 0],
        lambda x, i: x.index_select(1, i[0]),
        lambda x, i, y: x.scatter_add(0, i[:1] * 0, y),
        lambda x, i: aten.index_put(x, [None, i[0]], x.new_ones(()), True),
        lambda x, i, y: torch.index_put(x, (i[:, 0] * 0, i[:, 1]), y[:, 0], True),
        lambda x, y: torch.index_put(x, (torch.arange(x.shape[0]),), y * 2),
        lambda x, i, y: aten._unsafe_index_put(x, [None, torch.arange(2)], y[:, :2]),
        lambda x, b: torch.index_put(x, (b,), x.new_ones(())),
        lambda x, b: torch.index_put(x, (b[:, 0],), x.new_ones(()), True),
        lambda x, i: x[:, :, None].expand(-1, -1, 2)[i[:, 0] * 0, :, i[:, 1]],
        lambda x, i: F.one_hot(i, 3),
        lambda x, i: F.nll_loss(torch.log_softmax(x, 1), i[:, 0]),
        lambda x, i: aten._unsafe_index.Tensor(x, [None, i[0]]),
        lambda x, i: aten.embedding_dense_backward(x[:, :, None].expand(-1, -1, 3), i, 4, 1, False),
    ],
    "creation": [
        lambda x: torch.full((x.shape[0], 3), 2.5),
        lambda x: torch.full_like(x, 3),
        lambda x: x.new_full((2, x.shape[1]), 1),
        lambda x: torch.zeros(x.shape[0]) + torch.zeros_like(x)[:, 0],
        lambda x: x.new_zeros(x.shape[1]) + 1,
        lambda x: torch.ones(x.shape[1], dtype=torch.int32),
        lambda x: torch.ones_like(x) + x.new_ones(x.shape),
        lambda x: torch.arange(x.shape[0]),
        lambda x: torch.arange(1, x.shape[0] + 1, dtype=torch.float32),
        lambda x: torch.arange(0, 2 * x.shape[1], 2),
        lambda x: torch.arange(0.0, 1.0, 0.25),
        lambda x: torch.where(x < 9, x, torch.empty_like(x)),
        lambda x: torch.where(x < 9, x, torch.empty(x.shape)),
        lambda x: torch.where(x < 9, x, x.new_empty(x.shape)),
        lambda x: torch.triu(x, 1),
        lambda x: torch.tril(x),
        lambda x: torch.tril(x > 0, -1),
        lambda x: torch.scalar_tensor(3.5) + x,
        lambda x: x + torch.tensor([1.0]),
        lambda x: torch.linspace(0, 1, 5) + x.sum(),
        lambda x: torch.eye(3) + x.sum(),
        lambda x: torch.ops.prims.iota(
            x.shape[0], start=2, step=3, dtype=torch.int64, device="cpu", requires_grad=False
        ),
    ],
}

SEEN: set[str] = set()

# Run by test_networks.py, test_random.py and test_capture.py.
IN_NETWORKS = {
    "aten.as_strided.default",
    "aten.avg_pool2d.default",
    "aten.avg_pool2d_backward.default",
    "aten.convolution.default",
    "aten.convolution_backward.default",
    "aten.histc.default",
    "aten.max_pool2d_with_indices.default",
    "aten.max_pool2d_with_indices_backward.default",
    "relax_disc.attention.default",
    "relax_disc.attention_backward.default",
    "relax_disc.cross_entropy.default",
    "relax_disc.cross_entropy_backward.default",
    "relax_disc.keep.default",
    "relax_disc.uniform.default",
    "transformers.grouped_mm_fallback.default",
    "transformers.grouped_mm_fallback_backward.default",
    # Run by tests/training/test_recurrence.py, which has the library.
    "relax_disc.recurrence.default",
    "relax_disc.recurrence_backward.default",
    # Run by tests/training/test_operators.py.
    "aten.sort.default",
    "aten.sort.stable",
    "aten.topk.default",
    # Run by tests/training/test_ctc.py.
    "relax_disc.ctc_loss.default",
    "relax_disc.ctc_loss_backward.default",
}


def data(n, m):
    g = torch.Generator().manual_seed(31 * n + m)
    x, y = torch.randn(n, m, generator=g), torch.randn(n, m, generator=g)
    return {
        "x": x,
        "y": y,
        "p": y.abs() + 0.1,
        "i": torch.randint(0, 2, (n, m), generator=g),
        "j": torch.randint(-5, 5, (n, m), generator=g),
        "b": torch.randint(0, 2, (n, m), generator=g).bool(),
    }


class Family(nn.Module):
    def __init__(self, functions):
        super().__init__()
        self.functions = functions

    def forward(self, x, y, p, i, j, b):
        given = {"x": x, "y": y, "p": p, "i": i, "j": j, "b": b}
        outputs = []
        for function in self.functions:
            code = function.__code__
            used = code.co_varnames[: code.co_argcount - len(function.__defaults__ or ())]
            outputs.append(function(*(given[name] for name in used)))
        return tuple(outputs)


def run_family(functions, sizes):
    model = Family(functions)
    example = data(*SIZES[0])
    shapes = {name: {0: N, 1: M} for name in example}
    exported = export(wrap_forward(model), example, shapes)
    traced = trace_forward(exported, model)
    SEEN.update(str(node.target) for node in traced.graph.graph.nodes)
    refuse_unknown(traced)
    run = Runner(_build(exported, traced, [_Wanted(forward=True)])[0])
    for size in sizes:
        batch = data(*size)
        found = run(model, None, (), batch)["extra"]
        expected = model(**batch)
        assert len(found) == len(expected)
        for k, ((_, ours), theirs) in enumerate(zip(found, expected, strict=True)):
            torch.testing.assert_close(
                ours, theirs, equal_nan=True, msg=lambda text, k=k, size=size: f"{k} {size} {text}"
            )


@pytest.mark.parametrize("name", FAMILIES)
def test_converters(name):
    run_family(FAMILIES[name], SIZES)


def test_every_converter_was_exercised():
    if "aten.mm.default" not in SEEN:
        pytest.skip("needs the other tests of this file")
    assert sorted(set(TABLE) - SEEN) == sorted(IN_NETWORKS)
