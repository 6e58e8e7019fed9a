"""Operators without a converter: PyTorch's own kernel on planned memory, beside eager PyTorch."""

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses.fake_impls import op_implementations_dict
from torch.export import Dim

import relax_disc
from relax_disc.errors import UnsupportedOperatorError
from tests.tiers import every
from tests.training.beside_eager import assert_gradients_as_eager

ROWS = Dim("rows", min=2, max=64)


class Mixed(nn.Module):
    """Linear algebra, complex numbers, special functions, views, several results."""

    def __init__(self):
        super().__init__()
        self.linear, self.weight = nn.Linear(4, 4), nn.Parameter(3 * torch.eye(4))

    def forward(self, x):
        h = self.linear(x)
        square = h.transpose(1, 2) @ h + self.weight
        values, vectors = torch.linalg.eigh(square + square.mT)
        spectrum = torch.fft.rfft(h, dim=-1) * torch.polar(h[..., :3].exp(), h[..., :3])
        terms = [
            torch.linalg.inv(square),
            torch.linalg.cholesky(square @ square.mT + torch.eye(4)),
            values,
            vectors.abs(),
            spectrum.abs(),
            torch.view_as_real(spectrum.conj().resolve_conj()),
            torch.fft.irfft(spectrum, n=5),
            torch.special.digamma(square.abs() + 1),
            torch.lgamma(square.abs() + 1),
            h.unfold(2, 2, 1).contiguous(),
            torch.as_strided(h.contiguous(), (3, 2), (2, 4), 1),
        ]
        return sum((term**2).mean() for term in terms)


def compiled(model, x, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return relax_disc.compile(
            model, optimizer, (x,), dynamic_shapes={"x": {0: ROWS}}, **options
        )


def train_eagerly(model, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    loss = model(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def trained_as_eager(model, sizes, *shape, loss=None, parameters=None):
    """Train a model and its twin in eager, compared at each size; the compiled step."""
    twin = copy.deepcopy(model)
    step = compiled(model, torch.randn(3, *shape))
    for rows in sizes:
        x = torch.randn(rows, *shape)
        torch.testing.assert_close(step(x), train_eagerly(twin, x), **loss or {})
        for mine, plain in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine, plain, **parameters or {})
    return step


ROUNDED = {"loss": {"rtol": 1e-5, "atol": 1e-6}, "parameters": {"rtol": 2e-4, "atol": 2e-5}}


def test_mixed_model_trains_as_eager_does():
    torch.manual_seed(0)
    step = trained_as_eager(Mixed(), (3, 64, 2, 17), 5, 4, **ROUNDED)
    assert "relax_disc.aten.call" in step.session.kernel_names


class Spectral(nn.Module):
    """A layer of a Fourier neural operator, with parts, whole tensors and both in one call."""

    def __init__(self):
        super().__init__()
        self.linear, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(3, 4, 2))

    def forward(self, x):
        h = self.linear(x)
        modes = torch.fft.rfft(h, dim=1)
        rows = torch.arange(len(h))[:, None]
        twice = modes[:, torch.tensor([2, 0, 2])] * modes[rows, [[1, 0, 1]]]
        modes = modes[:, :3]
        mixed = torch.einsum("bmi,mi->bmi", modes, torch.view_as_complex(self.weight))
        field = torch.fft.irfft(mixed, n=5, dim=1)
        whole = torch.fft.ifft(torch.complex(h, x), dim=-1)
        return field.square().mean() + whole.abs().mean() + (twice.abs() + 0.1).log().mean()


def test_complex_tensors_of_both_kinds_train_as_in_eager():
    torch.manual_seed(0)
    trained_as_eager(Spectral(), (3, 64, 2, 17), 5, 4)


class Rotated(Spectral):
    """Complex tensors with real and with complex numbers."""

    def forward(self, x):
        h = self.linear(x)
        turned = torch.exp(1j * h) * (0.5 - 2j) + x + 1j * h
        return (torch.fft.fft(turned, dim=1) / 2.0 - 1).abs().mean() + (h * 3j).imag.mean()


def test_complex_tensors_meet_numbers():
    torch.manual_seed(0)
    model = Rotated()
    del model.weight
    trained_as_eager(model, (3, 64, 2, 17), 5, 4)


class Determinants(nn.Module):
    """Of matrices that lie with gaps in memory, which PyTorch's gradient looks at."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        h = self.linear(x)[:, :4].reshape(-1, 2, 2)
        return (h.det().square() + torch.linalg.slogdet(h + 3 * torch.eye(2))[1] + h.mT.det()).sum()


class KeptModes(nn.Module):
    """A layer of a Fourier neural operator: its modes are written into zeros."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2))

    def forward(self, x):
        modes = torch.fft.rfft(x)
        kept = torch.zeros_like(modes)
        kept[:, :3] = modes[:, :3] * torch.view_as_complex(self.weight)
        return torch.fft.irfft(kept, n=x.shape[1]).square().mean()


def test_what_is_written_into_complex_tensors_stays():
    torch.manual_seed(0)
    model = KeptModes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    shapes = ({0: Dim("batch", min=1, max=64), 1: Dim("length", min=4, max=64)},)
    step = relax_disc.compile(model, optimizer, (torch.randn(2, 8),), dynamic_shapes=shapes)
    for x in (torch.randn(2, 8), torch.randn(1, 9), torch.randn(3, 16)):
        expected = model(x)
        (gradient,) = torch.autograd.grad(expected, [model.weight])
        torch.testing.assert_close(step(x, keep_gradients=True), expected.detach())
        torch.testing.assert_close(model.weight.grad, gradient)


def test_gradients_of_determinants_do_not_depend_on_strides():
    torch.manual_seed(0)
    trained_as_eager(Determinants(), (3, 20, 2), 6, **ROUNDED)


class Deep(nn.Module):
    """Calls whose results are worth computing twice."""

    def __init__(self):
        super().__init__()
        self.scales = nn.Parameter(torch.rand(8, 64))

    def forward(self, x):
        for scale in self.scales:
            x = torch.special.i1e(x.roll(1, -1)) + scale * torch.special.i0e(x)
        return (x**2).sum()


def test_results_do_not_depend_on_the_budget():
    torch.manual_seed(0)
    model, x = Deep(), torch.randn(32, 5, 64)
    twin = copy.deepcopy(model)
    step, other = compiled(model, x), compiled(twin, x)
    peak = step.plan(rows=32).peak_bytes
    other.memory_budget = peak // 2
    least = other.plan(rows=32).least_bytes
    assert least < 0.8 * peak
    other.memory_budget = least
    for _ in range(3):
        assert torch.equal(step(x), other(x))
    for mine, plain in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, plain)
    assert other.memory_report().recomputations > 0


class Inverse(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return torch.linalg.inv(self.scale * x).sum()


def test_an_error_of_the_operator_leaves_the_step_intact():
    model = Inverse()
    step = compiled(model, torch.eye(3).repeat(2, 1, 1))
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        step(torch.zeros(4, 3, 3))
    assert model.scale == 1
    loss = step(2 * torch.eye(3).repeat(2, 1, 1))
    assert loss == 3 and model.scale != 1


class Distances(nn.Module):
    """Distances of more and of fewer rows than PyTorch's choice of an algorithm looks at."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(32, 4))

    def forward(self, x):
        nearest = torch.cdist(x, self.table).amin(-1)
        return (
            nearest.mean()
            + torch.cov(x.mT @ x * self.table[:4]).sum()
            + torch.corrcoef(x.mT + self.table[:4, :1]).square().sum()
        )


def test_distances_and_covariances_at_any_number_of_rows():
    torch.manual_seed(0)
    model = Distances()
    twin = copy.deepcopy(model)
    step = compiled(model, torch.randn(8, 4))
    for rows in (2, 25, 26, 64):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(step(x), train_eagerly(twin, x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model.table, twin.table, rtol=1e-4, atol=1e-5)


class Statistics(nn.Module):
    """Batch norm without its module: no schema says that it writes its statistics."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x):
        return (
            nn.functional.batch_norm(x, self.mean, self.var, self.weight, training=True).exp().sum()
        )


def test_functional_batch_norm_writes_its_statistics():
    torch.manual_seed(0)
    model, x = Statistics(), torch.randn(8, 4)
    twin = copy.deepcopy(model)
    compiled(model, x)(x)
    train_eagerly(twin, x)
    torch.testing.assert_close(model.mean, twin.mean)
    torch.testing.assert_close(model.var, twin.var)


class Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (torch.poisson(x.exp()) * self.scale + torch.masked_select(x, x > 0).sum()).sum()


def test_what_cannot_run_so_is_refused_by_name():
    with pytest.raises(UnsupportedOperatorError) as caught:
        compiled(Drawing(), torch.randn(4, 3))
    assert "poisson" in str(caught.value) or "masked_select" in str(caught.value)


class Undescribed(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return torch._standard_gamma((x * self.scale).exp()).sum()


def test_gradient_that_cannot_be_described_is_refused_by_name():
    with pytest.raises(UnsupportedOperatorError, match="_standard_gamma_grad"):
        compiled(Undescribed(), torch.randn(4, 3))


def test_what_operators_allocate_is_inside_the_planned_peak():
    torch.manual_seed(0)
    model = Mixed()
    step = compiled(model, torch.randn(3, 5, 4))
    for rows in (2, 3, 40, 64):
        step(torch.randn(rows, 5, 4))
        report = step.memory_report()
        assert report.peak_bytes == report.planned_peak_bytes == step.plan(rows=rows).peak_bytes
    calls = [k for k in step.session.metadata.kernels if k.name == "relax_disc.aten.call"]
    assert any(kernel.workspace[0] == "aten" for kernel in calls)


class OfTwoLengths(nn.Module):
    """One operator without a converter on a matrix, or on a grid, of two dynamic lengths."""

    def __init__(self, operator):
        super().__init__()
        self.weight, self.operator = nn.Parameter(torch.ones(3, 1, 1)), operator

    def forward(self, x):
        return self.operator(x * self.weight).square().mean()


def gram(x):
    return x @ x.mT + 3 * torch.eye(x.shape[-2])


def resampled(x):
    grid = torch.stack([x[:, 0], x[:, 1]], -1).tanh()
    return nn.functional.grid_sample(x, grid, align_corners=False)


OPERATORS = {
    "cdist": lambda x: torch.cdist(x, x + 1),
    "slogdet": lambda x: torch.linalg.slogdet(gram(x))[1],
    "eigvalsh": lambda x: torch.linalg.eigvalsh(gram(x)),
    "grid_sample": resampled,
    "solve": lambda x: torch.linalg.solve(gram(x), x),
    "matrix_exp": lambda x: torch.matrix_exp(gram(x) / 100),
    "qr": lambda x: torch.linalg.qr(gram(x))[1],
}


@pytest.mark.parametrize("name", every(4, OPERATORS))
def test_what_operators_allocate_is_inside_the_planned_peak_at_every_pair_of_lengths(name):
    torch.manual_seed(0)
    model = OfTwoLengths(OPERATORS[name])
    axes = {0: Dim("rows", min=1, max=16), 2: Dim("h", min=1, max=64), 3: Dim("w", min=1, max=64)}
    step = relax_disc.compile(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        (torch.randn(2, 3, 8, 9),),
        dynamic_shapes=(axes,),
    )
    one = itertools.product((1, 2), (1, 3), (1, 2, 5))
    for sizes in (*one, (1, 64, 1), (1, 1, 64), (16, 1, 1), (3, 17, 5), (7, 13, 64), (16, 64, 64)):
        step(torch.randn(sizes[0], 3, *sizes[1:]))
        report = step.memory_report()
        assert report.peak_bytes == report.planned_peak_bytes, sizes


class Smoothed(nn.Module):
    """Positions of a grid, resized to that of the image, as DINOv2 does."""

    def __init__(self):
        super().__init__()
        self.places = nn.Parameter(torch.randn(1, 3, 6, 5))

    def forward(self, x):
        size = x.shape[2:]
        return (x + smoothed(self.places, size) * smoothed(x, (7, 4)).mean()).square().mean()


def smoothed(x, size):
    return nn.functional.interpolate(x, size=size, mode="bicubic", antialias=True)


def test_grids_resized_by_a_cubic_filter():
    torch.manual_seed(0)
    model, axes = Smoothed(), {2: Dim("high", min=1, max=16), 3: Dim("wide", min=1, max=64)}
    batches = [(torch.randn(2, 3, *size),) for size in ((8, 9), (1, 1), (16, 5), (4, 64))]
    step = relax_disc.compile(model, None, batches[0], dynamic_shapes=(axes,))
    assert_gradients_as_eager(step, batches)


def test_a_gradient_that_pytorch_cannot_trace_is_refused_by_name(monkeypatch):
    operator = torch.ops.aten._upsample_bicubic2d_aa_backward.default
    monkeypatch.delitem(op_implementations_dict, operator)
    model = OfTwoLengths(lambda x: smoothed(x, (7, 5)))
    with pytest.raises(UnsupportedOperatorError, match=r"needs aten\._upsample_bicubic2d_aa_back"):
        compiled(model, torch.randn(2, 3, 8, 9))


class Lengthened(nn.Module):
    """Keys get two more rows, so that their number is spelled n + 1 + 1."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, add_bias_kv=True, add_zero_attn=True)

    def forward(self, x):
        return self.attention(x, x, x)[0].square().sum()


def test_lengths_that_are_spelled_in_two_ways():
    torch.manual_seed(0)
    model = Lengthened()
    twin = copy.deepcopy(model)
    step = compiled(model, torch.randn(5, 4))
    for rows in (3, 64):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(step(x), train_eagerly(twin, x), rtol=1e-5, atol=1e-5)
        for mine, plain in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-5)


class Started(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, 3))

    def forward(self, x, start):
        return (x * torch.narrow(self.table, 0, start, x.shape[0])).sum()


def test_rows_from_a_start_that_is_data():
    model = Started()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    example = (torch.randn(4, 3), torch.tensor(2))
    step = relax_disc.compile(model, optimizer, example, dynamic_shapes=({0: ROWS}, None))
    for rows, start in ((4, 2), (9, 0), (5, -7)):
        x, start = torch.randn(rows, 3), torch.tensor(start)
        other = torch.optim.SGD(twin.parameters(), lr=0.001)
        loss = twin(x, start)
        loss.backward()
        torch.testing.assert_close(step(x, start), loss.detach())
        other.step()
        other.zero_grad()
        torch.testing.assert_close(model.table, twin.table)


class Pooled(nn.Module):
    """Of one position of the image the second layer makes none, on which a kernel would divide."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 1)

    def forward(self, x):
        x = nn.functional.max_pool2d(self.first(x), 2)
        return nn.functional.adaptive_avg_pool2d(x, 7).square().mean()


def test_no_operator_is_tried_on_an_empty_plane():
    high, wide = Dim("high", min=1, max=32), Dim("wide", min=1, max=32)
    batches = [(torch.randn(2, 3, *size),) for size in ((8, 6), (2, 2), (9, 31))]
    step = relax_disc.compile(Pooled(), None, batches[0], dynamic_shapes=({2: high, 3: wide},))
    assert_gradients_as_eager(step, batches)
