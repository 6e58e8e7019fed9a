"""Rows that the analysis leaves out change neither loss nor gradients, whatever they hold.

Models are put together at random from layers that go row by row, attention, and layers that mix
rows.  Eager PyTorch runs each twice, in float64: with its batch, and with other numbers in all rows
that the analysis calls not needed.
"""

import gc

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

from relax_disc.frontend import capture_step
from relax_disc.frontend.padding import without_padding
from relax_disc.tir_kernels.target import resolve_target
from relax_disc.training.call.packing import place_rows
from relax_disc.transform.padding import remove_padding
from relax_disc.transform.padding.remove_padding import MISFIT
from tests.tiers import every

WIDTH, CLASSES, LONGEST, IGNORED = 8, 5, 9, -100


class Position(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(LONGEST, WIDTH))

    def forward(self, x, mask):
        return x + self.table[: x.shape[1]]


class Attention(nn.Module):
    def __init__(self, causal, masked):
        super().__init__()
        self.causal, self.masked = causal, masked
        self.inner = nn.Linear(WIDTH, 3 * WIDTH)

    def heads(self, x):
        b, t, _ = x.shape
        parts = self.inner(x).chunk(3, -1)
        return (part.view(b, t, 2, WIDTH // 2).transpose(1, 2) for part in parts)

    def forward(self, x, mask):
        b, t, _ = x.shape
        q, k, v = self.heads(x)
        if not self.masked:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            seen = mask[:, None, None, :].bool()
            if self.causal:
                places = torch.arange(t)
                seen = seen & (places[None, :] <= places[:, None])[None, None]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return x + out.transpose(1, 2).reshape(b, t, WIDTH)


class Written(Attention):
    """Attention as products, a number for what a mask hides, and a softmax."""

    def hidden(self, x, mask):
        t = x.shape[1]
        places = torch.arange(t)
        seen = torch.ones(1, 1, t, t, dtype=torch.bool)
        if self.masked:
            seen = seen & mask[:, None, None, :].bool()
        if self.causal:
            seen = seen & (places[None, :] <= places[:, None])[None, None]
        return torch.where(seen, torch.zeros((), dtype=x.dtype), torch.finfo(torch.float32).min)

    def forward(self, x, mask):
        b, t, _ = x.shape
        q, k, v = self.heads(x)
        hidden = self.hidden(x, mask)
        scores = torch.matmul(q, k.transpose(2, 3)) * 0.5 + hidden
        out = torch.matmul(torch.softmax(scores, -1), v)
        return x + out.transpose(1, 2).reshape(b, t, WIDTH)


class Capped(Written):
    """Attention with a cap on its scores, which is no operator."""

    def __init__(self, causal, masked, window=LONGEST, fills=False):
        super().__init__(causal, masked)
        self.window, self.fills = window, fills

    def hidden(self, x, mask):
        places = torch.arange(x.shape[1])
        if self.window == LONGEST:
            return super().hidden(x, mask)
        seen = (places <= places[:, None]) & (places > places[:, None] - self.window)
        seen = seen[None, None] & mask[:, None, None, :].bool()
        return torch.where(seen, 0.0, torch.finfo(torch.float32).min)

    def forward(self, x, mask):
        b, t, _ = x.shape
        q, k, v = self.heads(x)
        scores, hidden = torch.tanh(torch.matmul(q, k.transpose(2, 3)) * 0.5) * 3, None
        if self.fills:
            hidden = mask[:, None, None, :] == 0
            scores = scores.masked_fill(hidden, torch.finfo(torch.float32).min)
        else:
            scores = scores + self.hidden(x, mask)
        out = torch.matmul(torch.softmax(scores, -1), v)
        return x + out.transpose(1, 2).reshape(b, t, WIDTH)


class Biased(Written):
    """Attention with a trained bias by distance, or distances alone by heads as ALiBi has them."""

    def __init__(self, causal, masked, trained):
        super().__init__(causal, masked)
        self.distances = nn.Embedding(2 * LONGEST, 2) if trained else None

    def forward(self, x, mask):
        b, t, _ = x.shape
        q, k, v = self.heads(x)
        places, hidden = torch.arange(t), self.hidden(x, mask)
        if self.distances is not None:
            bias = self.distances(places[None] - places[:, None] + LONGEST).permute(2, 0, 1)
            scores = torch.matmul(q, k.transpose(2, 3)) * 0.5 + bias + hidden
            out = torch.matmul(torch.softmax(scores, -1), v)
        else:
            slopes = torch.full((), 0.5).pow(torch.arange(1, 3))[:, None]
            far = slopes * ((mask.cumsum(1) - 1) * mask)[:, None]
            far = far.reshape(b * 2, 1, t).to(x.dtype)
            q, k, v = (part.reshape(b * 2, t, -1) for part in (q, k, v))
            scores = far.baddbmm(q, k.transpose(1, 2), beta=1.0, alpha=0.5).view(b, 2, t, t)
            weights = torch.softmax(scores + hidden, -1).view(b * 2, t, t)
            out = torch.bmm(weights, v).view(b, 2, t, WIDTH // 2)
        return x + out.transpose(1, 2).reshape(b, t, WIDTH)


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.inner, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x, mask):
        return self.function(self.inner(x), mask)


def by_row(function):
    return lambda: Function(lambda x, mask: function(x))


def put_back(x, mask):
    """Take heads by lists of numbers, as Falcon does: their gradient is written where these say."""
    heads = x.view(*x.shape[:2], 4, 2)
    return torch.cat([heads[..., [-1], :] * 2, heads[..., [1, 0, 2], :]], -2).flatten(2)


PLAIN = {
    "linear": by_row(lambda x: x),
    "gelu": by_row(F.gelu),
    "gate": by_row(lambda x: x * torch.sigmoid(x)),
    "norm": by_row(lambda x: F.layer_norm(x, (WIDTH,))),
    "softmax of a row": by_row(lambda x: torch.softmax(x, -1)),
    "halves": by_row(lambda x: torch.cat([-x[..., 4:], x[..., :4]], -1)),
    "position": Position,
    "heads by numbers": lambda: Function(put_back),
}
ATTENTION = {
    "causal": lambda: Attention(True, False),
    "masked": lambda: Attention(False, True),
    "causal and masked": lambda: Attention(True, True),
    "causal, written out": lambda: Written(True, False),
    "masked, written out": lambda: Written(False, True),
    "causal and masked, written out": lambda: Written(True, True),
    "causal, biased": lambda: Biased(True, False, True),
    "masked, biased": lambda: Biased(False, True, True),
    "causal and masked, biased": lambda: Biased(True, True, True),
    "masked, by distance": lambda: Biased(False, True, False),
    "causal and masked, by distance": lambda: Biased(True, True, False),
    "causal, capped": lambda: Capped(True, False),
    "masked, capped": lambda: Capped(False, True),
    "causal and masked, capped": lambda: Capped(True, True),
    "causal and masked, window": lambda: Capped(True, True, 3),
    "masked, filled": lambda: Capped(False, True, fills=True),
}
CAPPED = ("capped", "window", "filled")


class Infinite(Capped):
    def hidden(self, x, mask):
        return torch.where(mask[:, None, None, :].bool(), 0.0, -float("inf"))


MIXING = {
    "attention to all": lambda: Attention(False, False),
    "mean": by_row(lambda x: x + x.mean(1, keepdim=True)),
    "flip": by_row(lambda x: x.flip(1)),
    "shift": by_row(lambda x: F.pad(x, (0, 0, 1, -1))),
    "next": by_row(lambda x: F.pad(x, (0, 0, -1, 1))),
    "cumulated": by_row(lambda x: x.cumsum(1)),
    "softmax of a column": by_row(lambda x: torch.softmax(x, 1)),
    "other sequences": by_row(lambda x: x + x.sum(0, keepdim=True)),
    "masked mean": lambda: Function(
        lambda x, mask: x + (x * mask[..., None]).sum(1, keepdim=True) / (mask.sum() + 1)
    ),
}
LAYERS = {**PLAIN, **ATTENTION, **MIXING}


class Model(nn.Module):
    def __init__(self, layers, loss):
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(LAYERS[name]() for name in layers)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.loss = loss

    def forward(self, x, ids, mask, labels):
        x = x + self.table(ids)
        for layer in self.layers:
            x = layer(x, mask)
        if self.loss == "pooled":
            weight = mask[..., None].expand(x.shape).to(x.dtype)
            pooled = (x * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
            return F.cross_entropy(self.head(pooled), labels[:, 0].clamp(min=0))
        if self.loss == "greatest":
            return F.cross_entropy(
                self.head(x.masked_fill(mask[..., None] == 0, -1e2).max(1).values),
                labels[:, 0].clamp(min=0),
            )
        if self.loss == "first":
            return F.cross_entropy(self.head(x[:, 0]), labels[:, 0].clamp(min=0))
        if self.loss == "shifted states":
            return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), labels[:, 1:].flatten())
        counts = labels != IGNORED
        if self.loss == "picked states":
            states = F.layer_norm(F.gelu(x[counts]), (WIDTH,)) * 0.5
            return F.cross_entropy(self.head(states).float(), labels[counts])
        logits = self.head(x)
        if self.loss in (losses := {**LOSSES, **MIXING_LOSSES}):
            return losses[self.loss](logits, labels, mask.to(x.dtype), counts)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        if self.loss == "all activations":
            loss = loss + x.square().mean()
        if self.loss == "z":
            loss = loss + torch.logsumexp(logits, -1).square().mean()
        return loss


def log_probabilities(logits, labels):
    return logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]


def shifted(logits, labels, distance=1):
    shorter = logits[..., :-distance, :].contiguous()
    return F.cross_entropy(shorter.view(-1, CLASSES), labels[..., distance:].reshape(-1))


def joined(labels):
    return torch.cat([labels[:, 1:], labels.new_full((labels.shape[0], 1), IGNORED)], 1)


def rolled(labels):
    moved = labels.roll(-1, 1)
    moved[:, -1] = IGNORED
    return moved


def of_labels(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def at(logits, places):
    return logits[torch.arange(logits.shape[0]), places]


def last(counts):
    return (counts.int() * torch.arange(counts.shape[1], dtype=torch.int32)).argmax(-1)


def gathered(logits, places):
    return logits.gather(1, places[:, None, None].expand(-1, 1, CLASSES))[:, 0]


def classified(chosen, labels):
    return F.cross_entropy(chosen, labels[:, 0].clamp(min=0))


LOSSES = {
    "picked": lambda logits, labels, mask, counts: F.cross_entropy(logits[counts], labels[counts]),
    "picked, shifted": lambda logits, labels, mask, counts: F.cross_entropy(
        logits[:, :-1][counts[:, 1:]].float(), labels[:, 1:][counts[:, 1:]], reduction="sum"
    ),
    "joined labels": lambda logits, labels, mask, counts: of_labels(logits, joined(labels)),
    "rolled labels": lambda logits, labels, mask, counts: of_labels(logits, rolled(labels)),
    "last": lambda logits, labels, mask, counts: classified(at(logits, last(counts)), labels),
    "last, gathered": lambda logits, labels, mask, counts: classified(
        gathered(logits, (counts.sum(1) - 1).clamp(min=0)), labels
    ),
    "at the end": lambda logits, labels, mask, counts: classified(logits[:, -1], labels),
    "first with none": lambda logits, labels, mask, counts: classified(
        at(logits, ((~counts).int().argmax(-1) - 1) % counts.shape[1]), labels
    ),
    "a value at the last": lambda logits, labels, mask, counts: (
        (at(logits.sum(-1), last(counts)) - labels[:, 0]).square().mean()
    ),
    "a value at the last, gathered": lambda logits, labels, mask, counts: (
        logits.sum(-1).gather(1, last(counts)[:, None]).sigmoid().sum()
    ),
    "a value at the end": lambda logits, labels, mask, counts: logits.sum(-1)[:, -1].exp().mean(),
    "classes of a weight": lambda logits, labels, mask, counts: (
        F.cross_entropy(logits[:, -1], (first := labels[:, 0].clamp(min=0)), reduction="none")
        * torch.linspace(0, 1, CLASSES)[first]
    ).sum(),
    "values before a gap": lambda logits, labels, mask, counts: (
        (logits.sum(-1) * mask * (1 - F.pad(mask[:, 1:], (0, 1)))).sum(1).square().mean()
    ),
    "smooth": lambda logits, labels, mask, counts: (
        F.smooth_l1_loss(logits[..., 0], labels.to(logits.dtype), reduction="none", beta=0.5) * mask
    ).sum(),
    "Huber": lambda logits, labels, mask, counts: (
        F.huber_loss(logits[..., 0], labels.to(logits.dtype), reduction="none")
        .masked_fill(~counts, 0.0)
        .mean()
    ),
    "shifted": lambda logits, labels, mask, counts: shifted(logits, labels),
    "two shifts": lambda logits, labels, mask, counts: (
        shifted(logits, labels) + (logits[:, :-2, 0].square() * mask[:, 2:]).sum()
    ),
    "squares": lambda logits, labels, mask, counts: (
        ((logits[..., 0] - labels) ** 2 * mask).sum() / mask.sum()
    ),
    "mean of all": lambda logits, labels, mask, counts: (
        F.binary_cross_entropy_with_logits(logits[..., 0], mask, reduction="none") * counts
    ).mean(),
    "by sequence": lambda logits, labels, mask, counts: (
        -F.logsigmoid((log_probabilities(logits, labels) * counts).sum(-1)).mean()
    ),
    "filled": lambda logits, labels, mask, counts: (
        -log_probabilities(logits, labels).masked_fill(~counts, 0.0).sum() / counts.sum()
    ),
    "counted z": lambda logits, labels, mask, counts: (
        (torch.logsumexp(logits, -1).square() * counts).sum() / counts.sum()
    ),
    "shifted by hand": lambda logits, labels, mask, counts: (
        F.cross_entropy(
            logits[:, :-1].transpose(1, 2), labels[:, 1:].clamp(min=0), reduction="none"
        )
        * mask[:, 1:]
    ).sum(),
}
"""Losses of positions that a label or a mask counts."""
OF_STATES = ("first", "shifted states", "picked states", "greatest")
MIXING_LOSSES = {
    "moved": lambda logits, labels, mask, counts: F.cross_entropy(
        (logits + F.pad(logits[:, :-1] * mask[:, 1:, None], (0, 0, 1, 0))).flatten(0, 1),
        labels.flatten(),
    ),
    "first of the rest": lambda logits, labels, mask, counts: F.cross_entropy(
        logits[:, 1:][:, 0], labels[:, 0].clamp(min=0)
    ),
    "sign of the next": lambda logits, labels, mask, counts: (
        logits[:, :-1, 0].square() * (logits[..., 0] > 0)[:, 1:] * mask[:, 1:]
    ).sum(),
}
"""Losses that read a position beside the one that counts."""


@st.composite
def models(draw):
    names = st.sampled_from([*PLAIN] * 3 + [*ATTENTION] * 4 + [*MIXING])
    layers = draw(st.lists(names, min_size=1, max_size=5))
    counted = ["plain"] * 4 + ["pooled"] * 2 + [*OF_STATES, *LOSSES]
    loss = draw(st.sampled_from([*counted, *MIXING_LOSSES, "all activations", "z"]))
    return layers, loss


def gradients(model, batch):
    model.zero_grad()
    loss = model(*batch)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def least_length(loss):
    return 4 if loss == "two shifts" or loss in MIXING_LOSSES else 3 if "shifted" in loss else 1


def a_batch(generator, least=1):
    ranges = (1, 5), (least, LONGEST + 1)
    b, t = (int(torch.randint(*each, (), generator=generator)) for each in ranges)
    mask = (torch.rand(b, t, generator=generator) < 0.7).long()
    hidden = torch.rand(b, t, generator=generator) < 0.6
    labels = torch.randint(0, CLASSES, (b, t), generator=generator).masked_fill(hidden, IGNORED)
    ids = torch.randint(0, 11, (b, t), generator=generator)
    x = torch.randn(b, t, WIDTH, generator=generator, dtype=torch.float64)
    return x, ids, mask, labels


def capture(layers, loss):
    """Capture a model and leave its padding out; return it with what is known of its rows."""
    torch.manual_seed(len(layers))
    model = Model(layers, loss)
    generator = torch.Generator().manual_seed(0)
    x, ids, mask, labels = (n.new_zeros(3, 4, *n.shape[2:]) for n in a_batch(generator))
    least = least_length(loss)
    shape = {0: Dim("batch", min=1, max=16), 1: Dim("length", min=least, max=LONGEST)}
    captured = capture_step(
        model, None, (x.float(), ids, mask, labels), dynamic_shapes=(shape,) * 4
    )
    (captured,) = without_padding([captured], resolve_target("llvm"))
    return model.double(), captured


def check(layers, loss):
    model, captured = capture(layers, loss)
    attention = {name for name in layers if name in ATTENTION}
    good = {*PLAIN, *ATTENTION}
    same = len({name.split(",")[0] for name in attention}) == 1
    if same and set(layers) <= good and loss not in ("all activations", "z", *MIXING_LOSSES):
        assert captured.packings, captured.padding
    if not captured.packings:
        assert captured.padding
        assert not any(each.reason.startswith(MISFIT) for each in captured.padding)
        return
    assert loss not in ("all activations", "z")
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        batch = a_batch(generator, least_length(loss))
        sizes = {"batch": batch[1].shape[0], "length": batch[1].shape[1]}
        places, starts = place_rows(captured.packings[0], dict(enumerate(batch)), sizes)
        count = int(starts[-1])
        needed = torch.zeros(batch[1].shape, dtype=torch.bool)
        needed[places[1, :count], places[2, :count]] = True
        assert torch.equal(needed.flatten().nonzero()[:, 0], places[0, :count])
        assert torch.equal(needed.sum(1).cumsum(0), starts[1:])
        wanted = gradients(model, batch)
        if wanted[0].isnan():
            continue  # nothing counts
        x, ids, mask, labels = batch
        other = torch.where(needed[..., None], x, 30 * torch.randn_like(x))
        ids = torch.where(needed, ids, (ids + 3) % 11)
        found = gradients(model, (other, ids, mask, labels))
        for a, b in zip(wanted, found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@seed(0)
@settings(max_examples=8, deadline=None)
@given(models())
def test_rows_that_are_left_out_change_nothing(drawn):
    check(*drawn)


@pytest.fixture(scope="module", autouse=True)
def seldom_collected():
    """Look for garbage seldom: a trace makes many objects that stay, a sixth of its time."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 20, 20)
    yield
    gc.set_threshold(*before)


@pytest.mark.slow
@seed(1)
@settings(max_examples=1000, deadline=None)
@given(models())
def test_a_thousand_times(drawn):
    """Two seconds each, of which export and trace are 95 %: no code is generated."""
    check(*drawn)


@pytest.mark.parametrize("name", [name for name in ATTENTION if name.split(", ")[-1] in CAPPED])
def test_scores_of_pairs_are_islands(name):
    check([name, "norm", name], "plain" if name.startswith("causal") else "pooled")


def test_a_mask_that_hides_by_infinity_keeps_padding_where_it_may_hide_all(monkeypatch):
    monkeypatch.setitem(LAYERS, "infinite", lambda: Infinite(False, True))
    _, captured = capture(["infinite"], "pooled")
    assert not captured.packings


def test_a_masked_mean_needs_what_the_mask_leaves():
    check(["linear", "masked", "masked mean", "gelu"], "pooled")
    _, captured = capture(["masked", "masked mean", "position"], "pooled")
    assert captured.packings, captured.padding


@pytest.mark.parametrize("loss", every(3, ["pooled", "first", *LOSSES]))
def test_attention_to_all_keeps_all(loss):
    _, captured = capture(["attention to all"], loss)
    assert not captured.packings
    assert "neither causal nor" in captured.padding[-1].reason


@pytest.mark.parametrize("loss", every(2, [*OF_STATES, *LOSSES, *MIXING_LOSSES]))
def test_losses_need_what_they_count(loss):
    check(["causal", "gelu"], loss)


def test_what_would_not_fit_keeps_its_padding_and_says_so(monkeypatch):
    before = set(capture(["causal", "gelu"], "plain")[1].module.functions)
    monkeypatch.setattr(remove_padding, "size_misfit", lambda *_: "3 rows where there are 4")
    _, captured = capture(["causal", "gelu"], "plain")
    assert not captured.packings
    (why,) = (each for each in captured.padding if each.reason.startswith(MISFIT))
    assert "test_padding.py" in why.line and "3 rows where there are 4" in why.reason
    names = {name.name_hint for name in captured.module.functions}
    assert names < {name.name_hint for name in before}, "parts of what was begun are left"


@pytest.mark.parametrize("name", [name for name in MIXING if name != "masked mean"])
def test_what_mixes_rows_keeps_them(name):
    _, captured = capture(["causal", name], "plain")
    assert not captured.packings
    assert captured.padding
