"""Small models, and batches for them, that the tests of the frontend share."""

import math

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

VOCABULARY = 61


class MLP(nn.Module):
    """Token-wise classifier of `[b, s, 16]`."""

    def __init__(self, hidden=24, classes=10):
        super().__init__()
        self.first = nn.Linear(16, hidden)
        self.second = nn.Linear(hidden, hidden)
        self.last = nn.Linear(hidden, classes)

    def forward(self, x, y):
        z = self.last(F.relu(self.second(F.gelu(self.first(x)))))
        return F.cross_entropy(z.reshape(-1, z.shape[-1]), y.reshape(-1), ignore_index=-100)


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Attention(nn.Module):
    def __init__(self, width, heads, key_heads, whole):
        super().__init__()
        self.heads, self.key_heads, self.depth = heads, key_heads, width // heads
        self.whole = whole
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, key_heads * self.depth, bias=False)
        self.v = nn.Linear(width, key_heads * self.depth, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x, cos, sin, hidden):
        b, t, _ = x.shape
        q = rotate(self.q(x).view(b, t, self.heads, self.depth).transpose(1, 2), cos, sin)
        k = rotate(self.k(x).view(b, t, self.key_heads, self.depth).transpose(1, 2), cos, sin)
        v = self.v(x).view(b, t, self.key_heads, self.depth).transpose(1, 2)
        if self.whole:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            repeats = self.heads // self.key_heads
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
            scores = (q @ k.transpose(-1, -2)) * (1 / math.sqrt(self.depth))
            out = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v
        return self.o(out.transpose(1, 2).reshape(b, t, -1))


class Block(nn.Module):
    def __init__(self, width, heads, key_heads, inner, whole):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.attention = Attention(width, heads, key_heads, whole)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x, cos, sin, hidden):
        x = x + self.attention(self.norm1(x), cos, sin, hidden)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A Llama of two small layers; attention whole or written by hand, head tied or not."""

    def __init__(self, whole=True, tied=True, layers=2, width=32, heads=4, key_heads=2):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, key_heads, 2 * width, whole) for _ in range(layers)
        )
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        with torch.no_grad():
            self.table.weight.mul_(0.05)
        if tied:
            self.head.weight = self.table.weight
        depth = width // heads
        steps = torch.arange(0, depth, 2).float() / depth
        self.register_buffer("frequencies", 10000.0**-steps, persistent=False)

    def forward(self, ids, labels):
        _, t = ids.shape
        x = self.table(ids)
        angles = torch.outer(torch.arange(t, dtype=torch.float32), self.frequencies.float())
        angles = torch.cat([angles, angles], -1).to(x.dtype)
        hidden = torch.ones(t, t, dtype=torch.bool).triu(1)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin(), hidden)
        z = self.head(self.norm(x))
        return F.cross_entropy(z.reshape(-1, z.shape[-1]), labels.reshape(-1), ignore_index=-100)


def dims(low=1, high=48):
    """Batch and length, and the dynamic shapes of two tensors `[b, s, ...]`."""
    b, s = Dim("b", min=1, max=8), Dim("s", min=low, max=high)
    return b, s


def labels(b, s, classes, generator):
    y = torch.randint(0, classes, (b, s), generator=generator)
    if s > 2:
        y[:, -max(1, s // 4) :] = -100
    return y


def mlp_batch(b, s, seed=0):
    g = torch.Generator().manual_seed(seed + 100 * b + s)
    return torch.randn(b, s, 16, generator=g), labels(b, s, 10, g)


def token_batch(b, s, seed=0):
    g = torch.Generator().manual_seed(seed + 100 * b + s)
    return torch.randint(0, VOCABULARY, (b, s), generator=g), labels(b, s, VOCABULARY, g)


def hugging_face_llama(**options):
    """Llama of Hugging Face, one narrow layer unless options say otherwise; skips without it."""
    transformers = pytest.importorskip("transformers")
    narrow = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        use_cache=False,
        **{"num_hidden_layers": 1, **narrow, **options},
    )
    return transformers.LlamaForCausalLM(config)
