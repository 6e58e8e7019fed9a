"""What the table knows of a model: how it is made, what a batch is, at which shapes it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One model of the table.

    Attributes
    ----------
    name : str
        As the table shows it.
    source : str
        Where it comes from: ``"transformers"`` or ``"torch.nn"``.
    make : callable
        Returns the model with random weights; it takes a batch as keywords and returns the loss or
        something with ``.loss``.
    batch : callable
        From the sizes of the dims, in the order of `ranges`, to a batch; equal sizes give equal
        batches.
    ranges : mapping of str to (int, int)
        The symbolic dims with their least and greatest size.
    axes : mapping of str to mapping of int to str
        For each tensor of the batch which axis is which dim; ``"8*side"`` is a multiple.
    sizes : sequence of tuple of int
        The shapes that are trained, the first is also the example of the capture. Holds a small one
        and the largest.
    """

    name: str
    source: str
    make: Callable[[], nn.Module]
    batch: Callable[..., Batch]
    ranges: Mapping[str, tuple[int, int]]
    axes: Mapping[str, Mapping[int, str]]
    sizes: Sequence[tuple[int, ...]]

    def dynamic_shapes(self) -> dict[str, dict[int, Any]]:
        """What `torch.export.export` takes."""
        dims = {name: Dim(name, min=low, max=high) for name, (low, high) in self.ranges.items()}

        def dim(text: str) -> Any:
            factor, _, name = text.rpartition("*")
            return int(factor) * dims[name] if factor else dims[name]

        return {
            key: {axis: dim(text) for axis, text in axes.items()} for key, axes in self.axes.items()
        }


def seeded(*sizes: int) -> torch.Generator:
    """Generator that depends on the sizes alone."""
    seed = 7
    for size in sizes:
        seed = 1009 * seed + size
    return torch.Generator().manual_seed(seed % 2**31)
