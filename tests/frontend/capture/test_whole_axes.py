"""Calls that take a length as a number, where it is the length of an axis that differs."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

import relax_disc
from relax_disc.errors import ModelCheckError, ShapeRangeError

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in ("Since version 1.3.0", "The length of signal is shorter")  # eager PyTorch's
]
LONGEST = 40
LENGTHS = (1, 2, 3, 5, 16, 17, LONGEST)


def matrices(x):
    """One affine map of the plane for each sample."""
    return torch.eye(2, 3) + x.mean((1, 2))[:, None, None] * torch.ones(2, 3)


def picture(x):
    """The same numbers as [batch, 1, length, width]."""
    return x[:, None]


def columns(x):
    return x.transpose(1, 2)


POOLS = {
    "max 1d": lambda x, n: F.max_pool1d(columns(x), n),
    "max 1d, its size": lambda x, n: F.max_pool1d(columns(x), kernel_size=columns(x).size(2)),
    "max 1d, shorter": lambda x, n: F.max_pool1d(F.pad(columns(x), (2, 0))[..., 1:-1], n),
    "max 2d, one axis": lambda x, n: F.max_pool2d(picture(x), (n, 1)),
    "max 2d, with windows": lambda x, n: F.max_pool2d(picture(x), (n, 2), stride=(n, 1)),
    "max 2d, both": lambda x, n: F.max_pool2d(picture(x), picture(x).size()[2:]),
    "max 3d": lambda x, n: F.max_pool3d(picture(x)[..., None], (n, 2, 1)),
    "mean 1d": lambda x, n: F.avg_pool1d(columns(x), n),
    "mean 2d": lambda x, n: F.avg_pool2d(picture(x), picture(x).shape[2:]),
    "mean 2d, with a border": lambda x, n: F.avg_pool2d(picture(x), (n, 2), padding=(0, 1)),
    "mean 3d": lambda x, n: F.avg_pool3d(picture(x)[..., None], (n, 4, 1)),
}
RANGES = {
    "hann": lambda x, n: torch.hann_window(n)[:, None] * x,
    "hann, symmetric": lambda x, n: torch.hann_window(n, periodic=False)[:, None] * x,
    "hamming": lambda x, n: torch.hamming_window(n, False, 0.6)[:, None] * x,
    "hamming, by name": lambda x, n: (
        torch.hamming_window(n, True, alpha=0.6, beta=0.3)[:, None] * x
    ),
    "blackman": lambda x, n: torch.blackman_window(n, dtype=torch.float64)[:, None].float() * x,
    "bartlett": lambda x, n: torch.bartlett_window(n)[:, None] * x,
    "bartlett, symmetric": lambda x, n: torch.bartlett_window(n, False)[:, None] * x,
    "frequencies": lambda x, n: torch.fft.fftfreq(n, 0.5)[:, None] * x,
    "real frequencies": lambda x, n: torch.fft.rfftfreq(n) * x.sum(),
    "powers": lambda x, n: torch.logspace(0, 1, n, 2.0)[:, None] * x,
    "one hot": lambda x, n: F.one_hot(torch.arange(n).flip(0), n).float() @ x,
    "diagonal filled": lambda x, n: (x[0] @ x[0].T).fill_diagonal_(-9.0),
    "diagonal filled, wide": lambda x, n: (x[0] * 1).fill_diagonal_(fill_value=2.0),
    "upper": lambda x, n: pairs(x, torch.triu_indices(n, n)),
    "lower": lambda x, n: pairs(x, torch.tril_indices(n, n)),
    "lower, no diagonal": lambda x, n: pairs(x, torch.tril_indices(n, n, -1)),
    "upper, no diagonal": lambda x, n: pairs(x, torch.triu_indices(n, n, 1)),
    "grid": lambda x, n: F.affine_grid(matrices(x), (x.shape[0], 1, n, 4), align_corners=False),
    "grid, corners": lambda x, n: F.affine_grid(matrices(x), picture(x).size(), align_corners=True),
    "grid of fixed extents": lambda x, n: F.affine_grid(
        matrices(x), (x.shape[0], 1, 3, 4), align_corners=False
    ),
    "sampled": lambda x, n: F.grid_sample(
        picture(x),
        F.affine_grid(matrices(x).detach(), picture(x).size(), align_corners=False),
        align_corners=False,
    ),
}
OPERANDS = {
    "power": lambda x, n: (x.abs() / 8) ** n,
    "negative base": lambda x, n: (x / 8) ** n,
    "root": lambda x, n: (x.abs() + 0.1) ** (1 / n),
    "complex": lambda x, n: torch.view_as_real(torch.fft.fft(x, dim=1) / n),
    "complex, by a fraction": lambda x, n: torch.view_as_real(torch.fft.fft(x, dim=1) * (1 / n)),
    "scale": lambda x, n: F.scaled_dot_product_attention(x, x, x, scale=1 / math.sqrt(n)),
    "scale, causal": lambda x, n: F.scaled_dot_product_attention(
        x, x, x, is_causal=True, scale=n**-0.5
    ),
    "three parts": lambda x, n: torch.cat(
        [p * i for i, p in enumerate(x.tensor_split(3, 1), 1)], 1
    ),
    "two parts": lambda x, n: torch.tensor_split(x, 2, dim=1)[1].sum((1, 2)),
}


def heard(x, less=None, **options):
    """Filter a signal of all numbers in a row by its spectrum; ``less`` samples come back."""
    signal = x.flatten(1)
    spectrum = torch.stft(signal, 4, hop_length=2, return_complex=True, **options)
    length = None if less is None else signal.shape[1] - less
    return torch.istft(spectrum * (0.9 + 0.1j), 4, hop_length=2, length=length, **options)


HANN = torch.hann_window(4)
SPECTRA = {
    "all": lambda x, n: heard(x, 0, window=HANN),
    "as many as whole frames": lambda x, n: heard(x, window=HANN),
    "fewer": lambda x, n: heard(x, 1, window=HANN, normalized=True),
    "more": lambda x, n: heard(x, -3, window=HANN),
    "of two sides": lambda x, n: heard(x, 0, window=HANN, onesided=False),
    "no border": lambda x, n: heard(x, window=torch.hamming_window(4), center=False),
}


def pairs(x, places):
    """Sums over pairs of rows; there may be none."""
    return (x[:, places[0]] * x[:, places[1]]).sum(1)


class Terms(nn.Module):
    """Each use in a term of its own, of its values and of where they stand."""

    def __init__(self, uses):
        super().__init__()
        self.layer, self.uses = nn.Linear(4, 4), uses

    def forward(self, x):
        found = [use(self.layer(x), x.shape[1]).double() for use in self.uses]
        return torch.stack([(y * (1 + y.flip(-1))).sum() for y in found])


def compiled(uses, shortest=1):
    torch.manual_seed(0)
    model = Terms(uses)
    shapes = ({0: Dim("rows", min=1, max=4), 1: Dim("length", min=shortest, max=LONGEST)},)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = relax_disc.compile(
        model, optimizer, (torch.randn(3, 9, 4),), dynamic_shapes=shapes,
        loss_fn=lambda model, x: ((terms := model(x)).sum(), terms),
    )  # fmt: skip
    return model, step


@pytest.mark.parametrize(
    "uses",
    [POOLS, RANGES, OPERANDS, SPECTRA],
    ids=["pools", "ranges", "operands", "spectra"],
)
def test_values_and_gradients_are_pytorchs_at_every_length(uses):
    model, step = compiled(list(uses.values()))
    for length in LENGTHS:
        x = torch.randn(2, length, 4)
        model.zero_grad()
        _, (terms,) = step(x, update=False)
        wanted = model(x)
        torch.testing.assert_close(
            dict(zip(uses, terms, strict=True)),
            dict(zip(uses, wanted.detach(), strict=True)),
            rtol=2e-5, atol=2e-5,
        )  # fmt: skip
        gradients = torch.autograd.grad(wanted.sum(), list(model.parameters()))
        for found, gradient in zip(model.parameters(), gradients, strict=True):
            scale = gradient.abs().max().item()
            torch.testing.assert_close(found.grad, gradient, rtol=1e-4, atol=1e-4 * scale)


def named(x, n):
    """Calls whose first argument has a name, as PyTorch's documentation writes them."""
    first, second = torch.chunk(input=x, chunks=2, dim=2)
    third, fourth = torch.tensor_split(input=x, indices=(1,), dim=2)
    pooled = F.avg_pool2d(input=F.max_pool2d(input=picture(x), kernel_size=(n, 1)), kernel_size=1)
    part = torch.narrow(input=x, dim=2, start=0, length=2)
    ids = F.embedding(input=torch.arange(n), weight=torch.ones(64, 2))
    near = torch.cdist(x1=part, x2=first)
    return (near.sum(2) + second.sum(2) + pooled.sum((1, 3))) * third[..., 0] + (
        fourth.sum(2) * F.one_hot(input=torch.arange(n), num_classes=n).sum(1) + ids.sum(1)
    )


def test_arguments_may_be_named():
    model, step = compiled([named])
    for length in LENGTHS:
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(step(x)[1][0], model(x).detach(), rtol=1e-4, atol=1e-4)


def test_two_chunks_are_compiled_from_two_rows_on():
    uses = [lambda x, n: torch.cat([y * i for i, y in enumerate(x.chunk(2, dim=1), 1)], 1)]
    model, step = compiled(uses, shortest=2)
    for length in LENGTHS[1:]:
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(step(x)[1][0], model(x).detach(), rtol=1e-5, atol=1e-6)
    with pytest.raises(ShapeRangeError, match=r"length >= 2.*min=2.*test_whole_axes"):
        compiled(uses)


def test_sums_of_quotients_in_any_order():
    """TVM's fusion takes one order for the other, and ends the process."""
    uses = [lambda x, n: torch.cat([x[:, : (n + 1) // 2] * 2, x.narrow(1, n - n // 2, n // 2)], 1)]
    model, step = compiled(uses)
    for length in LENGTHS:
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(step(x)[1][0], model(x).detach(), rtol=1e-5, atol=1e-6)


def test_a_place_in_no_window_is_an_error():
    model, step = compiled([lambda x, n: heard(x, window=HANN, center=False)])
    x = torch.randn(2, 5, 4)
    for call, error in ((step, ModelCheckError), (model, RuntimeError)):
        with pytest.raises(error, match="istft"):
            call(x)
