"""Recurrent layers over packed sequences, trained next to eager PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import relax_disc
from relax_disc.errors import ModelCheckError, UnsupportedOperatorError
from tests.tiers import every
from tests.training.beside_eager import assert_trains_as_eager
from tests.training.packed_models import MODELS, AsLongAsAsked, batch_of, compiled, optimizer_of

SIZES = ((4, 9), (1, 1), (3, 12), (5, 2), (1, 7))


@pytest.mark.parametrize("name", every(3, list(MODELS)))
def test_packed_sequences_train_as_in_eager(name: str) -> None:
    torch.manual_seed(0)
    batches = ((size, batch_of(*size)) for size in SIZES)
    assert_trains_as_eager(compiled(MODELS[name]()), optimizer_of, batches)


def test_no_sequence_need_be_as_long_as_a_length_that_is_named() -> None:
    torch.manual_seed(0)
    model = AsLongAsAsked()
    step = compiled(model)
    for length in (9, 4):
        batch = batch_of(1, length, longest=2)
        expected = model(*batch).detach()
        torch.testing.assert_close(step(*batch), expected, rtol=1e-5, atol=1e-6)


def test_what_padding_holds_is_never_read() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(6, 8, batch_first=True)

    def loss_fn(model: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        out, _ = pad_packed_sequence(model(packed)[0], batch_first=True)
        return out.square().mean()

    batch, length = Dim("batch", min=1, max=8), Dim("length", min=1, max=16)
    x, lengths = torch.randn(3, 5, 6), torch.tensor([5, 3, 1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    shapes = ({0: batch, 1: length}, {0: batch})
    step = relax_disc.compile(
        model, optimizer, (x, lengths), dynamic_shapes=shapes, loss_fn=loss_fn
    )
    for row, end in enumerate(lengths):
        x[row, end:] = float("nan")
    expected = loss_fn(model, x, lengths).detach()
    torch.testing.assert_close(step(x, lengths), expected)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([6, 2, 3], "as long as the padded batch"),
        ([7, 0, 3], "lengths from 1"),
        ([8, 7, 3], "lengths from 1"),
    ],
)
def test_lengths_that_pytorch_refuses_or_pads_otherwise(lengths: list[int], message: str) -> None:
    torch.manual_seed(0)
    model = MODELS["gru"]()
    step = compiled(model)
    before = copy.deepcopy(model.state_dict())
    ids, _, labels = batch_of(3, 7)
    with pytest.raises(ModelCheckError, match=message):
        step(ids, torch.tensor(lengths), labels)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert step(*batch_of(3, 7)).isfinite()


def test_lengths_out_of_order_are_refused() -> None:
    def loss_fn(model: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        return model(pack_padded_sequence(x, lengths, batch_first=True))[1].sum()

    model = nn.GRU(6, 8, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    example = (torch.randn(3, 5, 6), torch.tensor([5, 3, 1]))
    shapes = ({0: Dim("batch", min=1, max=8)},) * 2
    step = relax_disc.compile(model, optimizer, example, dynamic_shapes=shapes, loss_fn=loss_fn)
    step(torch.randn(2, 5, 6), torch.tensor([4, 4]))
    with pytest.raises(ModelCheckError, match="lengths that decrease"):
        step(torch.randn(2, 5, 6), torch.tensor([3, 4]))


def test_a_sequence_that_was_packed_elsewhere_is_refused() -> None:
    packed = pack_padded_sequence(torch.randn(5, 3, 6), torch.tensor([5, 3, 1]))

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(packed)[1].sum() + x.sum()

    model = nn.GRU(6, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.raises(UnsupportedOperatorError, match="pack_padded_sequence in the model"):
        relax_disc.compile(
            model, optimizer, (torch.randn(3),), dynamic_shapes=(None,), loss_fn=loss_fn
        )


def test_a_budget_computes_packed_layers_again_bit_for_bit() -> None:
    torch.manual_seed(0)
    model = MODELS["lstm"]()
    free = compiled(model)
    twin = copy.deepcopy(model)
    least = free.plan(batch=8, length=16).least_bytes
    tight = compiled(twin, memory_budget=least + 1024)
    batch = batch_of(8, 16)
    assert tight.plan(batch=8, length=16).peak_bytes < free.plan(batch=8, length=16).peak_bytes
    assert torch.equal(free(*batch), tight(*batch))
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)
