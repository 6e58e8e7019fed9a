"""Branches on several dims, each of which may be the greater one."""

import numpy as np
import pytest
import sympy
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

import relax_disc
from relax_disc.errors import ShapeRangeError
from relax_disc.frontend.capture.sizes.dims import symbol_of
from relax_disc.frontend.capture.sizes.joint_ways import JointWays, Region
from tests.training.beside_eager import assert_gradients_as_eager

WORDS = 12


class Scores(nn.Module):
    """Compares two batches of tokens, of lengths of their own."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(WORDS, 6), nn.Linear(6, 4)

    def forward(self, chosen, rejected):
        one, other = self.padded(self.out(self.table(chosen)), self.out(self.table(rejected)))
        both = torch.cat([one, other]).tanh()
        steps = torch.arange(both.shape[1]) + 1.0
        return (both[: len(one)] - 0.5 * both[len(one) :] * steps[:, None]).square().sum()


class PadToLength(Scores):
    """As the losses of preferences do that call ``pad_to_length`` for each of two batches."""

    def padded(self, one, other):
        longest = max(one.shape[1], other.shape[1])
        return [pad_to_length(x, longest, 1) for x in (one, other)]


class PadsWhatIsShorter(Scores):
    def padded(self, one, other):
        longest = max(one.shape[1], other.shape[1])
        return [self.pad(x, longest - x.shape[1]) for x in (one, other)]

    def pad(self, x, missing):
        if missing > 0:
            x = torch.cat([x, x.new_zeros(x.shape[0], missing, x.shape[2])], 1)
        return x


class PadsOneOfThem(Scores):
    """The second is padded by what only one way computes, and cut to the first."""

    def padded(self, one, other):
        if other.shape[1] < one.shape[1]:
            missing = one.shape[1] - other.shape[1]
            other = F.pad(other, (0, 0, 0, missing), value=0.25)
        return one, other[:, : one.shape[1]]


class AsksForOneToo(PadToLength):
    """A single position is no sequence."""

    def padded(self, one, other):
        one, other = super().padded(one, other)
        if one.shape[1] > 1:
            one = one.clone()
        return one, other


class PadsASequence(Scores):
    """By PyTorch's own function, in front or behind."""

    def padded(self, one, other):
        left = nn.utils.rnn.pad_sequence([one[0], other[0].double()], True, 0.5, "left")
        return left[:1], nn.utils.rnn.pad_sequence([other[0], one[0]])[:, :1].transpose(0, 1)


class GoesByTheLonger(Scores):
    """What is added is another number on each way."""

    def padded(self, one, other):
        if one.shape[1] > other.shape[1]:
            return one[:, :1] + 1, other[:, :1]
        return one[:, :1], other[:, :1] - 2


def pad_to_length(tensor, length, value):
    if tensor.size(1) >= length:
        return tensor
    size = list(tensor.shape)
    size[1] = length - tensor.size(1)
    return torch.cat([tensor, value * torch.ones(*size, dtype=tensor.dtype)], dim=1)


def batch(rows, *lengths):
    generator = torch.Generator().manual_seed(sum(lengths))
    return tuple(torch.randint(0, WORDS, (rows, n), generator=generator) for n in lengths)


def step_of(kind, *example):
    torch.manual_seed(0)
    rows, first, second = (Dim(name, min=1, max=12) for name in ("rows", "first", "second"))
    shapes = {0: rows, 1: first}, {0: rows, 1: second}
    return relax_disc.compile(kind(), None, batch(2, *example), dynamic_shapes=shapes)


@pytest.mark.parametrize("example", [(7, 4), (5, 5)])
@pytest.mark.parametrize(
    "kind", [PadToLength, PadsWhatIsShorter, PadsOneOfThem, AsksForOneToo, PadsASequence]
)
def test_one_program_pads_what_is_shorter(kind, example):
    step = step_of(kind, *example)
    lengths = [(7, 4), (4, 7), (5, 5), (1, 1), (1, 12), (12, 1), (2, 1), (12, 12)]
    assert_gradients_as_eager(step, [batch(rows, *n) for rows in (1, 3) for n in lengths])


def test_ways_that_are_two_programs_are_told_apart_by_calls():
    step = step_of(GoesByTheLonger, 4, 7)
    assert_gradients_as_eager(step, [batch(2, 3, 6), batch(1, 5, 5)])
    with pytest.raises(ShapeRangeError, match=r"test_joint_ways.py:\d+, and goes the example's"):
        step(*batch(2, 6, 3), update=False)


def test_an_example_of_a_way_that_limits_a_dim_is_refused_by_line():
    with pytest.raises(ShapeRangeError, match=r"test_joint_ways.py:\d+: .* where first > second"):
        step_of(GoesByTheLonger, 7, 4)


def test_a_region_is_split_by_what_is_asked():
    a, b = map(symbol_of, "ab")
    points = np.array([(x, y) for x in range(1, 6) for y in range(1, 6)])
    whole = Region(("a", "b"), points)
    assert whole.split(a >= 1) == [whole]
    greater, rest = whole.split(a > b)
    assert greater.sizes["a"].tolist() == [2, 3, 4, 5] and greater.equal == {}
    assert greater.example["a"] > greater.example["b"]
    (same,) = [part for part in rest.split(sympy.Eq(a, b)) if part.equal]
    assert same.equal == {"b": "a"} and same.where[-1] == sympy.Eq(a, b)


class KeepsItsGrid(nn.Module):
    """As a ViT takes its positions as they are for images of the size that it was trained on."""

    def __init__(self):
        super().__init__()
        self.layer, self.places = nn.Linear(4, 4), nn.Parameter(torch.randn(1, 4, 4, 4))

    def forward(self, x):
        high, wide = x.shape[2:]
        if high * wide == 16 and high == wide:
            places = self.places
        else:
            places = nn.functional.interpolate(self.places, size=(high, wide), mode="bilinear")
        tokens = (x + places).flatten(2).transpose(1, 2)
        return self.layer(tokens).square().mean()


@pytest.mark.parametrize("high", [4, 6])
def test_a_step_does_not_refuse_its_own_example(high):
    torch.manual_seed(0)
    axes = {2: Dim("high", min=2, max=12), 3: Dim("wide", min=2, max=12)}
    example = (torch.randn(2, 4, high, 4),)
    if high == 4:
        with pytest.raises(ShapeRangeError, match=r"the example goes a way of its own"):
            relax_disc.compile(KeepsItsGrid(), None, example, dynamic_shapes=(axes,))
        return
    step = relax_disc.compile(KeepsItsGrid(), None, example, dynamic_shapes=(axes,))
    assert_gradients_as_eager(step, [example, (torch.randn(2, 4, 3, 12),)])
    with pytest.raises(ShapeRangeError, match=r"high\)?\*\(?wide\)? != 16"):
        step(torch.randn(2, 4, 4, 4), update=False)


def test_a_condition_that_is_decided_by_the_ranges_has_one_way():
    """As one on dims whose names are put in for what they are made of, `8*h == 8*h + 4`."""
    assert not JointWays({}).differs(sympy.false)
