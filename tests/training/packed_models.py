"""Models with recurrent layers over packed sequences, and batches for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import relax_disc

WORDS, CLASSES = 20, 3


class _Tagger(nn.Module):
    """Reads outputs, states, lengths and what padding holds, each with weights of its own."""

    def __init__(self, layer: Any, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 6)
        self.layer = layer(6, 8, batch_first=True, **options)
        self.out = nn.LazyLinear(CLASSES)

    def forward(self, ids: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.table(ids), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        packed, states = self.layer(packed)
        out, back = pad_packed_sequence(packed, batch_first=True, padding_value=-0.5)
        loss = functional.cross_entropy(self.out(out).mean(1), labels)
        for state in states if isinstance(states, tuple) else (states,):
            place = torch.arange(state.numel()).view_as(state) / state.numel()
            loss = loss + (state * place).sum()
        return loss + out.square().mean() * back.to(out.dtype).mean()


class _Relu(nn.RNN):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, nonlinearity="relu", **options)


class _InOrder(nn.Module):
    """Sequences that are sorted, with first states and the time in front."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(WORDS, 6), nn.LSTM(6, 8, bidirectional=True)
        self.first = nn.Parameter(torch.randn(2, 2, 1, 8))

    def forward(self, ids: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        h, c = self.first.expand(-1, -1, ids.shape[0], -1).contiguous()
        lengths = lengths.sort(descending=True).values
        packed = pack_padded_sequence(self.table(ids).transpose(0, 1), lengths)
        packed, (h, c) = self.layer(packed, (h, c))
        out, _ = pad_packed_sequence(packed)
        return out.square().sum() + (h * c).mean() + (h[0] * labels[:, None]).sum()


class _Rows(nn.Module):
    """Computes with the rows of packed sequences themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(WORDS, 6), nn.GRU(6, 8, batch_first=True)
        self.out = nn.Linear(8, WORDS)

    def forward(self, ids: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        options = {"batch_first": True, "enforce_sorted": False}
        words = pack_padded_sequence(ids, lengths, **options)
        following = pack_padded_sequence(ids.roll(-1, 1), lengths, **options)
        out, _ = self.layer(words._replace(data=self.table(words.data)))
        assert isinstance(out, PackedSequence)
        return functional.cross_entropy(self.out(out.data), following.data)


class AsLongAsAsked(_Tagger):
    """Pads to a length that it names; no sequence need be as long."""

    def __init__(self) -> None:
        super().__init__(nn.RNN, bidirectional=True)

    def forward(self, ids: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.table(ids), lengths, True, enforce_sorted=False)
        packed, state = self.layer(packed)
        lines = [
            pad_packed_sequence(packed, True, total_length=ids.shape[1] + more)[0].sum(1)
            for more in (0, 2)
        ]
        return functional.cross_entropy(self.out(lines[0] + lines[1].tanh()), labels) + state.sum()


MODELS = {
    "gru": lambda: _Tagger(nn.GRU, bidirectional=True),
    "lstm": lambda: _Tagger(nn.LSTM, bidirectional=True, num_layers=2),
    "tanh": lambda: _Tagger(nn.RNN),
    "relu": lambda: _Tagger(_Relu, bidirectional=True),
    "in order": _InOrder,
    "rows": _Rows,
    "longer": AsLongAsAsked,
}


def batch_of(batch: int, length: int, longest: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Make texts of which the first is ``longest``, else as long as the batch."""
    lengths = torch.randint(1, length + 1, (batch,))
    lengths[0] = length if longest is None else longest
    return torch.randint(0, WORDS, (batch, length)), lengths, torch.randint(0, CLASSES, (batch,))


def optimizer_of(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def compiled(model: nn.Module, **options: Any) -> Any:
    batch, length = Dim("batch", min=1, max=8), Dim("length", min=1, max=16)
    example = batch_of(3, 8)
    model(*example)  # lazy layers are told their size
    optimizer = optimizer_of(model.parameters())
    shapes = ({0: batch, 1: length}, {0: batch}, {0: batch})
    return relax_disc.compile(model, optimizer, example, dynamic_shapes=shapes, **options)
