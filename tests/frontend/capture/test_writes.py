"""Operators that write into tensors: what is traced gives PyTorch's gradients and buffers."""

import copy

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

import relax_disc
from relax_disc.errors import UnsupportedOperatorError
from relax_disc.frontend import export_step
from relax_disc.frontend.capture.traced.writes import without_writes
from tests.frontend.running import Runner, check_gradients
from tests.training.beside_eager import assert_gradients_as_eager


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.ones(4))


class Plain(Writes):
    def forward(self, x):
        self.count.add_(1)
        hidden = self.linear(x)
        hidden += x
        hidden = F.relu_(self.norm(hidden))
        self.seen.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        return (hidden.sin() * self.seen).sum() * self.count


class Twice(Writes):
    """A buffer is read, written, read, and written again by the same layer."""

    def forward(self, x):
        before = (self.norm.running_mean * 2).sum()
        hidden = self.norm(self.norm(self.linear(x)).tanh())
        return (
            hidden.pow(3).sum() + before * self.linear.weight.sum() + self.norm.running_mean.sum()
        )


class Viewed(Writes):
    """A view from before a write is read after it."""

    def forward(self, x):
        hidden = self.linear(x) * 2.0
        view = hidden.flatten()
        hidden.add_(1.0)
        return view.pow(2).sum()


class Returned(Writes):
    """What may be another name of the operand is written."""

    def forward(self, x):
        hidden = self.linear(x) * 2
        same = F.dropout(hidden, 0.0)
        same.mul_(3.0)
        return (hidden + same).cos().sum()


class Mixed(Writes):
    """A result is rounded to the type of what it is written into."""

    def forward(self, x):
        self.count.add_(torch.ones((), dtype=torch.int32))
        hidden = self.linear(x).to(torch.bfloat16)
        hidden += x
        return hidden.float().sum()


@pytest.mark.parametrize("kind", [Plain, Twice, Viewed, Returned, Mixed])
def test_writes(kind):
    torch.manual_seed(0)
    model, batches = kind(), [(torch.randn(rows, 4),) for rows in (2, 7, 5)]
    shapes = ({0: Dim("rows", min=2, max=9)},)
    exported = export_step(model, None, batches[0], dynamic_shapes=shapes)
    program = exported.exported.program
    buffers = set(program.graph_signature.inputs_to_buffers)
    plain = without_writes(program.graph_module, buffers)
    assert (plain is not None) == (kind in (Plain, Twice))
    if plain is not None:
        targets = [node.target for node in plain[0].graph.nodes]
        assert not any(getattr(getattr(t, "_schema", None), "is_mutable", False) for t in targets)
    captured = exported.capture()
    run = Runner(captured)
    for batch in batches:
        eager = copy.deepcopy(model)
        outputs = run(model, None, batch)
        eager(*batch)
        expected = dict(eager.named_buffers())
        changed = {n: v for n, v in model.named_buffers() if not torch.equal(v, expected[n])}
        found = dict(outputs.get("buffer", ()))
        assert set(changed) <= set(found)
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name])
    if kind is not Mixed:  # float64 would not be rounded
        check_gradients(captured, model, batches, least=1e-5)


class ByStrides(nn.Module):
    """Writes a band of a matrix through a view of its memory, as lightweight convolutions do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.band = nn.Parameter(torch.randn(3))

    def forward(self, x):
        rows, length, _ = x.shape
        wide = x.new_zeros(rows, length, length + 2)
        band = wide.as_strided((rows, length, 3), (length * (length + 2), length + 3, 1))
        band.copy_(self.band.expand(rows, length, 3))
        return torch.bmm(wide[:, :, 2:], self.linear(x)).square().mean()


class BaseOfStrides(ByStrides):
    """Reads a view after what it shows was written."""

    def forward(self, x):
        rows, length, _ = x.shape
        hidden = self.linear(x).contiguous()
        first = hidden.as_strided((rows, length), (length * 4, 4), 1)
        hidden.mul_(self.band[0])
        return (first * hidden.sum(-1)).mean()


class InnerRegion(ByStrides):
    """Writes what a view shows in a region inside another."""

    def forward(self, x):
        hidden = x.clone()
        first = hidden.as_strided((x.shape[0], x.shape[1]), (x.shape[1] * 4, 4), 1)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            hidden[:, 0] += 1
        return (first * self.linear(x).sum(-1)).mean() * self.band[0]


class Listed(ByStrides):
    """Writes into what a tensor lists, as DETR fills a batch of pictures."""

    def forward(self, x):
        pair = x.new_zeros(2, *x.shape)
        one, other = pair
        one.copy_(x)
        other[:, 1:] += 2 * x[:, 1:]
        for row in pair:
            row.mul_(0.5)
        return (self.linear(pair) * self.band[0]).square().mean()


@pytest.mark.parametrize("kind", [ByStrides, BaseOfStrides, InnerRegion, Listed])
def test_views_that_are_written_are_views(kind):
    torch.manual_seed(0)
    rows, length = Dim("rows", min=1, max=9), Dim("length", min=2, max=9)
    batches = [(torch.randn(*size, 4),) for size in ((2, 5), (1, 2), (7, 9))]
    step = relax_disc.compile(kind(), None, batches[0], dynamic_shapes=({0: rows, 1: length},))
    assert_gradients_as_eager(step, batches)


class PartsOfComplex(ByStrides):
    def __init__(self, write):
        super().__init__()
        self.write = write

    def forward(self, x):
        hidden = self.linear(x)
        whole = torch.complex(hidden, hidden.tanh())
        self.write(whole)
        return whole.abs().sum()


@pytest.mark.parametrize(
    "write",
    [
        lambda z: z.real.mul_(2),
        lambda z: z.imag[:, 0].zero_(),
        lambda z: torch.view_as_real(z)[..., 1].add_(1),
    ],
)
def test_parts_of_complex_numbers_are_not_written(write):
    batch = (torch.randn(2, 4),)
    with pytest.raises(UnsupportedOperatorError, match=r"test_writes.py:\d+: .* share memory"):
        relax_disc.compile(
            PartsOfComplex(write), None, batch, dynamic_shapes=({0: Dim("rows", max=9)},)
        )


class ComplexAlone(ByStrides):
    """Writes parts of complex numbers, or what they were made of, that nothing else reads."""

    def forward(self, x):
        pairs = self.linear(x).reshape(*x.shape[:2], 2, 2)
        whole = torch.view_as_complex(pairs.contiguous()).clone()
        pairs.mul_(3)
        parts = torch.view_as_real(whole * 2)
        parts[..., 0] = 0
        return (parts.square().sum() + whole.abs().sum() + pairs.mean()) * self.band[0]


def test_parts_of_complex_numbers_that_nothing_else_reads_are_written():
    torch.manual_seed(0)
    shapes = ({0: Dim("rows", min=1, max=9), 1: Dim("length", min=1, max=9)},)
    step = relax_disc.compile(ComplexAlone(), None, (torch.randn(2, 5, 4),), dynamic_shapes=shapes)
    assert_gradients_as_eager(step, [(torch.randn(*size, 4),) for size in ((2, 5), (1, 1))])


class MasksHeads(nn.Module):
    """Writes a view whose axes are moved, which the result of a write does not have in memory."""

    def __init__(self):
        super().__init__()
        self.value = nn.Linear(8, 16)

    def forward(self, x, mask):
        rows, length, _ = x.shape
        value = self.value(x).reshape(rows, length, 2, 8).permute(0, 2, 1, 3)
        value.masked_fill_(~mask[:, None, :, None], 0.0)
        return value.permute(0, 2, 1, 3).reshape(rows, length, -1).square().sum()


def test_writes_of_views_whose_axes_are_moved():
    rows, length = Dim("rows", min=1, max=8), Dim("length", min=1, max=16)
    axes = {0: rows, 1: length}
    batches = [(torch.randn(b, n, 8), torch.rand(b, n) > 0.5) for b, n in ((2, 5), (1, 1), (3, 16))]
    step = relax_disc.compile(MasksHeads(), None, batches[0], dynamic_shapes=(axes, axes))
    assert_gradients_as_eager(step, batches)


class DropsNothing(nn.Module):
    """In place, over what the gradient of the softmax reads."""

    def __init__(self, p, training):
        super().__init__()
        self.layer, self.dropout = nn.Linear(4, 4), nn.Dropout(p, inplace=True)
        self.dropout.train(training)

    def forward(self, x):
        return (self.dropout(self.layer(x).softmax(-1)) * x).square().sum()


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False)])
def test_dropout_in_place_that_drops_nothing(p, training):
    rows = {0: Dim("rows", min=1, max=8)}
    batches = [(torch.randn(n, 4),) for n in (3, 1)]
    step = relax_disc.compile(DropsNothing(p, training), None, batches[0], dynamic_shapes=(rows,))
    assert_gradients_as_eager(step, batches)
