"""``pack_padded_sequence`` and ``pad_packed_sequence`` while a model is exported.

PyTorch's layout of a packed sequence depends on the data of the lengths.  Here a packed sequence
remembers the padded tensor that it was made of and which positions are there: recurrent layers run
over the padded tensor and leave alone what lies beyond a length, so that packing, a layer and
padding again pick and place no rows.  The packed rows themselves are those that a mask picks, for
models that read ``.data``.

PyTorch pads again to the longest of the lengths, which a program knows only when it runs: where no
``total_length`` is given, calls check that it is the length of the padded batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

from relax_disc.frontend.capture.loops.sequences import is_same
from relax_disc.frontend.capture.model_checks import asserted
from relax_disc.frontend.capture.refusals import refusal

_PACKING = "_relax_disc_packing"
_PADDED = "_relax_disc_padded"


class _Longest(int):
    """The length of a padded batch whose length is a number."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the rows of a packed sequence belong.

    ``lengths``: ``[B]``, none greater than the one before. ``there``: ``[T, B]``, the positions
    that are not padding.
    """

    lengths: Tensor
    there: Tensor
    longest: Any  # T, an object of its own: the size that `pad_packed_sequence` reads

    def only(self, x: Tensor, other: Any) -> Tensor:
        """Put a value beyond the lengths; ``x``: ``[T, B, ...]``."""
        there = self.there.reshape(*self.there.shape, *(1 for _ in x.shape[2:]))
        return torch.where(there, x, other)

    def at_last(self, x: Tensor) -> Tensor:
        """Pick the last position of each sequence: ``[T, B, H]`` to ``[B, H]``."""
        rows = torch.arange(x.shape[1], device=x.device)
        return x[(self.lengths - 1).clamp(0, x.shape[0] - 1), rows]

    def flipped(self, x: Tensor) -> Tensor:
        """Turn each sequence of ``[T, B, G]`` round, and leave alone what lies beyond it."""
        extent, batch = x.shape[:2]
        place = torch.arange(extent, device=x.device)[:, None]
        place = torch.where(self.there, self.lengths - 1 - place, place).clamp_max(extent - 1)
        place = place * batch + torch.arange(batch, device=x.device)
        return x.flatten(0, 1).index_select(0, place.flatten()).unflatten(0, (extent, batch))

    def pack(self, x: Tensor) -> Tensor:
        """Pick the rows that are there, position by position; ``x``: ``[T, B, ...]``."""
        data = x[self.there]
        setattr(data, _PADDED, x)
        return data

    def padded(self, data: Tensor) -> Tensor:
        """Return the tensor of which rows were picked, or put them where they belong."""
        known = getattr(data, _PADDED, None)
        if known is not None:
            return known
        empty = data.new_zeros((*self.there.shape, *data.shape[1:]))
        return empty.index_put((self.there,), data)


def packing_of(batch_sizes: Any) -> Packing:
    """Return how a packed sequence was made.

    Raises `UnsupportedOperatorError`: not by `pack_padded_sequence` in the model.
    """
    packing = getattr(batch_sizes, _PACKING, None)
    if packing is None:
        why = "its batch sizes are not those of a pack_padded_sequence in the model; pack it there"
        raise refusal(PackedSequence.__name__, why)
    return packing


def _pack(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Rows that a mask picks, and how many sequences have each position."""
    x = x.transpose(0, 1) if batch_first else x
    lengths = lengths.to(x.device)
    extent = x.shape[0]
    in_order = lengths == lengths.sort(descending=True).values
    wanted = "pack_padded_sequence: lengths that decrease (or enforce_sorted=False)"
    asserted(in_order.all(), wanted)
    fits = (lengths > 0) & (lengths <= extent)
    asserted(fits.all(), "pack_padded_sequence: lengths from 1 to that of the padded batch")
    there = torch.arange(extent, device=x.device)[:, None] < lengths
    longest = _Longest(extent) if isinstance(extent, int) else extent
    packing = Packing(lengths, there, longest)
    data, batch_sizes = packing.pack(x), there.sum(1)
    setattr(data, _PADDED, packing.only(x, 0))  # layers compute with padding, which may be NaN
    setattr(batch_sizes, _PACKING, packing)
    return data, batch_sizes


def _pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: Any
) -> tuple[Tensor, Tensor]:
    """The padded tensor that was packed, or one to which rows are written, and the lengths."""
    packing = packing_of(batch_sizes)
    x = packing.only(packing.padded(data), padding_value)
    if total_length is packing.longest:
        asserted(
            packing.lengths.amax() == x.shape[0],
            "pad_packed_sequence: a sequence as long as the padded batch (or total_length=)",
        )
    elif not is_same(total_length, x.shape[0]):
        more = (0, 0) * (x.dim() - 1) + (0, total_length - x.shape[0])
        x = functional.pad(x, more, value=padding_value)
    return (x.transpose(0, 1) if batch_first else x), packing.lengths


def _size(x: Tensor, axis: Any = None) -> Any:
    """The length of the padded batch of a packed one's sizes; None: PyTorch's own."""
    packing = getattr(x, _PACKING, None)
    return packing.longest if packing is not None and axis == 0 else None


def first_item(x: Tensor, index: Any) -> Any:
    """``batch_sizes[0]``: all sequences; None of another tensor."""
    packing = getattr(x, _PACKING, None)
    if packing is None or not isinstance(index, int) or index != 0:
        return None
    return packing.there.shape[1]


class _Sized:
    """Stands for a padded batch of which only the size is asked."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def size(self, _: int) -> Any:
        """Return the number of sequences."""
        return self._batch


def _of_packed(plain: Callable[..., Any]) -> Callable[..., Any]:
    def expected(self: nn.RNNBase, x: Any, batch_sizes: Any) -> Any:
        """Shape of a state, of a packed batch too."""
        return plain(self, x if batch_sizes is None else _Sized(batch_sizes[0]), None)

    return expected


@contextlib.contextmanager
def packed_batches() -> Iterator[None]:
    """Let recurrent layers see the symbolic size of a packed batch while this is active.

    They make a plain number of it, ``int(batch_sizes[0])``, to compare it.
    """
    hidden, cell = nn.RNNBase.get_expected_hidden_size, nn.LSTM.get_expected_cell_size
    with (
        patch.object(nn.RNNBase, hidden.__name__, _of_packed(hidden)),
        patch.object(nn.LSTM, cell.__name__, _of_packed(cell)),
    ):
        yield


REPLACED: dict[Any, Callable[..., Any]] = {
    torch._VF._pack_padded_sequence: _pack,
    torch._VF._pad_packed_sequence: _pad,
    Tensor.size: _size,
}
