"""State that lies at an odd address, or with its axes in another order, is taken as it comes."""

import copy

import pytest
import torch
from torch import nn
from torch.export import Dim

import relax_disc
from relax_disc.errors import InputMismatchError


class Squares(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x):
        return self.linear(x).square().mean()


def test_parameters_that_are_tied_stay_tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = relax_disc.compile(
        model,
        optimizer,
        (torch.ones(3, 4),),
        dynamic_shapes=({0: Dim("n", max=9)},),
        loss_fn=lambda model, x: model(x).square().mean(),
    )
    first = step(torch.ones(2, 4))
    model[2].weight = nn.Parameter(model[0].weight.detach().clone())
    for _ in range(2):
        with pytest.raises(
            InputMismatchError, match=r"2\.weight was the same tensor as .*0\.weight"
        ):
            step(torch.ones(2, 4))
    model[2].weight = model[0].weight
    assert step(torch.ones(2, 4)) < first


def odd(tensor):
    """A copy of a tensor, 12 bytes behind a boundary of 64."""
    room = torch.empty(tensor.numel() + 19, dtype=tensor.dtype)
    start = (-room.data_ptr() // tensor.element_size()) % 16 + 3
    copy = room[start : start + tensor.numel()].view(tensor.shape)
    assert copy.data_ptr() % 64 == 12
    return copy.copy_(tensor)


def test_misaligned_state_and_parameters_are_moved():
    torch.manual_seed(0)
    model = Squares()
    reference = Squares()
    reference.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    batch = torch.randn(5, 16)
    step = relax_disc.compile(
        model, optimizer, (batch,), dynamic_shapes={"x": {0: Dim("n", min=1, max=9)}}
    )
    other = torch.optim.AdamW(reference.parameters(), lr=0.1)
    losses = []
    for number in range(3):
        state = optimizer.state_dict()
        for values in state["state"].values():
            for key in ("exp_avg", "exp_avg_sq"):
                values[key] = odd(values[key])
        optimizer.load_state_dict(state)
        if number == 1:
            parameter = next(model.parameters())
            parameter.data = odd(parameter.detach())
        losses.append(float(step(batch)))
        expected = reference(batch)
        expected.backward()
        other.step()
        other.zero_grad()
        torch.testing.assert_close(losses[-1], expected.item(), rtol=1e-5, atol=1e-6)
    assert losses[2] < losses[0]


class Pictures(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        head = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))  # keeps a transposed buffer
        norm = nn.BatchNorm2d(8)
        super().__init__(nn.Conv2d(3, 8, 3), norm, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)

    def forward(self, x):
        return super().forward(x).square().mean()


def test_axes_in_another_order():
    model = Pictures().to(memory_format=torch.channels_last)
    reference = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, reference)]
    batches = [torch.randn(n, 3, 6, 6).to(memory_format=torch.channels_last) for n in (4, 1, 3, 2)]
    for each, optimizer in zip((model, reference), optimizers, strict=True):
        each(batches[0]).backward()  # eager makes its state in that order too
        optimizer.step()
        optimizer.zero_grad()
    shapes = ({0: Dim("n", min=1, max=9)},)
    step = relax_disc.compile(model, optimizers[0], (batches[0],), dynamic_shapes=shapes)
    for batch in batches[1:]:
        expected = reference(batch)
        torch.testing.assert_close(step(batch), expected.detach(), rtol=1e-5, atol=1e-6)
        expected.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, rtol=1e-4, atol=1e-6)


def test_memory_that_is_shared_is_not_moved():
    model = Squares()
    whole = torch.randn(16, 4)
    model.linear.weight.data = whole.T
    shapes = ({0: Dim("n", min=1, max=9)},)
    with pytest.raises(InputMismatchError, match=r"linear.weight has strides \(1, 4\) and shares"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = relax_disc.compile(model, optimizer, (torch.randn(5, 16),), dynamic_shapes=shapes)
        step(torch.randn(5, 16))
    assert model.linear.weight.data_ptr() == whole.data_ptr()
