"""Writes into what is a view of a tensor, though the operator that made it does not say so."""

import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

import relax_disc

VIEWS = {
    "a dropout of nothing": lambda h: F.dropout(h.t(), 0.0),
    "a dropout of nothing, of a view": lambda h: F.dropout(h.view(-1, 2, 2), 0.0),
    "channels that are not dropped": lambda h: F.dropout1d(h[None].transpose(1, 2), 0.0),
    "alpha dropout of nothing": lambda h: F.alpha_dropout(h[:, 1:3], 0.0),
    "einsum of one operand": lambda h: torch.einsum("...j->...j", h),
    "a transposition by einsum": lambda h: torch.einsum("ij->ji", h),
    "three axes at least": lambda h: torch.atleast_3d(h),
    "two axes at least": lambda h: torch.atleast_2d(h[:, 0]),
    "one axis at least": lambda h: torch.atleast_1d(h[0, 0]),
    "the product of one": lambda h: torch.cartesian_prod(h[:, 0]),
    "a conjugate": lambda h: torch.conj_physical(h.t()),
    "summed to its size": lambda h: h.t().sum_to_size(h.shape[1], h.shape[0]),
}


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        sums = {}
        for name, view in VIEWS.items():
            h = self.linear(x) * 1.5
            view(h).mul_(2)
            sums[name] = h.pow(2).sum()
        h = self.linear(x) * 1.5
        sums["copied"] = torch.einsum("ij,ij->ij", h, h).mul_(2).sum() + h.sum()
        return sum(sums.values()), sums


def test_they_are_written_as_in_eager_pytorch():
    torch.manual_seed(0)
    model = Views()
    rows = Dim("rows", min=1, max=16)
    x = torch.randn(5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = relax_disc.compile(model, optimizer, (x,), dynamic_shapes=({0: rows},))
    for count in (5, 3, 9):
        x = torch.randn(count, 4)
        model.zero_grad()
        loss, expected = model(x)
        loss.backward()
        wanted = {name: p.grad for name, p in model.named_parameters()}
        model.zero_grad()
        _, (found,) = step(x, keep_gradients=True)
        torch.testing.assert_close(found, {k: v.detach() for k, v in expected.items()})
        grads = {name: p.grad for name, p in model.named_parameters()}
        torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-4)
