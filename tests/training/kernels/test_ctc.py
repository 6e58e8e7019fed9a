"""Speech-like training with connectionist temporal classification, dynamic lengths."""

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

import relax_disc
from relax_disc.errors import IndexRangeError, ModelCheckError, UnsupportedOperatorError
from relax_disc.frontend import capture_step
from tests.training.kernels.test_operators import check

SIZES = [(7, 3, 2), (2, 1, 1), (20, 4, 6), (9, 2, 3)]


class Listener(nn.Module):
    """Frames to label scores, with the loss in each of its reductions."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5))

    def forward(self, frames, targets, input_lengths, target_lengths):
        scores = self.layers(frames).log_softmax(-1).transpose(0, 1)
        given = (scores, targets, input_lengths, target_lengths)
        mean = nn.CTCLoss(zero_infinity=True)(*given)
        total = F.ctc_loss(*given, blank=4, reduction="sum", zero_infinity=True)
        each = F.ctc_loss(*given, reduction="none", zero_infinity=True)
        return mean + 0.1 * total + each.square().mean(), mean, total


def batch(steps, count, room):
    generator = torch.Generator().manual_seed(steps * 100 + count)
    frames = torch.randn(count, steps, 4, generator=generator)
    targets = torch.randint(1, 4, (count, room), generator=generator)
    inputs = torch.randint(1, steps + 1, (count,), generator=generator)
    goals = torch.randint(0, room + 1, (count,), generator=generator)
    inputs[0] = steps
    return frames, targets, inputs, goals


T, N, S = Dim("t", min=2, max=20), Dim("n", min=1, max=4), Dim("s", min=1, max=6)


def test_gradients_against_float64():
    torch.manual_seed(0)
    model = Listener()
    shapes = ({0: N, 1: T}, {0: N, 1: S}, {0: N}, {0: N})
    check(model, ["mean", "sum"], [batch(*size) for size in SIZES], shapes)


def picked(model, frames, targets, input_lengths, shift):
    """Concatenated targets, as Hugging Face's speech models pick them by a mask."""
    scores = model.layers(frames).log_softmax(-1).transpose(0, 1)
    mask = targets > 0
    given = scores, targets.masked_select(mask), input_lengths, mask.sum(-1) + shift
    return F.ctc_loss(*given, zero_infinity=True)


def test_targets_that_a_mask_picks():
    torch.manual_seed(0)
    model = Listener()
    shapes = ({0: N, 1: T}, {0: N, 1: S}, {0: N}, {0: N})
    batches = [batch(*size) for size in SIZES]
    for _, targets, _, _ in batches:
        targets[0, 1::2] = 0  # left out in the midst of a row
    batches = [(*rest, torch.zeros_like(goals)) for *rest, goals in batches]
    step = relax_disc.compile(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        batches[0],
        dynamic_shapes=shapes,
        loss_fn=picked,
    )
    for given in batches:
        step(*given, keep_gradients=True)
        found = [p.grad.clone() for p in model.parameters()]
        expected = torch.autograd.grad(picked(model, *given), list(model.parameters()))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    with pytest.raises(ModelCheckError, match="target_lengths"):
        step(*batches[0][:3], torch.tensor([-1, 0, 0]))


def test_lengths_and_labels_out_of_range_are_told_before_anything_is_written():
    def loss_fn(model, frames, targets, input_lengths, target_lengths):
        scores = model.layers(frames).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, targets, input_lengths, target_lengths)

    torch.manual_seed(0)
    model = Listener()
    shapes = ({0: N, 1: T}, {0: N, 1: S}, {0: N}, {0: N})
    frames, targets, *_ = batch(7, 3, 2)
    good = frames, targets, torch.full((3,), 7), torch.full((3,), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = relax_disc.compile(model, optimizer, good, dynamic_shapes=shapes, loss_fn=loss_fn)
    step(*good)
    before = [p.detach().clone() for p in model.parameters()]
    *_, input_lengths, target_lengths = good
    for wrong, told in (
        ((frames, targets, input_lengths + 100, target_lengths), r"input_lengths = \d+, allowed"),
        ((frames, targets, input_lengths, target_lengths - 100), r"target_lengths = -\d+, allowed"),
        ((frames, targets + 100, input_lengths, target_lengths), r"label \d+ .*classes"),
    ):
        with pytest.raises(IndexRangeError, match=told) as caught:
            step(*wrong)
        assert "Check failed" not in str(caught.value)
        for p, value in zip(model.parameters(), before, strict=True):
            assert torch.equal(p, value)
    step(*good)


def test_concatenated_targets_are_refused_by_name():
    def loss_fn(model, frames, targets, input_lengths, target_lengths):
        scores = model.layers(frames).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, targets.flatten(), input_lengths, target_lengths)

    shapes = ({0: N, 1: T}, {0: N, 1: S}, {0: N}, {0: N})
    with pytest.raises(UnsupportedOperatorError, match="padded") as caught:
        capture_step(Listener(), None, batch(7, 3, 2), dynamic_shapes=shapes, loss_fn=loss_fn)
    assert caught.value.operators[0][0] == "ctc_loss"
    assert "test_ctc.py" in str(caught.value)
