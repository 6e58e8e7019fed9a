"""What other threads do while a step is compiled is theirs."""

import contextlib
import random
import secrets
import threading
import time
import uuid

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

import relax_disc
from relax_disc.errors import UnsupportedOperatorError


@pytest.mark.parametrize(
    "draw",
    [
        *(random.random, lambda: random.uniform(0, 1), lambda: random.sample(range(9), 3)),
        *(lambda: random.gauss(0, 1), lambda: np.random.rand(2), lambda: np.random.permutation(4)),
        *(lambda: random.Random(), lambda: np.random.default_rng(), uuid.uuid4, secrets.token_hex),
    ],
    ids=[
        *("random", "uniform", "sample", "gauss", "rand", "permutation"),
        *("Random", "default_rng", "uuid4", "token_hex"),
    ],
)
def test_they_may_draw(draw):
    """As threads that prefetch and augment batches, or name log entries, do."""
    with _meanwhile(draw) as kinds:
        _compile(lambda model, x: model(x).pow(2).mean())
    assert len(kinds) == 1 and torch.Tensor not in kinds


@pytest.mark.parametrize(
    "draw",
    [lambda: random.gauss(0, 1), lambda: np.random.randn(), lambda: held()],
    ids=["gauss", "randn", "held"],
)
def test_the_model_may_not_meanwhile(draw):
    with (
        _meanwhile(draw),
        pytest.raises(UnsupportedOperatorError, match=r"draws numbers by Python's `.*random`"),
    ):
        _compile(lambda model, x: model(x).pow(2).mean() * draw())


held = random._inst.random  # as `from random import random` gives


@contextlib.contextmanager
def _meanwhile(draw):
    stop, kinds = threading.Event(), set()

    def prefetch():
        while not stop.is_set():
            kinds.add(type(draw()))
            time.sleep(0.0005)

    thread = threading.Thread(target=prefetch)
    thread.start()
    try:
        yield kinds
    finally:
        stop.set()
        thread.join()


def _compile(loss_fn):
    model = nn.Linear(4, 4)
    relax_disc.compile(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        (torch.randn(8, 4),),
        dynamic_shapes=({0: Dim("rows", max=64)},),
        loss_fn=loss_fn,
    )
