"""State that a file reader placed at an odd address is taken as it comes."""

import torch
from torch import nn
from torch.export import Dim

import relax_disc


class Squares(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x):
        return self.linear(x).square().mean()


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
