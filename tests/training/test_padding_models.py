"""Models of Hugging Face that leave padding out, against eager PyTorch in float64."""

import copy
import functools
import math
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.export import Dim

import relax_disc
from relax_disc.pipeline import PipelineOptions
from tests.frontend.models import VOCABULARY
from tests.tiers import every

transformers = pytest.importorskip("transformers")

IGNORED = -100
CLASSES = {"num_labels": 5, "pad_token_id": 0, "problem_type": "single_label_classification"}
LONGEST = 40
SMALL = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48},
    **{"num_hidden_layers": 2, "num_attention_heads": 4},
}


def llama(kind=transformers.LlamaForCausalLM, **options):
    sizes = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": LONGEST}
    return kind(transformers.LlamaConfig(**{**sizes, "use_cache": False, **options}))


def mistral():
    """Make a model all of whose layers have a window, shorter than documents are."""
    config = transformers.MistralConfig(
        **SMALL,
        num_key_value_heads=2,
        sliding_window=4,
        max_position_embeddings=LONGEST,
        use_cache=False,
    )
    return transformers.MistralForCausalLM(config)


def gpt2(dropout=0.0, **options):
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LONGEST,
        n_layer=2,
        n_embd=32,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
        use_cache=False,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout),
        **options,
    )
    return transformers.GPT2LMHeadModel(config)


def bert(dropout=0.0, kind=transformers.BertForMaskedLM, **options):
    drops = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
    sizes = {**SMALL, "max_position_embeddings": LONGEST}
    return kind(transformers.BertConfig(**{**sizes, **drops, **options}))


def mpnet():
    """Make an encoder with a trained bias by distance, added to scores that are written out."""
    config = transformers.MPNetConfig(
        **SMALL,
        max_position_embeddings=LONGEST + 2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.MPNetForMaskedLM(config)


def bloom():
    """Make a model whose scores have a number for each distance, by heads (ALiBi)."""
    config = transformers.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, use_cache=False
    )
    return transformers.BloomForCausalLM(config)


def falcon():
    """Make a model that takes its heads by lists of numbers from one product."""
    config = transformers.FalconConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_cache=False,
    )
    return transformers.FalconForCausalLM(config)


def gemma2():
    """Make a model that caps its scores, in layers with a window and without."""
    config = transformers.Gemma2Config(
        **SMALL,
        num_key_value_heads=2,
        head_dim=8,
        attn_logit_softcapping=2.0,
        sliding_window=4,
        max_position_embeddings=LONGEST,
        use_cache=False,
        attn_implementation="eager",
    )
    return transformers.Gemma2ForCausalLM(config)


def deberta():
    """Make an encoder that adds products of states and of positions to its scores."""
    config = transformers.DebertaV2Config(
        **SMALL,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=LONGEST,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=8,
        share_att_key=True,
        norm_rel_ebd="layer_norm",
    )
    return transformers.DebertaV2ForMaskedLM(config)


class Picked(nn.Module):
    """Predicts the tokens of states that a mask picks, as ModernBERT and much code by hand do."""

    def __init__(self):
        super().__init__()
        self.model = bert()
        self.config = self.model.config

    def forward(self, input_ids, attention_mask, labels):
        states = self.model.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        picked = labels != IGNORED
        return nn.functional.cross_entropy(self.model.cls(states[picked]), labels[picked])


def in_double(exact, given):
    """Run a reference; Hugging Face's softmax goes back to float32, where its masks overflow."""
    with patch.object(nn.functional, "softmax", lambda x, dim, dtype=None: torch.softmax(x, dim)):
        return exact(**given)


def written_out(make):
    """Make a model that writes attention out, as products and a softmax."""
    return lambda *args, **options: make(*args, attn_implementation="eager", **options)


def batch(mask, labelled=None, seed=0):
    """Make a batch with a mask; labels are where that is or as told."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.as_tensor(mask, dtype=torch.int64)
    ids = torch.randint(0, VOCABULARY, mask.shape, generator=generator)
    labels = torch.randint(0, VOCABULARY, mask.shape, generator=generator)
    labelled = mask if labelled is None else labelled
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": labels.masked_fill(labelled == 0, IGNORED),
    }


def right(lengths, width=None):
    return (torch.arange(width or max(lengths)) < torch.tensor(lengths)[:, None]).long()


def some(rows, columns, share, seed=3):
    return (torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) < share).long()


BATCHES = {
    "full": batch(right([9, 9])),
    "right": batch(right([12, 30, 5])),
    "left": batch(right([12, 30, 5]).flip(1)),
    "one token each": batch(right([1, 1, 1], width=8), labelled=right([2, 2, 2], width=8)),
    "prompts": batch(right([20, 11]), labelled=right([20, 11]) - right([6, 4], width=20)),
    "labels where the mask is not": batch(right([7, 3]), labelled=torch.ones(2, 7)),
    "holes in the mask": batch(some(3, 25, 0.8), labelled=some(3, 25, 0.5, 4)),
}


def classified(given):
    """Make a batch with one class for each sequence."""
    return {**given, "labels": given["labels"][:, 0].clamp(min=0) % 5}


def compiled(model, class_of_each=False, example=None, **options):
    shape = {0: Dim("batch", min=1, max=8), 1: Dim("length", min=2, max=LONGEST)}
    example = batch(right([6, 4, 5])) if example is None else example
    shapes = dict.fromkeys(example, shape)
    if class_of_each:
        example, shapes = classified(example), {**shapes, "labels": {0: shape[0]}}
    return relax_disc.compile(model, None, example, dynamic_shapes=shapes, **options)


MODELS = {
    "llama": llama,
    "gpt2": gpt2,
    "bert": bert,
    "mpnet": mpnet,
    "bloom": bloom,
    "falcon": falcon,
    "gemma 2": gemma2,
    "deberta": deberta,
    "picked states": Picked,
    "llama, written out": written_out(llama),
    "gpt2, written out": written_out(gpt2),
    "bert, written out": written_out(bert),
    "bert, classes of tokens": lambda: bert(
        kind=transformers.BertForTokenClassification, num_labels=VOCABULARY
    ),
}
SLOW = (
    "mpnet",
    "bloom",
    "falcon",
    "gemma 2",
    "deberta",
    "picked states",
    "gpt2, written out",
    "bert, written out",
    "bert, classes of tokens",
)


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in MODELS],
)
def trained(request):
    torch.manual_seed(0)
    model = MODELS[request.param]().train()
    return model, compiled(model)


def assert_exact(step, model, given):
    """A step's loss and gradients are those of the model in float64."""
    exact = copy.deepcopy(model).double()
    exact.zero_grad()
    model.zero_grad()
    found = step(**given, update=False), in_double(exact, given)
    loss, wanted = (x if isinstance(x, torch.Tensor) else x[0] for x in found)
    wanted.backward()
    torch.testing.assert_close(loss.double(), wanted.detach().double(), rtol=1e-5, atol=1e-6)
    top = max(float(p.grad.abs().max()) for p in exact.parameters() if p.grad is not None)
    for (name, p), q in zip(model.named_parameters(), exact.parameters(), strict=True):
        if q.grad is not None:
            assert float((p.grad.double() - q.grad).abs().max()) < 3e-6 * top, name


@pytest.mark.parametrize("name", every(2, BATCHES))
def test_gradients_are_those_of_all_positions(trained, name):
    model, step = trained
    assert_exact(step, model, BATCHES[name])


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_masks_of_other_types_are_read(kind):
    torch.manual_seed(0)
    model = llama(num_hidden_layers=1)

    def given(name):
        return {**BATCHES[name], "attention_mask": BATCHES[name]["attention_mask"].to(kind)}

    step = compiled(model, example=given("right"))
    assert step.padding_report().is_left_out, str(step.padding_report())
    for name in ("right", "left", "holes in the mask"):
        assert_exact(step, model, given(name))
        assert name != "right" or step.memory_report().shape["tokens"] == 48


def test_masked_positions_are_not_computed(trained):
    model, step = trained
    assert step.padding_report().is_left_out, str(step.padding_report())
    # Padding before the first token predicts it. It sees nothing: by numbers, the mean of all.
    encoders = (
        *(transformers.BertPreTrainedModel, transformers.MPNetPreTrainedModel),
        *(transformers.DebertaV2PreTrainedModel, Picked),
    )
    is_causal = not isinstance(model, encoders)
    is_blind = is_causal and (
        model.config._attn_implementation == "eager" or model.config.model_type == "bloom"
    )
    for name in ("right", "left"):
        shape = step.shape_of(**BATCHES[name])
        # Causal models predict the next token: without a label behind it the last is not needed.
        assert shape["tokens"] == (90 if name == "left" and is_blind else 48)
    assert step.shape_of(**BATCHES["full"])["tokens"] <= 18


@pytest.mark.parametrize("make", [gpt2, pytest.param(bert, marks=pytest.mark.slow)])
def test_dropout_drops_what_it_drops_of_all_positions(make):
    torch.manual_seed(0)
    model = make(0.2).train()
    steps = [compiled(model), compiled(model, options=PipelineOptions(remove_padding=False))]
    assert [step.padding_report().is_left_out for step in steps] == [True, False]
    for name in ("right", "left", "holes in the mask"):
        gradients = []
        for step in steps:
            step.rng_state = torch.tensor([5, 1])
            model.zero_grad()
            step(**BATCHES[name], update=False)
            gradients.append([p.grad.clone() for p in model.parameters()])
        top = max(float(g.abs().max()) for g in gradients[1])
        for packed, padded in zip(*gradients, strict=True):
            assert float((packed - padded).abs().max()) < 3e-6 * top


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(written_out(llama), id="written out"),
        pytest.param(llama, id="as one", marks=pytest.mark.slow),
    ],
)
def test_the_last_token_is_that_of_all_positions(make):
    torch.manual_seed(0)
    sizes = {**CLASSES, "num_hidden_layers": 1}
    model = make(kind=transformers.LlamaForSequenceClassification, **sizes)
    step = compiled(model, class_of_each=True)
    assert step.padding_report().is_left_out, str(step.padding_report())
    for name in ("full", "right", "left", "one token each", "holes in the mask"):
        given = classified(BATCHES[name])
        # Padding has the id by which the model finds its last token.
        ids = given["input_ids"] = given["input_ids"].clamp(min=1) * given["attention_mask"]
        assert_exact(step, model, given)
        real = int(given["attention_mask"].sum())
        assert step.memory_report().shape["tokens"] <= min(-(-real // 16) * 16 + 16, ids.numel())


def documents(lengths, width, seed=0):
    """Make sequences of several documents each, whose positions tell where one starts."""
    given = batch(right([sum(each) for each in lengths], width=width), seed=seed)
    del given["attention_mask"]
    position = torch.zeros(len(lengths), width, dtype=torch.int64)
    for row, each in zip(position, lengths, strict=True):
        begun = torch.cat([torch.arange(n) for n in each])
        row[: len(begun)] = begun
        row[len(begun) :] = torch.arange(width - len(begun))
    return {**given, "position_ids": position}


def labels_left(given, left):
    """Ignore labels but where told."""
    return {**given, "labels": given["labels"].masked_fill(torch.as_tensor(left) == 0, IGNORED)}


def moved(given, steps):
    """Let the positions of each sequence begin at a number of its own."""
    return {**given, "position_ids": given["position_ids"] + torch.tensor(steps)[:, None]}


DOCUMENTS = {
    "behind the last": (documents([[7, 5, 4], [20], [1, 2, 1]], 34), 48),
    "full": (documents([[3, 4], [7]], 7), 14),
    "one token each": (documents([[1], [2]], 12), 16),
    "prompts": (
        labels_left(
            documents([[9, 8, 3], [12, 1], [4, 4]], 30, seed=1),
            right([20, 13, 8], width=30) - right([3, 12, 5], width=30),
        ),
        48,
    ),
    "the last documents have no label": (
        labels_left(documents([[6, 9], [2, 2, 2, 30]], LONGEST), right([6, 4], width=LONGEST)),
        16,
    ),
    "no label in one sequence": (
        labels_left(documents([[10, 5], [5, 10], [3]], 21), right([0, 15, 3], width=21)),
        16,
    ),
    "begun before": (moved(documents([[8, 9], [5, 6, 2]], 25), [3, 1]), 32),
}
"""Batches of documents, and how many of their positions are computed."""


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(llama, id="llama"),
        pytest.param(mistral, id="mistral", marks=pytest.mark.slow),
        pytest.param(gemma2, id="gemma 2", marks=pytest.mark.slow),
        pytest.param(falcon, id="falcon", marks=pytest.mark.slow),
        pytest.param(written_out(gpt2), id="gpt2, written out", marks=pytest.mark.slow),
    ],
)
def test_documents_in_one_sequence_leave_what_is_behind_them_out(make):
    torch.manual_seed(0)
    model = make().train()
    step = compiled(model, example=documents([[3, 2], [5], [1, 3]], 6))
    assert step.padding_report().is_left_out, str(step.padding_report())
    for given, tokens in DOCUMENTS.values():
        assert_exact(step, model, given)
        assert step.memory_report().shape["tokens"] == tokens


def gradient_errors(step, model, exact, given):
    """Greatest and root of the sum of squares of a step's errors, in units of its gradients."""
    model.zero_grad()
    step(**given, update=False)
    pairs = [(p, q) for p, q in zip(model.parameters(), exact.parameters(), strict=True)]
    differences = [p.grad.double() - q.grad for p, q in pairs if q.grad is not None]
    top = max(float(difference.abs().max()) for difference in differences)
    return top, math.sqrt(sum(float(difference.square().sum()) for difference in differences))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one token each", "right", "left"])
@pytest.mark.parametrize("make", [llama, gpt2, bert, "classifier"])
def test_errors_are_those_of_all_positions_over_many_seeds(make, name):
    """A few sums have other terms that are zero: which way each rounds differs, not how far."""
    is_classifier = make == "classifier"
    options = {"kind": transformers.LlamaForSequenceClassification, **CLASSES}
    build = functools.partial(llama, **options) if is_classifier else make
    model = build()
    all_positions = PipelineOptions(remove_padding=False)
    steps = [compiled(model, is_classifier), compiled(model, is_classifier, options=all_positions)]
    assert [step.padding_report().is_left_out for step in steps] == [True, False]
    logs = []
    for seed in range(24):
        torch.manual_seed(seed)
        model.load_state_dict(build().state_dict())
        given = batch(BATCHES[name]["attention_mask"], seed=seed)
        if is_classifier:
            given = classified(given)
            given["input_ids"] = given["input_ids"].clamp(min=1) * given["attention_mask"]
        elif name == "one token each":
            given["labels"] = batch(right([2, 2, 2], width=8), seed=seed)["labels"]
        exact = copy.deepcopy(model).double()
        in_double(exact, given).loss.backward()
        packed, padded = (gradient_errors(step, model, exact, given) for step in steps)
        logs.append([math.log(a / b) for a, b in zip(packed, padded, strict=True)])
    means = torch.tensor(logs).mean(0).exp()
    assert (means < 1.1).all(), means


class Preference(nn.Module):
    """Prefers one answer to another, by the sums of their log-probabilities, as DPO does."""

    def __init__(self):
        super().__init__()
        self.model = llama()

    def score(self, ids, mask, labels):
        logits = self.model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        wanted = labels[:, 1:]
        counts = wanted != IGNORED
        logs = logits.log_softmax(-1).gather(2, wanted.clamp(min=0)[..., None])[..., 0]
        return (logs * counts).sum(-1)

    def forward(self, ids, mask, labels, other_ids, other_mask, other_labels):
        chosen = self.score(ids, mask, labels)
        return -nn.functional.logsigmoid(
            0.1 * (chosen - self.score(other_ids, other_mask, other_labels))
        ).mean()


class Joined(Preference):
    """Runs both answers in one pass, as TRL does."""

    def forward(self, ids, mask, labels, other_ids, other_mask, other_labels):
        count, pairs = ids.shape[0], ((ids, other_ids), (mask, other_mask), (labels, other_labels))
        scores = self.score(*map(torch.cat, pairs))
        return -nn.functional.logsigmoid(0.1 * (scores[:count] - scores[count:])).mean()


@pytest.mark.slow
def test_two_answers_in_one_pass_are_packed():
    torch.manual_seed(0)
    model = Joined()
    shape = {0: Dim("batch", min=1, max=8), 1: Dim("length", min=2, max=LONGEST)}

    def pair(name, seed=1):
        one, other = batch(BATCHES[name]["attention_mask"], seed=seed), BATCHES[name]
        given = [*one.values(), *(x.flip(0) for x in other.values())]
        return dict(zip(("ids", "mask", "labels", *OTHERS), given, strict=True))

    example = pair("right")
    step = relax_disc.compile(model, None, example, dynamic_shapes=dict.fromkeys(example, shape))
    assert step.padding_report().is_left_out, str(step.padding_report())
    for name in BATCHES:
        assert_exact(step, model, pair(name))
        if name == "right":
            assert step.memory_report().shape["tokens"] == 96
    with pytest.raises(relax_disc.errors.ShapeRangeError, match=r"tokens=50; .* 48 = 6 \* 8"):
        step.plan(batch=3, length=8, tokens=50)
    assert step.plan(batch=3, length=8).shape["tokens"] == 48


@pytest.mark.slow
def test_two_answers_are_packed_each_by_itself():
    torch.manual_seed(0)
    model = Preference()
    rows = Dim("batch", min=1, max=8)
    shapes = [{0: rows, 1: Dim(name, min=2, max=LONGEST)} for name in ("chosen", "rejected")]
    shapes = [shape for shape in shapes for _ in range(3)]

    def pair(one, other):
        given = [batch(one, seed=1), batch(other, seed=2)]
        for each in given:  # padding has an id of its own
            each["input_ids"] = each["input_ids"].clamp(min=1) * each["attention_mask"]
        return [x for each in given for x in each.values()]

    example = pair(right([6, 4, 5]), right([7, 3, 2]))
    step = relax_disc.compile(model, None, tuple(example), dynamic_shapes=tuple(shapes))
    assert step.padding_report().tokens == ("chosen_tokens", "rejected_tokens")
    for given in (
        example,
        pair(right([20, 3]), right([5, 31])),
        pair(right([9, 9]), right([9, 9])),
    ):
        exact = copy.deepcopy(model).double()
        with torch.no_grad():
            model.model.model.embed_tokens.weight[0] = float("nan")
        model.zero_grad()
        loss, wanted = step(*given, update=False), exact(*given)
        wanted.backward()
        with torch.no_grad():
            model.model.model.embed_tokens.weight[0] = exact.model.model.embed_tokens.weight[0]
        torch.testing.assert_close(loss.double(), wanted.detach(), rtol=1e-5, atol=1e-6)
        top = max(float(p.grad.abs().max()) for p in exact.parameters())
        for p, q in zip(model.parameters(), exact.parameters(), strict=True):
            assert float((p.grad.double() - q.grad).abs().max()) < 3e-6 * top


OTHERS = ("other_ids", "other_mask", "other_labels")


class Sentences(nn.Module):
    """Classify sentences by the mean over their positions, as sentence-transformers does."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head = bert(num_hidden_layers=1).bert, nn.Linear(32, 5)

    def forward(self, input_ids, attention_mask, labels):
        states = self.encoder(input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).expand(states.size()).to(states.dtype)
        means = (states * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return nn.functional.cross_entropy(self.head(means), labels)


class Greatest(Sentences):
    """Classify sentences by the greatest numbers over their positions."""

    def forward(self, input_ids, attention_mask, labels):
        states = self.encoder(input_ids, attention_mask=attention_mask).last_hidden_state
        states = states.masked_fill(attention_mask[..., None] == 0, -1e4)
        return nn.functional.cross_entropy(self.head(states.max(1).values), labels)


@pytest.mark.parametrize(
    "make", [Sentences, pytest.param(Greatest, marks=[pytest.mark.slow])], ids=["mean", "greatest"]
)
def test_what_masks_leave_of_sentences_is_that_of_all_positions(make):
    torch.manual_seed(0)
    model = make()
    step = compiled(model, class_of_each=True)
    assert step.padding_report().is_left_out, str(step.padding_report())
    for name in ("full", "right", "left", "one token each", "holes in the mask"):
        given = classified(BATCHES[name])
        assert_exact(step, model, given)
        real = int(given["attention_mask"].sum())
        tokens = step.memory_report().shape["tokens"]
        assert tokens == min(-(-real // 16) * 16, given["input_ids"].numel())
