"""Sentence Transformers' trainers with compiled steps against the library's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

library = pytest.importorskip(
    "sentence_transformers", reason="sentence_transformers is not among the packages of the tests"
)
datasets = pytest.importorskip("datasets")

from sentence_transformers import cross_encoder, sparse_encoder  # noqa: E402
from sentence_transformers.sentence_transformer import losses, modules  # noqa: E402
from transformers import (  # noqa: E402
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
)

from relax_disc.errors import InputMismatchError  # noqa: E402
from relax_disc.integrations import sentence_transformers_trainers as compiled  # noqa: E402
from tests.integrations.trainers import ARGUMENTS, texts, tokenizer, weights  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def saved(kind, folder, **sizes) -> str:
    torch.manual_seed(0)
    kind(BertConfig(**SIZES, **sizes)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def sentences(folder):
    words = modules.Transformer(saved(BertModel, folder), max_seq_length=16)
    return library.SentenceTransformer(modules=[words, modules.Pooling(16)])


def sparse(folder):
    words = sparse_encoder.modules.MLMTransformer(saved(BertForMaskedLM, folder))
    return library.SparseEncoder(modules=[words, sparse_encoder.modules.SpladePooling()])


def pairs(folder):
    saved(BertForSequenceClassification, folder, num_labels=1)
    return library.CrossEncoder(str(folder), num_labels=1)


def rows(*names: str, label: Any = None):
    given = {} if label is None else {"label": label}
    return datasets.Dataset.from_list([{**row, **given} for row in texts(*names)])


def splade(model):
    return sparse_encoder.losses.SpladeLoss(
        model,
        sparse_encoder.losses.SparseMultipleNegativesRankingLoss(model),
        document_regularizer_weight=3e-3,
        query_regularizer_weight=5e-3,
    )


def trainer(home, kind: str, folder, model, data, loss, **arguments):
    made = model(folder / "model")
    settings = {**ARGUMENTS, "per_device_train_batch_size": 3, "max_steps": 4, **arguments}
    torch.manual_seed(0)  # of what a loss has
    return getattr(home, f"{kind}Trainer")(
        model=made,
        args=getattr(library, f"{kind}TrainingArguments")(output_dir=str(folder), **settings),
        train_dataset=data,
        loss=loss(made),
    )


def assert_alike(ours, theirs, norm_is_of_model=True):
    """Compare runs; the library's norm of gradients is without those of what the loss has."""
    for found, expected in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if name != "grad_norm" or norm_is_of_model:
                is_timed = name.startswith("train_") and name != "train_loss"
                assert is_timed or found[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "model", "columns", "label", "loss"),
    [
        (
            "SentenceTransformer",
            sentences,
            ("anchor", "positive", "negative"),
            None,
            lambda model: losses.MultipleNegativesRankingLoss(model),
        ),
        (
            "SentenceTransformer",
            sentences,
            ("one", "other"),
            1,
            lambda model: losses.SoftmaxLoss(model, 16, 2),
        ),
        ("SparseEncoder", sparse, ("anchor", "positive", "negative"), None, splade),
        (
            "CrossEncoder",
            pairs,
            ("one", "other"),
            1.0,
            lambda model: cross_encoder.losses.BinaryCrossEntropyLoss(model),
        ),
    ],
    ids=["three columns", "a loss with parameters", "sparse", "pairs"],
)
def test_losses_metrics_and_weights_are_those_of_the_library(
    kind, model, columns, label, loss, tmp_path
):
    given = (kind, tmp_path, model, rows(*columns, label=label), loss)
    arguments = {"max_grad_norm": 0.0, "optim": "sgd", "learning_rate": 1e-3}
    theirs, ours = (trainer(home, *given, **arguments) for home in (library, compiled))
    for each in (theirs, ours):
        each.train()
    assert_alike(ours, theirs, norm_is_of_model=not isinstance(ours.loss, losses.SoftmaxLoss))


def test_each_of_several_datasets_has_a_step_and_losses_their_parameters(tmp_path):
    def several(model):
        return {
            "nli": losses.SoftmaxLoss(model, 16, 2),
            "qa": losses.MultipleNegativesRankingLoss(model),
        }

    data = {"nli": rows("one", "other", label=1), "qa": rows("anchor", "positive")}
    given = ("SentenceTransformer", tmp_path, sentences, data, several)
    arguments = {"max_grad_norm": 0.0, "learning_rate": 1e-4}
    theirs, ours = (trainer(home, *given, **arguments) for home in (library, compiled))
    heads = [copy.deepcopy(each.loss["nli"].classifier.weight) for each in (theirs, ours)]
    for each in (theirs, ours):
        each.train()
    assert_alike(ours, theirs, norm_is_of_model=False)
    assert ours.steps.keys() == {"nli", "qa"}
    for each, before in zip((theirs, ours), heads, strict=True):
        assert not torch.equal(each.loss["nli"].classifier.weight, before)


@pytest.mark.parametrize(
    ("kind", "model", "loss", "said"),
    [
        (
            "SentenceTransformer",
            sentences,
            lambda model: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2),
            "use MultipleNegativesRankingLoss and state a memory_budget",
        ),
        (
            "CrossEncoder",
            pairs,
            lambda model: cross_encoder.losses.MultipleNegativesRankingLoss(model),
            "Losses that can be compiled: BinaryCrossEntropyLoss",
        ),
    ],
    ids=["by pieces", "texts in the loss"],
)
def test_losses_that_a_step_cannot_follow_are_refused_by_name(kind, model, loss, said, tmp_path):
    ours = trainer(compiled, kind, tmp_path, model, rows("anchor", "positive"), loss)
    with pytest.raises(InputMismatchError, match=said):
        ours.train()
