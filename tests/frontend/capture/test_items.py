"""Reading and writing at places that are made of sizes, and matrices whose sizes are symbols."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional

import relax_disc

LONGEST = 16
SIZES = ((3, 5), (1, 1), (2, 2), (4, LONGEST), (1, 7), (4, 1))

Use = Callable[[Tensor, Tensor], Tensor]


def last_of_each(h: Tensor, x: Tensor) -> Tensor:
    rows = torch.arange(h.shape[0])
    return h[rows, h.shape[1] - 1] * h[rows, h.shape[1] // 2, None, :].squeeze(1)


def places_around_a_size(h: Tensor, x: Tensor) -> Tensor:
    middle, rows = h.shape[1] // 2, torch.arange(h.shape[0])
    columns = h[..., middle, torch.tensor([2, 0])].sum()
    return (
        h[rows[:, None], None, middle, 1:]
        + h[h.shape[0] - 1, torch.arange(h.shape[1])].sum()
        + columns
    )


def picked_at_a_size(h: Tensor, x: Tensor) -> Tensor:
    return h[:, h.shape[1] - 1][x[:, 0] > 0].sum()


def written_at_the_end(h: Tensor, x: Tensor) -> Tensor:
    out, end = torch.zeros_like(h), h.shape[1] - 1
    out[:, end] = h[:, 0]
    out[:, end // 2, 1] = 2.0
    out[x.shape[0] - 1, end, 2:] = x[0, 0, 2:]
    out[:, end] += h[:, end]
    out[0, end] = h[:1, 0]
    return out


def written_at_several(h: Tensor, x: Tensor) -> Tensor:
    out, end = h.clone(), h.shape[1] - 1
    out[torch.arange(h.shape[0]), end, 1:] = 1.0
    out[:, end // 2, torch.tensor([1, 3])] = h[:, 0, :2]
    out[..., end, x[0, 0] > 0] *= 2
    out[:, end, None] = out[:, end, None] * 3
    return out


def written_where_there_may_be_none(h: Tensor, x: Tensor) -> Tensor:
    out, half = h.clone(), h.shape[1] // 2
    out[:, :half] *= 2
    out[:, 1:] -= h[:, :-1]
    out[:, 1::2].mul_(3)
    return out


def tensors_of_sizes(h: Tensor, x: Tensor) -> Tensor:
    rows, length = h.shape[:2]
    many = torch.as_tensor([length, rows, 3]).sum()
    return h / torch.as_tensor(length).sqrt() + many + torch.as_tensor(length / rows)


def blocks(h: Tensor, x: Tensor) -> Tensor:
    return torch.block_diag(h[0], x[:, 0], h[0, 0], torch.tensor(2))


def kronecker(h: Tensor, x: Tensor) -> Tensor:
    return torch.kron(h[0], x[:, 0]) + torch.kron(h[:, :, 0].contiguous(), torch.ones(4)).sum()


def chains(h: Tensor, x: Tensor) -> Tensor:
    two = torch.linalg.multi_dot([h[0].T, x[0]])
    vectors = torch.linalg.multi_dot((h[0, 0], h[0].T, x[0], h[0].T, x[0, :, 0]))
    return torch.linalg.multi_dot([two, h[0].T, x[0]]) + vectors


def ranges_beside_data(h: Tensor, x: Tensor) -> Tensor:
    rows, label = range(h.shape[0]), (x[:, 0, 0] > 0).long()
    picked = h[rows, 0, label] - h[list(range(len(h))), :, 1 - label].sum()
    return picked + h.tanh()[:, range(h.shape[1] - 1, -1, -1)].cumsum(1)[range(len(h)), -1, label]


def ranges_that_are_written_to(h: Tensor, x: Tensor) -> Tensor:
    out, label = h.clone(), (x[:, 0, 0] > 0).long()
    places = tuple(range(x.shape[0]))
    out[places, -1, label] -= 1
    out[range(len(out)), :, 2] = 0.0
    out[places, 0, 3] = h[places, 0, 0]
    return out


USES = (
    ranges_beside_data, ranges_that_are_written_to, last_of_each, places_around_a_size,
    picked_at_a_size, written_at_the_end, written_at_several,
    written_where_there_may_be_none, tensors_of_sizes, blocks, kronecker, chains,
)  # fmt: skip


class Terms(nn.Module):
    """A weighted sum of each use of ``[B, T, 4]``, in which each element counts differently."""

    def __init__(self, uses: Iterable[Use]) -> None:
        super().__init__()
        self.layer, self.uses = nn.Linear(4, 4), tuple(uses)

    def forward(self, x: Tensor) -> Tensor:
        made = [use(self.layer(x), x).flatten() for use in self.uses]
        return torch.stack([(each * torch.arange(len(each)).cos()).sum() for each in made])


def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    terms = model(x)
    return functional.softplus(terms).sum(), terms


def test_values_and_gradients_are_pytorchs_at_every_size() -> None:
    torch.manual_seed(0)
    model = Terms(USES)
    shapes = ({0: Dim("rows", min=1, max=4), 1: Dim("length", min=1, max=LONGEST)},)
    step = relax_disc.compile(
        model, None, (torch.randn(3, 5, 4),), dynamic_shapes=shapes, loss_fn=loss
    )
    for size in SIZES:
        x = torch.randn(*size, 4)
        model.zero_grad()
        _, (terms,) = step(x, update=False)
        found = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore
        model.zero_grad()
        total, expected = loss(model, x)
        total.backward()
        torch.testing.assert_close(terms, expected.detach(), rtol=1e-4, atol=1e-4)
        for ours, parameter in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(ours, parameter.grad, rtol=1e-4, atol=1e-4)
