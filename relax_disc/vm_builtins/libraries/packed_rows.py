"""Rows of sequences that lie one after the other, and the padded batch that they come from."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PackedRows:
    """Rows of sequences one after the other, and where they lie in the padded batch."""

    starts: torch.Tensor  # [sequences + 1] int64
    places: torch.Tensor  # [3, rows] int64: row, sequence and position in the padded batch
    length: int  # of the padded batch

    @property
    def count(self) -> int:
        """Number of sequences."""
        return self.starts.shape[0] - 1

    @property
    def longest(self) -> int:
        """Bound of the rows of a sequence that is known without asking the device."""
        return min(self.length, self.places.shape[1])

    def is_behind(self) -> torch.Tensor:
        """Which rows fill up, behind the last sequence, ``[rows]``."""
        numbers = torch.arange(self.places.shape[1], device=self.starts.device)
        return numbers >= self.starts[-1]

    def cleared(self, rows: torch.Tensor, value: float) -> torch.Tensor:
        """Give rows ``[1, rows, ..]`` that fill up a value."""
        shape = [1, -1, *[1] * (rows.dim() - 2)]
        return rows.masked_fill(self.is_behind().view(shape), value)

    def spread(self, rows: torch.Tensor, value: float = 0.0) -> torch.Tensor:
        """Lay packed rows ``[1, rows, ..]`` out as the padded batch, others with a value."""
        # Rows that fill up go to a sequence behind the last.
        sequence = self.places[1].masked_fill(self.is_behind(), self.count)
        shape = self.count + 1, self.length, *rows.shape[2:]
        padded = rows.new_full(shape, value)
        padded[sequence, self.places[2]] = rows[0]
        return padded[:-1]

    def collected(self, padded: torch.Tensor) -> torch.Tensor:
        """Take the packed rows of a padded batch."""
        return padded[self.places[1], self.places[2]][None]

    def is_kept(self) -> torch.Tensor:
        """Which positions of the padded batch are packed, ``[sequences, length]``."""
        ones = torch.ones(1, self.places.shape[1], dtype=torch.bool, device=self.places.device)
        return self.spread(ones, False)

    def in_sequence(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequence of each row, and its number there; of rows that fill up one behind the last."""
        numbers = torch.arange(self.places.shape[1], device=self.starts.device)
        sequence = self.places[1]
        rank = (numbers - self.starts[sequence]).clamp(0, self.longest - 1)
        return sequence.masked_fill(self.is_behind(), self.count), rank
