"""Convolutions, pooling, normalisation, graphs: gradients against float64 PyTorch."""

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

from relax_disc.frontend import capture_step
from tests.frontend.running import Runner, check_gradients

B, H, S, EDGES = (
    Dim("b", min=1, max=4),
    Dim("h", min=4, max=9),
    Dim("s", min=3, max=12),
    Dim("e", min=2, max=12),
)
SIZES = [(3, 6), (1, 4), (4, 9), (2, 7)]

# Sums in these tests run one after the other in float32, as TVM writes them without the package's
# schedules; PyTorch sums in blocks.
LOOSE = 8e-6


class Image(nn.Module):
    def __init__(self, *layers, channels=8):
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.last = nn.Linear(channels, 3)

    def forward(self, x, y):
        return F.cross_entropy(self.last(self.layers(x).flatten(2).mean(-1)), y)


class BatchNorms(nn.Module):
    """Two to five axes; without weight, bias, both, or statistics; a weight that is not trained."""

    def __init__(self):
        super().__init__()
        self.space = nn.BatchNorm3d(4)
        self.line = nn.BatchNorm1d(4, affine=False, momentum=0.3)
        self.alone = nn.BatchNorm1d(4, track_running_stats=False)
        self.alone.weight.requires_grad_(False)
        self.bias, self.weight = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4))

    def forward(self, x):
        x = torch.tanh(self.line(torch.tanh(self.space(x)).flatten(2)))
        x = torch.tanh(self.alone(x.transpose(1, 2).flatten(0, 1)) + 0.1)
        x = torch.sin(F.batch_norm(x, None, None, None, self.bias, training=True))
        return F.batch_norm(x, None, None, self.weight, training=True, eps=0.1).pow(3).mean()


class Upscaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)

    def forward(self, x):
        return (F.interpolate(self.up(F.silu(self.down(x))), scale_factor=2) ** 2).mean()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x).square().mean()


class Rotated(nn.Module):
    """Rotary angles as complex numbers, and other uses of those."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        angles = torch.arange(x.shape[1])[:, None] * torch.tensor([1.0, 0.5, 0.1, 0.01])
        turns = torch.polar(torch.ones_like(angles), angles) * 1.5
        pairs = torch.view_as_complex(self.layer(x).reshape(*x.shape[:-1], -1, 2))
        rotated = torch.view_as_real(pairs * turns.to(x.device)).flatten(2)
        lengths = (torch.complex(rotated, x) * 2).abs()
        return (rotated * x).square().mean() + lengths.mean() + (pairs * pairs.conj()).real.mean()


class SizeInTensor(nn.Module):
    """As DeBERTa bounds a slice, and Longformer cuts into chunks."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(40, 3))

    def forward(self, x):
        span = torch.tensor(min(x.size(1), 20))
        near = self.table[20 - span : 20 + span]
        places = torch.arange(x.size(1))
        distances = torch.clamp(places[:, None] - places + span, 0, span * 2 - 1)
        chunks = x.view(x.size(0), torch.div(x.size(1), 2, rounding_mode="trunc"), 2)
        scores = near[distances].sum(-1) * x[:, None] + chunks.prod(-1).sum()
        return scores.square().mean() + span * near.mean()


class Viewed(nn.Module):
    """Attention whose heads are joined by a view: PyTorch's own result is contiguous that way."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        b, s, width = x.shape
        heads = [y.view(b, s, 2, 8).transpose(1, 2) for y in self.inner(x).split(16, 2)]
        joined = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
        return self.outer(joined.contiguous().view(b, s, width)).square().mean()


class Normed(nn.Module):
    """Weights normalised by a parametrization, over another axis than the first."""

    def __init__(self):
        super().__init__()
        weight_norm = nn.utils.parametrizations.weight_norm
        self.conv = weight_norm(nn.Conv1d(4, 6, 3, padding=1), dim=2)
        self.last = weight_norm(nn.Linear(6, 3))

    def forward(self, x):
        return self.last(torch.tanh(self.conv(x)).mean(-1)).square().mean()


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 2)

    def forward(self, x, edges):
        h = self.first(x)
        h = F.relu(h + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]]))
        target = edges[1][:, None].expand(-1, 6)
        h = h + torch.zeros_like(h).scatter_add(0, target, h[edges[0]])
        return self.last(h).square().mean()


def image(scale=1):
    def batch(b, h):
        g = torch.Generator().manual_seed(b * 100 + h)
        x = torch.randn(b, 4, scale * h, scale * h, generator=g)
        return x, torch.randint(0, 3, (b,), generator=g)

    side = scale * H if scale > 1 else H
    return batch, ({0: B, 2: side, 3: side}, {0: B})


def random(*shape):
    def batch(b, s):
        sizes = [{"b": b, "s": s, "2s": 2 * s}.get(n, n) for n in shape]
        return (torch.randn(*sizes, generator=torch.Generator().manual_seed(b * 100 + s)),)

    axes = {"b": B, "s": S, "2s": 2 * H}
    return batch, ({k: axes[n] for k, n in enumerate(shape) if n in axes},)


def graph(b, s):
    g = torch.Generator().manual_seed(b * 100 + s)
    return torch.randn(b, 5, generator=g), torch.randint(0, b, (2, s), generator=g)


CASES = {
    "conv-batchnorm": lambda: (
        Image(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *image(),
    ),
    "conv-grouped-strided": lambda: (Image(nn.Conv2d(4, 8, 3, 2, 1, groups=2)), *image(2)),
    "conv-depthwise-dilated": lambda: (
        Image(nn.Conv2d(4, 8, 3, padding=2, dilation=2, groups=4)),
        *image(),
    ),
    "pooling": lambda: (
        Image(nn.Conv2d(4, 8, 3, padding=1), nn.MaxPool2d(2), nn.AvgPool2d(3, 2, 1)),
        *image(4),
    ),
    "norms": lambda: (
        Image(nn.GroupNorm(2, 4), nn.Tanh(), nn.InstanceNorm2d(4), nn.Tanh(), channels=4),
        *image(),
    ),
    "batch-norms": lambda: (
        BatchNorms(),
        lambda b, s: (torch.randn(b, 4, s, 2, 3),),
        ({0: B, 2: S},),
    ),
    "upscaling": lambda: (Upscaled(), *random("b", 4, "2s", "2s")),
    "conv1d": lambda: (
        Image(nn.Conv1d(4, 8, 5, padding=2), nn.GELU()),
        lambda b, s: (torch.randn(b, 4, s), torch.zeros(b, dtype=torch.int64)),
        ({0: B, 2: S}, {0: B}),
    ),
    "encoder": lambda: (Encoder(), *random("b", "s", 16)),
    "attention-viewed": lambda: (Viewed(), *random("b", "s", 16)),
    "weight-norm": lambda: (Normed(), *random("b", 4, 5)),
    "complex": lambda: (Rotated(), lambda b, s: (torch.randn(b, s, 8),), ({0: B, 1: S},)),
    "size in a tensor": lambda: (
        SizeInTensor(),
        lambda b, s: (torch.randn(b, 2 * s),),
        ({0: B, 1: 2 * S},),
    ),
    "graph": lambda: (Graph(), graph, ({0: B}, {1: EDGES})),
}
SLOW = {"conv-depthwise-dilated", "conv1d", "encoder"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES]
)
def test_gradients(name):
    torch.manual_seed(0)
    model, batch, shapes = CASES[name]()
    captured = capture_step(model, None, batch(3, 6), dynamic_shapes=shapes)
    check_gradients(captured, model, [batch(*size) for size in SIZES], least=LOOSE)


@pytest.mark.parametrize("name", ["conv-batchnorm", "batch-norms"])
def test_batch_norm_updates_its_statistics(name):
    torch.manual_seed(0)
    model, batch, shapes = CASES[name]()
    captured = capture_step(model, None, batch(3, 6), dynamic_shapes=shapes)
    args = batch(2, 5)
    found = dict(Runner(captured)(model, None, args)["buffer"])
    model(*args)
    expected = dict(model.named_buffers())
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


class Counting(nn.Module):
    """Asks for the lengths of a list, a tuple and a tensor, beside batch norms."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in "ab")

    def forward(self, x):
        found = (x,)
        for i in range(len(self.layers)):
            found += (torch.sin(self.layers[i](found[-1])),)
        return sum(each.square().sum() for each in found) / (len(found) * len(x))


def test_lengths_beside_a_batch_norm():
    torch.manual_seed(0)
    model = Counting()
    batches = [(torch.randn(n, 4),) for n in (3, 2, 9)]
    captured = capture_step(model, None, batches[0], dynamic_shapes=({0: Dim("n", min=2, max=9)},))
    check_gradients(captured, model, batches, least=5e-6)


def test_evaluation_mode_keeps_the_statistics():
    model = Image(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8)).eval()
    batch, shapes = image()
    captured = capture_step(model, None, batch(3, 6), dynamic_shapes=shapes)
    assert not [out for out in captured.outputs if out.kind == "buffer"]
    check_gradients(captured, model, [batch(2, 5)], least=LOOSE)
