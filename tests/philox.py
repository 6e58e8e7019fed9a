"""Philox4x32-10 in PyTorch: the reference for the random operators, which run eagerly with it."""

import math

import torch

from relax_disc.ops.philox import MANTISSA_BITS, MULTIPLIERS, ROUNDS, WEYL

_WORD = 0xFFFFFFFF


def philox(seed, offset, stream, count):
    """Return the first word of Philox4x32-10 for elements ``0 .. count - 1``, as int64."""
    index = torch.arange(count, dtype=torch.int64)
    words = [index & _WORD, (index >> 32) & _WORD]
    words[1] = words[1] ^ stream
    words += [
        torch.full_like(index, offset & _WORD),
        torch.full_like(index, (offset >> 32) & _WORD),
    ]
    for k in range(ROUNDS):
        keys = [(seed + WEYL[0] * k) & _WORD, ((seed >> 32) + WEYL[1] * k) & _WORD]
        (high0, low0), (high1, low1) = (
            _product(words[0], MULTIPLIERS[0]),
            _product(words[2], MULTIPLIERS[1]),
        )
        words = [high1 ^ words[1] ^ keys[0], low1, high0 ^ words[3] ^ keys[1], low0]
    return words[0]


def _product(word, factor):
    """Split the 64-bit product of two 32-bit words; int64 has one bit too few for it."""
    low = (word & 0xFFFF) * factor
    high = (word >> 16) * factor + (low >> 16)
    return (high >> 16) & _WORD, ((high << 16) | (low & 0xFFFF)) & _WORD


@torch.library.impl("relax_disc::uniform", "CPU")
def uniform(rng, shape, stream):
    seed, offset = (int(v) for v in rng)
    words = philox(seed, offset, stream, math.prod(shape))
    drawn = (words >> (32 - MANTISSA_BITS)).to(torch.float32) * 2.0**-MANTISSA_BITS
    return drawn.reshape(tuple(shape))


@torch.library.impl("relax_disc::keep", "CPU")
def keep(rng, shape, stream, p):
    return torch.ops.relax_disc.uniform(rng, shape, stream) >= p
