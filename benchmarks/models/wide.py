"""Principal models of the table at the width and sizes that they are used at, and more of timm.

Configurations of Hugging Face's models are the table's own, with the numbers that say how wide a
model is replaced.  Depth stays small: a layer costs the same every time.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import language, networks, perception
from benchmarks.models.catalogue import ENTRIES
from benchmarks.models.entry import Batch, Entry, seeded
from benchmarks.models.language import Built

_WIDTH = 384
_KEYS = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim"), _WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "hidden_dim"), 4 * _WIDTH),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 4 * _WIDTH),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 512),
    **dict.fromkeys(("num_attention_heads", "n_heads", "n_head", "num_heads"), 6),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 6),
    **dict.fromkeys(("head_dim", "d_kv"), 64),
    "embedding_size": 128,
    "image_size": 224,
    "moe_intermediate_size": 768,
    "num_key_value_heads": 2,
    "patch_size": 16,
    "position_buckets": 128,
    "sliding_window": 64,
    "vocab_size": 16_000,
}
"""What takes the place of a number of a small configuration, by its name."""

_OF_TOKENS = [(4, 192), (3, 109)]
_OF_PAIRS = [(4, 160, 96), (3, 75, 121)]
_SIDES = {"batch": (1, 16), "high": (2, 12), "wide": (2, 12)}
_PIXELS = [(4, 6, 5), (3, 4, 7)]
"""Times 32: 192 by 160 and 128 by 224."""


def _widened(name: str, **own: Any) -> Callable[[], nn.Module]:
    """Make what makes a Hugging Face model of the table, wide; `own` numbers come last."""
    made = _small(name).make
    assert isinstance(made, Built)
    wide = {key: _KEYS.get(key, value) for key, value in made.options.items()}
    return replace(made, options={**wide, **own})


def _small(name: str) -> Entry:
    return next(entry for entry in ENTRIES if entry.name == name)


def _of_language(entry: Entry) -> Entry:
    pairs = len(entry.ranges) == 3
    longest = 200
    return replace(
        entry,
        make=_widened(entry.name),
        ranges={"batch": (1, 16), **{dim: (3, longest) for dim in list(entry.ranges)[1:]}},
        sizes=_OF_PAIRS if pairs else _OF_TOKENS,
    )


def _of_pixels(entry: Entry, sizes: Sequence[tuple[int, ...]] = _PIXELS, **own: Any) -> Entry:
    """Make an entry of pictures of any size, or of 224 by 224."""
    make = _widened(entry.name, **own)
    if len(entry.ranges) == 1:
        batch = partial(perception.images, high=28, wide=28)
        return replace(entry, make=make, batch=batch, ranges={"batch": (1, 16)}, sizes=[(4,), (3,)])
    sizes = [(rows, 4 * high, 4 * wide) for rows, high, wide in sizes]
    sides = {"batch": (1, 16), "high": (8, 48), "wide": (8, 48)}
    return replace(entry, make=make, ranges=sides, sizes=sizes)


def _scaled(
    name: str, times: int, sizes: Sequence[tuple[int, ...]], most: Sequence[int], **batch: int
) -> Entry:
    """Make an entry of a network of torch.nn's blocks, so many times as wide."""
    entry = _small(name)
    make: Callable[..., nn.Module] = entry.make
    ranges = {
        dim: (least, top) for (dim, (least, _)), top in zip(entry.ranges.items(), most, strict=True)
    }
    return replace(
        entry,
        make=partial(make, scale=times),
        batch=partial(entry.batch, **batch) if batch else entry.batch,
        ranges=ranges,
        sizes=sizes,
    )


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


_OWN_WIDTHS: dict[str, dict[str, Any]] = {
    "Swin": {"embed_dim": 96, "num_heads": [3, 6], "patch_size": 4, "window_size": 7},
    "ConvNeXt": {"hidden_sizes": [96, 192]},
    "ResNet": {"embedding_size": 64, "hidden_sizes": [64, 128]},
    "SegFormer": {
        "hidden_sizes": [64, 128],
        "num_attention_heads": [2, 4],
        "decoder_hidden_size": 256,
    },
}
_SPEECH = {"num_mel_bins": 80, "max_source_positions": 400, "max_target_positions": 200}
_CLIP = {
    "hidden_size": _WIDTH,
    "intermediate_size": 4 * _WIDTH,
    "num_attention_heads": 6,
    "vocab_size": 16_000,
}


def _perception(entry: Entry) -> Entry:
    if entry.name.startswith("CLIP"):
        return replace(entry, make=partial(entry.make, **_CLIP), sizes=[(8, 32), (6, 21)])
    if entry.name == "Whisper":
        return replace(
            entry,
            make=_widened(entry.name, **_SPEECH),
            batch=partial(perception.spectra, bands=80, frames=800),
            ranges={"batch": (1, 8), "target": (3, 200)},
            sizes=[(2, 96), (1, 61)],
        )
    if entry.name == "Wav2Vec2":
        widths = {"conv_dim": [256] * 3, "num_conv_pos_embeddings": 64}
        return replace(
            entry,
            make=_widened(entry.name, **widths),
            ranges={"batch": (1, 8), "frames": (4, 128)},
            sizes=[(2, 100), (3, 61)],
        )
    return _of_pixels(entry, **_OWN_WIDTHS.get(entry.name, {}))


def _of_experts(name: str, **own: Any) -> Entry:
    """Make an entry of 256 wide words, each seen by two of eight experts."""
    entry = _small(f"{name}, 4 experts")
    width = {"hidden_size": 256, "num_attention_heads": 4, "vocab_size": language.VOCABULARY}
    return replace(
        _of_language(entry),
        name=f"{name}, 8 experts",
        make=_widened(entry.name, **width, intermediate_size=512, **own),
        sizes=[(8, 128), (2, 48)],
    )


WIDE: tuple[Entry, ...] = (
    *(_of_language(entry) for entry in language.ENTRIES),
    _of_experts("Mixtral", num_local_experts=8),
    _of_experts("Qwen3-MoE", num_experts=8, moe_intermediate_size=512),
    *(_perception(entry) for entry in perception.ENTRIES),
    _scaled("MLP", 16, [(256,), (171,)], [512], scale=16),
    _scaled("CNN, batch norm and pooling", 4, [(8, 96, 80), (6, 64, 112)], [16, 128, 128]),
    _scaled("U-net", 8, [(2, 24, 20), (1, 33, 25)], [8, 64, 64]),
    _scaled("Diffusion step, time embedding", 8, [(2, 24, 20), (1, 33, 25)], [8, 64, 64]),
    _scaled("Graph network, ragged", 8, [(2000, 9000), (1500, 7777)], [4096, 16384]),
    _scaled("Autoencoder, transposed convolution", 4, [(8, 24, 20), (6, 16, 28)], [16, 64, 64]),
    _scaled("Variational autoencoder", 16, [(256,), (171,)], [512], scale=16),
    _scaled("MLP-Mixer", 8, [(64,), (43,)], [128]),
    _scaled("nn.Transformer", 8, [(8, 96, 64), (6, 51, 120)], [16, 256, 256]),
    _scaled("LSTM tagger", 8, [(16, 64), (12, 47)], [32, 128]),
    _scaled("GRU tagger", 8, [(16, 64), (12, 47)], [32, 128]),
    _scaled("Temporal convolution, weight norm", 8, [(16, 128), (12, 93)], [32, 256]),
    _scaled("Mixture of experts, dense", 8, [(8, 128), (6, 93)], [16, 256]),
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
