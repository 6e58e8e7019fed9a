"""Sizes that a model's own code refuses, in the middle of a range: calls refuse them as it does."""

import contextlib
import sys

import pytest
import torch
import transformers
from torch import nn
from torch.export import Dim

import relax_disc
from relax_disc.errors import ShapeRangeError
from relax_disc.frontend.capture.source_lines import is_models
from tests.training.beside_eager import assert_gradients_as_eager


class Layered(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.checked(x).square().mean()


class Pairs(Layered):
    """Two views of each sample."""

    def checked(self, x):
        if x.shape[0] % 2:
            raise ValueError("give {two} views of each")
        one, other = self.layer(x).chunk(2)
        return one * other


class Queue(Layered):
    """As MoCo's, whose length is a multiple of the batch."""

    def checked(self, x):
        keys = self.layer(x)
        queue = torch.zeros(24, 4)
        if queue.shape[0] % x.shape[0] != 0:
            raise AssertionError
        queue[: x.shape[0]] = keys
        return queue


class Patches(Layered):
    """As vision transformers cut images."""

    def checked(self, x):
        rows, length, width = x.shape
        if length % 4 or rows == 3:
            raise ValueError(f"{self.__class__.__name__} takes other sizes")
        blocks = x.reshape(rows, length // 4, 4, width).mean(2)
        return self.layer(blocks)


class Longest(Layered):
    def checked(self, x):
        if x.shape[1] > 7:
            raise ValueError("too long")
        return self.layer(x)


def step_of(model, example):
    dims = Dim("rows", min=1, max=24), Dim("length", min=2, max=64)
    axes = dict(enumerate(dims[: example.dim() - 1]))
    return relax_disc.compile(model, None, (example,), dynamic_shapes=(axes,))


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        (Pairs, [(4,), (2,), (24,)]),
        (Queue, [(4,), (1,), (12,)]),
        (Patches, [(5, 8), (1, 4), (2, 64)]),
    ],
)
def test_the_other_sizes_are_right(kind, shapes):
    batches = [(torch.randn(*shape, 4),) for shape in shapes]
    assert_gradients_as_eager(step_of(kind(), *batches[0]), batches)


@pytest.mark.parametrize(
    ("kind", "taken", "refused", "said"),
    [
        (Pairs, (4,), (3,), r"rows=3: the model raises ValueError: give \{two\} views .*rows % 2"),
        (Queue, (4,), (5,), r"rows=5: the model raises AssertionError at .*24 % rows"),
        (Patches, (2, 8), (2, 9), r"takes other sizes at .*test_refused.*length % 4"),
        (Patches, (2, 8), (3, 8), r"takes other sizes at .*rows != 3"),
    ],
)
def test_calls_say_what_the_model_says(kind, taken, refused, said):
    step = step_of(kind(), torch.randn(*taken, 4))
    with pytest.raises(ShapeRangeError, match=said):
        step(torch.randn(*refused, 4), update=False)
    assert step(torch.randn(*taken, 4), update=False).isfinite()


class Weighted(Layered):
    def __init__(self):
        super().__init__()
        self.weight = 1.5

    def checked(self, x):
        if x.shape[0] % 2:
            raise ValueError("give two views of each")
        return self.layer(x) * self.weight


def test_numbers_stay_live():
    model = Weighted()
    step = step_of(model, torch.randn(4, 4))
    model.weight = 0.25
    assert_gradients_as_eager(step, [(torch.randn(2, 4),)])


class OneLength(Layered):
    def checked(self, x):
        if x.shape[1] == 16:
            return self.layer(x)
        raise ValueError("only 16")


def test_a_single_size_is_to_be_declared():
    with pytest.raises(ShapeRangeError, match=r"Eq\(length, 16\)"):
        step_of(OneLength(), torch.randn(2, 16, 4))


@pytest.mark.parametrize(
    ("module", "is_one"),
    [(transformers, True), (sys.modules[__name__], True), (nn, False), (contextlib, False)],
)
def test_what_pytorch_raises_is_not_the_models_own(module, is_one):
    assert is_models(module.__file__) == is_one
    assert not is_models(relax_disc.__file__)


def test_an_end_of_a_range_is_to_be_declared():
    with pytest.raises(ShapeRangeError, match=r"give Dim\('length', min=2, max=7\)"):
        step_of(Longest(), torch.randn(2, 5, 4))
