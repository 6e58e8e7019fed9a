"""Losses that freeze a part of the model for a while, as those of generators do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import relax_disc
from relax_disc.errors import RelaxDiscWarning, UnsupportedOperatorError
from tests.training.beside_eager import assert_gradients_as_eager

_DIMS = {0: Dim("batch", min=1, max=16)}


class _Rivals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(3, 4)
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.memory = nn.GRU(1, 2, batch_first=True)


def _by_each(part: nn.Module, value: bool) -> None:
    for parameter in part.parameters():
        parameter.requires_grad_(value)


def _by_attribute(part: nn.Module, value: bool) -> None:
    for parameter in part.parameters():
        parameter.requires_grad = value


def _by_keyword(part: nn.Module, value: bool) -> None:
    part.requires_grad_(requires_grad=value)


_WAYS: dict[str, Callable[[nn.Module, bool], Any]] = {
    "each": _by_each,
    "attribute": _by_attribute,
    "module": nn.Module.requires_grad_,
    "keyword": _by_keyword,
}


@pytest.mark.parametrize("way", _WAYS)
def test_gradients_of_a_frozen_part_stay_out(way: str) -> None:
    toggle = _WAYS[way]

    def loss_of(model: Any, x: Tensor, noise: Tensor) -> Tensor:
        toggle(model.critic, True)  # it is already
        fake = model.generator(noise)
        told = model.critic(fake.detach()).mean() - model.critic(x).square().mean()
        toggle(model.critic, False)
        assert not model.critic[0].weight.requires_grad
        toggle(model.memory, False)
        fooled, _ = model.memory(model.critic(fake)[:, None])
        weight = model.critic[2].weight.square().sum()  # has no gradient here
        toggle(model.critic, True)
        toggle(model.memory, True)
        later, _ = model.memory(fake[:, :, None])
        return told - fooled.mean() + weight + later.square().mean()

    torch.manual_seed(0)
    model = _Rivals()
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    step = relax_disc.compile(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        (torch.rand(3, 4), torch.rand(3, 3)),
        dynamic_shapes=(_DIMS, _DIMS),
        loss_fn=loss_of,
    )
    for rows in (5, 1, 16):
        batch = torch.randn(rows, 4), torch.randn(rows, 3)
        loss = step(*batch)
        optimizer.zero_grad()
        expected = loss_of(eager, *batch)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach())
        for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
            assert ours.requires_grad


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight, gradients[0].t() @ x


def test_a_frozen_part_in_a_loop_and_in_a_function_of_the_users() -> None:
    def loss_of(model: Any, x: Tensor) -> Tensor:
        model["critic"].requires_grad_(False)
        model["cell"].requires_grad_(False)
        rows = model["generator"](x)
        h = torch.zeros(x.shape[0], 4)
        for t in range(x.shape[1]):
            h = model["cell"](rows[:, t], h)
        fooled = _Product.apply(h, model["critic"].weight)
        model["cell"].requires_grad_(True)
        model["critic"].requires_grad_(True)
        return model["critic"](rows.detach()).mean() - fooled.square().mean() + h.mean()  # pyright: ignore

    torch.manual_seed(0)
    parts = {"generator": nn.Linear(3, 4), "cell": nn.GRUCell(4, 4), "critic": nn.Linear(4, 1)}
    model = nn.ModuleDict(parts)
    dims = ({0: _DIMS[0], 1: Dim("length", min=1, max=9)},)
    options: Any = {"dynamic_shapes": dims, "loss_fn": loss_of}
    trained = [*parts["generator"].parameters(), *parts["critic"].parameters()]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    step = relax_disc.compile(model, optimizer, (torch.randn(2, 3, 3),), **options)
    for size in ((4, 9), (1, 1), (16, 5)):
        x = torch.randn(*size, 3)
        expected = loss_of(model, x)
        gradients = torch.autograd.grad(expected, trained)
        before = [p.detach().clone() for p in trained]
        torch.testing.assert_close(step(x), expected.detach())
        for now, then, gradient in zip(trained, before, gradients, strict=True):
            torch.testing.assert_close(now, then - 0.1 * gradient, rtol=1e-5, atol=1e-6)


def _thawing(model: Any, x: Tensor) -> Tensor:
    model.requires_grad_(True)
    return model(x).mean()


def _freezing(model: Any, x: Tensor) -> Tensor:
    loss = model(x).mean()
    model.weight.requires_grad = False
    return loss


@pytest.mark.parametrize(
    ("loss_of", "frozen", "said"),
    [(_thawing, "weight", "Thaw it before"), (_freezing, "bias", "Freeze it before")],
)
def test_what_stays_frozen_or_thawed_is_refused(loss_of: Any, frozen: str, said: str) -> None:
    model = nn.Linear(4, 2)
    model.get_parameter(frozen).requires_grad_(False)
    with pytest.raises(UnsupportedOperatorError, match=rf"test_frozen.py:\d+: .*{said}"):
        relax_disc.compile(
            model, None, (torch.rand(3, 4),), dynamic_shapes=(_DIMS,), loss_fn=loss_of
        )
    assert [p.requires_grad for p in model.parameters()] == [frozen != "weight", frozen != "bias"]


def _by_reference(model: Any, x: Tensor) -> Tensor:
    """As peft's ``set_adapter``: one is switched on for a reference, and the other again."""
    ours = model["trained"](x)
    model["trained"].requires_grad_(False)
    model["reference"].requires_grad_(True)
    with torch.no_grad():
        theirs = model["reference"](x)
    model["reference"].requires_grad_(False)
    model["trained"].requires_grad_(True)
    return (ours - theirs).square().mean()


def test_a_part_is_thawed_where_nothing_is_trained() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"trained": nn.Linear(4, 2), "reference": nn.Linear(4, 2)})
    model["reference"].requires_grad_(False)
    options: Any = {"dynamic_shapes": (_DIMS,), "loss_fn": _by_reference}
    step = relax_disc.compile(model, None, (torch.rand(3, 4),), **options)
    batches = ((torch.rand(rows, 4),) for rows in (1, 5))
    assert_gradients_as_eager(step, batches, _by_reference)


def test_what_is_trained_while_it_is_thawed_is_refused() -> None:
    def loss_of(model: Any, x: Tensor) -> Tensor:
        model.weight.requires_grad_(True)
        loss = model(x).mean()
        model.weight.requires_grad_(False)
        return loss

    model = nn.Linear(4, 2)
    model.weight.requires_grad_(False)
    example: Any = (torch.rand(3, 4),)
    with pytest.raises(UnsupportedOperatorError, match=r"test_frozen.py:\d+: .*Thaw it before"):
        relax_disc.compile(model, None, example, dynamic_shapes=(_DIMS,), loss_fn=loss_of)


def test_another_network_that_a_loss_freezes_stays_as_it_was() -> None:
    torch.manual_seed(0)
    generator, critic = nn.Linear(3, 4), nn.Linear(4, 1)

    def loss_of(model: nn.Module, noise: Tensor) -> Tensor:
        critic.requires_grad_(False)
        return -critic(model(noise)).mean()

    x = torch.randn(5, 3)
    with pytest.warns(RelaxDiscWarning, match="critic.weight"):
        step = relax_disc.compile(generator, None, (x,), dynamic_shapes=(_DIMS,), loss_fn=loss_of)
    assert all(p.requires_grad for p in critic.parameters())
    loss = step(x, update=False)
    assert all(p.requires_grad for p in critic.parameters())
    expected = -critic(generator(x)).mean()
    torch.testing.assert_close(loss, expected.detach())
    gradients = torch.autograd.grad(expected, list(generator.parameters()))
    for parameter, gradient in zip(generator.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
