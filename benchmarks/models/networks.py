"""Networks of torch.nn's building blocks over vectors, pictures and graphs."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models.entry import Batch, Entry, seeded

CLASSES = 5


class Perceptron(nn.Module):
    """Three layers with GELU."""

    def __init__(self, scale: int = 1) -> None:
        super().__init__()
        inner, width = 16 * scale, 64 * scale
        self.layers = nn.Sequential(
            nn.Linear(inner, width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, CLASSES),
        )

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy."""
        return F.cross_entropy(self.layers(x), labels)


class Convolutional(nn.Module):
    """Convolutions, batch norm and pooling over pictures of any size."""

    def __init__(self, scale: int = 1) -> None:
        super().__init__()
        first, second = 16 * scale, 32 * scale
        self.layers = nn.Sequential(
            nn.Conv2d(3, first, 3, padding=1),
            nn.BatchNorm2d(first),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, first, 3, padding=1, groups=4),
            nn.BatchNorm2d(first),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Conv2d(first, second, 3, dilation=2, padding=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.head = nn.Linear(second, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy with smoothed labels."""
        return F.cross_entropy(self.head(self.layers(x).flatten(1)), labels, label_smoothing=0.1)


class _Double(nn.Sequential):
    def __init__(self, before: int, after: int) -> None:
        super().__init__(
            nn.Conv2d(before, after, 3, padding=1),
            nn.GroupNorm(4, after),
            nn.SiLU(),
            nn.Conv2d(after, after, 3, padding=1),
            nn.GroupNorm(4, after),
            nn.SiLU(),
        )


class UNet(nn.Module):
    """Two levels down and up again, with skip connections."""

    def __init__(self, scale: int = 1, out: int = CLASSES) -> None:
        super().__init__()
        a, b, c = 8 * scale, 16 * scale, 32 * scale
        self.first, self.second, self.bottom = _Double(3, a), _Double(a, b), _Double(b, c)
        self.up_second = nn.ConvTranspose2d(c, b, 2, stride=2)
        self.up_first = nn.ConvTranspose2d(b, a, 2, stride=2)
        self.third, self.last = _Double(c, b), _Double(b, a)
        self.head = nn.Conv2d(a, out, 1)

    def pixels(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the values of every pixel; ``bias`` is added at the bottom."""
        first = self.first(x)
        second = self.second(F.max_pool2d(first, 2))
        bottom = self.bottom(F.max_pool2d(second, 2))
        if bias is not None:
            bottom = bottom + bias[:, :, None, None]
        up = self.third(torch.cat([self.up_second(bottom), second], 1))
        return self.head(self.last(torch.cat([self.up_first(up), first], 1)))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy of the pixels."""
        return F.cross_entropy(self.pixels(x), labels)


class Diffusion(nn.Module):
    """A denoising step: noise of a random strength, a U-net that is told the time."""

    def __init__(self, scale: int = 1) -> None:
        super().__init__()
        self.net = UNet(scale, out=3)
        self.time = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32 * scale))
        kept = torch.cumprod(1.0 - torch.linspace(1e-4, 0.02, 100), 0)
        self.register_buffer("kept", kept)

    def forward(self, x: Tensor, time: Tensor, noise: Tensor) -> Tensor:
        """Return the mean squared error of the noise."""
        rates = torch.exp(-math.log(1e4) / 16 * torch.arange(16, device=x.device))
        angles = time[:, None] * rates
        embedded = self.time(torch.cat([angles.sin(), angles.cos()], -1).to(x.dtype))
        kept = self.get_buffer("kept")[time][:, None, None, None]
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        return F.mse_loss(self.net.pixels(noisy, embedded), noise)


class GraphNetwork(nn.Module):
    """Attention over the edges of a ragged graph, then sums by graph."""

    def __init__(self, scale: int = 1) -> None:
        super().__init__()
        width = 32 * scale
        self.inner = nn.Linear(8, width)
        self.messages = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(2))
        self.scores = nn.ModuleList(nn.Linear(2 * width, 1) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy of the nodes' classes."""
        h = self.inner(x)
        for message, score, norm in zip(self.messages, self.scores, self.norms, strict=True):
            both = torch.cat([h[edges[0]], h[edges[1]]], -1)
            weight = F.leaky_relu(score(both)).clamp(-10, 10).exp()
            total = torch.zeros_like(h[:, :1]).index_add(0, edges[1], weight)
            sent = torch.zeros_like(h).index_add(0, edges[1], weight * message(both))
            h = norm(h + F.relu(sent / (total + 1e-6)))
        return F.cross_entropy(self.head(h), labels)


class AutoEncoder(nn.Module):
    """Strided convolutions down, transposed ones up."""

    def __init__(self, scale: int = 1) -> None:
        super().__init__()
        first, second = 16 * scale, 32 * scale
        self.layers = nn.Sequential(
            nn.Conv2d(3, first, 3, stride=2, padding=1),
            nn.LeakyReLU(),
            nn.Conv2d(first, second, 3, stride=2, padding=1),
            nn.ELU(),
            nn.ConvTranspose2d(second, first, 4, stride=2, padding=1),
            nn.Softplus(),
            nn.ConvTranspose2d(first, 3, 4, stride=2, padding=1),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the binary cross-entropy of the pixels."""
        return F.binary_cross_entropy(self.layers(x), x)


class Variational(nn.Module):
    """A variational autoencoder; its noise comes with the batch."""

    def __init__(self, scale: int = 1) -> None:
        super().__init__()
        inner, width = 16 * scale, 64 * scale
        self.encoder = nn.Sequential(nn.Linear(inner, width), nn.Tanh(), nn.Linear(width, 16))
        self.decoder = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, inner))

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        """Return the reconstruction's error plus the divergence from the prior."""
        mean, log_variance = self.encoder(x).chunk(2, -1)
        found = self.decoder(mean + noise * torch.exp(0.5 * log_variance))
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
        return F.smooth_l1_loss(found, x) + 0.01 * divergence


class _Mixing(nn.Module):
    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Sequential(
            nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches)
        )
        self.channels = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.second(x))


class Mixer(nn.Module):
    """MLP-Mixer over sixteen patches."""

    def __init__(self, scale: int = 1) -> None:
        super().__init__()
        width = 32 * scale
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.blocks = nn.Sequential(_Mixing(16, width), _Mixing(16, width), nn.LayerNorm(width))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy."""
        found = self.blocks(self.patches(x).flatten(2).transpose(1, 2))
        return F.cross_entropy(self.head(found.mean(1)), labels)


def vectors(rows: int, scale: int = 1) -> Batch:
    """Vectors and classes."""
    generator = seeded(rows)
    labels = torch.randint(0, CLASSES, (rows,), generator=generator)
    return {"x": torch.randn(rows, 16 * scale, generator=generator), "labels": labels}


def noisy_vectors(rows: int, scale: int = 1) -> Batch:
    """Vectors and noise for each."""
    generator = seeded(rows)
    x = torch.randn(rows, 16 * scale, generator=generator)
    return {"x": x, "noise": torch.randn(rows, 8, generator=generator)}


def pictures(rows: int, high: int, wide: int) -> Batch:
    """Pictures of any size with a class each."""
    generator = seeded(rows, high, wide)
    x = torch.randn(rows, 3, high, wide, generator=generator)
    return {"x": x, "labels": torch.randint(0, CLASSES, (rows,), generator=generator)}


def segmented(rows: int, high: int, wide: int) -> Batch:
    """Pictures of ``4 * high`` by ``4 * wide`` with a class for each pixel."""
    found = pictures(rows, 4 * high, 4 * wide)
    labels = torch.randint(0, CLASSES, (rows, 4 * high, 4 * wide), generator=seeded(rows, wide))
    return {**found, "labels": labels}


def unlabelled(rows: int, high: int, wide: int) -> Batch:
    """Pictures of ``4 * high`` by ``4 * wide`` with values between 0 and 1."""
    return {"x": pictures(rows, 4 * high, 4 * wide)["x"].sigmoid()}


def noised(rows: int, high: int, wide: int) -> Batch:
    """Pictures, times and noise."""
    x = pictures(rows, 4 * high, 4 * wide)["x"]
    generator = seeded(rows, high)
    time = torch.randint(0, 100, (rows,), generator=generator)
    return {"x": x, "time": time, "noise": torch.randn(x.shape, generator=generator)}


def squares(rows: int) -> Batch:
    """Pictures of 32 pixels and classes."""
    return pictures(rows, 32, 32)


def graphs(nodes: int, edges: int) -> Batch:
    """A graph with values and classes for its nodes."""
    generator = seeded(nodes, edges)
    return {
        "x": torch.randn(nodes, 8, generator=generator),
        "edges": torch.randint(0, nodes, (2, edges), generator=generator),
        "labels": torch.randint(0, CLASSES, (nodes,), generator=generator),
    }


def _of_rows(name: str, make: Callable[[], nn.Module], batch: Callable[..., Batch]) -> Entry:
    return Entry(
        name=name,
        source="torch.nn",
        make=make,
        batch=batch,
        ranges={"rows": (1, 64)},
        axes={key: {0: "rows"} for key in batch(2)},
        sizes=[(5,), (1,), (64,), (17,)],
    )


def _of_pictures(
    name: str, make: Callable[[], nn.Module], batch: Callable[..., Batch], least: int, most: int
) -> Entry:
    factor = "" if batch is pictures else "4*"
    sides = {1: f"{factor}high", 2: f"{factor}wide"}
    by_key: dict[str, dict[int, str]] = {}
    for key, tensor in batch(2, 2, 2).items():
        by_key[key] = {0: "rows"}
        if tensor.dim() > 1:
            by_key[key].update({axis + tensor.dim() - 3: dim for axis, dim in sides.items()})
    return Entry(
        name=name,
        source="torch.nn",
        make=make,
        batch=batch,
        ranges={"rows": (1, 4), "high": (least, most), "wide": (least, most)},
        axes=by_key,
        sizes=[
            (3, least + 1, least + 2),
            (1, least, least),
            (4, most, most),
            (2, most - 1, least + 1),
        ],
    )


ENTRIES = [
    _of_rows("MLP", Perceptron, vectors),
    _of_pictures("CNN, batch norm and pooling", Convolutional, pictures, 8, 32),
    _of_pictures("U-net", UNet, segmented, 2, 8),
    _of_pictures("Diffusion step, time embedding", Diffusion, noised, 2, 6),
    Entry(
        name="Graph network, ragged",
        source="torch.nn",
        make=GraphNetwork,
        batch=graphs,
        ranges={"nodes": (1, 64), "edges": (1, 256)},
        axes={"x": {0: "nodes"}, "edges": {1: "edges"}, "labels": {0: "nodes"}},
        sizes=[(7, 12), (1, 1), (64, 256), (30, 41)],
    ),
    _of_pictures("Autoencoder, transposed convolution", AutoEncoder, unlabelled, 2, 8),
    _of_rows("Variational autoencoder", Variational, noisy_vectors),
    _of_rows("MLP-Mixer", Mixer, squares),
]
