"""Language models of Hugging Face, small, with random weights, and batches of token ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.models.entry import Batch, Entry, seeded

VOCABULARY = 96
LONGEST = 48

_HEADS = {"num_attention_heads": 4}
_GROUPED = {**_HEADS, "num_key_value_heads": 2}
_WIDTH = {"hidden_size": 32, "intermediate_size": 64}
_DEPTH = {"num_hidden_layers": 2, "max_position_embeddings": 64}
BASE = {"vocab_size": VOCABULARY, **_WIDTH, **_DEPTH, **_HEADS}
LLAMA: dict[str, Any] = {**BASE, **_GROUPED}


def configured(config: Any, **options: Any) -> Any:
    """Make a configuration without dropout and cache; what is random cannot be compared."""
    made = config(**options)
    for key, value in list(vars(made).items()):
        if ("drop" in key) and isinstance(value, float):
            setattr(made, key, 0.0)
    if hasattr(made, "use_cache"):
        made.use_cache = False
    return made


@dataclass(frozen=True)
class Built:
    """Makes ``<family><head>`` from ``<family>Config(**options)``."""

    family: str
    head: str
    options: dict[str, Any]

    def __call__(self) -> nn.Module:
        """Make the model, with random weights."""
        config = configured(getattr(transformers, f"{self.family}Config"), **self.options)
        family = self.family.removesuffix("Text")  # of models that read more than text
        return getattr(transformers, family + self.head)(config)


def built(family: str, head: str, **options: Any) -> Built:
    """Return what makes ``<family><head>`` from ``<family>Config(**options)``."""
    return Built(family, head, options)


def tokens(batch: int, length: int) -> Batch:
    """Ids with padding at the end of one row, as a collator makes it; labels are the ids."""
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=seeded(batch, length))
    mask, labels = torch.ones_like(ids), ids.clone()
    if length > 4:
        ids[0, -2:], mask[0, -2:], labels[0, -2:] = 1, 0, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def pairs(batch: int, source: int, target: int) -> Batch:
    """Source and target ids of independent lengths."""
    generator = seeded(batch, source, target)
    ids = torch.randint(3, VOCABULARY, (batch, source), generator=generator)
    labels = torch.randint(3, VOCABULARY, (batch, target), generator=generator)
    mask = torch.ones_like(ids)
    if source > 4:
        ids[0, -2:], mask[0, -2:] = 1, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def of_tokens(name: str, make: Callable[[], nn.Module]) -> Entry:
    """Make an entry of a model of one sequence."""
    return Entry(
        name=name,
        source="transformers",
        make=make,
        batch=tokens,
        ranges={"batch": (1, 8), "length": (2, LONGEST)},
        axes={key: {0: "batch", 1: "length"} for key in tokens(2, 2)},
        sizes=[(3, 12), (1, 2), (8, LONGEST), (5, 33)],
    )


def of_pairs(name: str, make: Callable[[], nn.Module]) -> Entry:
    """Make an entry of a model of two sequences."""
    return Entry(
        name=name,
        source="transformers",
        make=make,
        batch=pairs,
        ranges={"batch": (1, 8), "source": (2, LONGEST), "target": (3, LONGEST)},
        axes={
            "input_ids": {0: "batch", 1: "source"},
            "attention_mask": {0: "batch", 1: "source"},
            "labels": {0: "batch", 1: "target"},
        },
        sizes=[(3, 12, 9), (1, 2, 3), (8, LONGEST, LONGEST), (4, 7, 31)],
    )


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
BART = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 64,
}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2}
_OPT = {**_DEPTH, **_HEADS, "hidden_size": 32, "ffn_dim": 64, "word_embed_proj_dim": 32}

CAUSAL = [
    of_tokens("GPT-2", built("GPT2", "LMHeadModel", **_GPT2, **_ENDS)),
    of_tokens("GPT-NeoX", built("GPTNeoX", "ForCausalLM", **BASE)),
    of_tokens("OPT", built("OPT", "ForCausalLM", vocab_size=VOCABULARY, **_OPT)),
    of_tokens(
        "BLOOM",
        built("Bloom", "ForCausalLM", vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
    ),
    of_tokens("Llama", built("Llama", "ForCausalLM", **LLAMA)),
    of_tokens(
        "Mistral, sliding window of 8",
        built("Mistral", "ForCausalLM", **LLAMA, sliding_window=8),
    ),
    of_tokens("Qwen2", built("Qwen2", "ForCausalLM", **LLAMA)),
    of_tokens("Qwen3", built("Qwen3", "ForCausalLM", **LLAMA, head_dim=8)),
    of_tokens("Gemma", built("Gemma", "ForCausalLM", **LLAMA, head_dim=8)),
    of_tokens("Gemma 2", built("Gemma2", "ForCausalLM", **LLAMA, head_dim=8, sliding_window=16)),
    of_tokens("Phi", built("Phi", "ForCausalLM", **BASE, pad_token_id=0, **_ENDS)),
    of_tokens(
        "Falcon",
        built(
            "Falcon",
            "ForCausalLM",
            vocab_size=VOCABULARY,
            hidden_size=32,
            **_HEADS,
            num_hidden_layers=2,
        ),
    ),
    of_tokens(
        "Mixtral, 4 experts",
        built("Mixtral", "ForCausalLM", **LLAMA, num_local_experts=4, head_dim=8),
    ),
    of_tokens(
        "Qwen3-MoE, 4 experts",
        built("Qwen3Moe", "ForCausalLM", **LLAMA, **_EXPERTS, head_dim=8, pad_token_id=0),
    ),
    of_tokens(
        "Mamba",
        built(
            "Mamba",
            "ForCausalLM",
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            state_size=8,
            pad_token_id=0,
        ),
    ),
]

ENCODERS = [
    of_tokens("BERT", built("Bert", "ForMaskedLM", **BASE)),
    of_tokens("RoBERTa", built("Roberta", "ForMaskedLM", **BASE)),
    of_tokens("ALBERT", built("Albert", "ForMaskedLM", **BASE, embedding_size=16)),
    of_tokens("ELECTRA", built("Electra", "ForMaskedLM", **BASE, embedding_size=16)),
    of_tokens(
        "DistilBERT",
        built(
            "DistilBert",
            "ForMaskedLM",
            vocab_size=VOCABULARY,
            dim=32,
            hidden_dim=64,
            n_layers=2,
            n_heads=4,
            max_position_embeddings=64,
        ),
    ),
    of_tokens(
        "DeBERTa-v2",
        built(
            "DebertaV2",
            "ForMaskedLM",
            **BASE,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            position_buckets=16,
            share_att_key=True,
            norm_rel_ebd="layer_norm",
        ),
    ),
    of_tokens("MPNet", built("MPNet", "ForMaskedLM", **BASE)),
]

PAIRS = [
    of_pairs(
        "T5",
        built(
            "T5",
            "ForConditionalGeneration",
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        ),
    ),
    of_pairs("BART", built("Bart", "ForConditionalGeneration", **BART)),
]

ENTRIES = [*CAUSAL, *ENCODERS, *PAIRS]
