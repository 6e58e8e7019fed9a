"""Scatters keep no more than they must: no filled tensor is copied, no dying operand is kept."""

import torch
from torch.export import Dim

import relax_disc


class Scattered(torch.nn.Module):
    """Adds rows to what `start` makes of `x`, which nothing else reads after that."""

    def __init__(self, start):
        super().__init__()
        self.start = start

    def forward(self, x, rows):
        base = self.start(x)
        return torch.cumsum(base.index_add(0, rows, x), 0)


def peak_in_tensors(start):
    """Peak of the arena in tensors of x's size, the result compared with PyTorch's."""
    model = Scattered(start)
    x, rows = torch.randint(-3, 4, (64, 256)).float(), torch.arange(64) % 5  # exact sums
    dims = ({0: Dim("n", max=128)}, {0: Dim("n", max=128)})
    function = relax_disc.compile_forward(model, (x, rows), dynamic_shapes=dims)
    for count in (64, 33):
        batch = x[:count], rows[:count]
        torch.testing.assert_close(function(*batch), model(*batch))
    return function.plan(n=64).timeline.arena_bytes / (x.numel() * 4)


def test_what_is_filled_with_a_number_is_not_kept_to_be_copied():
    assert peak_in_tensors(torch.zeros_like) < 1.1
    assert peak_in_tensors(lambda x: x.new_full(x.shape, -2.5)) < 1.1


def test_an_operand_that_dies_is_written_over():
    # A sum of columns is no kernel that could be computed where it is read.
    assert peak_in_tensors(lambda x: torch.cumsum(x, 0)) < 1.1


def test_an_operand_that_is_also_added_is_not_written_over():
    class Twice(torch.nn.Module):
        def forward(self, x, rows):
            base = torch.cumsum(x, 0)
            return base.index_add(0, rows, base)

    x, rows = torch.randn(16, 8), torch.arange(16).flip(0)
    dims = ({0: Dim("n", max=128)}, {0: Dim("n", max=128)})
    function = relax_disc.compile_forward(Twice(), (x, rows), dynamic_shapes=dims)
    torch.testing.assert_close(function(x, rows), Twice()(x, rows))
