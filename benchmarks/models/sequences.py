"""Networks of torch.nn's building blocks over sequences of dynamic length."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.models.entry import Batch, Entry, seeded

VOCABULARY = 64
TAGS = 7
LONGEST = 32


class Translator(nn.Module):
    """`nn.Transformer` between two sequences, with a causal mask."""

    def __init__(self, scale: int = 1) -> None:
        super().__init__()
        width = 32 * scale
        self.table = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(LONGEST * scale, width)
        self.body = nn.Transformer(
            width,
            4,
            num_encoder_layers=1,
            num_decoder_layers=1,
            dim_feedforward=2 * width,
            dropout=0.0,
            batch_first=True,
        )
        self.head = nn.Linear(width, VOCABULARY)

    def _embed(self, ids: Tensor) -> Tensor:
        return self.table(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy of the target's tokens."""
        length = target.shape[1]
        hidden = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        out = self.body(self._embed(source), self._embed(target), tgt_mask=hidden)
        return F.cross_entropy(self.head(out).flatten(0, 1), labels.flatten())


class Tagger(nn.Module):
    """A bidirectional recurrence with a class for every token."""

    def __init__(self, cell: Callable[..., nn.Module], scale: int = 1) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 16 * scale, padding_idx=0)
        self.cell = cell(16 * scale, 24 * scale, batch_first=True, bidirectional=True)
        self.head = nn.Linear(48 * scale, TAGS)

    def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
        """Return the cross-entropy, padding left out."""
        out = self.states(ids)
        return F.cross_entropy(self.head(out).flatten(0, 1), tags.flatten(), ignore_index=-100)

    def states(self, ids: Tensor) -> Tensor:
        """Return the outputs of the recurrence."""
        return self.cell(self.table(ids))[0]


class PackedTagger(Tagger):
    """The same over packed sequences, which end where their padding begins."""

    def states(self, ids: Tensor) -> Tensor:
        """Return the outputs of the recurrence, of padding zeros."""
        lengths = (ids != 0).sum(1).cpu()
        packed = pack_padded_sequence(self.table(ids), lengths, True, enforce_sorted=False)
        packed, _ = self.cell(packed)
        return pad_packed_sequence(packed, batch_first=True, total_length=ids.shape[1])[0]


class _CausalBlock(nn.Module):
    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.padding = 2 * dilation
        self.convolution = nn.utils.parametrizations.weight_norm(
            nn.Conv1d(width, width, 3, dilation=dilation)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.convolution(F.pad(x, (self.padding, 0))))


class TemporalConvolution(nn.Module):
    """Dilated causal convolutions with weight norm."""

    def __init__(self, scale: int = 1) -> None:
        super().__init__()
        width = 24 * scale
        self.table = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(_CausalBlock(width, 2**k) for k in range(3)))
        self.head = nn.Linear(width, TAGS)

    def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
        """Return the cross-entropy, padding left out."""
        out = self.blocks(self.table(ids).transpose(1, 2)).transpose(1, 2)
        return F.cross_entropy(self.head(out).flatten(0, 1), tags.flatten(), ignore_index=-100)


class DenseExperts(nn.Module):
    """A softmax mixture in which every expert sees every token, one of einsum's uses."""

    def __init__(self, scale: int = 1) -> None:
        super().__init__()
        width = 24 * scale
        self.table = nn.Embedding(VOCABULARY, width)
        self.gate = nn.Linear(width, 4)
        self.inner = nn.Parameter(torch.randn(4, width, 2 * width) / width**0.5)
        self.outer = nn.Parameter(torch.randn(4, 2 * width, width) / (2 * width) ** 0.5)
        self.head = nn.Linear(width, TAGS)

    def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
        """Return the cross-entropy plus a loss that balances the experts."""
        x = self.table(ids)
        weight = self.gate(x).softmax(-1)
        inner = F.gelu(torch.einsum("bld,edf->blef", x, self.inner))
        x = x + torch.einsum("blef,efd,ble->bld", inner, self.outer, weight)
        balance = weight.mean((0, 1)).square().sum()
        loss = F.cross_entropy(self.head(x).flatten(0, 1), tags.flatten(), ignore_index=-100)
        return loss + 0.01 * balance


def tagged(batch: int, length: int) -> Batch:
    """Ids and tags; one row ends in padding."""
    generator = seeded(batch, length)
    ids = torch.randint(1, VOCABULARY, (batch, length), generator=generator)
    tags = torch.randint(0, TAGS, (batch, length), generator=generator)
    if length > 4:
        ids[0, -2:], tags[0, -2:] = 0, -100
    return {"ids": ids, "tags": tags}


def translated(batch: int, source: int, target: int) -> Batch:
    """Source and target ids of independent lengths, and labels for the target."""
    generator = seeded(batch, source, target)

    def ids(length: int) -> Tensor:
        return torch.randint(0, VOCABULARY, (batch, length), generator=generator)

    return {"source": ids(source), "target": ids(target), "labels": ids(target)}


def _of_tags(name: str, make: Callable[[], nn.Module]) -> Entry:
    return Entry(
        name=name,
        source="torch.nn",
        make=make,
        batch=tagged,
        ranges={"batch": (1, 8), "length": (1, LONGEST)},
        axes={key: {0: "batch", 1: "length"} for key in ("ids", "tags")},
        sizes=[(3, 12), (1, 1), (8, LONGEST), (5, 23)],
    )


ENTRIES = [
    Entry(
        name="nn.Transformer",
        source="torch.nn",
        make=Translator,
        batch=translated,
        ranges={"batch": (1, 8), "source": (1, LONGEST), "target": (1, LONGEST)},
        axes={
            "source": {0: "batch", 1: "source"},
            "target": {0: "batch", 1: "target"},
            "labels": {0: "batch", 1: "target"},
        },
        sizes=[(3, 12, 9), (1, 1, 1), (8, LONGEST, LONGEST), (4, 7, 30)],
    ),
    _of_tags("LSTM tagger", partial(Tagger, nn.LSTM)),
    _of_tags("GRU tagger", partial(Tagger, nn.GRU)),
    _of_tags("LSTM tagger, packed", partial(PackedTagger, nn.LSTM)),
    _of_tags("Temporal convolution, weight norm", TemporalConvolution),
    _of_tags("Mixture of experts, dense", DenseExperts),
]
