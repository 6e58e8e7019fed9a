"""Networks of timm and diffusers at the width that they have, and a network over sound."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import networks
from benchmarks.models.entry import Batch, Entry, seeded

_SIDES = {"batch": (1, 16), "high": (2, 12), "wide": (2, 12)}
_PIXELS = [(4, 6, 5), (3, 4, 7)]
"""Times 32: 192 by 160 and 128 by 224."""


class Classifier(nn.Module):
    """A model of timm and its cross-entropy."""

    def __init__(self, name: str) -> None:
        super().__init__()
        import timm  # pyright: ignore[reportMissingImports]

        self.body = timm.create_model(name)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        return F.cross_entropy(self.body(x), labels)


class Denoiser(nn.Module):
    """`diffusers.UNet2DModel` that tells the noise."""

    def __init__(self) -> None:
        super().__init__()
        diffusers: Any = importlib.import_module("diffusers")

        self.body = diffusers.UNet2DModel(
            in_channels=3,
            out_channels=3,
            block_out_channels=(64, 128, 128),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
        )

    def forward(self, x: Tensor, time: Tensor, noise: Tensor) -> Tensor:
        """Return the mean squared error."""
        return F.mse_loss(self.body(x, time).sample, noise)


class Latent(nn.Module):
    """`diffusers.AutoencoderKL`, decoding the mean."""

    def __init__(self) -> None:
        super().__init__()
        diffusers: Any = importlib.import_module("diffusers")

        self.body = diffusers.AutoencoderKL(
            block_out_channels=(64, 128),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean squared error of the pixels."""
        return F.mse_loss(self.body(x, sample_posterior=False).sample, x)


class Waveforms(nn.Sequential):
    """A convolution network over sound (M5): batch norm and pooling along one axis."""

    def __init__(self) -> None:
        widths = (1, 64, 64, 128, 256)
        layers: list[nn.Module] = []
        for k, (before, after) in enumerate(pairwise(widths)):
            window = nn.Conv1d(before, after, 3, padding=1) if k else nn.Conv1d(1, 64, 80, stride=4)
            layers += [window, nn.BatchNorm1d(after), nn.ReLU(), nn.MaxPool1d(4)]
        super().__init__(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(256, 35))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy."""
        return F.cross_entropy(super().forward(x), labels)


def pictures(batch: int, high: int, wide: int) -> Batch:
    """Pictures of ``32 * high`` by ``32 * wide`` and one of ten classes for each."""
    found = networks.pictures(batch, 32 * high, 32 * wide)
    return {**found, "labels": found["labels"] % 10}


def unlabelled(batch: int, high: int, wide: int) -> Batch:
    """Pictures of ``8 * high`` by ``8 * wide``."""
    return {"x": networks.pictures(batch, 8 * high, 8 * wide)["x"]}


def noised(batch: int, high: int, wide: int) -> Batch:
    """Pictures of ``8 * high`` by ``8 * wide``, noise and times."""
    return networks.noised(batch, 2 * high, 2 * wide)


def sounds(batch: int, length: int) -> Batch:
    """Sound of ``1024 * length`` samples, and its class."""
    generator = seeded(batch, length)
    labels = torch.randint(0, 35, (batch,), generator=generator)
    return {"x": torch.randn(batch, 1, 1024 * length, generator=generator), "labels": labels}


def _of_pictures(
    name: str, source: str, make: Callable[[], nn.Module], batch: Callable[..., Batch], factor: int
) -> Entry:
    sides = {2: f"{factor}*high", 3: f"{factor}*wide"}
    keys = batch(1, 2, 2).items()
    return Entry(
        name=name,
        source=source,
        make=make,
        batch=batch,
        ranges=_SIDES,
        axes={key: {0: "batch", **(sides if value.dim() == 4 else {})} for key, value in keys},
        sizes=_PIXELS,
    )


def _timm(name: str) -> Entry:
    return _of_pictures(name, "timm", partial(Classifier, name), pictures, 32)


ENTRIES: tuple[Entry, ...] = (
    *map(
        _timm,
        (
            "resnet18",
            "regnetx_002",
            "densenet121",
            "mobilenetv3_small_100",
            "efficientnet_b0",
            "convnext_atto",
            "nfnet_l0",
            "ghostnet_100",
            "repvgg_a0",
            "resnest14d",
        ),
    ),
    replace(
        _of_pictures("UNet2DModel", "diffusers", Denoiser, noised, 8), sizes=[(2, 8, 6), (1, 7, 10)]
    ),
    replace(
        _of_pictures("AutoencoderKL", "diffusers", Latent, unlabelled, 8),
        sizes=[(2, 8, 6), (1, 7, 10)],
    ),
    Entry(
        name="1-D CNN",
        source="torch.nn",
        make=Waveforms,
        batch=sounds,
        ranges={"batch": (1, 32), "length": (2, 16)},
        axes={"x": {0: "batch", 2: "1024*length"}, "labels": {0: "batch"}},
        sizes=[(8, 8), (5, 13)],
    ),
)
