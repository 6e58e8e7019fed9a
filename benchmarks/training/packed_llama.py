"""The Llama of `benchmarks.training` packed by hand, as people do who care for padding.

`torch.nn.attention.varlen` has kernels for CUDA alone and `flex_attention` no gradient on the CPU
(PyTorch 2.13), so attention is either one call for each sequence, or that of the padded batch
between a scatter and a gather; all else works on packed rows.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tutorials._llama import IGNORED, Attention, Llama, rotate

Kind = Literal["split", "padded"]


class PackedLlama(nn.Module):
    """`Llama` over the rows that have a label; it shares that model's parameters."""

    def __init__(self, model: Llama, kind: Kind) -> None:
        super().__init__()
        self.model, self.kind = model, kind

    def forward(
        self, ids: Tensor, labels: Tensor, rows: Tensor, sequences: Tensor, lengths: list[int]
    ) -> Tensor:
        """Return the mean loss.

        Parameters
        ----------
        ids, labels : Tensor
            ``[batch, length]``, as the collator makes them.
        rows : Tensor
            ``[tokens]``: places of the rows that are kept in ``[batch * length]``.
        sequences : Tensor
            ``[tokens]``: the position of each in its sequence.
        lengths : list of int
            Of the sequences; read by attention sequence by sequence alone.
        """
        model, (batch, length) = self.model, ids.shape
        x = model.embedding(ids.flatten()[rows])
        cos, sin = model.cos[sequences], model.sin[sequences]
        block: Any
        for block in model.blocks:
            mixed = self._attend(
                block.attention, block.norm_attention(x), cos, sin, rows, batch, length, lengths
            )
            x = x + mixed
            x = x + block.feed_forward(block.norm_feed_forward(x))
        return F.cross_entropy(
            model.head(model.norm(x)), labels.flatten()[rows], ignore_index=IGNORED
        )

    def _attend(
        self,
        layer: Attention,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        rows: Tensor,
        batch: int,
        length: int,
        lengths: list[int],
    ) -> Tensor:
        tokens, hidden = x.shape
        width = hidden // layer.heads

        def heads(y: Tensor) -> Tensor:
            return y.view(tokens, layer.heads, width).transpose(0, 1)

        query = rotate(heads(layer.query(x)), cos, sin)
        key = rotate(heads(layer.key(x)), cos, sin)
        value = heads(layer.value(x))
        if self.kind == "split":
            parts = zip(*(y.split(lengths, 1) for y in (query, key, value)), strict=True)
            mixed = torch.cat(
                [
                    F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
                    for q, k, v in parts
                ],
                1,
            )
            return layer.out(mixed.transpose(0, 1).reshape(tokens, hidden))

        def spread(y: Tensor) -> Tensor:
            whole = y.new_zeros(batch * length, hidden)
            whole = whole.index_copy(0, rows, y.transpose(0, 1).reshape(tokens, hidden))
            return whole.view(batch, length, layer.heads, width).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(
            spread(query), spread(key), spread(value), is_causal=True
        )
        return layer.out(mixed.transpose(1, 2).reshape(batch * length, hidden)[rows])


def places(labels: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """Find the rows that have a label: their places, their positions, the sequences' lengths."""
    kept = labels != IGNORED
    rows = kept.flatten().nonzero()[:, 0]
    return rows, rows % labels.shape[1], kept.sum(1).tolist()
