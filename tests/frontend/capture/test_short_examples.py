"""Examples whose sizes make something 1 that is more at others: PyTorch takes it for a number."""

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional

from relax_disc.frontend import capture_step
from tests.frontend.running import check_gradients


class InChunks(nn.Module):
    """Running sums over chunks of 16 positions of ``[rows, length, 4]``."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        rows, length, width = x.shape
        chunks = functional.pad(x, (0, 0, 0, -length % 16)).reshape(rows, -1, 16, width)
        return self.layer(chunks).cumsum(1).mean(2).tanh().sum(1).square().mean()


class Pyramid(nn.Module):
    """Convolutions of stride 2 over ``[rows, 2, height, width]``, to one pixel at the least."""

    def __init__(self):
        super().__init__()
        convolutions = [nn.Conv2d(2, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1)]
        self.layers = nn.ModuleList(convolutions)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1)).square().mean()


ROWS = Dim("n", min=1, max=4)


def sequence(rows, length):
    return (torch.randn(rows, length, 4),)


@pytest.mark.parametrize("example", [4, 12, 16])
@pytest.mark.parametrize("by_four", [False, True])
def test_one_chunk_is_no_number_of_chunks(by_four, example):
    torch.manual_seed(0)
    length = 4 * Dim("t", min=1, max=16) if by_four else Dim("t", min=1, max=64)
    model = InChunks()
    shapes = ({0: ROWS, 1: length},)
    captured = capture_step(model, None, sequence(3, example), dynamic_shapes=shapes)
    lengths = (4, 12, 16, 20, 32, 64) if by_four else (1, 2, 15, 16, 17, 32, 33, 64)
    check_gradients(captured, model, [sequence(2, size) for size in lengths], least=5e-6)


@pytest.mark.parametrize("factor", [2, 4])
def test_the_smallest_image_of_multiples_is_an_example(factor):
    torch.manual_seed(0)
    model, side = Pyramid(), factor * Dim("side", min=1, max=8)
    shapes = ({0: ROWS, 2: side, 3: side},)
    example = (torch.randn(2, 2, factor, factor),)
    captured = capture_step(model, None, example, dynamic_shapes=shapes)
    sizes = [(rows, 2, factor * n, factor * n) for rows, n in ((1, 1), (4, 8), (3, 3))]
    batches = [(torch.randn(size),) for size in sizes]
    check_gradients(captured, model, batches, least=5e-6)


def test_an_example_is_long_enough_where_longer_ones_do_not_go_through():
    """The model refuses what it was not declared to get, though the range holds it."""

    class Limited(InChunks):
        def forward(self, x):
            torch._check(x.shape[1] <= 16, lambda: "at most 16 positions")
            return super().forward(x)

    torch.manual_seed(0)
    model, length = Limited(), Dim("t", min=1, max=16)
    captured = capture_step(model, None, sequence(3, 12), dynamic_shapes=({0: ROWS, 1: length},))
    check_gradients(captured, model, [sequence(2, size) for size in (1, 9, 16)], least=5e-6)
