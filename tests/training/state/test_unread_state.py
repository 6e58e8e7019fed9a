"""What a loss's own object holds and the loss does not read may be replaced; what it reads not."""

import collections
import dataclasses

import pytest
import torch
from torch import nn

from relax_disc.errors import InputMismatchError
from tests.training.state.outer_batch import X, agree, compiled

scale = torch.tanh


class Meter:
    def __init__(self):
        self.sum, self.count = 0.0, 0


@dataclasses.dataclass
class State:
    step: int = 0
    best: float = 0.0


class Loop:
    """A training loop of the user's own, with a loss among its methods."""

    def __init__(self):
        self.model, self.state, self.meter = nn.Linear(4, 4), State(), Meter()
        self.metrics, self.losses, self.best = {"loss": 0.0}, [1.0], {"mean": None, "pow": "a"}
        self.window = collections.deque([0.0], maxlen=5)
        self.read, self.weights, self.table = Meter(), {"loss": 2.0}, {"mean": None}
        self.read.sum = 1.0

    def loss(self, model, x):
        loss = scale(model(x)).pow(2).mean() * self.read.sum * self.weights["loss"]
        return loss if self.table["mean"] is None else loss * 2


def bound(loop):
    return loop.loss


def closed_over(loop):
    return lambda model, x: loop.loss(model, x)


UNREAD = {
    "object": lambda loop: setattr(loop, "meter", Meter()),
    "dataclass": lambda loop: setattr(loop, "state", State()),
    "dict": lambda loop: setattr(loop, "metrics", {}),
    "list": lambda loop: setattr(loop, "losses", []),
    "deque": lambda loop: setattr(loop, "window", collections.deque([1.0])),
    "item of a name that the code has": lambda loop: loop.best.update(mean=0.5, pow="b"),
}


@pytest.mark.parametrize("loss_of", [bound, closed_over])
def test_what_the_loss_does_not_read_may_be_replaced(loss_of):
    loop = Loop()
    step = compiled(loop.model, X, loss_fn=loss_of(loop))
    for change in UNREAD.values():
        change(loop)
        agree(step, loop.loss, loop.model)
    loop.read.sum = 3.0  # live
    agree(step, loop.loss, loop.model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda loop: setattr(loop, "read", Meter()), r"read was replaced"),
        (lambda loop: setattr(loop, "weights", {"loss": 1.0}), r"weights was \{'loss': 2.0\}"),
        (lambda loop: loop.table.update(mean=1.0), r"table\['mean'\] was None"),
        (lambda loop: globals().update(scale=torch.sin), r"scale was replaced"),
    ],
)
@pytest.mark.parametrize("loss_of", [bound, closed_over])
def test_the_path_to_what_the_loss_reads_is_guarded(loss_of, change, message, monkeypatch):
    monkeypatch.setitem(globals(), "scale", torch.tanh)
    loop = Loop()
    step = compiled(loop.model, X, loss_fn=loss_of(loop))
    change(loop)
    with pytest.raises(InputMismatchError, match=message):
        step(X)


def test_what_is_read_by_another_path_than_the_first_is_guarded():
    """The walk reaches the table by an attribute that is not read, the loss by another list."""
    table = {"mean": "a"}

    class Both:
        def __init__(self):
            self.unread, self.listed = table, [[table]]

        def loss(self, model, x):
            return model(x).mean() * (1 if self.listed[0][0]["mean"] == "a" else 2)

    model = nn.Linear(4, 4)
    step = compiled(model, X, loss_fn=Both().loss)
    table["mean"] = "b"
    with pytest.raises(InputMismatchError, match="was 'a' when"):
        step(X)


@pytest.mark.filterwarnings("ignore")  # of what accelerate writes into its own state
def test_an_accelerator_that_the_loss_reads_may_go_on():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    data = torch.utils.data.TensorDataset(X)
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model, loader = accelerator.prepare(nn.Linear(4, 4), loader)

    def loss_fn(model, x):
        with accelerator.autocast():
            return model(x).pow(2).mean() / accelerator.gradient_accumulation_steps

    step = compiled(model, X, loss_fn=loss_fn)
    for _ in range(2):
        for (x,) in loader:
            with accelerator.accumulate(model):
                agree(step, loss_fn, model, x)
