"""TRL's trainers with a compiled step against TRL's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

trl = pytest.importorskip("trl", reason="trl is not among the packages of the tests")
datasets = pytest.importorskip("datasets")

from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from relax_disc.errors import InputMismatchError  # noqa: E402
from relax_disc.integrations import trl_trainers as compiled  # noqa: E402
from tests.integrations.trainers import ARGUMENTS, texts, tokenizer, weights  # noqa: E402

SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}


def trainer(home, kind: str, folder, *names: str, **arguments):
    torch.manual_seed(0)
    of_reward = kind == "Reward"
    sizes = LlamaConfig(**SIZES, num_attention_heads=2, vocab_size=64, pad_token_id=0)
    sizes.num_labels = 1
    plain = (LlamaForSequenceClassification if of_reward else LlamaForCausalLM)(sizes)
    plain.save_pretrained(folder / "model")
    # Seven rows: the third step of an epoch has one, and the fourth begins the next.
    common = {**ARGUMENTS, "per_device_train_batch_size": 3, "max_steps": 5, "bf16": False}
    common |= {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}
    rows = datasets.Dataset.from_list(texts(*names)[:7])
    return getattr(home, f"{kind}Trainer")(
        model=type(plain).from_pretrained(folder / "model"),
        args=getattr(trl, f"{kind}Config")(output_dir=str(folder), **common, **arguments),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=tokenizer(),
    )


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("SFT", ("text",)),
        ("Reward", ("prompt", "chosen", "rejected")),
        ("DPO", ("prompt", "chosen", "rejected")),
    ],
)
def test_losses_metrics_and_weights_are_those_of_the_library(kind, names, tmp_path):
    theirs = trainer(trl, kind, tmp_path, *names)
    ours = trainer(compiled, kind, tmp_path, *names)
    for each in (theirs, ours):
        each.train()
    logged = [[*each.state.log_history] for each in (theirs, ours)]
    for expected, found in zip(*logged, strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if name.endswith(("runtime", "_per_second", "_flos")):
                continue
            if name == "rewards/accuracies" and expected["rewards/margins"] == 0:
                continue  # the model is the reference, and rounding decides
            assert float(found[name]) == pytest.approx(float(value), rel=1e-3, abs=1e-5), name
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-3, atol=1e-4)


def test_what_cannot_be_honoured_is_refused_by_name(tmp_path):
    with pytest.raises(InputMismatchError, match="packing"):
        trainer(compiled, "SFT", tmp_path, "text", packing=True)


def test_of_branches_on_data_only_those_on_a_count_are_taken_to_hold(monkeypatch):
    monkeypatch.setattr(compiled, "_is_called_by_trl", lambda: True)
    with compiled._Numbers() as numbers:
        assert torch.tensor(0) > 0
        assert not torch.zeros(2).any()
        assert not torch.tensor(1) > 1
    assert [bool(condition) for condition in numbers.conditions] == [False]
