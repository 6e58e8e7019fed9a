"""PyTorch's kernels of attention on CUDA: flash, memory-efficient, and the composite.

- *flash* (Dao, FlashAttention-2, 2023): half precision without a mask, heads of up to 256 numbers,
  a multiple of 8, the same for values, from compute capability 8.0 on;
- *efficient* (Rabe and Staats, 2021; xFormers): float32 too, and masks, where rows are a multiple
  of 16 bytes;
- *math*: PyTorch's composite, of what the two do not take, such as float64.

``torch.backends.cuda.enable_flash_sdp(False)`` and ``enable_mem_efficient_sdp(False)`` turn kernels
off, as in PyTorch. Gradients are computed from the log of the sums that forward kept, by
deterministic kernels.

Tensors are ``[batch, length, heads, dim]``, as the kernels have them, and the log of the sums is
``[batch, heads, length]``, -inf where a row sees nothing. Packed rows are those of
`relax_disc.ops.attention.packed`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from relax_disc.vm_builtins.libraries.packed_rows import PackedRows
from relax_disc.vm_builtins.libraries.random_seeds import drawing_from

_FLASH_MOST_DIM = 256
_LSE_ROWS = 32
"""The memory-efficient kernels keep the log of the sums in rows of a multiple of this."""
_BIAS_ELEMENTS = 16
"""Rows of an added mask start at multiples of this."""
_MATH_ROWS = 1024
"""Rows of scores at a time, for the log of their sums."""
_HIDDEN = torch.finfo(torch.float32).min / math.log2(math.e)
"""Numbers of a mask up to this hide a key beside others, as -inf does; see the native kernels."""
_BLIND = -1e30
"""Beside greater numbers of a mask the scores of a row vanish; all of its keys are hidden so."""
_aten = torch.ops.aten


@dataclass(frozen=True)
class Problem:
    """What a call of attention asks for."""

    scale: float
    is_causal: bool
    mask: torch.Tensor | None  # [B|1, H|1, Tq|1, Tk|1], bool or added
    dropout: float = 0.0  # probability; not of packed rows
    seed: int = 0  # that dropout draws from, of 63 bits
    is_sighted: bool = False  # numbers of the mask hide no row wholly

    def _hiding(self, keys: PackedRows) -> Problem:
        """The same over the padded batch, where keys that are not packed are hidden."""
        kept = keys.is_kept()[:, None, None]
        if self.mask is None:
            mask = kept
        elif self.mask.dtype == torch.bool:
            mask = self.mask & kept
        else:
            mask = self.mask.masked_fill(~kept, -math.inf)
        return replace(self, mask=mask)

    def kernel(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str:
        """Choose "flash", "efficient" or "math" for operands ``[batch, length, heads, dim]``."""
        width, value_width, dtype = query.shape[3], value.shape[3], query.dtype
        is_half = dtype in (torch.float16, torch.bfloat16)
        major = _capability(query.device)
        if (
            is_half
            and major >= 8
            and self.mask is None
            and torch.backends.cuda.flash_sdp_enabled()
            and width == value_width <= _FLASH_MOST_DIM
            and width % 8 == 0
            # Their causal mask is aligned to the bottom right.
            and (not self.is_causal or query.shape[1] == key.shape[1])
        ):
            return "flash"
        # From 8.0 on it has kernels of bfloat16.
        is_known = dtype != torch.float64 and major >= (8 if dtype == torch.bfloat16 else 5)
        is_aligned = all(each * query.element_size() % 16 == 0 for each in (width, value_width))
        enabled = torch.backends.cuda.mem_efficient_sdp_enabled()
        return "efficient" if is_known and is_aligned and enabled else "math"

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the result and the log of the sums of a batch."""
        kernel = self.kernel(query, key, value)
        if kernel == "flash":
            lengths = query.shape[1], key.shape[1]
            with self._drawing(query):
                return _aten._flash_attention_forward(
                    query, key, value, None, None, *lengths, self.dropout, self.is_causal, False,
                    scale=self.scale,
                )[:2]  # fmt: skip
        empty = self._sees_nothing(query, key)
        if kernel == "math":
            sums = self._log_sums(query, key)
            out = self._composite(query, key, value)
        else:
            wide = _repeated(query, key, value)
            blind = self._blind(query, key)
            asking = query if blind is None else query.masked_fill(_by_row(blind), 0)
            with self._drawing(query):
                out, sums, *_ = _aten._efficient_attention_forward(
                    asking, *wide, self._bias(query, key), None, None, None, None, self.dropout,
                    int(self.is_causal), True, scale=self.scale,
                )  # fmt: skip
            sums = sums[:, :, : query.shape[1]]
        if empty is None:
            return out, sums
        # PyTorch's kernels differ in what a row that sees nothing gets.
        return (out.masked_fill(_by_row(empty), 0), sums.masked_fill(empty, -math.inf))

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        sums: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Compute the gradients of the three operands of a batch."""
        kernel = self.kernel(query, key, value)
        lengths = query.shape[1], key.shape[1]
        if kernel == "flash":
            with _deterministic():
                return _aten._flash_attention_backward(
                    grad, query, key, value, out, sums.contiguous(), None, None, *lengths,
                    self.dropout, self.is_causal, *self._flash_state(query), scale=self.scale,
                )  # fmt: skip
        if kernel == "math":
            return self._composite_gradients(grad, query, key, value, sums)
        hidden = sums.isneginf()
        padded = _padded_sums(sums.masked_fill(hidden, math.inf))
        # A row that sees nothing gives nothing, whatever stands in its gradient.
        grad = grad.masked_fill(_by_row(hidden), 0)
        bias, numbers = self._bias(query, key), (None, None, *lengths)
        blind = self._blind(query, key)
        if blind is None:
            return self._efficient_backward(grad, query, key, value, out, bias, numbers, padded)
        # Blind rows stand beside the others, where keys are zero: their scores vanish, and what
        # they add to the gradient of keys is found there.
        rows, width = _by_row(blind), query.shape[3]
        query = torch.cat([query.masked_fill(rows, 0), query.masked_fill(~rows, 0)], 3)
        key = torch.nn.functional.pad(key, (0, width))
        dq, dk, dv = self._efficient_backward(grad, query, key, value, out, bias, numbers, padded)
        return dq[..., :width], dk[..., :width] + dk[..., width:], dv

    def packed_forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        queries: PackedRows,
        keys: PackedRows,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the result and the log of the sums of packed sequences."""
        kernel = self.kernel(query, key, value)
        if self.mask is not None or kernel == "math":
            operands = queries.spread(query), keys.spread(key), keys.spread(value)
            padded, logs = self._hiding(keys).forward(*operands)
            out, by_rows = queries.collected(padded), queries.collected(logs.transpose(1, 2))
        elif kernel == "flash":
            out, sums, *_ = _aten._flash_attention_forward(
                query[0], key[0], value[0], *_sequences(queries, keys), 0.0, self.is_causal, False,
                scale=self.scale,
            )  # fmt: skip
            out, by_rows = out[None], sums.T[None]
        else:
            wide = _repeated(query, key, value)
            out, sums, *_ = _aten._efficient_attention_forward(
                query, *wide, None, *_sequences(queries, keys), 0.0, int(self.is_causal), True,
                scale=self.scale,
            )  # fmt: skip
            sequence, rank = queries.in_sequence()
            by_rows = sums[sequence.clamp(max=queries.count - 1), :, rank][None]
        return queries.cleared(out, 0), queries.cleared(by_rows, -math.inf).transpose(1, 2)

    def packed_backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        sums: torch.Tensor,
        queries: PackedRows,
        keys: PackedRows,
    ) -> tuple[torch.Tensor, ...]:
        """Compute the gradients of the three operands of packed sequences."""
        kernel, sides = self.kernel(query, key, value), (queries, keys, keys)
        if self.mask is not None or kernel == "math":
            found = self._hiding(keys).backward(
                queries.spread(grad),
                queries.spread(query),
                keys.spread(key),
                keys.spread(value),
                queries.spread(out),
                queries.spread(sums.transpose(1, 2), -math.inf).transpose(1, 2),
            )
            found = [side.collected(x) for side, x in zip(sides, found, strict=True)]
        elif kernel == "flash":
            rows = [x[0] for x in (grad, query, key, value, out, sums.contiguous())]
            with _deterministic():
                found = _aten._flash_attention_backward(
                    *rows, *_sequences(queries, keys), 0.0, self.is_causal,
                    *self._flash_state(query), scale=self.scale,
                )  # fmt: skip
            found = [x[None] for x in found]
        else:
            sequence, rank = queries.in_sequence()
            shape = queries.count + 1, query.shape[2], _rounded(queries.longest, _LSE_ROWS)
            padded = sums.new_full(shape, math.inf)
            padded[sequence, :, rank] = sums[0].T
            numbers = _sequences(queries, keys)
            found = self._efficient_backward(
                grad, query, key, value, out, None, numbers, padded[:-1]
            )
        return tuple(side.cleared(x, 0) for side, x in zip(sides, found, strict=True))

    def _efficient_backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None,
        numbers: tuple[Any, ...],
        sums: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """``numbers``: starts of queries and keys or None, and the most rows of both."""
        with _deterministic():
            dq, dk, dv, _ = _aten._efficient_attention_backward(
                grad, query, *_repeated(query, key, value), bias, out, *numbers, sums,
                self.dropout, *self._state(), int(self.is_causal), False, scale=self.scale,
            )  # fmt: skip
        group = query.shape[2] // key.shape[2]
        if group > 1:
            dk, dv = (x.unflatten(2, (-1, group)).sum(3) for x in (dk, dv))
        return dq, dk, dv

    # -- dropout -------------------------------------------------------------------------------

    def _drawing(self, query: torch.Tensor) -> AbstractContextManager[None]:
        return drawing_from(query.device, self.seed) if self.dropout else nullcontext()

    def _state(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Seed and offset, from which the memory-efficient kernels draw again."""
        return torch.tensor(self.seed), torch.tensor(0)

    def _flash_state(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for flash, on its device: both in one tensor, the other is not used."""
        state = torch.zeros(2, dtype=torch.int64, device=query.device)
        state[:1].fill_(self.seed)
        unused = torch.zeros((), dtype=torch.uint64, device=query.device)
        return state.view(torch.uint64), unused

    # -- masks ---------------------------------------------------------------------------------

    def _top(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """The greatest number, or the truth, of what rows see, ``[B|1, H|1, Tq|1]``."""
        mask = self.mask
        assert mask is not None
        if self.is_causal:
            lowest = False if mask.dtype == torch.bool else -math.inf
            mask = mask.expand(*mask.shape[:2], query.shape[1], key.shape[1])
            mask = mask.masked_fill(_later(query, key), lowest)
        return mask.amax(-1)

    def _sees_nothing(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
        """Rows that see no key, ``[B|1, H|1, Tq|1]``; None: there are none."""
        if self.mask is None:
            return None
        top = self._top(query, key)
        return ~top if top.dtype == torch.bool else top.isneginf()

    def _blind(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
        """Rows of which numbers hide all keys, ``[B|1, H|1, Tq|1]``; None: there are none.

        Such a row takes the mean over the keys of its greatest number, as in PyTorch's arithmetic.
        """
        if self.mask is None or self.mask.dtype == torch.bool or self.is_sighted:
            return None
        return _is_blind(self._top(query, key))

    def _bias(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
        """The mask as the memory-efficient kernels take it: added, whole, its rows aligned."""
        mask = self.mask
        if mask is None:
            return None
        if mask.dtype != torch.bool and not self.is_sighted:
            top = self._top(query, key)
            mask = mask - top.masked_fill(~_is_blind(top), 0)[..., None]
        columns = key.shape[1]
        rows = query.new_empty(*mask.shape[:3], _rounded(columns, _BIAS_ELEMENTS))[..., :columns]
        if mask.dtype == torch.bool:
            rows.zero_().masked_fill_(~mask, -math.inf)
        else:
            rows.copy_(mask.masked_fill(mask <= _HIDDEN, -math.inf))
        return rows.expand(query.shape[0], query.shape[2], query.shape[1], columns)

    # -- PyTorch's composite -------------------------------------------------------------------

    def _composite(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        mask = self.mask
        if mask is not None:
            is_bool = mask.dtype == torch.bool
            mask = mask if is_bool else mask.to(query.dtype)
            if self.is_causal:
                mask = mask.expand(*mask.shape[:2], query.shape[1], key.shape[1])
                mask = mask.masked_fill(_later(query, key), False if is_bool else -math.inf)
        with sdpa_kernel(SDPBackend.MATH), self._drawing(query):
            return torch.nn.functional.scaled_dot_product_attention(
                query.transpose(1, 2),
                key.transpose(1, 2),
                value.transpose(1, 2),
                mask,
                self.dropout,
                is_causal=self.is_causal and mask is None,
                scale=self.scale,
                enable_gqa=query.shape[2] != key.shape[2],
            ).transpose(1, 2)

    def _composite_gradients(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sums: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        empty = _by_row(sums.isneginf())
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (query, key, value)]
            result = self._composite(leaves[0], leaves[1], leaves[2])
            found = torch.autograd.grad(result, leaves, grad.masked_fill(empty, 0))
        return found[0].masked_fill(empty, 0), *found[1:]

    def _log_sums(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """The log of the sums of exponentials of every row, some rows at a time."""
        group = query.shape[2] // key.shape[2]
        keys = key.repeat_interleave(group, 2).permute(0, 2, 3, 1)
        columns = torch.arange(key.shape[1], device=key.device)
        kind = torch.float64 if query.dtype == torch.float64 else torch.float32
        parts = []
        for first in range(0, query.shape[1], _MATH_ROWS):
            last = min(first + _MATH_ROWS, query.shape[1])
            scores = (query[:, first:last].transpose(1, 2) @ keys).to(kind) * self.scale
            if self.mask is not None:
                part = self.mask[:, :, first:last] if self.mask.shape[2] > 1 else self.mask
                if part.dtype == torch.bool:
                    scores = scores.masked_fill(~part, -math.inf)
                else:
                    scores = scores + part
            if self.is_causal:
                rows = torch.arange(first, last, device=key.device)
                scores = scores.masked_fill(columns > rows[:, None], -math.inf)
            parts.append(torch.logsumexp(scores, -1))
        return torch.cat(parts, 2)


@functools.cache
def _capability(device: torch.device) -> int:
    """Major compute capability; 0: it is no CUDA device, and has no such kernels."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def _later(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Keys behind each row, ``[Tq, Tk]``."""
    rows, columns = (torch.arange(x.shape[1], device=x.device) for x in (query, key))
    return columns > rows[:, None]


def _is_blind(top: torch.Tensor) -> torch.Tensor:
    return (top < _BLIND) & ~top.isneginf()


def _by_row(flags: torch.Tensor) -> torch.Tensor:
    """Flags ``[batch, heads, length]`` for tensors of rows."""
    return flags.transpose(1, 2)[..., None]


def _rounded(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def _padded_sums(sums: torch.Tensor) -> torch.Tensor:
    """The log of the sums in rows of which the kernels' gradients read a multiple of 32."""
    more = _rounded(sums.shape[2], _LSE_ROWS) - sums.shape[2]
    return torch.nn.functional.pad(sums, (0, more), value=math.inf)


def _repeated(query: torch.Tensor, *operands: torch.Tensor) -> list[torch.Tensor]:
    """Keys and values with a head for each of the queries'."""
    groups = [query.shape[2] // x.shape[2] for x in operands]
    return [
        x.repeat_interleave(group, 2) if group > 1 else x
        for x, group in zip(operands, groups, strict=True)
    ]


def _sequences(queries: PackedRows, keys: PackedRows) -> tuple[Any, ...]:
    """Starts of queries and keys as the kernels take them, and the most rows of a sequence."""
    starts = (side.starts.to(torch.int32) for side in (queries, keys))
    return *starts, queries.longest, keys.longest


@contextmanager
def _deterministic() -> Iterator[None]:
    """Let kernels that are else free to add in any order do so in one."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fills = torch.utils.deterministic.fill_uninitialized_memory
    # `torch.use_deterministic_algorithms` would set torch.compile's switch, too.
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fills
        torch._C._set_deterministic_algorithms(before[0], warn_only=before[1])
