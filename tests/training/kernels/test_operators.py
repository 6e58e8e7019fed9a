"""Operators of real models with their gradients, against float64, families of them in one build.

Each case has parameters of its own, so that a wrong gradient names its case.
"""

import copy

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

from relax_disc.compiler import build
from relax_disc.frontend import capture_step
from relax_disc.training.compiled_function import CompiledFunction

SIZES = [(4, 6), (1, 5), (7, 12), (3, 9)]
DIMS = Dim("n", min=1, max=7), Dim("m", min=5, max=12)

# Each function gets trained tensors x, y [n, m] and s [n, m, 8], im [n, 3, m, m]; integers
# i [n, m] in [0, 5) and a mask b [n, m]; what it uses is written in its argument names.
FAMILIES = {
    "ranks": {
        "topk": lambda x: torch.topk(x, 3, 1)[0] * torch.arange(3),
        "topk of a middle axis": lambda s: torch.topk(s, 2, 1, largest=False)[0],
        "topk positions": lambda x: x * torch.topk(x, 1, 1)[1],
        "sort": lambda x: torch.sort(x, 1)[0] * torch.arange(x.shape[1]),
        "sort, descending": lambda s: torch.sort(s, 0, descending=True)[0] * torch.arange(8),
        "argsort": lambda x: x * torch.argsort(x, 1),
        "max": lambda x: torch.max(x, 1)[0] ** 2,
        "min of a middle axis": lambda s: torch.min(s, 1, keepdim=True)[0],
        "argmax": lambda x: x * torch.max(x, 1, keepdim=True)[1],
        "median": lambda x: torch.median(x, 1)[0],
        "kthvalue": lambda x: torch.kthvalue(x, 2, 1)[0],
        "quantile": lambda x: torch.quantile(x, 0.3, 1),
        "searchsorted": lambda x: x * torch.searchsorted(torch.arange(-2.0, 2.0), x),
        "searchsorted, right, rows": lambda x: (
            x * torch.searchsorted(torch.sort(x, 1)[0], x, right=True)
        ),
        "bucketize": lambda x: x * torch.bucketize(x, torch.arange(-2.0, 2.0)),
        "cumprod": lambda x: torch.cumprod(x, 1),
        "cumprod of integers": lambda x, i: x * (i.to(torch.int8) * 30).cumprod(1),
        "cumprod of flags": lambda x, b: x * b.cumprod(1),
        "cumprod with a zero": lambda x: torch.cumprod(
            torch.where(torch.arange(x.shape[1]) == 2, 0.0, x), 1
        ),
        "cumsum": lambda s: torch.cumsum(s, 1) ** 2,
        "prod": lambda x: torch.prod(x, 1),
    },
    "positions": {
        "scatter_reduce sum": lambda x, i, y: x.scatter_reduce(1, i, y, "sum") ** 2,
        "scatter_reduce mean": lambda x, i, y: x.scatter_reduce(1, i, y, "mean") ** 2,
        "scatter_reduce mean of others": lambda x, i, y: (
            x.scatter_reduce(1, i, y, "mean", include_self=False) ** 2
        ),
        "scatter_reduce amax": lambda x, i, y: x.scatter_reduce(1, i, y, "amax"),
        "scatter_reduce amin of others": lambda x, i, y: x.scatter_reduce(
            1, i, y, "amin", include_self=False
        ),
        "take_along_dim": lambda x, i: x.take_along_dim(i[:, :3].repeat(1, 2), 1) ** 2,
        "take_along_dim of all": lambda x, i: x.take_along_dim(i) ** 2,
        "take_along_dim, broadcast": lambda s, i: s.take_along_dim(i[:, :, None], 2) ** 2,
        "masked_scatter": lambda x, b, y: x.masked_scatter(b, y) ** 2,
        "assignment": lambda x, y: assigned(x, y),
        "assignment by a mask": lambda x, b: assigned_by_mask(x, b),
        "diagonal": lambda s: (s @ s.transpose(1, 2)).diagonal(0, 1, 2) ** 2,
        "diagonal, shifted": lambda s: s.diagonal(-1, 1, 2) ** 2,
        "diag_embed": lambda s: torch.diag_embed(s[:, 0]) ** 2,
        "trace": lambda x: torch.trace(x[:1, :1] @ x[:1, :1].t()),
        "triangle": lambda s: s.transpose(1, 2)[:, torch.triu_indices(4, 4, 1)[0]],
        "index_add": lambda x, i, y: x.new_zeros(5, x.shape[0]).index_add(0, i[0], y.t()) ** 2,
        "bincount": lambda x, i: x[:, :1] * torch.bincount(i.flatten(), minlength=5),
        "bincount, weighted": lambda x, i: x[:, :1] * i[0].bincount(x[0].detach(), minlength=5),
        "one_hot": lambda x, i: F.one_hot(i, 5) * x[..., None],
        "bags": lambda s, i: F.embedding_bag(i, s[0, :5], mode="mean") ** 2,
        "bags, greatest": lambda s, i: F.embedding_bag(i, s[0, :5], mode="max", padding_idx=1),
        "linspace": lambda x: x * torch.linspace(-1, 2, x.shape[1]),
        "centres": lambda x: x * torch.linspace(0.5, x.shape[1] - 0.5, x.shape[1]),
        "between sizes": lambda x: x * torch.linspace(x.shape[0], 3 * x.shape[1], 5).mean(),
        "floats in a range": lambda x: x * torch.arange(0.0, x.shape[1]),
        "halves in a range": lambda x: x * torch.arange(0.5, x.shape[1]),
        "a range by names": lambda x: x * torch.arange(start=0, end=x.shape[1]),
        "floats by names": lambda x: x * torch.arange(end=x.shape[1], start=0.5),
        "constants by names": lambda s: s * torch.arange(start=0, end=8, dtype=torch.float32),
        "every second float": lambda x: x * torch.arange(1.0, 2 * x.shape[1] + 1, 2.0),
    },
    "images": {
        "adaptive average": lambda im: F.adaptive_avg_pool2d(im, (2, 3)) ** 2,
        "adaptive average of one axis": lambda s: F.adaptive_avg_pool1d(s.transpose(1, 2), 3) ** 2,
        "adaptive maximum": lambda im: F.adaptive_max_pool2d(im, 3),
        "area": lambda im: F.interpolate(im, size=(2, 2), mode="area") ** 2,
        "bilinear": lambda im: F.interpolate(im, scale_factor=2, mode="bilinear") ** 2,
        "bilinear, corners": lambda im: (
            F.interpolate(im, size=(7, 4), mode="bilinear", align_corners=True) ** 2
        ),
        "bicubic": lambda im: F.interpolate(im, scale_factor=2, mode="bicubic") ** 2,
        "replicate": lambda im: F.pad(im, (1, 2, 0, 1), mode="replicate") ** 2,
        "reflect": lambda im: F.pad(im, (1, 2, 0, 1), mode="reflect") ** 2,
        "reflect, cut": lambda im: F.pad(im, (-1, 2, 1, 1), mode="reflect") ** 2,
        "reflect one axis": lambda im: F.pad(im.flatten(1, 2), (2, 3), mode="reflect") ** 2,
        "reflect volumes": lambda im: (
            F.pad(im[:, :2, None].expand(-1, -1, 3, -1, -1), (1, 1, 2, 1, 2, 2), mode="reflect")
            ** 2
        ),
        "circular": lambda im: F.pad(im, (1, 2, 0, 1), mode="circular") ** 2,
        "response norm": lambda im: F.local_response_norm(im, 2) ** 2,
        "pixel_shuffle": lambda im: F.pixel_shuffle(im.repeat(1, 4, 1, 1), 2) ** 2,
        "unfold and fold": lambda im: F.fold(F.unfold(im, 2), (im.shape[2], im.shape[3]), 2) ** 2,
        "maximum of one axis": lambda s: F.max_pool1d(s.transpose(1, 2), 3, 2, 1, ceil_mode=True),
        "maximum over volumes": lambda im: F.max_pool3d(im[:, None], 2),
        "average over volumes": lambda im: F.avg_pool3d(im[:, None], 2) ** 2,
        "grid_sample": lambda im: (
            F.grid_sample(im, torch.tanh(im[:, :2].permute(0, 2, 3, 1)), align_corners=False) ** 2
        ),
    },
    "algebra": {
        "norm of order 3": lambda x: torch.linalg.vector_norm(x, 3, dim=1),
        "norm of order -inf": lambda x: torch.linalg.vector_norm(x, -float("inf"), dim=1),
        "cdist": lambda s, y: torch.cdist(s, s[:, :3].detach() * 2 + y[:, :3, None]),
        "cdist of order 1": lambda s: torch.cdist(s, s[:, :3].detach() + 1, p=1.0),
        "dist": lambda x, y: torch.dist(x, y),
        "bilinear": lambda s: F.bilinear(s[..., :2], s[..., 2:5], s[0, :4, :6].reshape(4, 2, 3)),
        "addbmm": lambda s: torch.addbmm(s[0, :, :1], s, s.transpose(1, 2), beta=0.5),
        "addmv": lambda x, y: torch.addmv(x[:, 0], x, y[0], alpha=2),
        "einsum": lambda s: torch.einsum("bqd,bkd,bk->bqd", s, s, s[..., 0]),
        "hypot": lambda x, y: torch.hypot(x, y),
        "exp2": lambda x: torch.exp2(x),
        "copysign": lambda x, y: torch.copysign(x, y.detach()),
        "sgn": lambda x: x * torch.sgn(x),
        "logsumexp": lambda x: torch.logsumexp(x, 1),
        "std": lambda s: s.std(1),
        "nan_to_num": lambda x: torch.nan_to_num(torch.where(x.detach() > 0, x, float("nan"))),
        "lerp": lambda x, y: torch.lerp(x, y, 0.3),
        "softmin": lambda x: F.softmin(x, 1) ** 2,
        "glu": lambda s: F.glu(s),
        "roll": lambda x: x.roll(2, 1) * x,
        "flip": lambda x: x.flip(1) * x,
        "repeat_interleave": lambda x: x.repeat_interleave(3, 1) ** 2,
    },
}


def assigned(x, y):
    z = x.clone()
    z[:, 1:] = y[:, :-1] * 2
    z[:, 0] = 0
    return z**2


def assigned_by_mask(x, b):
    z = x * 1
    z[b] = 0.5
    return z**2


LARGEST = {"x": (8, 13), "y": (8, 13), "s": (8, 13, 8), "im": (8, 3, 13, 13)}


LARGEST = {"x": (8, 13), "y": (8, 13), "s": (8, 13, 8), "im": (8, 3, 13, 13)}


class Family(nn.Module):
    """The mean of every case; a case's tensors are the batch's times its own parameters."""

    def __init__(self, cases):
        super().__init__()
        self.cases = list(cases.values())
        generator = torch.Generator().manual_seed(5)
        self.factors = nn.ModuleList()
        for function in self.cases:
            names = [n for n in self.names(function) if n in LARGEST]
            values = {n: 1 + 0.1 * torch.randn(LARGEST[n], generator=generator) for n in names}
            self.factors.append(
                nn.ParameterDict({n: nn.Parameter(value) for n, value in values.items()})
            )

    @staticmethod
    def names(function):
        return function.__code__.co_varnames[: function.__code__.co_argcount]

    def forward(self, x, y, s, im, i, b):
        given = {"x": x, "y": y, "s": s, "im": im, "i": i, "b": b}
        values = []
        for function, factors in zip(self.cases, self.factors, strict=True):
            tensors = []
            for name in self.names(function):
                tensor = given[name]
                if name in factors:
                    factor = factors[name][: x.shape[0]]
                    if name == "im":
                        factor = factor[:, :, : x.shape[1], : x.shape[1]]
                    else:
                        factor = factor[:, : x.shape[1]]
                    tensor = tensor * factor
                tensors.append(tensor)
            values.append(function(*tensors).mean())
        return sum(values), *values


def data(n, m):
    generator = torch.Generator().manual_seed(31 * n + m)
    return (
        torch.randn(n, m, generator=generator),
        torch.randn(n, m, generator=generator),
        torch.randn(n, m, 8, generator=generator),
        torch.randn(n, 3, m, m, generator=generator),
        torch.randint(0, 5, (n, m), generator=generator),
        torch.randint(0, 2, (n, m), generator=generator).bool(),
    )


def run_eagerly(model, args, dtype):
    twin = copy.deepcopy(model).to(dtype)
    found = twin(*(a.to(dtype) if a.is_floating_point() else a for a in args))
    found[0].backward()
    grads = {n: p.grad.double() for n, p in twin.named_parameters() if p.grad is not None}
    return [v.item() for v in found[1:]], grads


def check(model, names, batches, shapes):
    """Compare the values after the loss, by name, and all gradients, from one build."""
    captured = capture_step(model, None, batches[0], dynamic_shapes=shapes)
    function = CompiledFunction(captured, build(captured.module, "llvm"), model, None)
    order = [out.name for out in captured.outputs]
    for args in batches:
        results = function.run(args)
        found = dict(zip(order, results, strict=True))
        values, exact = run_eagerly(model, args, torch.float64)
        _, rough = run_eagerly(model, args, torch.float32)
        for k, (name, value) in enumerate(zip(names, values, strict=True)):
            where = (name, tuple(args[0].shape))
            assert results[1 + k].item() == pytest.approx(value, rel=3e-5, abs=3e-6), where
        for name, wanted in exact.items():
            where = (name, tuple(args[0].shape))
            size = max(float(wanted.norm()), 1e-3)
            theirs = float((rough[name] - wanted).norm()) / size
            ours = float((found[name].double() - wanted).norm()) / size
            assert ours <= max(3 * theirs, 2e-6), (where, ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_against_float64(name):
    n, m = DIMS
    shapes = (
        {0: n, 1: m},
        {0: n, 1: m},
        {0: n, 1: m},
        {0: n, 2: m, 3: m},
        {0: n, 1: m},
        {0: n, 1: m},
    )
    cases = FAMILIES[name]
    check(Family(cases), list(cases), [data(*size) for size in SIZES], shapes)
