"""What a step reads of classes: their tensors, and what overridden methods of bases read."""

import pytest
import torch
from torch import nn

from relax_disc.errors import InputMismatchError
from tests.training.state.outer_batch import X, agree, compiled

SCALE = torch.tensor(1.0)


class Scaled(nn.Module):
    scale = torch.tensor(1.0)

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return (self.linear(x) * self.scale).square().mean()


class Settings:
    scale = torch.tensor(1.0)


def of_module():
    model = Scaled()
    return model, model, None


def of_object():
    model, settings = nn.Linear(4, 4), Settings()
    return model, settings, lambda model, x: model(x).square().mean() * settings.scale


HOLDERS = pytest.mark.parametrize("made", [of_module, of_object])


@HOLDERS
def test_a_tensor_of_a_class_may_be_replaced(made, monkeypatch):
    model, holder, loss_fn = made()
    step = compiled(model, X, loss_fn=loss_fn)
    monkeypatch.setattr(type(holder), "scale", torch.tensor(3.0))
    agree(step, loss_fn or (lambda model, x: model(x)), model)


@HOLDERS
def test_a_tensor_of_a_class_that_an_object_hides_is_refused(made):
    model, holder, loss_fn = made()
    step = compiled(model, X, loss_fn=loss_fn)
    holder.scale = torch.tensor(3.0)
    with pytest.raises(InputMismatchError, match=r"\.scale was not there when the step was comp"):
        step(X)
    del holder.scale
    agree(step, loss_fn or (lambda model, x: model(x)), model)


class Plain:
    def loss(self, model, x):
        return model(x).square().mean() * SCALE


class BySuper(Plain):
    def loss(self, model, x):
        return super().loss(model, x) + 1


class ByName(Plain):
    def loss(self, model, x):
        return Plain.loss(self, model, x) + 1


class OfClass(Plain):
    @classmethod
    def scaled(cls, x):
        return x * SCALE


class BySuperOfClass(OfClass):
    @classmethod
    def scaled(cls, x):
        return super().scaled(x) + 1

    def loss(self, model, x):
        return self.scaled(model(x)).square().mean()


class Property(Plain):
    @property
    def scale(self):
        return SCALE


class BySuperProperty(Property):
    @property
    def scale(self):
        return super().scale + 1

    def loss(self, model, x):
        return model(x).square().mean() * self.scale


@pytest.mark.parametrize("kind", [BySuper, ByName, BySuperOfClass, BySuperProperty])
def test_what_an_overridden_method_reads_is_followed(kind, monkeypatch):
    model, loss_fn = nn.Linear(4, 4), kind().loss
    step = compiled(model, X, loss_fn=loss_fn)
    monkeypatch.setitem(globals(), "SCALE", torch.tensor(3.0))
    agree(step, loss_fn, model)
