"""Branches on data go the way of the example batch; a batch that goes another way is refused."""

import copy

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import relax_disc
from relax_disc.errors import BranchError, ShapeRangeError, UnsupportedOperatorError

X, Y = torch.linspace(-1, 1, 20).reshape(5, 4), torch.tensor([0, 2, 1, -100, 2])
EMPTY = torch.full((5,), -100)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x):
        return self.head(self.dropout(self.layer(x)).tanh())


def any_label(model, x, y):
    if (y >= 0).any():
        return F.cross_entropy(model(x), y)
    return model(x).pow(2).mean()


def pixels(model, x, y):
    return model(x / 255 if x.max() > 1 else x).pow(2).mean()


def activations(model, x, y):
    h = model.norm(model.layer(x)) * x.abs().amax()  # writes its statistics
    h += 1
    with torch.no_grad():
        if h.abs().max().item() > 9.5 and h.mean() == h.mean():
            h = h / 10
    return model.head(h).pow(2).mean()


def counted(model, x, y):
    chosen = (y >= 0).nonzero().squeeze(1)
    if len(chosen) == 0:
        return model(x).pow(2).mean()
    return F.cross_entropy(model(x)[chosen], y[chosen])


def number(model, x, y):
    count = (y >= 0).sum().item()
    logits = model(x)
    if not count:
        logits = logits * 2
    return logits.pow(2).mean() if 2 * count + x.shape[0] > 1 else logits.mean()


def early_exit(model, x, y):
    for _ in range(4):
        x = x * 0.5
        if (x.abs() < 0.3).all():
            break
    return checkpoint(model, x, use_reentrant=False).pow(2).mean()


def autocast(model, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        h = model.layer(x)
        h = h * 2 if (x > 1).any() else h
    return h.float().pow(2).mean()


def parameters(model, x, y):
    return model(x).mean() * (2 if model.head.bias.sum() * x.max() > 3 else 3)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


def after_a_function(model, x, y):
    h = model(Doubled.apply(x))
    return h.pow(2).mean() if Doubled.apply(x).abs().max() < 3 else h.mean()


def the_same(model, x, y):
    """As gpytorch asks whether a kernel is taken of one set of points."""
    labels = y.clamp(min=0)
    if torch.equal(y, labels) or torch.allclose(x, x * 0, atol=0.1):
        return F.cross_entropy(model(x), labels)
    return model(x).pow(2).mean()


def compiled(model, batch, loss_fn):
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    shapes = ({0: Dim("batch", min=2, max=64)},) * len(batch)
    return relax_disc.compile(model, optimizer, batch, dynamic_shapes=shapes, loss_fn=loss_fn)


def trained(model, batch, loss_fn):
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loss = loss_fn(model, *batch)
    loss.backward()
    optimizer.step()
    return model.state_dict(), loss.detach()


PROGRAMS = [
    (any_label, (X, EMPTY), r"`\(y >= 0\).any\(\)`"),
    (pixels, (X * 200, Y), "`x.max\\(\\) > 1`"),
    (activations, (X * 100, Y), r"`h.abs\(\).max\(\).item\(\) > 9.5`"),
    (counted, (X, EMPTY), r"`len\(chosen\) == 0`"),
    (number, (X, EMPTY), "`count`"),
    (early_exit, (X / 4, Y), r"`\(x.abs\(\) < 0.3\).all\(\)`"),
    (autocast, (X * 2, Y), r"`\(x > 1\).any\(\)`"),
    (parameters, (X + 1, Y), "> 3`"),
    (after_a_function, (X * 10, Y), "< 3`"),
    (the_same, (X, Y.clamp(min=0)), r"`torch.equal\(y, labels\)`"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("loss_fn", "other", "condition"), PROGRAMS)
def test_a_step_is_eagers_or_says_why_not(loss_fn, other, condition):
    first = (X - 0.02, Y)
    with torch.no_grad():
        (net := Net()).head.bias.fill_(1.0)
    for example, odd in ((first, other), (other, first)):
        model = copy.deepcopy(net)
        step = compiled(model, example, loss_fn)
        assert str(model.state_dict()) == str(net.state_dict())  # and nothing was run on it
        for rows in (5, 2, 4):
            batch = tuple(x[-rows:] for x in example)
            expected, loss = trained(model, batch, loss_fn)
            torch.testing.assert_close(step(*batch), loss)
            torch.testing.assert_close(dict(model.state_dict()), dict(expected))
            before = copy.deepcopy(model.state_dict())
            with pytest.raises(BranchError, match=f"{__file__}.*{condition}.*been written"):
                step(*odd)
            assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gru = nn.GRU(3, 4, 2, batch_first=True, bidirectional=True)
        self.lstm, self.rnn = nn.LSTM(8, 3), nn.RNN(3, 3, batch_first=True)
        self.cell = nn.LSTMCell(3, 5)

    def layers(self, x):
        out, (_, cell) = self.lstm(self.gru(x)[0].transpose(0, 1))
        return self.rnn(out.transpose(0, 1) * x)[0], cell

    def steps(self, x):
        """Carries a state, collects, writes rows, and leaves what the last step made."""
        states = [x.new_zeros(x.shape[0], 5) for _ in range(2)]
        outs, rows, last = [], x.new_zeros(x.shape[:2]), x[:, 0]
        for t in range(x.shape[1]):
            states = self.cell(x[:, t], states)
            outs.append(states[0] + states[1])
            rows[:, t] = states[1].sum(-1)
            last = x[:, t] + states[1][:, :3]
        return torch.stack(outs, 1) * rows[..., None], last


def not_finite(model, x):
    first, second = model.layers(x)
    loss = first.square().mean() + second.mean()
    if not torch.isfinite(loss):
        loss = first.sum()
    return loss


def after_layers(model, x):
    first, second = model.layers(x)
    top = first.abs().max() + second.abs().max()
    return first.square().mean() if top < 1.5 else second.square().mean()


def after_steps(model, x):
    first, second = model.steps(x)
    return first.square().mean() if second.abs().max() < 4 else second.square().mean()


def after_ctc(model, x):
    logs = model.gru(x)[0].log_softmax(-1).transpose(0, 1)
    lengths = torch.full((x.shape[0],), x.shape[1])
    targets = 1 + torch.arange(2 * x.shape[0]).reshape(-1, 2) % 5
    loss = F.ctc_loss(logs, targets, lengths, torch.full((x.shape[0],), 2))
    return loss * 2 if torch.isinf(loss) or loss > 1e4 else loss


@pytest.mark.parametrize(
    ("loss_fn", "odd"),
    [(not_finite, float("nan")), (after_layers, 50.0), (after_steps, 9.0), (after_ctc, None)],
)
def test_branches_behind_layers_and_loops_over_a_length(loss_fn, odd):
    model = Recurrent()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(0)) / 2
    shapes = ({0: Dim("batch", min=1, max=8), 1: Dim("length", min=2, max=16)},)
    step = relax_disc.compile(model, optimizer, (x,), dynamic_shapes=shapes, loss_fn=loss_fn)
    for batch in (x, x[:1, :3], torch.cat([x, x / 2], 1)):
        expected, loss = trained(model, (batch,), loss_fn)
        torch.testing.assert_close(step(batch), loss)
        torch.testing.assert_close(dict(model.state_dict()), dict(expected))
    if odd is not None:
        with pytest.raises(BranchError, match=f"{__file__}.*been written"):
            step(x * odd)
        larger = relax_disc.compile(model, None, (x * odd,), dynamic_shapes=shapes, loss_fn=loss_fn)
        with pytest.raises(BranchError, match=f"{__file__}.*been written"):
            larger(x, update=False)


def several(model, x, y):
    return sum(loss_fn(model, x, y) for loss_fn, _, _ in PROGRAMS[3:6])


def test_each_of_several_branches_is_checked():
    model = Net()
    step = compiled(model, (X - 0.02, Y), several)
    for rows in (5, 2):
        batch = X[-rows:] - 0.02, Y[-rows:]
        expected, loss = trained(model, batch, several)
        torch.testing.assert_close(step(*batch), loss)
        torch.testing.assert_close(dict(model.state_dict()), dict(expected))
    for batch in ((X, EMPTY), (X / 4, Y)):
        before = copy.deepcopy(model.state_dict())
        for update in (True, False):
            with pytest.raises(BranchError, match=f"{__file__}.*been written"):
                step(*batch, update=update)
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_no_random_number_is_drawn_for_the_example():
    model = Net()
    model.dropout.p = 0.5

    def loss_fn(model, x):
        h = model(x)
        return h.mean() if (h == h).all() else h.sum()

    torch.manual_seed(5)
    step = compiled(model, (X,), loss_fn)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))
    step(X)


@pytest.mark.filterwarnings("ignore:.*item:relax_disc.errors.RelaxDiscWarning")
def test_what_no_batch_tells_is_refused():
    def drawn(model, x):
        return model(x).mean() if torch.rand(()) < 0.5 else model(x).sum()

    def repeated(model, x):
        return sum(model(x).mean() for _ in range(int((x > 0).sum())))

    cases = ((drawn, "a random number is below 0.5"), (repeated, "decides from data"))
    for loss_fn, said in cases:
        with pytest.raises(UnsupportedOperatorError, match=said):
            compiled(Net(), (X,), loss_fn)


class OnSizes(nn.Module):
    """Takes another way for pictures that are square, as wide as high, or of 16 patches."""

    def __init__(self, asks):
        super().__init__()
        self.linear, self.asks = nn.Linear(4, 4), asks

    def forward(self, x):
        h = self.linear(x).square().mean()
        return 2 * h if self.asks(x.shape[1], x.shape[2]) else h


@pytest.mark.parametrize(
    ("asks", "kind"),
    [
        (lambda high, wide: high == wide, "plain"),
        (lambda high, wide: high == wide, "multiple"),
        (lambda high, wide: (high // 8) * (wide // 8) == 16 and high == wide, "plain"),
        (lambda high, wide: (high // 8) * (wide // 8) == 16 and high == wide, "multiple"),
        (lambda high, wide: high > wide, "plain"),
    ],
)
def test_a_branch_on_two_sizes_is_checked_at_each_call(asks, kind):
    """torch.export watches each dim by itself, and lets two differ in the example and be equal."""
    model = OnSizes(asks)
    if kind == "plain":
        shapes = {1: Dim("high", min=8, max=64), 2: Dim("wide", min=8, max=64)}
    else:
        shapes = {1: 8 * Dim("p", min=1, max=8), 2: 8 * Dim("q", min=1, max=8)}
    example = torch.randn(1, 40, 48, 4)
    step = relax_disc.compile(
        model, torch.optim.SGD(model.parameters(), lr=0.0), (example,), dynamic_shapes=(shapes,)
    )
    for high, wide in ((40, 48), (24, 64), (32, 32), (56, 40)):
        batch = torch.randn(1, high, wide, 4)
        if asks(high, wide) == asks(40, 48):
            torch.testing.assert_close(step(batch), model(batch).detach())
        else:
            with pytest.raises(ShapeRangeError, match=r"branches at .+:\d+, and goes the example"):
                step(batch)
