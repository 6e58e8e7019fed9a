"""What other threads do while a step is compiled is theirs."""

import random
import threading
import time

import pytest
import torch
from torch import nn
from torch.export import Dim

import relax_disc


@pytest.mark.parametrize(
    "draw",
    [random.random, lambda: random.uniform(0, 1), lambda: random.sample(range(9), 3)],
    ids=["random", "uniform", "sample"],
)
def test_they_may_draw_from_pythons_random(draw):
    """As threads that prefetch and augment batches do."""
    stop, kinds = threading.Event(), set()

    def prefetch():
        while not stop.is_set():
            kinds.add(type(draw()))
            time.sleep(0.0005)

    model = nn.Linear(4, 4)
    thread = threading.Thread(target=prefetch)
    thread.start()
    try:
        relax_disc.compile(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            (torch.randn(8, 4),),
            dynamic_shapes=({0: Dim("rows", max=64)},),
            loss_fn=lambda model, x: model(x).pow(2).mean(),
        )
    finally:
        stop.set()
        thread.join()
    assert len(kinds) == 1 and kinds <= {float, list}
