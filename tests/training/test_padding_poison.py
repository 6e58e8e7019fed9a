"""What embeddings hold for padding, NaN or an infinity, reaches neither loss nor gradients."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.export import Dim

import relax_disc
from tests.training.test_padding_models import (
    BATCHES,
    IGNORED,
    LONGEST,
    Greatest,
    Joined,
    Picked,
    batch,
    bert,
    classified,
    compiled,
    deberta,
    falcon,
    gemma2,
    in_double,
    llama,
    right,
    some,
    written_out,
)

transformers = pytest.importorskip("transformers")

MODELS = {
    "llama": llama,
    "bert, written out": written_out(bert),
    "falcon": falcon,
    "gemma 2": gemma2,
    "deberta": deberta,
    "picked states": Picked,
    "greatest": Greatest,
}
CAUSAL = ("llama", "falcon", "gemma 2")
GIVEN = {
    "right": BATCHES["right"],
    "one token each": BATCHES["one token each"],
    "some labels": batch(right([20, 11, 3]), labelled=some(3, 20, 0.4) * right([20, 11, 3])),
    "no label": batch(right([12, 30, 5]), labelled=torch.zeros(3, 30)),
}


def with_padding(given):
    """Give padding a token of its own."""
    return {**given, "input_ids": given["input_ids"].clamp(min=1) * given["attention_mask"]}


def untied(model):
    """Give the head weights of its own: those of padding's token are a class there."""
    if isinstance(whole := getattr(model, "model", model), transformers.PreTrainedModel):
        model_with_head = model if isinstance(model, transformers.PreTrainedModel) else whole
        head = model_with_head.get_output_embeddings()
        if head is not None:
            head.weight = nn.Parameter(head.weight.detach().clone())
    return model


def assert_not_read(step, model, given, poison):
    """A step whose padding is embedded as ``poison`` is that with numbers there, in float64."""
    table = next(m for m in model.modules() if isinstance(m, nn.Embedding)).weight
    exact = copy.deepcopy(model).double()
    exact.zero_grad()
    wanted = in_double(exact, given)
    wanted = wanted if isinstance(wanted, torch.Tensor) else wanted.loss
    wanted.backward()
    kept = table[0].detach().clone()
    with torch.no_grad():
        table[0] = poison
    model.zero_grad()
    loss = step(**given, update=False)
    with torch.no_grad():
        table[0] = kept
    torch.testing.assert_close(
        loss.double(), wanted.detach().double(), rtol=1e-5, atol=1e-6, equal_nan=True
    )
    pairs = [p for p in zip(model.named_parameters(), exact.parameters(), strict=True)]
    top = max(float(q.grad.abs().max()) for _, q in pairs if q.grad is not None)
    for (name, p), q in pairs:
        if q.grad is not None:
            assert float((p.grad.double() - q.grad).abs().max()) <= 3e-6 * top, name


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_padding_of_any_embedding_is_not_read(name):
    torch.manual_seed(0)
    model = untied(MODELS[name]().train())
    is_pooled = name == "greatest"
    step = compiled(model, class_of_each=is_pooled)
    assert step.padding_report().is_left_out, str(step.padding_report())
    for given in map(with_padding, GIVEN.values()):
        if name not in CAUSAL:  # else a label at padding is predicted from the token before
            hidden = given["attention_mask"] == 0
            given["labels"] = given["labels"].masked_fill(hidden, IGNORED)
        given = classified(given) if is_pooled else given
        for poison in (math.nan, math.inf):
            assert_not_read(step, model, given, poison)


@pytest.mark.slow
def test_padding_of_two_answers_in_one_pass_is_not_read():
    torch.manual_seed(0)
    model = untied(Joined())
    shape = {0: Dim("batch", min=1, max=8), 1: Dim("length", min=2, max=LONGEST)}

    def pair(given):
        one = with_padding(given)
        ids, mask, labels = (each.flip(0) for each in one.values())
        ids = (ids * 7 % 60 + 1) * mask  # else most of the two answers' gradients cancel
        labels = labels.where(labels == IGNORED, labels * 7 % 61)
        names = "ids", "mask", "labels", "other_ids", "other_mask", "other_labels"
        return dict(zip(names, (*one.values(), ids, mask, labels), strict=True))

    example = pair(GIVEN["right"])
    step = relax_disc.compile(model, None, example, dynamic_shapes=dict.fromkeys(example, shape))
    assert step.padding_report().is_left_out, str(step.padding_report())
    for name, given in GIVEN.items():
        assert name != "no label" or bool((given["labels"] == IGNORED).all())
        for poison in (math.nan, math.inf):
            assert_not_read(step, model, pair(given), poison)
