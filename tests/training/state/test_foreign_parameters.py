"""Parameters that the loss reads and the model does not have: never silently left untrained."""

import pytest
import torch
from torch import nn
from torch.export import Dim

import relax_disc
from relax_disc.errors import InputMismatchError, RelaxDiscWarning

BATCH = (torch.randn(8, 4), torch.randint(0, 3, (8,)))


class Prototypes(nn.Module):
    """A criterion that learns, as metric learning has."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5))

    def forward(self, states, labels):
        return nn.functional.cross_entropy(states @ self.weight.T, labels)


def compiled(model, optimizer, loss_fn):
    shapes = ({0: Dim("rows", min=1, max=64)},) * 2
    return relax_disc.compile(model, optimizer, BATCH, dynamic_shapes=shapes, loss_fn=loss_fn)


def test_an_optimizer_over_a_criterion_that_learns_is_refused():
    model, criterion = nn.Linear(4, 5), Prototypes()
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
    with pytest.raises(InputMismatchError, match=r"holds loss_fn\.weight.*ModuleList"):
        compiled(model, optimizer, criterion)


def test_several_optimizers_are_looked_at():
    model, criterion = nn.Linear(4, 5), Prototypes()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, criterion)]
    with pytest.raises(InputMismatchError, match=r"criterion\.weight"):
        compiled(model, optimizers, lambda model, x, y: criterion(model(x), y))


def test_what_gets_no_gradient_in_eager_pytorch_either_may_be_held():
    model, criterion = nn.Linear(4, 5), Prototypes()
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)

    def loss(model, x, y):
        with torch.no_grad():
            wanted = criterion.weight[y]
        return (model(x) - wanted).pow(2).mean()

    step, before = compiled(model, optimizer, loss), criterion.weight.detach().clone()
    expected = loss(model, *BATCH).item()
    assert float(step(*BATCH)) == pytest.approx(expected, rel=1e-5)
    assert torch.equal(criterion.weight, before)


def test_without_an_optimizer_missing_gradients_are_told():
    model, criterion = nn.Linear(4, 5), Prototypes()
    with pytest.warns(RelaxDiscWarning, match=r"criterion\.weight.*requires_grad_"):
        compiled(model, None, lambda model, x, y: criterion(model(x), y))
