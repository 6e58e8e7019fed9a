"""A Hugging Face model and the Trainer
====================================

The library's Trainer and the compiled one train the same model on texts of different lengths: the
import is the one difference.

    python tutorials/hugging_face_trainer.py
"""  # noqa: D205, D400

from __future__ import annotations

import tempfile
from typing import Any

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

from relax_disc.integrations.transformers import Trainer

# %%
# A small GPT-2; ``AutoModelForCausalLM.from_pretrained(...)`` gives you your own.
# Dropout is off, so that the two runs can be compared.


def make_model() -> transformers.GPT2LMHeadModel:
    """Make the model, always with the same weights."""
    transformers.set_seed(0)
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=4)
    config.update({**off, **special})
    return transformers.GPT2LMHeadModel(config)


# %%
# Lines of a text as bytes, padded in each batch to the longest of it.

LINES = [line for line in (transformers.Trainer.train.__doc__ or "").splitlines() if line.strip()]
RECORDS = [{"input_ids": torch.tensor(list(line.encode()))} for line in LINES]


def collate(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Pad a batch."""
    ids = [record["input_ids"] for record in records]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(i) for i in ids], batch_first=True),
        "labels": pad_sequence(ids, batch_first=True, padding_value=-100),
    }


def losses(kind: type, **options: Any) -> list[float]:
    """Train by a Trainer of a class; the logged losses."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            num_train_epochs=2,
            learning_rate=1e-3,
            lr_scheduler_type="cosine",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = kind(make_model(), arguments, collate, RECORDS, **options)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


# %%
# Shapes are found in the first batch: the first axis is the batch, the second of tables of integers
# the length.  A budget holds for every step, sums of gradients included.

theirs = losses(transformers.Trainer)
ours = losses(Trainer, memory_budget="64MiB")
for number, (one, other) in enumerate(zip(theirs, ours, strict=True), 1):
    print(f"update {number}: transformers {one:.5f}, relax_disc {other:.5f}")
assert torch.allclose(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4)
print("the losses are the same within rounding")
