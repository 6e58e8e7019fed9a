"""Networks of timm and diffusers, small: their tiny test models, and others made shallow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models.entry import Batch, Entry, seeded

CLASSES = 5


class Classifier(nn.Module):
    """A network of timm with its cross-entropy; of two heads, both.

    Parameters
    ----------
    name : str
        Of the network.
    after_a_pass : bool
        Have it run once: a first pass may assign positions to a buffer of another shape.  A
        compiled step warns of such a first pass, and leaves the buffer as it was.
    """

    def __init__(self, name: str, *, after_a_pass: bool = False, **options: Any) -> None:
        super().__init__()
        import timm  # pyright: ignore[reportMissingImports]

        self.net = timm.create_model(name, num_classes=CLASSES, **options)
        for module in self.net.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # what is random cannot be compared
        if after_a_pass:
            self(**pictures(1, side=options["img_size"]))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        found = self.net(x)
        heads = found if isinstance(found, tuple) else (found,)
        return torch.stack([F.cross_entropy(head, labels) for head in heads]).mean()


def pictures(rows: int, high: int = 1, wide: int = 1, *, side: int) -> Batch:
    """Pictures of so many times a side and their classes."""
    generator = seeded(rows, high, wide, side)
    x = torch.randn(rows, 3, side * high, side * wide, generator=generator)
    return {"x": x, "labels": torch.randint(0, CLASSES, (rows,), generator=generator)}


def _timm(name: str, side: int, **options: Any) -> Entry:
    """Pictures of one size."""
    return Entry(
        name=f"timm {name}",
        source="timm",
        make=partial(Classifier, name, **options),
        batch=partial(pictures, side=side),
        ranges={"rows": (1, 8)},
        axes={"x": {0: "rows"}, "labels": {0: "rows"}},
        sizes=[(3,), (1,), (8,)],
    )


def _any_size(name: str, **options: Any) -> Entry:
    """Pictures of any size that 32 divides.

    One row of the least size has one value for each channel in the deepest layers, which batch
    norm refuses; the least batch is therefore one of a larger size.
    """
    return Entry(
        name=f"timm {name}",
        source="timm",
        make=partial(Classifier, name, **options),
        batch=partial(pictures, side=32),
        ranges={"rows": (1, 4), "high": (2, 4), "wide": (2, 4)},
        axes={"x": {0: "rows", 2: "32*high", 3: "32*wide"}, "labels": {0: "rows"}},
        sizes=[(3, 2, 3), (1, 2, 2), (4, 4, 4), (2, 4, 2)],
    )


_TINY = {"embed_dim": 32, "num_heads": 4, "img_size": 32, "patch_size": 8}
_FOUR = (1, 1, 1, 1)

OF_TIMM = [
    _any_size("test_byobnet"),
    _any_size("test_convnext"),
    _any_size("test_convnext2"),
    _any_size("test_convnext3"),
    _any_size("test_efficientnet"),
    _any_size("test_efficientnet_evos"),
    _any_size("test_efficientnet_gn"),
    _any_size("test_efficientnet_ln"),
    _any_size("test_mambaout"),
    _any_size("test_nfnet"),
    _any_size("test_resnet"),
    _timm("test_vit", 64, img_size=64),
    _timm("test_vit2", 64, img_size=64),
    _timm("test_vit3", 64, img_size=64),
    _timm("test_vit4", 64, img_size=64),
    _timm("test_vit_relpos", 64, img_size=64),
    _timm("test_coatnet", 160),
    _timm("test_maxvit", 160),
    _any_size("resnet18", layers=_FOUR),
    _any_size("densenet121", growth_rate=8, block_config=(2, 2, 2, 2)),
    _any_size("poolformer_s12"),
    _any_size("pvt_v2_b0", depths=_FOUR),
    _any_size("lcnet_035"),
    _any_size("regnetx_002"),
    # From two pictures on: of one of 64 by 64, the last batch norms see four values, and PyTorch's
    # own gradient in float32 is off by 6e-5.
    replace(
        _any_size("mobilenetv3_small_050"),
        ranges={"rows": (2, 4), "high": (2, 4), "wide": (2, 4)},
        sizes=[(3, 2, 3), (2, 2, 2), (4, 4, 4), (2, 4, 2)],
    ),
    _timm("vit_tiny_patch16_224", 32, depth=2, **_TINY),
    _timm("deit_tiny_distilled_patch16_224", 32, depth=2, **_TINY),
    _timm("beit_base_patch16_224", 32, depth=2, **_TINY),
    _timm("cait_xxs24_224", 32, depth=2, **_TINY),
    _timm("convit_tiny", 32, after_a_pass=True, depth=2, **_TINY),
    # From two pictures on: of one, PyTorch 2.13's own gradient is wrong, as finite differences
    # tell.  Its batch norm takes the strides of a transposed slice of a batch of 1 for
    # channels-last.
    replace(
        _timm("xcit_nano_12_p16_224", 64, depth=2, embed_dim=32, num_heads=4, img_size=64),
        ranges={"rows": (2, 8)},
        sizes=[(3,), (2,), (8,)],
    ),
    _timm(
        "swin_tiny_patch4_window7_224",
        56,
        img_size=56,
        window_size=7,
        embed_dim=16,
        depths=(2, 1, 1),
        num_heads=(2, 2, 4),
    ),
]


class Denoiser(nn.Module):
    """A network of diffusers that predicts noise."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        import diffusers  # pyright: ignore[reportMissingImports]

        self.net = getattr(diffusers, name)(**options)
        for module in self.net.modules():
            if hasattr(module, "dropout_prob"):
                module.dropout_prob = 0.0  # of labels

    def forward(self, sample: Tensor, noise: Tensor, **given: Tensor) -> Tensor:
        """Return the mean squared error."""
        found = self.net(sample, return_dict=False, **given)[0]
        return F.mse_loss(found[:, : noise.shape[1]], noise)


class Compressor(nn.Module):
    """An autoencoder of diffusers: reconstruction, and divergence where codes are distributed."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        import diffusers  # pyright: ignore[reportMissingImports]

        self.net = getattr(diffusers, name)(**options)

    def forward(self, sample: Tensor, noise: Tensor) -> Tensor:
        """Return the loss."""
        found = self.net.encode(sample).latent_dist
        decoded = self.net.decode(found.mode()).sample
        return F.mse_loss(decoded, noise) + 1e-3 * found.kl().mean()


def noised(
    rows: int,
    high: int,
    wide: int,
    *,
    channels: int,
    words: int = 0,
    caption_channels: int = 16,
    labels: int = 0,
) -> Batch:
    """Pictures of ``8 * high`` by ``8 * wide`` with noise and times, and words or classes."""
    generator = seeded(rows, high, wide)
    sample = torch.randn(rows, channels, 8 * high, 8 * wide, generator=generator)
    made = {
        "sample": sample,
        "noise": torch.randn(sample.shape, generator=generator),
        "timestep": torch.randint(0, 1000, (rows,), generator=generator),
    }
    if words:
        shape = (rows, words, caption_channels)
        made["encoder_hidden_states"] = torch.randn(shape, generator=generator)
    if labels:
        made["class_labels"] = torch.randint(0, labels, (rows,), generator=generator)
    return made


def _reconstructed(rows: int, high: int, wide: int) -> Batch:
    made = noised(rows, high, wide, channels=3)
    return {key: made[key] for key in ("sample", "noise")}


def _diffusers(
    name: str, make: Callable[[], nn.Module], batch: Callable[..., Batch], fixed: bool = False
) -> Entry:
    axes: dict[str, dict[int, str]] = {key: {0: "rows"} for key in batch(1, 2, 2)}
    if fixed:
        return Entry(
            name=f"diffusers {name}",
            source="diffusers",
            make=make,
            batch=partial(batch, high=2, wide=2),
            ranges={"rows": (1, 4)},
            axes=axes,
            sizes=[(3,), (1,), (4,)],
        )
    for key in ("sample", "noise"):
        axes[key] |= {2: "8*high", 3: "8*wide"}
    return Entry(
        name=f"diffusers {name}",
        source="diffusers",
        make=make,
        batch=batch,
        ranges={"rows": (1, 4), "high": (2, 6), "wide": (2, 6)},
        axes=axes,
        sizes=[(3, 2, 3), (1, 2, 2), (4, 6, 6), (2, 5, 3)],
    )


_CONVOLUTIONAL = {
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "sample_size": 16,
}
_PATCHED = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 16}

OF_DIFFUSERS = [
    _diffusers(
        "UNet2DModel",
        partial(
            Denoiser,
            "UNet2DModel",
            **_CONVOLUTIONAL,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=4,
        ),
        partial(noised, channels=3),
    ),
    _diffusers(
        "UNet2DConditionModel",
        partial(
            Denoiser,
            "UNet2DConditionModel",
            **_CONVOLUTIONAL,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=16,
            attention_head_dim=2,
        ),
        partial(noised, channels=4, words=5, caption_channels=16),
    ),
    _diffusers(
        "AutoencoderKL",
        partial(
            Compressor,
            "AutoencoderKL",
            **_CONVOLUTIONAL,
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
        ),
        _reconstructed,
    ),
    _diffusers(
        "DiTTransformer2DModel",
        partial(
            Denoiser,
            "DiTTransformer2DModel",
            **_PATCHED,
            in_channels=4,
            patch_size=2,
            num_embeds_ada_norm=10,
        ),
        partial(noised, channels=4, labels=10),
        fixed=True,
    ),
    _diffusers(
        "PixArtTransformer2DModel",
        partial(
            Denoiser,
            "PixArtTransformer2DModel",
            **_PATCHED,
            in_channels=4,
            out_channels=8,
            cross_attention_dim=16,
            caption_channels=16,
        ),
        partial(noised, channels=4, words=5, caption_channels=16),
        fixed=True,
    ),
]

ENTRIES = [*OF_TIMM, *OF_DIFFUSERS]
