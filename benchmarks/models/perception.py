"""Vision and speech models of Hugging Face, small, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.models.entry import Batch, Entry, seeded
from benchmarks.models.language import VOCABULARY, built, configured

CLASSES = 5

_WIDTH = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
_PATCHES = {**_WIDTH, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
_LABELS = {"num_labels": CLASSES}


def pictures(batch: int) -> Batch:
    """Square pictures of 32 pixels and their classes."""
    return images(batch, 4, 4)


def images(batch: int, high: int, wide: int) -> Batch:
    """Pictures of ``8 * high`` by ``8 * wide`` pixels and their classes."""
    generator = seeded(batch, high, wide)
    pixels = torch.randn(batch, 3, 8 * high, 8 * wide, generator=generator)
    return {
        "pixel_values": pixels,
        "labels": torch.randint(0, CLASSES, (batch,), generator=generator),
    }


def masks(batch: int, high: int, wide: int) -> Batch:
    """Pictures with a class for every pixel."""
    found = images(batch, high, wide)
    shape = (batch, 8 * high, 8 * wide)
    return {**found, "labels": torch.randint(0, CLASSES, shape, generator=seeded(*shape))}


def _fixed(name: str, make: Callable[[], nn.Module]) -> Entry:
    """Make an entry of a model whose pictures have one size."""
    return Entry(
        name=name,
        source="transformers",
        make=make,
        batch=pictures,
        ranges={"batch": (1, 8)},
        axes={"pixel_values": {0: "batch"}, "labels": {0: "batch"}},
        sizes=[(3,), (1,), (8,)],
    )


def _sized(name: str, make: Callable[[], nn.Module], batch: Callable[..., Batch] = images) -> Entry:
    """Make an entry of a model whose pictures may have any size."""
    axes: dict[str, dict[int, str]] = {
        "pixel_values": {0: "batch", 2: "8*high", 3: "8*wide"},
        "labels": {0: "batch"},
    }
    if batch is masks:
        axes["labels"] = {0: "batch", 1: "8*high", 2: "8*wide"}
    return Entry(
        name=name,
        source="transformers",
        make=make,
        batch=batch,
        ranges={"batch": (1, 4), "high": (4, 8), "wide": (4, 8)},
        axes=axes,
        sizes=[(3, 4, 6), (1, 4, 4), (4, 8, 8), (2, 7, 5)],
    )


class ContrastiveCLIP(nn.Module):
    """CLIP that returns its contrastive loss."""

    def __init__(self, **wide: int) -> None:
        super().__init__()
        import transformers

        heads = {"num_attention_heads": 4, "projection_dim": 16, "vocab_size": VOCABULARY}
        text = {**_WIDTH, **heads, **wide}
        sizes = {"max_position_embeddings": 32, "eos_token_id": 2, "bos_token_id": 1}
        config = configured(
            transformers.CLIPConfig,
            text_config={**text, **sizes, "pad_token_id": 0},
            vision_config={**_PATCHES, "projection_dim": 16, **wide},
            projection_dim=16,
        )
        self.model = transformers.CLIPModel(config)

    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> Any:
        """Return what CLIP returns, the loss among it."""
        return self.model(input_ids=input_ids, pixel_values=pixel_values, return_loss=True)


def captions(batch: int, length: int) -> Batch:
    """Pictures, each with its caption; the end token comes last."""
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=seeded(batch, length))
    ids[:, -1] = 2
    return {"input_ids": ids, "pixel_values": pictures(batch)["pixel_values"]}


def spectra(batch: int, target: int, bands: int = 16, frames: int = 64) -> Batch:
    """Log-mel spectra of a fixed window, as Whisper takes them, and target ids."""
    generator = seeded(batch, target)
    return {
        "input_features": torch.randn(batch, bands, frames, generator=generator),
        "labels": torch.randint(3, VOCABULARY, (batch, target), generator=generator),
    }


def waves(batch: int, frames: int) -> Batch:
    """Sound of ``64 * frames`` samples and a class for each recording."""
    generator = seeded(batch, frames)
    return {
        "input_values": torch.randn(batch, 64 * frames, generator=generator),
        "labels": torch.randint(0, CLASSES, (batch,), generator=generator),
    }


_WHISPER = {
    "vocab_size": VOCABULARY,
    "num_mel_bins": 16,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_source_positions": 32,
    "max_target_positions": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
_WAV2VEC2 = {
    **_WIDTH,
    "num_attention_heads": 4,
    "conv_dim": [16, 16, 16],
    "conv_kernel": [10, 3, 3],
    "conv_stride": [5, 2, 2],
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "classifier_proj_size": 16,
}
_STAGES = {"depths": [1, 1], "num_stages": 2}
_SEGFORMER = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [2, 1],
    "hidden_sizes": [16, 32],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [2, 4],
    "mlp_ratios": [2, 2],
    "decoder_hidden_size": 32,
}
_RESNET = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 2], "layer_type": "basic"}
_SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}

ENTRIES = [
    _fixed("ViT", built("ViT", "ForImageClassification", **_PATCHES, **_LABELS)),
    _fixed("DeiT", built("DeiT", "ForImageClassification", **_PATCHES, **_LABELS)),
    _fixed("BEiT", built("Beit", "ForImageClassification", **_PATCHES, **_LABELS)),
    _fixed("Swin", built("Swin", "ForImageClassification", **_SWIN, **_LABELS)),
    _sized(
        "ConvNeXt",
        built("ConvNext", "ForImageClassification", hidden_sizes=[16, 32], **_STAGES, **_LABELS),
    ),
    _sized("ResNet", built("ResNet", "ForImageClassification", **_RESNET, **_LABELS)),
    _fixed(
        "Data2Vec, vision", built("Data2VecVision", "ForImageClassification", **_PATCHES, **_LABELS)
    ),
    _fixed("DINOv2", built("Dinov2", "ForImageClassification", **_PATCHES, **_LABELS)),
    _sized(
        "SegFormer", built("Segformer", "ForSemanticSegmentation", **_SEGFORMER, **_LABELS), masks
    ),
    Entry(
        name="CLIP, contrastive",
        source="transformers",
        make=ContrastiveCLIP,
        batch=captions,
        ranges={"batch": (2, 8), "length": (2, 32)},
        axes={"input_ids": {0: "batch", 1: "length"}, "pixel_values": {0: "batch"}},
        sizes=[(3, 12), (2, 2), (8, 32), (5, 17)],
    ),
    Entry(
        name="Whisper",
        source="transformers",
        make=built("Whisper", "ForConditionalGeneration", **_WHISPER),
        batch=spectra,
        ranges={"batch": (1, 4), "target": (3, 48)},
        axes={"input_features": {0: "batch"}, "labels": {0: "batch", 1: "target"}},
        sizes=[(3, 12), (1, 3), (4, 48), (2, 31)],
    ),
    Entry(
        name="Wav2Vec2",
        source="transformers",
        make=built("Wav2Vec2", "ForSequenceClassification", **_WAV2VEC2, **_LABELS),
        batch=waves,
        ranges={"batch": (1, 4), "frames": (4, 32)},
        axes={"input_values": {0: "batch", 1: "64*frames"}, "labels": {0: "batch"}},
        sizes=[(3, 12), (1, 4), (4, 32), (2, 19)],
    ),
]
