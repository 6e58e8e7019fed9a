"""Models of the table at the width and sizes that they are used at, and more of timm.

What makes a small model is the table's own, with the numbers that say how wide it is replaced by
their names; so are the sizes of batches.  Depth stays small: a layer costs the same every time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from benchmarks.models import families, full_width, graphs, language, perception, pictures
from benchmarks.models.catalogue import entry_named
from benchmarks.models.entry import Batch, Entry
from benchmarks.models.language import Built

_WIDTH = 384
_KEYS: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim"), _WIDTH),
    **dict.fromkeys(("embed_dim", "cross_attention_dim", "caption_channels"), _WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "hidden_dim"), 4 * _WIDTH),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_inner"), 4 * _WIDTH),
    **dict.fromkeys(("feed_forward_size", "intermediate_size_mlp"), 4 * _WIDTH),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 512),
    **dict.fromkeys(("max_encoder_position_embeddings", "context_length"), 512),
    "max_decoder_position_embeddings": 512,
    **dict.fromkeys(("num_attention_heads", "n_heads", "n_head", "num_heads", "heads"), 6),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 6),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "attn_dim_head", "attention_head_size"), 64),
    **dict.fromkeys(("attention_head_dim", "qk_nope_head_dim", "v_head_dim"), 64),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 64),
    **dict.fromkeys(("sliding_window", "attention_window", "local_attention"), 64),
    **dict.fromkeys(("local_attn_chunk_length", "chunk_size"), 64),
    **dict.fromkeys(("vocab_size", "num_tokens", "vocab_size_per_layer_input"), 16_000),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 768),
    **dict.fromkeys(("image_size", "img_size"), 224),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "embedding_size"), 128),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "laurel_rank"), 32),
    "block_out_channels": (64, 128),
    "features": 128,
    "hidden_size_per_layer_input": 64,
    "norm_num_groups": 32,
    "num_conv_pos_embeddings": 64,
    "num_hash_buckets": 16_000,
    "num_key_value_heads": 2,
    "patch_size": 16,
    "position_buckets": 128,
    "sample_size": 32,
    "width": 256,
    "words": 77,
}
"""What takes the place of a number of a small configuration, by its name."""

_SIZES: dict[str, tuple[int, int, int]] = {
    "batch": (4, 3, 16),
    "rows": (8, 6, 16),
    "length": (192, 109, 200),
    "source": (160, 75, 200),
    "target": (96, 121, 200),
    "parts": (3, 2, 4),  # of 64
    "high": (6, 4, 12),
    "wide": (5, 7, 12),
    "nodes": (8000, 6000, 16384),
    "edges": (36000, 31108, 65536),
    "count": (64, 41, 128),
}
"""Of the dims: the first shape's size, the second's and the most."""

_OWN_KEYS: dict[str, dict[str, Any]] = {
    "Swin": {"embed_dim": 96, "num_heads": [3, 6], "patch_size": 4, "window_size": 7},
    "ConvNeXt": {"hidden_sizes": [96, 192]},
    "ResNet": {"embedding_size": 64, "hidden_sizes": [64, 128]},
    "SegFormer": {
        "hidden_sizes": [64, 128],
        "num_attention_heads": [2, 4],
        "decoder_hidden_size": 256,
    },
    "Whisper": {"num_mel_bins": 80, "max_source_positions": 400, "max_target_positions": 200},
    "Wav2Vec2": {"conv_dim": [256] * 3},
    "Mamba 2": {"num_heads": 12},
    "Kimi Linear": {"num_key_value_heads": 6, "linear_head_dim": 64},
    # A state-space layer is twice as wide as the model, and a chunk holds the longest batch.
    "Bamba": {"mamba_d_head": 96, "mamba_chunk_size": 256},
    "Falcon-H1": {"mamba_d_head": 96, "mamba_d_ssm": 768, "mamba_chunk_size": 256},
    "Nemotron-H": {"mamba_head_dim": 96, "chunk_size": 256},
    "Granite 4 hybrid": {"mamba_d_head": 96, "mamba_chunk_size": 256},
    "Mamba 2, any length": {"num_heads": 12, "chunk_size": 256},
    "Zamba 2": {"mamba_headdim": 96, "chunk_size": 256},
    "DeepSeek-V3, latent attention": {"num_key_value_heads": 6},
    "Wav2Vec2, CTC": {"conv_dim": (256, 256)},
    "timm convit_tiny": {"embed_dim": 48, "num_heads": 4},  # a head's width
    "timm swin_tiny_patch4_window7_224": {"embed_dim": 96, "num_heads": (3, 6, 12)},
    "diffusers UNet2DConditionModel": {"attention_head_dim": 8},
    "diffusers DiTTransformer2DModel": {"patch_size": 2},
}
"""Numbers of one model, where those by name do not go together."""

_NARROW = [
    entry.name
    for entry in pictures.ENTRIES
    if entry.name.startswith(("timm test_", "timm lcnet_035", "timm mobilenetv3_small_050"))
]
_OF_PIXELS = {"high": (24, 16, 48), "wide": (20, 28, 48)}
_OWN_SIZES: dict[str, dict[str, tuple[int, int, int]]] = {
    **{name: _OF_PIXELS for name in ("ConvNeXt", "ResNet", "SegFormer")},
    "Whisper": {"batch": (2, 1, 8), "target": (96, 61, 200)},
    "Wav2Vec2": {"batch": (2, 3, 8), "frames": (100, 61, 128)},
    "CANINE": {"length": (128, 109, 128)},
    "LLaVA, 3 pictures": {"length": (240, 221, 256)},
    "LLaVA": {"batch": (3, 1, 8), "length": (240, 221, 256)},
    "Wav2Vec2, CTC": {"frames": (100, 61, 128), "target": (20, 13, 24), "batch": (2, 3, 8)},
    "diffusers UNet2DConditionModel": {"high": (4, 5, 8), "wide": (6, 4, 8), "rows": (2, 1, 4)},
    **{name: {"rows": (16, 12, 32)} for name in _NARROW},
}


def _replaced(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _replaced(value) if isinstance(value, Mapping) else _KEYS.get(key, value)
        for key, value in options.items()
    }


def _widened(make: Callable[..., Any], **own: Any) -> Callable[..., Any]:
    """Make what makes a model or a batch of the table, wide; `own` numbers come last."""
    if isinstance(make, Built):
        return replace(make, options={**_replaced(make.options), **own})
    if isinstance(make, partial):
        return partial(make.func, *make.args, **{**_replaced(make.keywords), **own})
    return make


def _wider(entry: Entry) -> Entry:
    """Make an entry of a model of the table: wide, at the sizes that its dims have by name."""
    if "parts" in entry.ranges:
        entry = _of_windows(entry)
    sizes = {dim: {**_SIZES, **_OWN_SIZES.get(entry.name, {})}[dim] for dim in entry.ranges}
    first, second, most = zip(*sizes.values(), strict=True)
    return replace(
        entry,
        make=_widened(entry.make, **_OWN_KEYS.get(entry.name, {})),
        batch=_widened(entry.batch),
        ranges={
            dim: (least, top)
            for (dim, (least, _)), top in zip(entry.ranges.items(), most, strict=True)
        },
        sizes=[first, second],
    )


def _of_windows(entry: Entry) -> Entry:
    """Have lengths come in parts of 64 tokens, as wide windows take them."""
    index = list(entry.ranges).index("parts")
    times = 64 // int(entry.axes["input_ids"][1].partition("*")[0])
    axes = {
        key: {axis: "64*parts" if dim.endswith("*parts") else dim for axis, dim in named.items()}
        for key, named in entry.axes.items()
    }

    def batch(*sizes: int) -> Batch:
        return entry.batch(*sizes[:index], times * sizes[index], *sizes[index + 1 :])

    return replace(entry, batch=batch, axes=axes)


def _scaled(
    name: str, times: int, sizes: Sequence[tuple[int, ...]], most: Sequence[int], **batch: int
) -> Entry:
    """Make an entry of a network of torch.nn's blocks, so many times as wide."""
    entry = entry_named(name)
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


_CLIP = {key: _KEYS[key] for key in ("hidden_size", "intermediate_size", "vocab_size")}


def _perception(entry: Entry) -> Entry:
    if entry.name.startswith("CLIP"):
        make = partial(entry.make, **_CLIP, num_attention_heads=6)
        return replace(entry, make=make, sizes=[(8, 32), (6, 21)])
    wide = _wider(entry)
    if entry.name == "Whisper":
        return replace(wide, batch=partial(perception.spectra, bands=80, frames=800))
    if list(entry.ranges) == ["batch"]:
        return replace(wide, batch=partial(perception.images, high=28, wide=28))
    return wide


def _of_experts(name: str, **own: Any) -> Entry:
    """Make an entry of 256 wide words, each seen by two of eight experts."""
    entry = entry_named(f"{name}, 4 experts")
    width = {"hidden_size": 256, "num_attention_heads": 4, "vocab_size": language.VOCABULARY}
    return replace(
        _wider(entry),
        name=f"{name}, 8 experts",
        make=_widened(entry.make, **width, intermediate_size=512, **own),
        sizes=[(8, 128), (2, 48)],
    )


def _of_pictures(entry: Entry) -> Entry:
    """Make an entry of pictures of any size, or of the one that the network is made for."""
    if len(entry.ranges) > 1:
        return _wider(entry)
    if entry.source == "diffusers":  # of 8 * 4 pixels
        return _wider(replace(entry, batch=partial(entry.batch, high=4, wide=4)))
    wide = _wider(entry)
    assert isinstance(wide.make, partial)
    side = wide.make.keywords.get("img_size")
    return replace(wide, batch=partial(entry.batch, side=side)) if side else wide


_AT_FULL_WIDTH = {f"{entry.source} {entry.name}" for entry in full_width.ENTRIES}

WIDE: tuple[Entry, ...] = (
    *map(_wider, language.ENTRIES),
    _of_experts("Mixtral", num_local_experts=8),
    _of_experts("Qwen3-MoE", num_experts=8, moe_intermediate_size=512),
    *map(_perception, perception.ENTRIES),
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
    _scaled("LSTM tagger, packed", 8, [(16, 64), (12, 47)], [32, 128]),
    _scaled("Temporal convolution, weight norm", 8, [(16, 128), (12, 93)], [32, 256]),
    _scaled("Mixture of experts, dense", 8, [(8, 128), (6, 93)], [16, 256]),
    *full_width.ENTRIES,
    *map(_wider, families.ENTRIES),
    *(_of_pictures(e) for e in pictures.ENTRIES if e.name not in _AT_FULL_WIDTH),
    *map(_wider, graphs.ENTRIES),
)
