"""What the tests of the compiled Trainers share."""

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

ARGUMENTS: dict[str, Any] = {
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
}
"""A short run on the CPU that logs each update and writes nothing."""


def weights(trainer: Any) -> Tensor:
    """Return all parameters of a Trainer's model, one after the other."""
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


WORDS = {"[PAD]": 0, "[UNK]": 1, "</s>": 2} | {f"w{i}": i + 3 for i in range(61)}


def tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of `WORDS`."""
    plain = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=plain, model_max_length=32, **names)


def texts(*names: str) -> list[dict[str, str]]:
    """Make 16 rows of texts of 2 to 8 words, one text for each name."""
    draw = torch.Generator().manual_seed(0)

    def text() -> str:
        count = int(torch.randint(2, 9, (), generator=draw))
        return " ".join(f"w{i}" for i in torch.randint(0, 61, (count,), generator=draw))

    return [{name: text() for name in names} for _ in range(16)]
