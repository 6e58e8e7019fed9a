"""Examples whose sizes make something 1 that is more at others: PyTorch takes it for a number."""

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional

import relax_disc
from relax_disc.errors import ShapeRangeError
from relax_disc.frontend import capture_step
from relax_disc.frontend.capture.exported.all_sizes import Task
from tests.frontend.capture.test_capture import Padded
from tests.frontend.running import check_gradients
from tests.training.beside_eager import assert_gradients_as_eager


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


class Stage(nn.Module):
    """Two ways of stride 2 that are added up; of few frames one is left."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Conv1d(4, 4, 3, 2, 1), nn.Conv1d(4, 4, 1, 2)

    def forward(self, x):
        return (self.one(x) + self.other(x)).tanh()


class Video(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.Sequential(*(Stage() for _ in range(3)))

    def forward(self, x):
        return self.stages(x).mean(-1).square().sum()


class Windows(nn.Module):
    """Overlapping windows, of which the shortest sequence has one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x.transpose(1, 2).clone().unfold(1, 2, 1).sum(-1)[..., :3]).square().sum()


ROWS = Dim("n", min=1, max=4)


def sequence(rows, length):
    return (torch.randn(rows, length, 6),)


@pytest.mark.parametrize(("factor", "example"), [(1, 1), (1, 3), (1, 4), (2, 2), (2, 4)])
def test_one_chunk_is_no_number_of_chunks(factor, example):
    torch.manual_seed(0)
    length = Dim("t", min=1, max=48) if factor == 1 else 2 * Dim("t", min=1, max=24)
    model, shapes = Padded(), ({0: ROWS, 1: length},)
    captured = capture_step(model, None, sequence(3, example), dynamic_shapes=shapes)
    lengths = [size for size in (1, 2, 3, 4, 5, 6, 16, 17, 48) if size % factor == 0]
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


class Starts(nn.Module):
    """As many positions as the length has chunks of 16; one chunk is right for several."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x):
        return self.layer(x)[:, : (x.shape[1] + 15) // 16].square().mean()


def test_the_example_stands_where_longer_ones_do_not_go_through(monkeypatch):
    checked, longer = Task._checked, []

    def refusing(self, ways, part, sizes):
        run = checked(self, ways, part, sizes)
        if sizes:
            longer.append(sizes)
            raise ShapeRangeError("not at these sizes")
        return run

    monkeypatch.setattr(Task, "_checked", refusing)
    torch.manual_seed(0)
    model, shapes = Starts(), ({0: ROWS, 1: Dim("t", min=1, max=64)},)
    captured = capture_step(model, None, sequence(3, 12), dynamic_shapes=shapes)
    assert len(longer) == 1 and longer[0]["t"] > 16
    check_gradients(captured, model, [sequence(2, size) for size in (1, 16, 17, 64)], least=5e-6)


class Parts(nn.Module):
    """Eight parts of a length, whose sizes differ by one; a short one has parts of none."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x):
        return sum(self.layer(part).tanh().sum() for part in x.tensor_split(8, dim=1)) / x.numel()


@pytest.mark.parametrize("example", [3, 8, 20])
def test_parts_of_none_or_of_one_in_the_example(example):
    torch.manual_seed(0)
    model, shapes = Parts(), ({0: ROWS, 1: Dim("t", min=1, max=64)},)
    step = relax_disc.compile(model, None, sequence(3, example), dynamic_shapes=shapes)
    assert_gradients_as_eager(step, (sequence(2, n) for n in (1, 7, 8, 17, 64)))


@pytest.mark.parametrize(("kind", "example"), [(Video, 4), (Video, 18), (Windows, 5), (Windows, 2)])
def test_what_is_one_at_short_sequences_alone(kind, example):
    torch.manual_seed(0)
    model, shapes = kind(), ({0: ROWS, 2: Dim("t", min=2, max=20)},)
    step = relax_disc.compile(model, None, (torch.randn(2, 4, example),), dynamic_shapes=shapes)
    batches = [(torch.randn(rows, 4, t),) for rows, t in ((2, 2), (1, 9), (4, 16), (3, 20))]
    assert_gradients_as_eager(step, batches)
