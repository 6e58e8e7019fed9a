"""Checks that a model makes of its own data stop a step before it writes, as they stop eager's.

PYTEST_DONT_REWRITE: the model's assertion here shall be Python's own.
"""

import copy
import sys

import pytest
import torch
from torch import nn
from torch.export import Dim

import relax_disc
from relax_disc.errors import ModelCheckError

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Python 3.10 does not tell which part of a condition asks"
)
X, Y = torch.linspace(-1, 1, 16).reshape(4, 4), torch.tensor([0, 2, 1, 2])


class Checked(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.limit = nn.Linear(4, 3), 3

    def forward(self, x, y=None):
        if y is not None and y.max() >= self.limit:
            raise ValueError("labels")
        h = self.layer(x)
        assert torch.isfinite(h).all(), "not finite"
        if self.limit < 0 or (h > 90).any() or not (h.abs() < 100).all():
            raise RuntimeError("too large")
        if (x < 50).all():
            h = h.tanh() if self.limit < 0 else h
        else:
            raise RuntimeError("x")
        torch._assert((x > -50).all(), "too small")
        torch._check_tensor_all(x != 7, lambda: "seven")
        chosen = torch.distributions.Categorical(logits=h, validate_args=True)
        return -chosen.log_prob(y.clamp(max=2)).mean()


def compiled(model, batch, loss_fn=None):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    shapes = ({0: Dim("batch", min=1, max=64)},) * len(batch)
    return relax_disc.compile(model, optimizer, batch, dynamic_shapes=shapes, loss_fn=loss_fn)


def test_checks_hold_or_nothing_is_written():
    model = Checked()
    step = compiled(model, (X, Y))
    for rows in (4, 1, 3):
        expected = model(X[:rows], Y[:rows]).detach()
        torch.testing.assert_close(step(X[:rows], Y[:rows]), expected)
    for batch, condition in (
        ((X, Y + 1), r"`y is not None and y.max\(\) >= self.limit` holds"),
        ((X * float("nan"), Y), r"`torch.isfinite\(h\).all\(\)` does not hold"),
        ((X * 1e30, Y), r"`self.limit < 0 or .* holds"),
        ((X.index_fill(1, torch.tensor(0), 60.0), Y), r"`\(x < 50\).all\(\)` does not hold"),
        (
            (X.index_fill(1, torch.tensor(0), -60.0), Y),
            r"test_model_checks\.py:\d+.* fails: too small",
        ),
        ((X.index_fill(1, torch.tensor(0), 7.0), Y), r"fails: torch\._check_tensor_all"),
    ):
        before = copy.deepcopy(model.state_dict())
        with pytest.raises((ValueError, RuntimeError, AssertionError)):
            model(*batch)
        with pytest.raises(ModelCheckError, match=f"{condition}.*Nothing has been written"):
            step(*batch)
        with pytest.raises(ModelCheckError):
            step(*batch, update=False)
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    torch.testing.assert_close(step(X, Y), model(X, Y).detach(), atol=0.1, rtol=0)


def repeated(model, x, n):
    h = x[:, 0]
    for t in range(x.shape[1]):
        h = torch.tanh(h + x[:, t])
        assert (h < 0.9).all()
    return model.layer(h).mean()


def test_a_check_inside_a_loop_looks_at_every_step():
    shape = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=1, max=64)}
    optimizer = torch.optim.SGD((model := Checked()).parameters(), 0.1)
    step = relax_disc.compile(
        *(model, optimizer, (X[:, :3, None].expand(4, 3, 4) / 8, None)),
        dynamic_shapes=(shape, None),
        loss_fn=repeated,
    )
    eager = copy.deepcopy(model)
    for length in (1, 2, 9):
        x = torch.randn(3, length, 4) / 100
        torch.testing.assert_close(step(x, None, update=False), repeated(eager, x, None).detach())
        for place in {0, length // 2, length - 1}:
            bad = x.clone()
            bad[1, place] = 5
            with pytest.raises(AssertionError):
                repeated(eager, bad, None)
            with pytest.raises(ModelCheckError, match=r"`\(h < 0.9\).all\(\)` does not hold"):
                step(bad, None)
    assert all(map(torch.equal, model.parameters(), eager.parameters()))
