"""Models of Hugging Face, tiny and with random weights: gradients against float64 PyTorch."""

import warnings

import pytest
import torch
from torch.export import Dim

from relax_disc.errors import RelaxDiscWarning
from relax_disc.frontend import capture_step
from tests.frontend.running import check_gradients

transformers = pytest.importorskip("transformers")

SIZES = dict(vocab_size=64, num_hidden_layers=1, max_position_embeddings=64)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2)
WIDTH = dict(hidden_size=32, intermediate_size=48)

CASES = {
    "llama": ("Llama", "CausalLM", {**SIZES, **HEADS, **WIDTH}, 2),
    "llama-eager": ("Llama", "CausalLM", {**SIZES, **HEADS, **WIDTH}, 2),
    "mistral": ("Mistral", "CausalLM", {**SIZES, **HEADS, **WIDTH, "sliding_window": 8}, 2),
    "qwen3": ("Qwen3", "CausalLM", {**SIZES, **HEADS, **WIDTH, "head_dim": 8}, 2),
    "gemma": ("Gemma", "CausalLM", {**SIZES, **HEADS, **WIDTH, "head_dim": 8}, 2),
    "gpt2": (
        "GPT2",
        "LMHeadModel",
        dict(
            vocab_size=64,
            n_embd=32,
            n_layer=1,
            n_head=4,
            n_positions=64,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=1,
        ),
        2,
    ),
    "bert": (
        "Bert",
        "MaskedLM",
        {
            **SIZES,
            **WIDTH,
            "num_attention_heads": 4,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        2,
    ),
    **{
        f"funnel-{kind}": (
            "Funnel",
            "MaskedLM",
            dict(
                vocab_size=64,
                d_model=32,
                n_head=4,
                d_head=8,
                d_inner=48,
                block_sizes=[1, 1, 1],
                num_decoder_layers=1,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                activation_dropout=0.0,
                initializer_std=0.02,
                **options,
            ),
            13,
        )
        for kind, options in {
            "factorized": {"attention_type": "factorized"},
            "whole": {"separate_cls": False, "pool_q_only": False, "truncate_seq": False},
        }.items()
    },
    "t5": (
        "T5",
        "ConditionalGeneration",
        dict(
            vocab_size=64,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=1,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        ),
        3,
    ),
}


_EAGER = ("llama-eager", "t5", "funnel")


def make(name):
    family, head, options, least = CASES[name]
    config = getattr(transformers, f"{family}Config")(**options, use_cache=False)
    config._attn_implementation = "eager" if name.startswith(_EAGER) else "sdpa"
    for key in ("loss_type",):
        setattr(config, key, "ForMaskedLM" if head == "MaskedLM" else "ForCausalLM")
    prefix = "For" if head != "LMHeadModel" else ""
    torch.manual_seed(0)
    return getattr(transformers, f"{family}{prefix}{head}")(config).train(), least


def batch(b, s):
    g = torch.Generator().manual_seed(100 * b + s)
    ids = torch.randint(0, 64, (b, s), generator=g)
    mask, labels = torch.ones_like(ids), ids.clone()
    if s > 4:
        mask[0, -2:], labels[0, -2:] = 0, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.slow  # in the fast tier tests/training/test_numerics.py trains a Llama
@pytest.mark.filterwarnings("ignore:.*attention_structure")  # Funnel keeps sizes there
@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    model, least = make(name)
    b, s = Dim("b", min=1, max=8), Dim("s", min=least, max=40)
    shapes = {key: {0: b, 1: s} for key in batch(2, 3)}
    captured = capture_step(model, None, batch(3, max(12, least)), dynamic_shapes=shapes)
    assert [out.kind for out in captured.outputs].count("extra") == 0
    check_gradients(
        captured, model, [batch(3, max(12, least)), batch(1, least), batch(5, 33), batch(8, 40)]
    )


def test_what_the_library_notes_and_formats_for_itself_is_not_told():
    """A classifier notes its kind of loss in the config; PaliGemma writes its checks' messages."""
    config = transformers.BertConfig(**SIZES, **WIDTH, num_attention_heads=4)
    classifier = transformers.BertForSequenceClassification(config).train()
    example = {"input_ids": torch.ones(2, 5, dtype=torch.int64), "labels": torch.tensor([0, 1])}
    rows = {0: Dim("rows", min=1, max=8)}
    with warnings.catch_warnings():
        warnings.simplefilter("error", RelaxDiscWarning)
        capture_step(classifier, None, example, dynamic_shapes={"input_ids": rows, "labels": rows})
        capture_step(*_pictures(), dynamic_shapes={"input_ids": rows, "pixel_values": rows})
    assert classifier.config.problem_type is None


def _pictures():
    """A model that calls transformers' check of a message with a tensor in it."""

    class Pictured(torch.nn.Module):
        def __init__(self):
            super().__init__()
            config = transformers.PaliGemmaConfig(
                text_config={"model_type": "gemma", **SIZES, **HEADS, **WIDTH, "head_dim": 8},
                vision_config={
                    "model_type": "siglip_vision_model",
                    **WIDTH,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 4,
                    "image_size": 32,
                    "patch_size": 16,
                    "projection_dim": 32,
                },
                image_token_index=7,
                projection_dim=32,
                hidden_size=32,
            )
            self.net = transformers.PaliGemmaForConditionalGeneration(config)

        def forward(self, input_ids, pixel_values):
            kinds = (input_ids != 7).long()
            return self.net(
                input_ids=input_ids,
                pixel_values=pixel_values,
                token_type_ids=kinds,
                labels=input_ids,
            ).loss

    ids = torch.full((2, 9), 3)
    ids[:, 1:5] = 7
    return Pictured().train(), None, {"input_ids": ids, "pixel_values": torch.randn(2, 3, 32, 32)}
