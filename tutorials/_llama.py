"""A Llama-style language model in plain PyTorch: RMS norm, rotary positions, gated feed-forward.

`forward(ids, labels)` returns the mean cross-entropy, so that the module is all that a training
step needs.  Nothing here knows of `relax_disc`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class LlamaSizes:
    """Dimensions of the model; `attention` "math" writes the softmax out, as older code does."""

    vocabulary: int
    hidden: int = 320
    layers: int = 6
    heads: int = 5
    feed_forward: int = 864
    longest: int = 512
    attention: Literal["fused", "math"] = "fused"


class RMSNorm(nn.Module):
    """Scale every row to unit mean square, then by a learned weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return x * scale * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + D/2) of `x` [B, H, T, D] by the angles of their positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.kind = sizes.attention
        self.query = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.key = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.value = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.out = nn.Linear(sizes.hidden, sizes.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, hidden = x.shape

        def split_heads(y: Tensor) -> Tensor:
            return y.view(batch, length, self.heads, hidden // self.heads).transpose(1, 2)

        query = rotate(split_heads(self.query(x)), cos, sin)
        key = rotate(split_heads(self.key(x)), cos, sin)
        value = split_heads(self.value(x))
        if self.kind == "fused":
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            scores = torch.matmul(query, key.transpose(-1, -2)) * (hidden // self.heads) ** -0.5
            future = torch.full((length, length), float("-inf"), device=x.device).triu(1)
            mixed = torch.matmul(torch.softmax(scores + future, dim=-1), value)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))


class FeedForward(nn.Module):
    """Two projections, one gating the other, and one back."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.hidden, sizes.feed_forward, bias=False)
        self.up = nn.Linear(sizes.hidden, sizes.feed_forward, bias=False)
        self.down = nn.Linear(sizes.feed_forward, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: attention, then feed-forward, each beside a residual connection."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.norm_attention = RMSNorm(sizes.hidden)
        self.attention = Attention(sizes)
        self.norm_feed_forward = RMSNorm(sizes.hidden)
        self.feed_forward = FeedForward(sizes)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x), cos, sin)
        return x + self.feed_forward(self.norm_feed_forward(x))


class Llama(nn.Module):
    """The whole model; `ids` and `labels` are int64 [batch, length], the result is a scalar."""

    cos: Tensor
    sin: Tensor

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = RMSNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
        width = sizes.hidden // sizes.heads
        frequencies = 10_000.0 ** (-torch.arange(0, width, 2).float() / width)
        angles = torch.outer(torch.arange(sizes.longest).float(), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        logits = self.head(self.norm(x))
        return F.cross_entropy(
            logits.view(-1, self.sizes.vocabulary), labels.view(-1), ignore_index=IGNORED
        )
