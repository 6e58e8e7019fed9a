"""Batches and outputs in all the containers that training loops use, from one small model."""

import collections
import dataclasses

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F
from torch.utils.data import DataLoader

import relax_disc
from relax_disc.errors import InputMismatchError

ROWS = Dim("rows", min=1, max=32)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor
    note: str | None = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    y: torch.Tensor


class Encoding(collections.UserDict):
    """A mapping that PyTorch does not know, like what tokenizers return."""


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class Net(nn.Module):
    def __init__(self, returns="loss"):
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.returns = returns

    def forward(self, batch, scale=1.0):
        x, y = (batch["x"], batch["y"]) if hasattr(batch, "keys") else (batch.x, batch.y)
        logits = self.linear(x)
        loss = F.cross_entropy(logits, y) * scale
        if self.returns == "output":
            return Output(loss, logits)
        if self.returns == "metrics":
            right = (logits.argmax(-1) == y).float().mean()
            parts = {"right": right, "rows": x.shape[0], "twice": (2 * len(y), loss.square())}
            return {"loss": loss, "name": "cross-entropy", "nothing": None, **parts}
        return loss


def data(rows):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 6, generator=generator)
    return x, torch.randint(0, 3, (rows,), generator=generator)


def compiled(example, shapes, returns="loss"):
    torch.manual_seed(0)
    model = Net(returns)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = relax_disc.compile(model, optimizer, example, dynamic_shapes=shapes)
    torch.manual_seed(0)
    twin = Net(returns)
    return step, twin, torch.optim.SGD(twin.parameters(), lr=0.1)


def follow(step, twin, optimizer, batches):
    """Train both and compare the losses."""
    for batch in batches:
        optimizer.zero_grad()
        expected = twin(batch)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(step(batch), expected.detach())


FIELD = {0: ROWS}
CASES = {
    "dict": (dict, {"x": FIELD, "y": FIELD}),
    "dataclass": (Batch, Batch(FIELD, FIELD)),
    "frozen dataclass, shapes by name": (Frozen, {"x": FIELD, "y": FIELD}),
    "mapping": (Encoding, {"x": FIELD, "y": FIELD}),
}


@pytest.mark.parametrize("kind", CASES)
def test_batches(kind):
    container, shapes = CASES[kind]

    def batch(rows):
        x, y = data(rows)
        return container(x=x, y=y)

    follow(*compiled((batch(4),), (shapes,)), [batch(rows) for rows in (1, 32, 7)])


@pytest.mark.parametrize("container", [dict, Encoding, collections.OrderedDict])
def test_keys_come_in_any_order(container):
    shapes = {"batch": CASES["dict"][1], "scale": None}
    step, twin, _ = compiled(
        {"batch": container(zip("xy", data(4), strict=True)), "scale": 2.0}, shapes
    )
    x, y = data(7)
    batch = container(y=y, x=x)
    expected = twin(batch, scale=2.0)
    torch.testing.assert_close(step(batch=batch, scale=2.0), expected.detach())
    with pytest.raises(InputMismatchError, match=r"batch argument batch must be .* got .*'z'"):
        step(batch=container(x=x, z=y), scale=2.0)


def test_a_dataclass_is_saved_and_loaded(tmp_path):
    step, twin, optimizer = compiled((Batch(*data(4)),), ([FIELD, FIELD, None],))
    step.save(tmp_path / "step")
    loaded = relax_disc.TrainingStep.load(tmp_path / "step", twin, optimizer)
    assert torch.equal(loaded(Batch(*data(5))), step(Batch(*data(5))))
    with pytest.raises(InputMismatchError, match=r"batch.note is 'other', but it was None"):
        step(Batch(*data(5), note="other"))


def test_batches_of_a_loader():
    """The last batch is shorter; the collator makes dicts, the loader lists of tensors."""
    rows = [{"x": x, "y": y} for x, y in zip(*data(10), strict=True)]
    step, twin, optimizer = compiled(({**next(iter(DataLoader(rows, 4)))},), (CASES["dict"][1],))
    follow(step, twin, optimizer, DataLoader(rows, batch_size=4))


def test_metrics_beside_the_loss():
    shapes = {"batch": CASES["dict"][1], "scale": None}
    example = {"batch": dict(zip("xy", data(4), strict=True)), "scale": 2.0}
    step, twin, _ = compiled(example, shapes, "metrics")
    for rows in (1, 9):
        batch = dict(zip("xy", data(rows), strict=True))
        expected = twin(batch, scale=2.0)
        loss, metrics = step(batch=batch, scale=2.0)
        with torch.no_grad():
            for mine, theirs in zip(twin.parameters(), step.model.parameters(), strict=True):
                mine.copy_(theirs)
        torch.testing.assert_close(loss, expected.pop("loss").detach())
        assert set(metrics) == set(expected)
        assert (metrics["rows"], metrics["name"], metrics["nothing"]) == (
            rows,
            "cross-entropy",
            None,
        )
        assert metrics["twice"][0] == 2 * rows
        torch.testing.assert_close(metrics["twice"][1], expected["twice"][1].detach())
        torch.testing.assert_close(metrics["right"], expected["right"])
    with pytest.raises(InputMismatchError, match=r"scale is 3.0, .* was 2.0 .* as a tensor"):
        step(batch=batch, scale=3.0)


def test_outputs_with_a_loss():
    """The loss alone is kept of an output object, so that logits need not leave the arena."""
    step, twin, _ = compiled((Batch(*data(4)),), (CASES["dataclass"][1],), "output")
    batch = Batch(*data(6))
    torch.testing.assert_close(step(batch), twin(batch).loss.detach())


def test_shapes_that_do_not_fit_are_refused():
    for shapes in ([FIELD], {"x": FIELD, "z": FIELD}):
        with pytest.raises(InputMismatchError, match="dynamic_shapes"):
            compiled((dict(zip("xy", data(4), strict=True)),), (shapes,))


@pytest.mark.parametrize("is_nested", [False, True])
def test_shapes_of_a_batch_of_any_number(is_nested):
    def loss_fn(model, first, *others):
        return sum(model(x).square().mean() for x in (first, *others))

    model = nn.Linear(4, 2)
    rows = {0: Dim("rows", min=1, max=8)}
    shapes = (rows, (rows, rows)) if is_nested else (rows, rows, rows)
    batch = tuple(torch.randn(3, 4) for _ in range(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = relax_disc.compile(model, optimizer, batch, dynamic_shapes=shapes, loss_fn=loss_fn)
    batch = tuple(torch.randn(5, 4) for _ in range(3))
    expected = loss_fn(model, *batch).detach()
    torch.testing.assert_close(step(*batch), expected)
