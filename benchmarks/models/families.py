"""Families of language models that differ from the usual ones in a construct, and x-transformers.

State-space and linear recurrences, complex rotary angles, windows and buckets of attention, pooled
lengths, hashed ids, speech with CTC, pictures among the words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models.entry import Batch, Entry, seeded
from benchmarks.models.language import (
    BART,
    BASE,
    LLAMA,
    LONGEST,
    VOCABULARY,
    built,
    of_pairs,
    of_tokens,
    pairs,
    tokens,
)

_RECURRENT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_LINEAR = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,  # so that some lengths are whole chunks and others are not
}


def _speech(batch: int, frames: int, target: int) -> Batch:
    generator = seeded(batch, frames, target)
    return {
        "input_values": torch.randn(batch, 20 * frames, generator=generator),
        "labels": torch.randint(3, VOCABULARY, (batch, target), generator=generator),
    }


def _pictured(batch: int, length: int, image_size: int, patch_size: int) -> Batch:
    """Sequences in which a picture's patches follow the first token."""
    generator = seeded(batch, length)
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
    ids[:, 1 : 1 + (image_size // patch_size) ** 2] = 1
    pixels = torch.randn(batch, 3, image_size, image_size, generator=generator)
    return {"input_ids": ids, "pixel_values": pixels, "labels": ids.clone()}


class Decoder(nn.Module):
    """x-transformers' language model."""

    def __init__(self, num_tokens: int, max_seq_len: int, **options: Any) -> None:
        super().__init__()
        import x_transformers as x  # pyright: ignore[reportMissingImports]

        layers = x.Decoder(depth=2, **options)
        net = x.TransformerWrapper(
            num_tokens=num_tokens, max_seq_len=max_seq_len, attn_layers=layers
        )
        self.net = x.AutoregressiveWrapper(net)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the loss of predicting each next token."""
        return self.net(input_ids)


_OF_DECODER: dict[str, Any] = {
    "num_tokens": VOCABULARY,
    "max_seq_len": LONGEST,
    "dim": 32,
    "heads": 4,
    "attn_dim_head": 8,
}


def _of_x(name: str, **options: Any) -> Entry:
    return Entry(
        name=f"x-transformers, {name}",
        source="x_transformers",
        make=partial(Decoder, **_OF_DECODER, **options),
        batch=_ids,
        ranges={"batch": (1, 8), "length": (3, LONGEST)},
        axes={"input_ids": {0: "batch", 1: "length"}},
        sizes=[(3, 12), (1, 3), (8, LONGEST), (5, 33)],
    )


def _ids(batch: int, length: int) -> Batch:
    generator = seeded(batch, length)
    return {"input_ids": torch.randint(3, VOCABULARY, (batch, length), generator=generator)}


def _masked(batch: int, length: int) -> Batch:
    """Tokens to be predicted where others stand.

    Funnel's large weights are sure of a token that they see; how far from 1 its probability is
    would be all rounding.
    """
    made = tokens(batch, length)
    return {**made, "labels": made["labels"].roll(1, 1)}


def _other(name: str, make: Callable[[], nn.Module], **facts: Any) -> Entry:
    return Entry(name=name, source="transformers", make=make, **facts)


def _canine(name: str, ranges: dict[str, tuple[int, int]], **options: Any) -> Entry:
    """Make an entry of characters, each with a class."""
    own = {key: value for key, value in BASE.items() if key != "vocab_size"}
    options = {**own, "num_labels": 5, "num_hash_buckets": 64, **options}
    return _other(
        name,
        built("Canine", "ForTokenClassification", **options),
        batch=lambda rows, length: {
            **_ids(rows, length),
            "labels": torch.randint(0, 5, (rows, length), generator=seeded(rows, length)),
        },
        ranges=ranges,
        axes={key: {0: "batch", 1: "length"} for key in ("input_ids", "labels")},
        sizes=[(3, 12), (1, ranges["length"][0]), (8, LONGEST), (5, 33)],
    )


def _mamba_2(chunk_size: int) -> Callable[[], nn.Module]:
    heads = {"num_heads": 8, "head_dim": 8, "n_groups": 2}
    sizes = {"state_size": 8, "chunk_size": chunk_size}
    return built("Mamba2", "ForCausalLM", **_RECURRENT, **heads, **sizes)


def _of_chunks(name: str, make: Callable[[], nn.Module]) -> Entry:
    """Make an entry of a model that loops over chunks of 64: one chunk, some, and a part of one."""
    entry = of_tokens(name, make)
    sizes = [(3, 12), (1, 2), (2, 64), (1, 65), (8, 150)]
    return replace(entry, ranges={"batch": (1, 8), "length": (2, 150)}, sizes=sizes)


def _of_length(name: str, multiple: int, make: Callable[[], nn.Module]) -> Entry:
    """Lengths that a number divides, as the model's collator pads them."""

    def batch(rows: int, parts: int) -> Batch:
        generator = seeded(rows, parts)
        ids = torch.randint(3, VOCABULARY, (rows, multiple * parts), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}

    axes: Mapping[str, Mapping[int, str]] = {
        key: {0: "batch", 1: f"{multiple}*parts"} for key in batch(1, 1)
    }
    most = LONGEST // multiple
    return _other(
        name,
        make,
        batch=batch,
        ranges={"batch": (1, 8), "parts": (2, most)},
        axes=axes,
        sizes=[(3, 3), (1, 2), (8, most), (5, most - 1)],
    )


def _seen_by_all(rows: int, parts: int) -> Batch:
    """Sequences of which the first words, one to four, are seen by all others."""
    generator = seeded(rows, parts)
    ids = torch.randint(3, VOCABULARY, (rows, 8 * parts), generator=generator)
    count = torch.randint(1, 5, (rows, 1), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "global_attention_mask": (torch.arange(8 * parts) < count).long(),
        "labels": torch.randint(0, 5, (rows,), generator=generator),
    }


def _llava(name: str, **sizes: Any) -> Entry:
    return _other(
        name,
        built(
            "Llava",
            "ForConditionalGeneration",
            vision_config=_VISION,
            text_config={"model_type": "llama", "use_cache": False, **LLAMA},
            image_token_index=1,
        ),
        **sizes,
    )


_PATCHES = {"image_size": 32, "patch_size": 8}
_VISION = {
    "model_type": "clip_vision_model",
    "projection_dim": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    **_PATCHES,
}
_BIG = {"block_size": 4, "num_random_blocks": 1}
_REFORMER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "attention_head_size": 8,
    "num_attention_heads": 4,
    "feed_forward_size": 64,
    "axial_pos_embds": False,
    "max_position_embeddings": 64,
    "attn_layers": ["local", "local"],
    "local_attn_chunk_length": 8,
    "is_decoder": True,
}

OF_TRANSFORMERS = [
    of_tokens(
        "Llama 4, complex rotary angles",
        built(
            "Llama4Text",
            "ForCausalLM",
            **LLAMA,
            head_dim=8,
            intermediate_size_mlp=64,
            num_local_experts=2,
        ),
    ),
    of_tokens(
        "Gemma 3n",
        built(
            "Gemma3nText",
            "ForCausalLM",
            **{**LLAMA, "num_hidden_layers": 4},
            head_dim=8,
            vocab_size_per_layer_input=VOCABULARY,
            hidden_size_per_layer_input=8,
            layer_types=["sliding_attention", "full_attention"] * 2,
            num_kv_shared_layers=0,
            laurel_rank=4,
            sliding_window=8,
            activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
            pad_token_id=0,
        ),
    ),
    of_tokens("Gemma 3", built("Gemma3Text", "ForCausalLM", **LLAMA)),
    _of_chunks(
        "Qwen3-Next, gated delta rule",
        built(
            "Qwen3Next",
            "ForCausalLM",
            **LLAMA,
            **_EXPERTS,
            **_LINEAR,
            head_dim=8,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            **_HYBRID,
        ),
    ),
    _of_length(
        "Mamba 2",  # lengths that its chunks divide
        8,
        _mamba_2(chunk_size=8),
    ),
    of_tokens(
        "Mamba 2, any length",
        _mamba_2(chunk_size=16),
    ),
    of_tokens(
        "Zamba 2",
        built(
            "Zamba2",
            "ForCausalLM",
            **{**LLAMA, "num_hidden_layers": 3},
            layers_block_type=["mamba", "mamba", "hybrid"],
            mamba_d_state=8,
            mamba_headdim=8,
            mamba_ngroups=2,
            n_mamba_heads=8,
            num_mem_blocks=1,
            adapter_rank=4,
            chunk_size=16,
        ),
    ),
    of_tokens("Falcon Mamba", built("FalconMamba", "ForCausalLM", **_RECURRENT, state_size=8)),
    of_tokens(
        "Jamba",
        built(
            "Jamba",
            "ForCausalLM",
            **LLAMA,
            num_experts=2,
            mamba_d_state=8,
            attn_layer_period=2,
            attn_layer_offset=1,
            use_mamba_kernels=False,
            pad_token_id=0,
        ),
    ),
    of_tokens(
        "Qwen 3.5",
        built("Qwen3_5Text", "ForCausalLM", **LLAMA, **_LINEAR, **_HYBRID, head_dim=8),
    ),
    of_tokens(
        "OLMo hybrid",
        built(
            "OlmoHybrid",
            "ForCausalLM",
            **{**LLAMA, "num_key_value_heads": 4},
            **{**_LINEAR, "linear_num_key_heads": 4},
            **_HYBRID,
            pad_token_id=0,
        ),
    ),
    of_tokens(
        "Kimi Linear",
        built(
            "KimiLinear",
            "ForCausalLM",
            **{**LLAMA, "num_key_value_heads": 4},
            **_HYBRID,
            pad_token_id=0,
            moe_intermediate_size=32,
            num_local_experts=4,
            num_experts_per_tok=2,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            linear_head_dim=8,
            linear_num_heads=4,
        ),
    ),
    of_tokens(
        "MiniMax",
        built("MiniMax", "ForCausalLM", **LLAMA, **_HYBRID, head_dim=8, num_local_experts=4),
    ),
    of_tokens("Bamba", built("Bamba", "ForCausalLM", **LLAMA, **_MAMBA, attn_layer_indices=[1])),
    of_tokens("Falcon-H1", built("FalconH1", "ForCausalLM", **LLAMA, **_MAMBA, mamba_d_ssm=64)),
    of_tokens(
        "Nemotron-H",
        built(
            "NemotronH",
            "ForCausalLM",
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            layers_block_type=["mamba", "attention", "mlp"],
            ssm_state_size=8,
            mamba_num_heads=8,
            mamba_head_dim=8,
            n_groups=2,
            chunk_size=16,
        ),
    ),
    of_tokens(
        "Granite 4 hybrid",
        built(
            "GraniteMoeHybrid",
            "ForCausalLM",
            **LLAMA,
            **_MAMBA,
            layer_types=["mamba", "attention"],
            position_embedding_type="rope",
            shared_intermediate_size=32,
            num_local_experts=4,
        ),
    ),
    of_tokens("RWKV", built("Rwkv", "ForCausalLM", **_RECURRENT, context_length=LONGEST)),
    of_tokens(
        "DeBERTa",
        built(
            "Deberta", "ForMaskedLM", **BASE, relative_attention=True, pos_att_type=["c2p", "p2c"]
        ),
    ),
    _of_length("Longformer", 8, built("Longformer", "ForMaskedLM", **BASE, attention_window=8)),
    _other(
        "Longformer, global attention",
        built(
            "Longformer",
            "ForSequenceClassification",
            **BASE,
            attention_window=8,
            num_labels=5,
            problem_type="single_label_classification",
        ),
        batch=_seen_by_all,
        ranges={"batch": (1, 8), "parts": (2, LONGEST // 8)},
        axes={
            **{
                key: {0: "batch", 1: "8*parts"}
                for key in ("input_ids", "attention_mask", "global_attention_mask")
            },
            "labels": {0: "batch"},
        },
        sizes=[(3, 3), (1, 2), (8, LONGEST // 8), (5, 5)],
    ),
    replace(
        of_pairs(
            "LED",
            built(
                "LED",
                "ForConditionalGeneration",
                **{k: v for k, v in BART.items() if k != "max_position_embeddings"},
                max_encoder_position_embeddings=64,
                max_decoder_position_embeddings=64,
                attention_window=8,
            ),
        ),
        batch=lambda rows, parts, target: pairs(rows, 8 * parts, target),
        ranges={"batch": (1, 8), "parts": (2, LONGEST // 8), "target": (3, LONGEST)},
        axes={
            "input_ids": {0: "batch", 1: "8*parts"},
            "attention_mask": {0: "batch", 1: "8*parts"},
            "labels": {0: "batch", 1: "target"},
        },
        sizes=[(3, 3, 9), (1, 2, 3), (8, LONGEST // 8, LONGEST), (4, 4, 31)],
    ),
    replace(
        of_tokens(
            "Funnel",
            built(
                "Funnel",
                "ForMaskedLM",
                vocab_size=VOCABULARY,
                d_model=32,
                n_head=4,
                d_head=8,
                d_inner=64,
                block_sizes=[1, 1],
                num_decoder_layers=1,
            ),
        ),
        batch=_masked,
        ranges={"batch": (1, 8), "length": (8, LONGEST)},
        sizes=[(3, 12), (1, 8), (8, LONGEST), (5, 33)],
    ),
    # Up to 128 characters, the default, are one window of local attention.
    _canine("CANINE", {"batch": (1, 8), "length": (12, LONGEST)}, downsampling_rate=2),
    _canine(
        "CANINE, windows",
        {"batch": (1, 8), "length": (8, LONGEST)},
        downsampling_rate=2,
        local_transformer_stride=8,
    ),
    _llava(
        "LLaVA, 3 pictures",
        batch=partial(_pictured, 3, **_PATCHES),
        ranges={"length": (18, 40)},
        axes={"input_ids": {1: "length"}, "pixel_values": {}, "labels": {1: "length"}},
        sizes=[(24,), (18,), (40,)],
    ),
    _llava(
        "LLaVA",  # it makes a list of its pictures
        batch=partial(_pictured, **_PATCHES),
        ranges={"batch": (1, 8), "length": (18, 40)},
        axes={
            "input_ids": {0: "batch", 1: "length"},
            "pixel_values": {0: "batch"},
            "labels": {0: "batch", 1: "length"},
        },
        sizes=[(3, 24), (1, 18), (8, 40), (2, 19)],
    ),
    _other(
        "Wav2Vec2, CTC",
        built(
            "Wav2Vec2",
            "ForCTC",
            **BASE,
            conv_dim=(16, 16),
            conv_stride=(5, 2),
            conv_kernel=(10, 3),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            apply_spec_augment=False,
        ),
        batch=_speech,
        ranges={"batch": (1, 4), "frames": (8, 32), "target": (1, 6)},
        axes={
            "input_values": {0: "batch", 1: "20*frames"},
            "labels": {0: "batch", 1: "target"},
        },
        sizes=[(3, 16, 4), (1, 8, 1), (4, 32, 6)],
    ),
    _of_length("Reformer", 8, built("Reformer", "ModelWithLMHead", **_REFORMER)),
    of_tokens(
        "XLNet",
        built(
            "XLNet",
            "LMHeadModel",
            vocab_size=VOCABULARY,
            d_model=32,
            n_layer=2,
            n_head=4,
            d_inner=64,
        ),
    ),
    of_tokens("FNet", built("FNet", "ForMaskedLM", **BASE)),
    _of_length(
        "BigBird",
        16,
        built("BigBird", "ForMaskedLM", **BASE, attention_type="original_full", **_BIG),
    ),
    of_tokens("Phi-3", built("Phi3", "ForCausalLM", **LLAMA, pad_token_id=0)),
    of_tokens(
        "ModernBERT", built("ModernBert", "ForMaskedLM", **BASE, local_attention=8, pad_token_id=0)
    ),
    of_tokens(
        "GPT-J",
        built(
            "GPTJ",
            "ForCausalLM",
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            rotary_dim=4,
            n_positions=64,
        ),
    ),
    of_tokens("Cohere", built("Cohere", "ForCausalLM", **LLAMA, pad_token_id=0)),
    of_tokens("OLMo 2", built("Olmo2", "ForCausalLM", **LLAMA)),
    of_tokens("StableLM", built("StableLm", "ForCausalLM", **LLAMA)),
    of_tokens(
        "DeepSeek-V3, latent attention",
        built(
            "DeepseekV3",
            "ForCausalLM",
            **BASE,
            num_key_value_heads=4,
            moe_intermediate_size=32,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            kv_lora_rank=8,
            q_lora_rank=8,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            first_k_dense_replace=1,
        ),
    ),
    of_pairs(
        "Marian", built("Marian", "MTModel", **BART, decoder_start_token_id=0, pad_token_id=0)
    ),
    of_pairs("Pegasus", built("Pegasus", "ForConditionalGeneration", **BART)),
]

OF_X_TRANSFORMERS = [
    _of_x(
        "rotary, RMS norm, SwiGLU",
        rotary_pos_emb=True,
        use_rmsnorm=True,
        ff_swish=True,
        ff_glu=True,
    ),
    _of_x("ALiBi", alibi_pos_bias=True),
    _of_x("relative positions", rel_pos_bias=True),
    _of_x("normalised queries, flash", attn_qk_norm=True, attn_flash=True),
    _of_x("talking heads, value residuals", attn_pre_talking_heads=True, add_value_residual=True),
    _of_x("scaled norms, sandwiched", use_scalenorm=True, sandwich_norm=True),
    _of_x("residuals that are gated", gate_residual=True),
    _of_x("macaron", macaron=True),
    _of_x("shifted tokens", shift_tokens=1),
]

ENTRIES = [*OF_TRANSFORMERS, *OF_X_TRANSFORMERS]
