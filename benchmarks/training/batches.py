"""Batches of the lengths of real instructions, and batches of one length never met before.

The token ids are random: speed and memory depend on the lengths alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

IGNORED = -100
LONGEST = 512
VOCABULARY = 32_000
_LENGTHS = Path(__file__).parents[1] / "data" / "code_alpaca_lengths.npz"


def real_batches(batch: int, count: int, *, seed: int = 0) -> list[list[int]]:
    """Draw `count` batches of lengths, cut at `LONGEST`, in a repeatable order."""
    with np.load(_LENGTHS) as file:
        lengths = np.random.default_rng(seed).permutation(file["llama2"])[: batch * count]
    return np.minimum(lengths, LONGEST).reshape(count, batch).tolist()


def epoch_lengths(batch: int, *, seed: int = 0) -> list[list[int]]:
    """Cut all lengths, whole and in a repeatable order, into batches; the last may be shorter."""
    with np.load(_LENGTHS) as file:
        lengths = np.random.default_rng(seed).permutation(file["llama2"]).tolist()
    return [lengths[i : i + batch] for i in range(0, len(lengths), batch)]


def unseen_lengths(seen: set[int], count: int, *, seed: int = 0) -> list[int]:
    """Draw lengths spread over the range of those seen, none of which is among them."""
    free = [n for n in range(max(2, min(seen)), max(seen) + 1) if n not in seen]
    spread = [free[i] for i in np.linspace(0, len(free) - 1, min(count, len(free))).astype(int)]
    return np.random.default_rng(seed).permutation(spread).tolist()


def make_batch(lengths: list[int], seed: int) -> tuple[Tensor, Tensor]:
    """Make `ids` and `labels`, int64 [batch, longest of them], padded behind each record."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    labels = torch.full((len(lengths), max(lengths)), IGNORED)
    for row, length in enumerate(lengths):
        tokens = torch.randint(1, VOCABULARY, (length + 1,), generator=generator)
        ids[row, :length] = tokens[:-1]
        labels[row, :length] = tokens[1:]
    return ids, labels
