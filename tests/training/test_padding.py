"""Steps that leave padding out: numbers of eager PyTorch, whatever the labels, and no less."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import relax_disc
from relax_disc.errors import ShapeRangeError
from relax_disc.frontend.random_ops import Randomness
from relax_disc.pipeline import PipelineOptions
from tests import philox  # noqa: F401  the random operators in eager PyTorch
from tests.frontend.models import VOCABULARY, Llama, dims
from tests.tiers import every

IGNORED = -100


def compiled(model, optimizer=None, **options):
    """Compile a model of `ids` and `labels` for every batch and length."""
    b, s = dims(1, 48)
    ids, labels = padded([5, 3])
    shapes = {0: b, 1: s}
    return relax_disc.compile(
        model, optimizer, (ids, labels), dynamic_shapes=(shapes, shapes), **options
    )


def padded(lengths, seed=0, width=None):
    """Make ids and labels of records, padded to the longest with another id and no label."""
    generator = torch.Generator().manual_seed(seed)
    shape = len(lengths), width or max(lengths)
    ids = torch.randint(1, VOCABULARY, shape, generator=generator)
    labels = torch.randint(0, VOCABULARY, shape, generator=generator)
    for row, length in enumerate(lengths):
        ids[row, length:], labels[row, length:] = 0, IGNORED
    return ids, labels


def only(rows, columns, *places):
    """Make a batch in which a few positions have a label."""
    ids, labels = padded([columns] * rows, 3)
    kept = torch.full_like(labels, IGNORED)
    for place in places:
        kept[place] = labels[place]
    return ids, kept


def scattered(rows, columns):
    """Make a batch in which every second label counts, at random."""
    ids, labels = padded([columns] * rows, 5)
    hidden = torch.rand(labels.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    return ids, labels.masked_fill(hidden, IGNORED)


BATCHES = {
    "full": padded([7, 7, 7]),
    "lengths": padded([9, 2, 30, 17]),
    "padded behind the longest": padded([3, 5], width=40),
    "one sequence of one": padded([1]),
    "one label": only(3, 12, (1, 4)),
    "first and last": only(3, 12, (0, 0), (2, 11)),
    "prompts are ignored": (
        padded([20, 8])[0],
        padded([20, 8])[1].index_fill(1, torch.arange(6), -100),
    ),
    "random": scattered(4, 33),
}


def gradient_error(model, exact):
    """Greatest error of a gradient, in units of the greatest number of any."""
    top = max(float(p.grad.abs().max()) for p in exact.parameters())
    return max(
        float((p.grad.double() - q.grad).abs().max()) / top
        for p, q in zip(model.parameters(), exact.parameters(), strict=True)
    )


@pytest.fixture(scope="module", params=["tied", "untied"])
def llama(request):
    torch.manual_seed(0)
    model = Llama(whole=True, tied=request.param == "tied")
    return model, compiled(model)


def trained(step, model, batch):
    """Call a step that sums gradients, and leave them in the model."""
    model.zero_grad()
    return step(*batch, update=False)


@pytest.mark.parametrize("name", BATCHES)
def test_gradients_are_those_of_all_positions(llama, name):
    model, step = llama
    exact = copy.deepcopy(model).double()
    loss = trained(step, model, BATCHES[name])
    wanted = exact(*BATCHES[name])
    wanted.backward()
    torch.testing.assert_close(loss.double(), wanted.detach(), rtol=1e-5, atol=1e-6)
    assert gradient_error(model, exact) < 2e-6


class Scaled(Llama):
    """Looks up a number of each sequence by its place in the batch, as chunked masks do."""

    def forward(self, ids, labels):
        counts = (labels != IGNORED).sum(1)
        picked = counts[torch.arange(ids.shape[0])[:, None]]
        return super().forward(ids, labels) * picked.float().mean()


def test_numbers_of_sequences_may_be_looked_up():
    torch.manual_seed(0)
    model = Scaled(layers=1)
    step = compiled(model)
    for name in ("lengths", "one sequence of one", "one label"):
        exact = copy.deepcopy(model).double()
        exact(*BATCHES[name]).backward()
        trained(step, model, BATCHES[name])
        assert gradient_error(model, exact) < 2e-6


def test_positions_behind_the_last_label_are_not_computed(llama):
    _, step = llama
    assert step.padding_report().is_left_out
    trained(step, step.model, padded([9, 2, 30, 17]))
    assert step.memory_report().shape == {"b": 4, "s": 30, "tokens": 64}  # of 58, by sixteens
    trained(step, step.model, padded([3, 2]))
    assert step.memory_report().shape["tokens"] == 6  # never more than there are


def test_no_label_gives_the_loss_of_eager(llama):
    model, step = llama
    ids, labels = padded([6, 4])
    loss = trained(step, model, (ids, torch.full_like(labels, IGNORED)))
    assert loss.isnan()
    assert all(not p.grad.any() for p in model.parameters())


def test_what_is_left_out_may_be_anything(llama):
    model, step = llama
    ids, labels = padded([9, 3])
    trained(step, model, (ids, labels))
    clean = [p.grad.clone() for p in model.parameters()]
    broken = copy.deepcopy(model)
    with torch.no_grad():
        model.table.weight[0] = float("nan")
    try:
        if model.head.weight is not model.table.weight:  # the head reads every row of its own
            loss = trained(step, model, (ids, labels))
            assert loss.isfinite()
            for p, gradient in zip(model.parameters(), clean, strict=True):
                torch.testing.assert_close(p.grad, gradient, rtol=0, atol=0)
    finally:
        model.load_state_dict(broken.state_dict())


def test_a_plan_is_made_for_a_number_of_positions(llama):
    _, step = llama
    least, most = step.plan(b=8, s=40, tokens=60), step.plan(b=8, s=40)
    assert least.shape == {"b": 8, "s": 40, "tokens": 64}
    assert most.shape["tokens"] == 320
    assert least.activation_peak_bytes < most.activation_peak_bytes
    with pytest.raises(ShapeRangeError, match=r"tokens=321; allowed is 0 .. 320"):
        step.plan(b=8, s=40, tokens=321)
    for shape in ({"b": 8, "s": 40, "tokens": 64}, {"b": 8, "s": 40}):
        analysed = relax_disc.analyze_memory(step, shape)
        assert analysed.peak_bytes == step.plan(**shape).peak_bytes
    budget = step.plan(b=8, s=40, tokens=160).peak_bytes
    long = step.largest("s", b=8, memory_budget=budget, tokens=160)
    assert long >= 40 and long >= step.largest("s", b=8, memory_budget=budget)


def test_a_budget_holds_for_the_real_number():
    torch.manual_seed(1)
    model = Llama(whole=True, tied=False, width=64)
    step = compiled(model, torch.optim.SGD(model.parameters()))
    batch = padded([40, 5, 9, 11])
    budget = step.plan(b=4, s=40).least_bytes
    step.memory_budget = budget
    step(*batch)
    report = step.memory_report()
    assert report.peak_bytes == report.planned_peak_bytes <= budget
    assert report.shape["tokens"] == 80


def test_updates_sums_and_saved_steps_are_those_of_all_positions(tmp_path):
    torch.manual_seed(2)
    models = [Llama(layers=1)]
    models.append(copy.deepcopy(models[0]))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    all_positions = PipelineOptions(remove_padding=False)
    steps = [
        compiled(models[0], optimizers[0]),
        compiled(models[1], optimizers[1], options=all_positions),
    ]
    assert not steps[1].padding_report().is_left_out
    batches = [padded([8, 3, 20], 1), padded([2, 17], 2), padded([30], 3)]
    for step in steps:
        step(*batches[0])
        step(*batches[1], update=False)
        step(*batches[2])
    steps[0].save(tmp_path / "step")
    loaded = relax_disc.TrainingStep.load(tmp_path / "step", models[0], optimizers[0])
    assert str(loaded.padding_report()) == str(steps[0].padding_report())
    loaded(*batches[0])
    steps[1](*batches[0])
    assert loaded.memory_report().shape["tokens"] == 32
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-4, atol=2e-5)


def split_qkv(x, b, t):
    return [part.view(b, t, 4, 8).transpose(1, 2) for part in x.split(32, 2)]


def unbind_permuted(x, b, t):
    return x.view(b, t, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)


def unbind_third(x, b, t):
    return [part.transpose(1, 2) for part in x.view(b, t, 3, 4, 8).unbind(2)]


def index_third(x, b, t):
    parts = x.view(b, t, 3, 4, 8)
    return [parts[:, :, k].transpose(1, 2) for k in range(3)]


def chunk_heads(x, b, t):
    return x.view(b, t, 4, 24).transpose(1, 2).chunk(3, -1)


def one_key_head(x, b, t):
    """Multi-query attention: keys and values have one head, which is spread."""
    q, k, v, _ = x.split([32, 8, 8, 48], 2)
    return q.view(b, t, 4, 8).transpose(1, 2), k[:, None], v[:, None]


class Dropping(nn.Module):
    """One linear layer for queries, keys and values; dropout of all that GPT-2 drops."""

    def __init__(self, parts):
        super().__init__()
        self.table, self.places = nn.Embedding(VOCABULARY, 32), nn.Embedding(48, 32)
        self.fused, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, VOCABULARY)
        self.parts = parts

    def forward(self, ids, labels, kept=None):
        b, t = ids.shape
        draws = iter(kept or ())

        def dropped(x, p):
            return F.dropout(x, p) if kept is None else x * next(draws) / (1 - p)

        x = dropped(self.table(ids) + self.places(torch.arange(t)), 0.1)
        q, k, v = self.parts(self.fused(self.norm(x)), b, t)
        if kept is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.3)
        else:
            scores = q @ k.transpose(2, 3) / 8**0.5
            scores = scores.masked_fill(~torch.ones(t, t).tril().bool(), float("-inf"))
            out = dropped(scores.softmax(-1), 0.3) @ v
        x = x + dropped(self.out(out.transpose(1, 2).reshape(b, t, 32)), 0.2)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    "parts",
    every(3, [split_qkv, unbind_permuted, unbind_third, index_third, chunk_heads, one_key_head]),
)
def test_dropout_and_joint_projections_are_those_of_all_positions(parts):
    """What is dropped is drawn by the reference of the random operators, for all positions."""
    torch.manual_seed(0)
    model = Dropping(parts)
    exact = copy.deepcopy(model).double()
    step = compiled(model)
    assert step.padding_report().is_left_out, str(step.padding_report())
    for name in ("lengths", "one sequence of one", "random", "prompts are ignored"):
        ids, labels = BATCHES[name]
        b, t = ids.shape
        step.rng_state = torch.tensor([7, 3])
        loss = trained(step, model, (ids, labels))
        draws = Randomness(step.rng_state - torch.tensor([0, 1]))
        sizes = ((b, t, 32), 0.1), ((b, 4, t, t), 0.3), ((b, t, 32), 0.2)
        exact.zero_grad()
        wanted = exact(ids, labels, [draws.keep(shape, p) for shape, p in sizes])
        wanted.backward()
        torch.testing.assert_close(loss.double(), wanted.detach(), rtol=1e-5, atol=1e-6)
        assert gradient_error(model, exact) < 2e-6


class Pooled(Llama):
    """Asks for something that depends on all positions."""

    def forward(self, ids, labels):
        return self.end(self.states(ids), labels)

    def states(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x, *self.angles(ids), None)
        return x

    def angles(self, ids):
        angles = torch.outer(torch.arange(ids.shape[1], dtype=torch.float32), self.frequencies)
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()

    def loss(self, x, labels):
        return F.cross_entropy(
            self.head(self.norm(x)).flatten(0, 1), labels.flatten(), ignore_index=IGNORED
        )


class MeanOfAll(Pooled):
    def end(self, x, labels):
        return self.loss(x, labels) + x.square().mean()


class Returned(Pooled):
    def end(self, x, labels):
        return self.loss(x, labels), x


class Normed(Pooled):
    def __init__(self, **options):
        super().__init__(**options)
        self.over_all = nn.BatchNorm1d(32)

    def end(self, x, labels):
        return self.loss(self.over_all(x.flatten(0, 1)).view_as(x), labels)


@pytest.mark.parametrize("kind", [MeanOfAll, Returned, Normed])
def test_a_use_of_all_positions_keeps_them_and_says_where(kind):
    torch.manual_seed(0)
    model = kind(layers=1)
    exact = copy.deepcopy(model).double()
    step = compiled(model)
    report = step.padding_report()
    assert not report.is_left_out
    assert any("test_padding.py" in each.line or "result" in each.reason for each in report.reasons)
    batch = padded([9, 3])
    found, wanted = trained(step, model, batch), exact(*batch)
    loss = wanted[0] if isinstance(wanted, tuple) else wanted
    loss.backward()
    if isinstance(wanted, tuple):
        torch.testing.assert_close(found[1][0].double(), wanted[1].detach(), rtol=1e-4, atol=1e-5)
    assert gradient_error(model, exact) < 1e-5


class Shifted(Pooled):
    """Slices logits and labels by hand."""

    def end(self, x, labels):
        logits = self.head(self.norm(x))[..., :-1, :].contiguous()
        return F.cross_entropy(logits.view(-1, VOCABULARY), labels[..., 1:].reshape(-1))


class Gathered(Pooled):
    """Picks log-probabilities of all positions but the last, which kernels of their length do."""

    def end(self, x, labels):
        logits, wanted = self.head(self.norm(x))[:, :-1], labels[:, 1:]
        counts = wanted != IGNORED
        logs = logits.log_softmax(-1).gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
        return -(logs + torch.log1p(logs.exp())).where(counts, 0).sum() / counts.sum()


class Picked(Pooled):
    """Picks logits and labels by a mask of booleans."""

    def end(self, x, labels):
        logits, counts = self.head(self.norm(x)), labels != IGNORED
        flat, wanted = logits.view(-1, VOCABULARY), labels.view(-1)
        some = wanted > 3
        return F.cross_entropy(logits[counts], labels[counts]) + F.cross_entropy(
            flat[some].float(), wanted[some], reduction="sum", label_smoothing=0.1
        )


class FirstState(Pooled):
    """Classifies by the state of the first position."""

    def end(self, x, labels):
        return F.cross_entropy(self.head(self.norm(x[:, 0])), labels[:, 0].clamp(min=0))


class Weighted(Pooled):
    """Divides by numbers of the batch; rows that fill up must not divide by zero."""

    def forward(self, ids, labels):
        logits, counts = self.head(self.norm(self.states(ids))), labels != IGNORED
        losses = F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none")
        return (losses / (ids + 1).float() * counts).sum() / counts.sum()


class MeanOfMasked(Pooled):
    """Takes the mean over all positions of what is zero where nothing counts."""

    def end(self, x, labels):
        values, counts = self.head(self.norm(x))[..., 0], labels != IGNORED
        return ((values - labels) ** 2).masked_fill(~counts, 0.0).mean()


class Chosen(Pooled):
    """Moves labels itself, and picks positions that the labels say."""

    def end(self, x, labels):
        logits, counts = self.head(self.norm(x)), labels != IGNORED
        following = torch.cat([labels[:, 1:], labels.new_full((labels.shape[0], 1), IGNORED)], 1)
        number = (counts.sum(1) - 1).clamp(min=0)
        some = logits.gather(1, number[:, None, None].expand(-1, 1, VOCABULARY))[:, 0]
        last = (counts * torch.arange(labels.shape[1])).argmax(-1)
        classes = labels[:, 0].clamp(min=0)
        error = F.smooth_l1_loss(logits[..., 0], labels.to(x.dtype), reduction="none", beta=40.0)
        return (
            F.cross_entropy(logits.flatten(0, 1), following.flatten())
            + F.cross_entropy(some, classes)
            + F.cross_entropy(logits[torch.arange(labels.shape[0]), last], classes)
            + (error * counts).sum() / counts.sum()
        )


class AtTheEnd(Pooled):
    """Classifies by the last position: all before it are keys."""

    def end(self, x, labels):
        return F.cross_entropy(self.head(self.norm(x))[:, -1], labels[:, 0].clamp(min=0))


class Gated(Pooled):
    """Joins what a block makes to what it was given by a recurrent cell over all positions."""

    def __init__(self, **options):
        super().__init__(**options)
        self.gate = nn.GRUCell(32, 32)

    def end(self, x, labels):
        for block in self.blocks:
            y = block(x, *self.angles(labels), None)
            x = self.gate(y.reshape(-1, 32), x.reshape(-1, 32)).reshape_as(x)
        return self.loss(x, labels)


class Valued(Pooled):
    """Gives each position a number, as reward models do, and takes that of the last label."""

    def __init__(self, **options):
        super().__init__(**options)
        self.value = nn.Linear(32, 1, bias=False)

    def end(self, x, labels):
        values, counts = self.value(self.norm(x)).squeeze(-1), labels != IGNORED
        last = (counts * torch.arange(labels.shape[1])).argmax(-1)
        before = ((~counts).int().argmax(-1) - 1) % labels.shape[1]
        some = values[torch.arange(labels.shape[0]), last] - values.gather(1, before[:, None])[:, 0]
        return F.softplus(some).mean() + (values * counts).sum(1).square().mean()


@pytest.mark.parametrize(
    "kind",
    every(
        3,
        [
            *(Shifted, Gathered, Picked, FirstState, Weighted, MeanOfMasked, Chosen, Gated, Valued),
            AtTheEnd,
        ],
    ),
)
def test_losses_of_what_counts_are_those_of_all_positions(kind):
    torch.manual_seed(0)
    model = kind(layers=1)
    exact = copy.deepcopy(model).double()
    shape = dict(enumerate(dims(2 if kind in (Shifted, Gathered, Chosen) else 1, 48)))
    example = padded([5, 3])
    step = relax_disc.compile(model, None, example, dynamic_shapes=(shape, shape))
    assert step.padding_report().is_left_out, str(step.padding_report())
    for name in ("full", "lengths", "first and last", "prompts are ignored", "random"):
        exact.zero_grad()
        loss, wanted = trained(step, model, BATCHES[name]), exact(*BATCHES[name])
        wanted.backward()
        torch.testing.assert_close(loss.double(), wanted.detach().double(), rtol=1e-5, atol=1e-6)
        assert gradient_error(model, exact) < 3e-6
    assert trained(step, model, padded([9, 2, 30, 17])).isfinite()
    assert step.memory_report().shape["tokens"] < 4 * 30 or kind is AtTheEnd


class Preferred(Pooled):
    """Adds up log-probabilities of each sequence; one of one token has none."""

    def end(self, x, labels):
        logits, wanted = self.head(self.norm(x))[:, :-1], labels[:, 1:]
        logs = logits.log_softmax(-1).gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
        return -F.logsigmoid((logs * (wanted != IGNORED)).sum(-1)).mean()


def test_of_single_tokens_all_but_the_last_position_are_none():
    torch.manual_seed(0)
    model = Preferred(layers=1)
    exact = copy.deepcopy(model).double()
    step = compiled(model)
    assert step.padding_report().is_left_out, str(step.padding_report())
    for lengths in ([9, 2, 30], [1], [1, 1, 1], [2]):
        exact.zero_grad()
        loss, wanted = trained(step, model, padded(lengths)), exact(*padded(lengths))
        wanted.backward()
        torch.testing.assert_close(loss.double(), wanted.detach().double(), rtol=1e-5, atol=1e-6)
        assert max(lengths) == 1 or gradient_error(model, exact) < 3e-6
        assert max(lengths) > 1 or all(not p.grad.any() for p in model.parameters())
