"""Randomness as a pure function: one torch operator, and random operators written with it.

``relax_disc::uniform(rng, shape, stream)`` draws numbers in [0, 1) by Philox4x32-10 (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011), keyed by the seed; the counter holds the
element's index, the stream (which operator of the model asks) and the offset (which step it is).
Whatever is recomputed is therefore bit-identical, and no two operators or steps share numbers.
``relax_disc::keep`` says where such a number is at least ``p``: a mask that is false that often.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from relax_disc.ops.attention import composed_attention, whole_attention

_TINY = 2.0**-25
"""Half of the least step of a number drawn: keeps exponential numbers above 0."""
_SELU_LOWEST = -1.7580993408473766
"""What SELU tends to from below (Klambauer et al., 2017), where alpha dropout puts elements."""


torch.library.define("relax_disc::uniform", "(Tensor rng, SymInt[] shape, int stream) -> Tensor")
torch.library.define(
    "relax_disc::keep", "(Tensor rng, SymInt[] shape, int stream, float p) -> Tensor"
)


@torch.library.register_fake("relax_disc::uniform")
def _(rng: Tensor, shape: Sequence[int], stream: int) -> Tensor:
    return torch.empty(tuple(shape), dtype=torch.float32, device=rng.device)


@torch.library.register_fake("relax_disc::keep")
def _(rng: Tensor, shape: Sequence[int], stream: int, p: float) -> Tensor:
    return torch.empty(tuple(shape), dtype=torch.bool, device=rng.device)


class RandomOperators:
    """The random operators, by the numbers that a subclass draws."""

    def uniform(self, shape: Sequence[Any]) -> Tensor:
        """Draw numbers in [0, 1), float32."""
        raise NotImplementedError

    def keep(self, shape: Sequence[Any], p: float) -> Tensor:
        """Draw a mask that is false with probability ``p``."""
        raise NotImplementedError

    def normal(self, shape: Sequence[Any]) -> Tensor:
        """Draw normal numbers by the method of Box and Muller."""
        radius = torch.sqrt(-2.0 * torch.log1p(-self.uniform(shape)))
        return radius * torch.cos(2.0 * math.pi * self.uniform(shape))

    # -- operators of ATen, with their own arguments ------------------------------------------

    def dropout(self, x: Tensor, p: float, train: bool) -> Tensor:
        """``aten.dropout``."""
        return self._drop(x, x.shape, p) if train and p > 0 else x

    def feature_dropout(self, x: Tensor, p: float, train: bool) -> Tensor:
        """``aten.feature_dropout``: whole channels."""
        shape = [*x.shape[:2], *([1] * (x.dim() - 2))]
        return self._drop(x, shape, p) if train and p > 0 else x

    def native_dropout(self, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        """``aten.native_dropout``."""
        if not train or p == 0:
            return x, torch.ones_like(x, dtype=torch.bool)
        mask = self.keep(x.shape, p)
        return self._masked(x, mask, p), mask

    def _drop(self, x: Tensor, shape: Sequence[Any], p: float) -> Tensor:
        return torch.zeros_like(x) if p == 1 else self._masked(x, self.keep(shape, p), p)

    def alpha_dropout(self, x: Tensor, p: float, train: bool) -> Tensor:
        """``aten.alpha_dropout``: keeps mean and variance of SELU's outputs."""
        return self._drop_alpha(x, x.shape, p) if train and p > 0 else x

    def feature_alpha_dropout(self, x: Tensor, p: float, train: bool) -> Tensor:
        """``aten.feature_alpha_dropout``: whole channels."""
        shape = [*x.shape[:2], *([1] * (x.dim() - 2))]
        return self._drop_alpha(x, shape, p) if train and p > 0 else x

    def _drop_alpha(self, x: Tensor, shape: Sequence[Any], p: float) -> Tensor:
        if p == 1:
            return torch.zeros_like(x)
        scale = 1.0 / math.sqrt((1 - p) * (1 + p * _SELU_LOWEST**2))
        dropped = torch.where(self.keep(shape, p), x, torch.full((), _SELU_LOWEST, dtype=x.dtype))
        return dropped * scale - scale * _SELU_LOWEST * p

    @staticmethod
    def _masked(x: Tensor, mask: Tensor, p: float) -> Tensor:
        return torch.where(mask, x * (1.0 / (1.0 - p)), torch.zeros((), dtype=x.dtype))

    def bernoulli(self, probability: Tensor, *, generator: Any = None) -> Tensor:
        """``aten.bernoulli``."""
        return (self.uniform(probability.shape) < probability).to(probability.dtype)

    def bernoulli_(self, x: Tensor, p: float = 0.5, *, generator: Any = None) -> Tensor:
        """``aten.bernoulli_.float``: fill in place."""
        return x.copy_(self.uniform(x.shape) < p)

    def bernoulli_p(self, x: Tensor, p: float, *, generator: Any = None) -> Tensor:
        """``aten.bernoulli.p``."""
        return (self.uniform(x.shape) < p).to(x.dtype)

    def rand(self, size: Sequence[Any], *, dtype: Any = None, **_: Any) -> Tensor:
        """``aten.rand``."""
        return self.uniform(size).to(dtype or torch.get_default_dtype())

    def rand_like(self, x: Tensor, *, dtype: Any = None, **_: Any) -> Tensor:
        """``aten.rand_like``."""
        return self.uniform(x.shape).to(dtype or x.dtype)

    def randn(self, size: Sequence[Any], *, dtype: Any = None, **_: Any) -> Tensor:
        """``aten.randn``."""
        return self.normal(size).to(dtype or torch.get_default_dtype())

    def randn_like(self, x: Tensor, *, dtype: Any = None, **_: Any) -> Tensor:
        """``aten.randn_like``."""
        return self.normal(x.shape).to(dtype or x.dtype)

    def randint(self, low: Any, high: Any, size: Sequence[Any], **options: Any) -> Tensor:
        """``aten.randint.low``: of fewer than 2**24 values, the only ones drawn without holes."""
        drawn = torch.floor(self.uniform(size) * (high - low)).to(torch.int64) + low
        return drawn.to(options.get("dtype") or torch.int64)

    def exponential(self, x: Tensor, rate: float = 1.0) -> Tensor:
        """Draw exponential numbers, above 0."""
        return (-torch.log1p(-self.uniform(x.shape)) / rate).clamp_min(_TINY).to(x.dtype)

    def normal_of(self, mean: Any, std: Any, shape: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """Draw normal numbers of given means and deviations."""
        return (self.normal(shape) * std + mean).to(dtype)

    def fill_normal(self, x: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
        """``aten.normal_``."""
        return x.copy_(self.normal_of(mean, std, x.shape, x.dtype))

    def fill_uniform(self, x: Tensor, low: float = 0.0, high: float = 1.0, **_: Any) -> Tensor:
        """``aten.uniform_``."""
        return x.copy_((self.uniform(x.shape) * (high - low) + low).to(x.dtype))

    def fill_exponential(self, x: Tensor, rate: float = 1.0, **_: Any) -> Tensor:
        """``aten.exponential_``."""
        return x.copy_(self.exponential(x, rate))

    def randint_like(
        self, x: Tensor, low: Any, high: Any, *, dtype: Any = None, **_: Any
    ) -> Tensor:
        """``aten.randint_like.low_dtype``."""
        return self.randint(low, high, x.shape, dtype=dtype or x.dtype)

    def randperm(self, count: Any, *, dtype: Any = None, **_: Any) -> Tensor:
        """``aten.randperm``: the order of numbers drawn."""
        return torch.argsort(self.uniform([count])).to(dtype or torch.int64)

    def multinomial(
        self, weights: Tensor, count: int, replacement: bool = False, **_: Any
    ) -> Tensor | None:
        """``aten.multinomial`` of one draw, or several without replacement (Efraimidis, 2006)."""
        if replacement and count != 1:
            return None
        keys = weights / self.exponential(torch.empty_like(weights))
        return torch.topk(keys, count, -1)[1]

    def rrelu(
        self, x: Tensor, low: float = 0.125, high: float = 1 / 3, train: bool = False, **_: Any
    ) -> Tensor:
        """``aten.rrelu``: random slopes below zero, their mean in evaluation."""
        slope = self.uniform(x.shape) * (high - low) + low if train else (low + high) / 2
        return torch.where(x < 0, x * slope, x)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor | None:
        """Attention with dropout of its weights: one operator, or plain ones where it is not."""
        if dropout_p == 0:
            return None
        operands = (query, key, value, attn_mask, is_causal, scale, enable_gqa)
        found = self._whole_attention(operands, dropout_p) if dropout_p < 1 else None
        if found is not None:
            return found
        return composed_attention(*operands, lambda weights: self.dropout(weights, dropout_p, True))

    def _whole_attention(self, operands: tuple[Any, ...], p: float) -> Tensor | None:
        """Attention as one operator that drops weights by itself; None where there is none."""
        return None

    def rules(self) -> dict[Any, Callable[..., Any]]:
        """List the operators that draw numbers, with what traces them."""
        aten = torch.ops.aten
        return {
            aten.dropout.default: self.dropout,
            aten.dropout_.default: lambda x, p, train: x.copy_(self.dropout(x, p, train)),
            aten.feature_dropout.default: self.feature_dropout,
            aten.feature_dropout_.default: lambda x, p, train: x.copy_(
                self.feature_dropout(x, p, train)
            ),
            aten.native_dropout.default: self.native_dropout,
            aten.alpha_dropout.default: self.alpha_dropout,
            aten.feature_alpha_dropout.default: self.feature_alpha_dropout,
            aten.bernoulli.default: self.bernoulli,
            aten.bernoulli.p: self.bernoulli_p,
            aten.bernoulli_.float: self.bernoulli_,
            aten.rand.default: self.rand,
            aten.rand_like.default: self.rand_like,
            aten.randn.default: self.randn,
            aten.randn_like.default: self.randn_like,
            aten.randint.low: self.randint,
            aten.randint_like.low_dtype: self.randint_like,
            aten.randint_like.default: lambda x, high, **o: self.randint_like(x, 0, high, **o),
            aten.randperm.default: self.randperm,
            aten.multinomial.default: self.multinomial,
            aten.rrelu.default: self.rrelu,
            aten.scaled_dot_product_attention.default: self.attention,
            aten.normal_.default: self.fill_normal,
            aten.uniform_.default: self.fill_uniform,
            aten.exponential_.default: self.fill_exponential,
            aten.normal.Tensor_float: lambda m, s=1.0, **_: self.normal_of(m, s, m.shape, m.dtype),
            aten.normal.float_Tensor: lambda m, s, **_: self.normal_of(m, s, s.shape, s.dtype),
            aten.normal.Tensor_Tensor: lambda m, s, **_: self.normal_of(
                m, s, torch.broadcast_shapes(m.shape, s.shape), m.dtype
            ),
            aten.normal.float_float: lambda m, s, size, dtype=None, **_: self.normal_of(
                m, s, size, dtype or torch.get_default_dtype()
            ),
            aten.randint.default: lambda high, size, **o: self.randint(0, high, size, **o),
        }


class Randomness(RandomOperators):
    """The random operators of one traced function: each call gets a stream of its own.

    ``rng`` is the input ``[seed, offset]``, int64.
    """

    def __init__(self, rng: Tensor) -> None:
        self._rng = rng
        self._streams = 0

    def uniform(self, shape: Sequence[Any]) -> Tensor:
        """Draw numbers in [0, 1), float32."""
        return torch.ops.relax_disc.uniform(self._rng, list(shape), self._stream())

    def keep(self, shape: Sequence[Any], p: float) -> Tensor:
        """Draw a mask that is false with probability ``p``."""
        return torch.ops.relax_disc.keep(self._rng, list(shape), self._stream(), p)

    def _stream(self) -> int:
        self._streams += 1
        return self._streams - 1

    def _whole_attention(self, operands: tuple[Any, ...], p: float) -> Tensor | None:
        found = whole_attention(*operands, draws=(self._rng, p, self._streams))
        if found is not None:
            self._streams += 1
        return found
