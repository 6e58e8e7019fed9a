"""Losses with a multiple of the squared log-sum-exp: chunked where they can be, always right."""

import copy

import pytest
import torch
from torch import nn
from torch.export import Dim

import relax_disc
from relax_disc.errors import MemoryBudgetError
from relax_disc.frontend import capture_step
from relax_disc.transform.libraries.chunk_vocabulary_head import ChunkVocabularyHead
from relax_disc.transform.simplify.simplify import Simplify

CLASSES = 23


class Model(nn.Module):
    """A language model reduced to its ends, with a loss of (logits [B, S, V], labels [B, S])."""

    def __init__(self, loss, *, tied=False, bias=False, frozen=False):
        super().__init__()
        self.table = nn.Embedding(CLASSES, 6)
        self.head = nn.Linear(6, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.table.weight
        self.head.weight.requires_grad_(not frozen)
        self.loss = loss

    def forward(self, ids, labels):
        return self.loss(self.head(torch.tanh(self.table(ids))), labels)


def cross_entropy(logits, labels, **options):
    return nn.functional.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), **options)


def over_all_rows(logits, labels):
    return cross_entropy(logits, labels) + 0.1 * torch.logsumexp(logits, -1).square().mean()


def of_rows(logits, labels):
    rows = logits.view(-1, CLASSES)
    lse = torch.logsumexp(rows, dim=1, keepdim=True)
    smooth = nn.functional.cross_entropy(rows, labels.view(-1), label_smoothing=0.1)
    return smooth + 0.1 * (lse**2).mean()


def before(logits, labels):
    z = torch.logsumexp(logits, -1).pow(2).sum() / 50
    return z + cross_entropy(logits, labels, reduction="sum")


def masked(logits, labels):
    counted = (labels != -100).float()
    z = (torch.logsumexp(logits, -1).square() * counted).sum() / counted.sum()
    return cross_entropy(logits, labels) + 0.1 * z


def selected(logits, labels):
    squares = torch.logsumexp(logits, -1).square()
    return cross_entropy(logits, labels) + torch.where(labels == -100, 0.0, squares).mean()


def weighted(logits, labels):
    weights = torch.arange(labels.shape[1], device=labels.device) / 10
    z = (weights * torch.logsumexp(logits, -1).square()).mean()
    return 0.5 * (cross_entropy(logits, labels) + z)


def with_metrics(logits, labels):
    lse = torch.logsumexp(logits, -1)
    loss = cross_entropy(logits, labels)
    return loss + 0.1 * lse.square().mean(), {"loss": loss.detach(), "lse": lse.detach().amax()}


def linear(logits, labels):
    return cross_entropy(logits, labels) + 0.1 * torch.logsumexp(logits, -1).mean()


def cubic(logits, labels):
    return cross_entropy(logits, labels) + 0.1 * torch.logsumexp(logits, -1).pow(3).mean()


def by_the_loss(logits, labels):
    loss = cross_entropy(logits, labels)
    return loss + loss.detach() * torch.logsumexp(logits, -1).square().mean()


def other_logits(logits, labels):
    return cross_entropy(logits, labels) + torch.logsumexp(2 * logits, -1).square().mean()


CHUNKED = (over_all_rows, of_rows, before, masked, selected, weighted, with_metrics)
PLAIN = (linear, cubic, by_the_loss, other_logits)
KINDS = ({}, {"tied": True}, {"bias": True}, {"frozen": True}, {"bias": True, "frozen": True})


def optimizer(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)


def shapes():
    dims = {0: Dim("batch", min=1, max=8), 1: Dim("seq", min=1, max=64)}
    return dims, dims


def is_chunked(model):
    example = (torch.zeros((2, 3), dtype=torch.int64),) * 2
    captured = capture_step(model, optimizer(model), example, dynamic_shapes=shapes())
    text = ChunkVocabularyHead()(Simplify()(captured.module)).script()
    assert ("cpu.vocabulary_head_" in text) != ("relax_disc.logsumexp" in text)
    return "cpu.vocabulary_head_" in text


@pytest.mark.parametrize("loss", CHUNKED + PLAIN)
def test_takes_what_is_quadratic(loss):
    assert is_chunked(Model(loss)) == (loss in CHUNKED)


@pytest.mark.parametrize("options", KINDS[1:], ids=str)
def test_takes_every_kind_of_head(options):
    assert is_chunked(Model(masked, **options))


def batch(rows, columns):
    generator = torch.Generator().manual_seed(rows)
    ids, labels = (
        torch.randint(0, CLASSES, (rows, columns), generator=generator) for _ in range(2)
    )
    labels[:, columns // 2 :] = -100
    labels[0, 0] = 1
    return ids, labels


def loss_of(output):
    return output[0] if isinstance(output, tuple) else output


def compiled(model):
    return relax_disc.compile(model, optimizer(model), batch(2, 3), dynamic_shapes=shapes())


@pytest.mark.parametrize(
    ("loss", "options"),
    [(loss, {}) for loss in CHUNKED + PLAIN] + [(masked, options) for options in KINDS[1:]],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_gradients_are_exact(loss, options):
    torch.manual_seed(0)
    model = Model(loss, **options)
    with torch.no_grad():
        model.head.weight.mul_(3)
    start = copy.deepcopy(model.state_dict())
    step = compiled(model)
    for rows, columns in ((1, 1), (3, 7), (8, 64)):
        model.load_state_dict(start)
        ids, labels = batch(rows, columns)
        exact = copy.deepcopy(model).double()
        expected = loss_of(exact(ids, labels))
        expected.backward()
        found = loss_of(step(ids, labels))
        torch.testing.assert_close(found, expected.detach().float(), rtol=2e-6, atol=1e-6)
        for name, value in model.named_parameters():
            gradient = (start[name].double() - value.double()).detach()
            wanted = exact.get_parameter(name).grad
            wanted = torch.zeros_like(gradient) if wanted is None else wanted
            torch.testing.assert_close(gradient, wanted, rtol=2e-5, atol=2e-6, msg=name)


class Deep(Model):
    """Enough before the head for a budget to have something to give up."""

    def forward(self, ids, labels):
        hidden = self.table(ids)
        for _ in range(6):
            hidden = hidden + torch.tanh(hidden).sin()
        return self.loss(self.head(hidden), labels)


def test_budgets_do_not_change_a_bit():
    torch.manual_seed(1)
    model = Deep(masked, bias=True)
    start = copy.deepcopy(model.state_dict())
    step = compiled(model)
    step.memory_budget = 1
    with pytest.raises(MemoryBudgetError) as refused:
        step(*batch(8, 64))
    results = []
    for budget in (None, refused.value.least_bytes):
        model.load_state_dict(start)
        step.memory_budget = budget
        losses = [step(*batch(8, 64)) for _ in range(2)]
        results.append([*losses, *(p.detach().clone() for p in model.parameters())])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
