"""Encoders and decoders that leave the padding of both sides out, against PyTorch in float64."""

import copy

import pytest
import torch
from torch import nn
from torch.export import Dim

import relax_disc
from relax_disc.errors import ShapeRangeError
from relax_disc.pipeline import PipelineOptions
from tests.frontend.models import VOCABULARY
from tests.tiers import every

transformers = pytest.importorskip("transformers")

IGNORED = -100
LONGEST = 40
UNUSED = 2  # an id that only padding of the source has


def t5(dropout=0.0, layers=2):
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=layers,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
        dropout_rate=dropout,
        decoder_start_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config)


def bart(dropout=0.0, layers=2):
    config = transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=LONGEST,
        decoder_start_token_id=1,
        pad_token_id=0,
        use_cache=False,
        **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), dropout),
    )
    return transformers.BartForConditionalGeneration(config)


def batch(mask, labelled, decoder_mask=None, seed=0):
    """Make a batch: a source where `mask` is, labels where `labelled` is."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, mask.shape, generator=generator)
    labels = torch.randint(3, VOCABULARY, labelled.shape, generator=generator)
    found = {
        "input_ids": ids.masked_fill(mask == 0, UNUSED),
        "attention_mask": mask,
        "labels": labels.masked_fill(labelled == 0, IGNORED),
    }
    return found if decoder_mask is None else {**found, "decoder_attention_mask": decoder_mask}


def right(lengths, width=None):
    return (torch.arange(width or max(lengths)) < torch.tensor(lengths)[:, None]).long()


def some(rows, columns, share, seed=3):
    kept = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) < share
    kept[:, 0] = True
    return kept.long()


BATCHES = {
    "full": batch(right([9, 9]), right([5, 5])),
    "right": batch(right([12, 40, 5]), right([3, 17, 11])),
    "left": batch(right([12, 30, 5]).flip(1), right([3, 17, 11]).flip(1)),
    "one token each": batch(right([1, 1, 1], width=8), right([1, 1, 1], width=6)),
    "one sequence": batch(right([2]), right([3])),
    "holes": batch(some(3, 25, 0.5), some(3, 14, 0.3, 4)),
    "a target without labels": batch(right([7, 3]), right([6, 0])),
}


def compiled(model, example=None, **options):
    shapes = {
        "source": {0: Dim("batch", min=1, max=8), 1: Dim("source", min=2, max=LONGEST)},
        "target": {0: Dim("batch", min=1, max=8), 1: Dim("target", min=3, max=LONGEST)},
    }
    example = batch(right([6, 4, 5]), right([3, 7, 2])) if example is None else example
    kinds = {"input_ids": "source", "attention_mask": "source"}
    dynamic = {name: shapes[kinds.get(name, "target")] for name in example}
    return relax_disc.compile(model, None, example, dynamic_shapes=dynamic, **options)


@pytest.fixture(scope="module", params=[t5, bart], ids=lambda make: make.__name__)
def trained(request):
    torch.manual_seed(0)
    model = request.param().train()
    return model, compiled(model)


def check(model, step, given):
    """Compare loss and gradients of a step with those of PyTorch in float64."""
    exact = copy.deepcopy(model).double()
    model.zero_grad()
    exact.zero_grad()
    loss = step(**given, update=False)
    wanted = exact(**given).loss
    wanted.backward()
    torch.testing.assert_close(loss.double(), wanted.detach().double(), rtol=1e-5, atol=1e-6)
    gradients = {name: p.grad for name, p in exact.named_parameters() if p.grad is not None}
    top = max(float(grad.abs().max()) for grad in gradients.values())
    for name, p in model.named_parameters():
        if name in gradients:
            assert float((p.grad.double() - gradients[name]).abs().max()) < 3e-6 * top, name


@pytest.mark.parametrize("name", every(2, BATCHES))
def test_gradients_are_those_of_all_positions(trained, name):
    check(*trained, BATCHES[name])


def test_both_sides_are_counted(trained):
    _, step = trained
    assert step.padding_report().tokens == ("source_tokens", "target_tokens")
    for name, wanted in (("right", (64, 32)), ("left", (48, 51)), ("one token each", (16, 16))):
        shape = step.shape_of(**BATCHES[name])
        # Before a label, positions without one are keys: padding on the left is computed.
        assert (shape["source_tokens"], shape["target_tokens"]) == wanted


def test_a_plan_is_made_for_two_numbers_of_positions(trained):
    _, step = trained
    sizes = {"batch": 4, "source": 40, "target": 30}
    plans = [
        step.plan(**sizes, **counts)
        for counts in (
            {"source_tokens": 60, "target_tokens": 50},
            {"source_tokens": 60},
            {"target_tokens": 50},
            {},
        )
    ]
    assert plans[0].shape == {**sizes, "source_tokens": 64, "target_tokens": 64}
    assert plans[3].shape == {**sizes, "source_tokens": 160, "target_tokens": 120}
    peaks = [plan.peak_bytes for plan in plans]
    assert peaks[0] < min(peaks[1:3]) and max(peaks[1:3]) < peaks[3]
    with pytest.raises(ShapeRangeError, match=r"target_tokens=121; allowed is 0 .. 120"):
        step.plan(**sizes, target_tokens=121)


def test_the_least_memory_gives_the_same_bits(trained):
    model, step = trained
    runs = []
    given = BATCHES["right"]
    for budget in (None, step.plan(**step.shape_of(**given)).least_bytes):
        step.memory_budget = budget
        model.zero_grad()
        step(**given, update=False)
        report = step.memory_report()
        assert report.peak_bytes == report.planned_peak_bytes
        runs.append([p.grad.clone() for p in model.parameters()])
    step.memory_budget = None
    assert report.recomputations > 0
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("make", [t5, pytest.param(bart, marks=pytest.mark.slow)])
def test_a_mask_of_the_target_hides_its_padding(make):
    torch.manual_seed(0)
    model = make(layers=1).train()
    labelled = right([3, 17, 11])
    given = batch(right([12, 30, 5]), labelled, labelled)
    step = compiled(model, given)
    check(model, step, given)
    check(model, step, batch(right([9, 4]), right([8, 3]).flip(1), right([8, 3]).flip(1)))
    # What a label counts is computed, whether the mask leaves it or not.
    holes = some(3, 14, 0.5)
    check(model, step, batch(some(3, 25, 0.5), some(3, 14, 0.7, 5), holes))
    assert step.shape_of(**given)["target_tokens"] == 32


@pytest.mark.parametrize("make", [t5, pytest.param(bart, marks=pytest.mark.slow)])
def test_without_a_mask_of_the_source_only_targets_are_left_out(make):
    torch.manual_seed(0)
    model = make(layers=1).train()
    given = {k: v for k, v in BATCHES["right"].items() if k != "attention_mask"}
    step = compiled(model, given)
    report = step.padding_report()
    assert report.is_left_out and any("source: " in each.reason for each in report.reasons)
    check(model, step, given)
    shape = step.shape_of(**given)
    assert (shape["source_tokens"], shape["target_tokens"]) == (120, 32)


@pytest.mark.slow
@pytest.mark.parametrize("make", [t5, bart])
def test_dropout_drops_what_it_drops_of_all_positions(make):
    torch.manual_seed(0)
    model = make(0.2).train()
    steps = [compiled(model), compiled(model, options=PipelineOptions(remove_padding=False))]
    assert [step.padding_report().is_left_out for step in steps] == [True, False]
    for name in ("right", "left", "holes"):
        gradients = []
        for step in steps:
            step.rng_state = torch.tensor([5, 1])
            model.zero_grad()
            step(**BATCHES[name], update=False)
            gradients.append([p.grad.clone() for p in model.parameters()])
        top = max(float(g.abs().max()) for g in gradients[1])
        for packed, padded in zip(*gradients, strict=True):
            assert float((packed - padded).abs().max()) < 3e-6 * top


@pytest.mark.parametrize("make", [t5, pytest.param(bart, marks=pytest.mark.slow)])
def test_what_pads_the_source_may_be_anything(make):
    torch.manual_seed(0)
    model = make(layers=1).train()
    # The head reads every row of its own table.
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    tables = [x for x in model.modules() if isinstance(x, nn.Embedding)]
    step = compiled(model)
    given = BATCHES["right"]
    model.zero_grad()
    step(**given, update=False)
    clean = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with torch.no_grad():
        for table in tables:
            if table.num_embeddings == VOCABULARY:
                table.weight[UNUSED] = float("nan")
    model.zero_grad()
    loss = step(**given, update=False)
    assert loss.isfinite()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    for gradient, wanted in zip(found, clean, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=0)
