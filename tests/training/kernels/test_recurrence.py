"""LSTM, GRU and RNN layers over a dynamic length and batch, from one build each."""

import copy

import pytest
import torch
from torch import nn
from torch.export import Dim

import relax_disc
from relax_disc.compiler import build
from relax_disc.errors import MemoryBudgetError, UnsupportedOperatorError
from relax_disc.frontend import capture_step
from relax_disc.training.compiled_function import CompiledFunction

SIZES = [(3, 7), (1, 1), (4, 12), (2, 1), (1, 12)]
DIMS = Dim("b", min=1, max=4), Dim("t", min=1, max=12)


class Layer(nn.Module):
    """A recurrent layer whose outputs and last states all reach the loss."""

    def __init__(self, kind, given=False, **options):
        super().__init__()
        self.cell = kind(5, 6, **options)
        width = 12 if self.cell.bidirectional else 6
        self.last = nn.Linear(width, 3)
        rows = self.cell.num_layers * (2 if self.cell.bidirectional else 1)
        self.start = nn.Parameter(torch.randn(rows, 1, 6)) if given else None

    def forward(self, x):
        first = None
        if self.start is not None:
            batch = x.shape[0 if self.cell.batch_first else 1]
            first = self.start.expand(-1, batch, -1).contiguous()
            first = (first, first * 0.5) if isinstance(self.cell, nn.LSTM) else first
        out, last = self.cell(x, first)
        states = last if isinstance(last, tuple) else (last,)
        return self.last(out).square().mean() + sum((s + 1).square().mean() for s in states)


CASES = {
    "lstm": lambda: Layer(nn.LSTM, batch_first=True),
    "lstm, two layers both ways, given state": lambda: Layer(
        nn.LSTM, given=True, num_layers=2, bidirectional=True
    ),
    "gru": lambda: Layer(nn.GRU, given=True, batch_first=True),
    "gru, both ways, no bias": lambda: Layer(nn.GRU, bidirectional=True, bias=False),
    "rnn, tanh, two layers": lambda: Layer(nn.RNN, num_layers=2, batch_first=True),
    "rnn, relu": lambda: Layer(nn.RNN, given=True, nonlinearity="relu"),
}
SLOW = {"gru, both ways, no bias", "rnn, tanh, two layers", "lstm"}


def batch(model, rows, length):
    shape = (rows, length, 5) if model.cell.batch_first else (length, rows, 5)
    return torch.randn(shape, generator=torch.Generator().manual_seed(rows * 100 + length))


def shapes(model):
    rows, length = DIMS
    return ({0: rows, 1: length} if model.cell.batch_first else {0: length, 1: rows},)


def exact_gradients(model, x, dtype):
    twin = copy.deepcopy(model).to(dtype)
    loss = twin(x.to(dtype))
    loss.backward()
    return loss.item(), {n: p.grad.double() for n, p in twin.named_parameters()}


def error(grads, exact):
    difference = sum(float((grads[n].double() - g).pow(2).sum()) for n, g in exact.items())
    return (difference / sum(float(g.pow(2).sum()) for g in exact.values())) ** 0.5


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES]
)
def test_gradients_against_float64(name):
    torch.manual_seed(0)
    model = CASES[name]()
    captured = capture_step(model, None, (batch(model, 3, 7),), dynamic_shapes=shapes(model))
    function = CompiledFunction(captured, build(captured.module, "llvm"), model, None)
    names = [out.name for out in captured.outputs]
    for size in SIZES:
        x = batch(model, *size)
        found = dict(zip(names, function.run((x,)), strict=True))
        loss, exact = exact_gradients(model, x, torch.float64)
        theirs = error(exact_gradients(model, x, torch.float32)[1], exact)
        assert found[names[0]].item() == pytest.approx(loss, rel=2e-6)
        ours = error({n: found[n] for n in exact}, exact)
        assert ours <= max(2 * theirs, 4e-7), (size, ours, theirs)
        report = function.memory_report()
        assert report.peak_bytes == report.planned_peak_bytes


class Tagger(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.embedding = nn.Embedding(20, 8, padding_idx=0)
        self.cell = kind(8, 10, batch_first=True, bidirectional=True, **options)
        self.last = nn.Linear(20, 4)

    def forward(self, words, tags):
        scores = self.last(self.cell(self.embedding(words))[0])
        return nn.functional.cross_entropy(scores.transpose(1, 2), tags, ignore_index=-1)


def sentences(rows, length, seed):
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(1, 20, (rows, length), generator=generator)
    lengths = torch.randint(1, length + 1, (rows, 1), generator=generator)
    there = torch.arange(length) < lengths
    return words * there, torch.where(there, words % 4, -1)


@pytest.mark.parametrize("kind", [nn.LSTM, pytest.param(nn.GRU, marks=pytest.mark.slow)])
def test_a_tagger_trains_as_in_eager(kind):
    torch.manual_seed(1)
    model = Tagger(kind)
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.Adam(m.parameters(), 2e-2) for m in (model, twin))
    both = {0: DIMS[0], 1: DIMS[1]}
    step = relax_disc.compile(model, optimizer, sentences(3, 7, 0), dynamic_shapes=(both, both))
    losses = []
    for k in range(12):
        args = sentences(*SIZES[k % 3], seed=k)
        loss = float(step(*args))
        other.zero_grad()
        expected = twin(*args)
        expected.backward()
        other.step()
        assert loss == pytest.approx(expected.item(), rel=1e-4)
        losses.append(loss)
    assert losses[9] < losses[0]


def test_a_smaller_budget_changes_no_bit():
    results = []
    axes = ({0: DIMS[0], 1: Dim("t", min=1, max=96)},)
    for tight in (False, True):
        torch.manual_seed(2)
        model = Layer(nn.GRU, batch_first=True, num_layers=3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        args = (batch(model, 4, 96),)
        step = relax_disc.compile(model, optimizer, args, dynamic_shapes=axes)
        whole = step.plan(b=4, t=96).peak_bytes
        if tight:
            with pytest.raises(MemoryBudgetError) as refusal:
                step.memory_budget = 1
                step(*args)
            assert refusal.value.least_bytes < 0.95 * whole
            step.memory_budget = refusal.value.least_bytes
            assert step.plan(b=4, t=96).evicted
        losses = [step(*args) for _ in range(2)]
        results.append([*losses, *(p.detach().clone() for p in model.parameters())])
        report = step.memory_report()
        assert report.peak_bytes == report.planned_peak_bytes
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


@pytest.mark.slow
def test_dropout_between_layers_drops_the_given_share():
    torch.manual_seed(3)
    model = nn.LSTM(4, 64, num_layers=2, dropout=0.5)
    silent = copy.deepcopy(model)
    x = torch.randn(8, 3, 4)

    def loss_fn(model, x):
        return model(x)[0].square().mean()

    step = relax_disc.compile(
        model, torch.optim.SGD(model.parameters(), 0.0), (x,), dynamic_shapes=None, loss_fn=loss_fn
    )
    losses = {float(step(x)) for _ in range(3)}
    assert len(losses) == 3  # a mask of its own for each step
    silent.dropout = 0.0
    assert min(losses) > 0.5 * loss_fn(silent, x).item()


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="eager PyTorch has no LSTM of bfloat16 on this processor",
)
def test_autocast_gives_the_types_of_eager():
    torch.manual_seed(4)
    model = Layer(nn.LSTM, batch_first=True)

    def loss_fn(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            out, _ = model.cell(x)
        assert out.dtype == torch.bfloat16
        return model.last(out.float()).square().mean()

    x = batch(model, 3, 7)
    captured = capture_step(model, None, (x,), dynamic_shapes=shapes(model), loss_fn=loss_fn)
    function = CompiledFunction(captured, build(captured.module, "llvm"), model, None)
    assert function.run((x,))[0].item() == pytest.approx(loss_fn(model, x).item(), rel=2e-2)


def test_projections_are_refused_by_name():
    model = Layer(nn.LSTM, batch_first=True, proj_size=3)
    with pytest.raises(UnsupportedOperatorError, match="proj_size"):
        capture_step(model, None, (batch(model, 3, 7),), dynamic_shapes=shapes(model))
