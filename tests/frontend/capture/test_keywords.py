"""Calls of PyTorch's functions by the names of their arguments, as eager PyTorch takes them."""

import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

import relax_disc

CALLS = {
    "size": lambda h, n: h * h.size(dim=0) + h.size(dim=1),
    "cat": lambda h, n: torch.cat(tensors=(h, h * n), dim=1),
    "concat": lambda h, n: torch.concat(dim=0, tensors=[h, h]) * n,
    "stack": lambda h, n: torch.stack(tensors=[h, h + n], dim=1),
    "hstack": lambda h, n: torch.hstack(tensors=(h, h)) * n,
    "where": lambda h, n: torch.where(condition=h > 0, input=h, other=h * n),
    "where, in another order": lambda h, n: torch.where(other=h * n, condition=h > 0, input=h),
    "kron": lambda h, n: torch.kron(input=h, other=torch.ones(1, 2) * n),
    "div": lambda h, n: torch.div(h, other=n) + h.div(other=2),
    "div, rounded": lambda h, n: h * torch.div(torch.arange(4), other=2, rounding_mode="floor"),
    "tensor": lambda h, n: h * torch.tensor(data=[1.0, 2.0, 3.0, 4.0]),
    "a tensor of a size": lambda h, n: h * torch.tensor(data=n, dtype=torch.float32),
    "as_tensor": lambda h, n: h * torch.as_tensor(data=n),
    "split": lambda h, n: torch.split(tensor=h, split_size_or_sections=2, dim=1)[1] * n,
    "chunk": lambda h, n: torch.chunk(input=h, chunks=2, dim=1)[0] * n,
    "full": lambda h, n: h * torch.full(size=(n, 4), fill_value=2.0),
    "full_like": lambda h, n: h * torch.full_like(input=h, fill_value=n),
    "zeros": lambda h, n: h + torch.zeros(size=(n, 4)),
    "arange": lambda h, n: h * torch.arange(start=1, end=n + 1)[:, None],
    "linspace": lambda h, n: h * torch.linspace(start=0, end=1, steps=n)[:, None],
    "reshape": lambda h, n: torch.reshape(input=h, shape=(n * 2, 2)),
    "flatten": lambda h, n: torch.flatten(input=h, start_dim=0) * n,
    "sum": lambda h, n: torch.sum(input=h, dim=1) * n,
    "matmul": lambda h, n: torch.matmul(input=h, other=h.t()),
    "einsum": lambda h, n: torch.einsum("ij,ij->i", h, h),
    "pad": lambda h, n: F.pad(input=h, pad=(1, 1), mode="constant", value=float(1)) * n,
    "cross entropy": lambda h, n: F.cross_entropy(target=torch.arange(n) % 4, input=h),
    "one hot": lambda h, n: h * F.one_hot(input=torch.arange(n) % 4, num_classes=4),
    "softmax": lambda h, n: F.softmax(input=h, dim=-1) * n,
    "layer norm": lambda h, n: F.layer_norm(input=h, normalized_shape=(4,)) * n,
    "unsqueeze": lambda h, n: torch.unsqueeze(input=h, dim=0) * n,
    "index_select": lambda h, n: torch.index_select(
        input=h, dim=1, index=torch.tensor(data=[0, 2])
    ),
    "masked_fill": lambda h, n: torch.masked_fill(input=h, mask=h > 0, value=0.5) * n,
    "clamp": lambda h, n: torch.clamp(input=h, min=-0.5, max=0.5) * n,
}


class Called(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        h = self.linear(x)
        found = {name: call(h, x.shape[0]) for name, call in CALLS.items()}
        return sum(value.pow(2).sum() for value in found.values()), found


def test_arguments_may_be_given_by_name():
    torch.manual_seed(0)
    model = Called()
    x = torch.randn(5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rows = Dim("rows", min=1, max=16)
    step = relax_disc.compile(model, optimizer, (x,), dynamic_shapes=({0: rows},))
    for count in (5, 1, 8):
        x = torch.randn(count, 4)
        _, (found,) = step(x)
        _, expected = model(x)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value.detach(), rtol=1e-4, atol=1e-4, msg=name)
