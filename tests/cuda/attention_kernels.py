"""Stand-ins for PyTorch's flash and memory-efficient kernels of attention, on the CPU.

Written from what PyTorch's sources say of them (`aten/src/ATen/native/transformers/cuda`): what
they accept, the layout of the log of the sums, on which side a causal mask is aligned.  What they
leave unwritten is NaN, and so is the result of a row that sees nothing, which no contract covers.

Dropout draws what the native library draws from the state that a seed was made of, so that results
are comparable; forward kernels take the seed from the generator, the others from their operands.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from relax_disc.ops.philox import MANTISSA_BITS
from relax_disc.vm_builtins.capturing import is_capturing
from relax_disc.vm_builtins.libraries import cuda_attention_kernels, random_seeds
from tests.philox import philox

calls: list[str] = []
"""Names of the stand-ins that ran, in order; for tests to read and clear."""
_LSE_ROWS = 32
_states: dict[int, tuple[int, int, int]] = {}
"""Seed, offset and stream that a seed was made of."""


@contextmanager
def attention_kernels(major: int = 9) -> Iterator[None]:
    """Inside, every device has the kernels of a GPU of this compute capability."""
    _register()
    with (
        mock.patch.object(cuda_attention_kernels, "_capability", lambda device: major),
        mock.patch.object(random_seeds, "seed_of", _seed_of),
    ):
        yield


def _seed_of(state: Tensor, stream: int, make: Any = random_seeds.seed_of) -> int:
    seed = make(state, stream)
    made_of = (*state.tolist(), stream)
    assert _states.setdefault(seed, made_of) == made_of, "two states have one seed"
    return seed


def _factors(p: float, seed: int, *shape: int) -> Tensor | None:
    """What dropout multiplies weights ``[batch, heads, rows, columns]`` by; None: nothing."""
    if p == 0:
        return None
    words = philox(*_states[seed], math.prod(shape)) >> (32 - MANTISSA_BITS)
    kept = words.to(torch.float32) * 2.0**-MANTISSA_BITS >= p
    return kept.reshape(shape) / (1 - p)


@functools.cache
def _register() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    for function in (
        _flash_attention_forward,
        _flash_attention_backward,
        _efficient_attention_forward,
        _efficient_attention_backward,
    ):
        library.impl(function.__name__, function, "CPU")
    return library


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    offset: int | None,
    scale: float,
    factors: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """One sequence ``[length, heads, dim]``; ``offset``: row i sees column j <= i + offset."""
    q, k, v = (x.double().transpose(0, 1) for x in (query, key, value))
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    scores = q @ k.mT * scale
    if bias is not None:
        scores = scores + bias.double()
    if offset is not None:
        rows, columns = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
        scores = scores.masked_fill(columns > rows + offset, -math.inf)
    sums = scores.logsumexp(-1)  # [heads, length]
    weights = (scores - sums[..., None]).exp()  # NaN where a row sees nothing
    weights = weights if factors is None else weights * factors
    return (weights @ v).transpose(0, 1), sums.masked_fill(sums.isneginf(), math.nan)


def _gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor,
    bias: Tensor | None, offset: int | None, scale: float, factors: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of one sequence from the log of its sums, as the kernels compute them."""
    group = query.shape[1] // key.shape[1]
    q, k, v, g, o = (x.double().transpose(0, 1) for x in (query, key, value, grad, out))
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    scores = q @ k.mT * scale
    if bias is not None:
        scores = scores + bias.double()
    if offset is not None:
        rows, columns = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
        scores = scores.masked_fill(columns > rows + offset, -math.inf)
    weights = (scores - sums.double()[..., None]).exp()
    drops = 1.0 if factors is None else factors
    by_score = weights * (g @ v.mT * drops - (g * o).sum(-1, keepdim=True)) * scale
    dq, dk, dv = by_score @ k, by_score.mT @ q, (weights * drops).mT @ g
    dk, dv = (x.unflatten(0, (-1, group)).sum(1) for x in (dk, dv))
    return dq.transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1)


def _spans(starts: Tensor | None, count: int, longest: int) -> list[slice]:
    """Rows of each sequence."""
    if starts is None:
        return [slice(None)] * count
    assert starts.dtype == torch.int32 and starts.dim() == 1 and starts.is_contiguous()
    ends = starts.tolist()
    assert all(0 <= b - a <= longest for a, b in itertools.pairwise(ends)), "longest"
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


def _flash_checks(query: Tensor, key: Tensor, value: Tensor, starts: Any, dropout: float) -> None:
    assert 0 <= dropout < 1
    assert dropout == 0 or starts is None, "positions are not those of the padded batch"
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256
    assert query.shape[-1] % 8 == 0 and query.shape[-2] % key.shape[-2] == 0
    assert query.dim() == (4 if starts is None else 3)
    for x in (query, key, value):
        assert x.dtype == query.dtype and x.stride(-1) == 1


def _pieces(tensors: tuple[Tensor, ...], starts: Tensor | None, k: int, span: slice) -> Any:
    return [x[k] if starts is None else x[span] for x in tensors]


def _flash_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None,
    max_q: int, max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *,
    scale: float, window_size_left: Any = None, window_size_right: Any = None,
    seqused_k: Any = None, alibi_slopes: Any = None, block_table: Any = None,
    num_splits: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    calls.append("flash" if cum_seq_q is None else "flash packed")
    _flash_checks(query, key, value, cum_seq_q, dropout_p)
    heads = query.shape[-2]
    seed = torch.default_generator.initial_seed()
    factors = _factors(dropout_p, seed, len(query), heads, max_q, max_k)
    out = torch.full_like(query, math.nan)
    shape = (query.shape[0], heads, query.shape[1]) if cum_seq_q is None else (heads, len(query))
    sums = torch.full(shape, math.nan)
    rows, columns = (
        _spans(starts, query.shape[0], most)
        for starts, most in ((cum_seq_q, max_q), (cum_seq_k, max_k))
    )
    for k, (r, c) in enumerate(zip(rows, columns, strict=True)):
        (q,) = _pieces((query,), cum_seq_q, k, r)
        keys, values = _pieces((key, value), cum_seq_k, k, c)
        offset = len(keys) - len(q) if is_causal else None  # aligned to the bottom right
        drops = None if factors is None else factors[k]
        found, logs = _attend(q, keys, values, None, offset, scale, drops)
        if cum_seq_q is None:
            out[k], sums[k] = found.to(out.dtype), logs.float()
        else:
            out[r], sums[:, r] = found.to(out.dtype), logs.float()
    state = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return out, sums, *state, torch.empty(0, dtype=query.dtype)


def _flash_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, rng_state: Tensor, unused: Tensor, *, scale: float,
    window_size_left: Any = None, window_size_right: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    calls.append("flash backward" if cum_seq_q is None else "flash packed backward")
    assert torch.are_deterministic_algorithms_enabled(), "the order of sums is free"
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    _flash_checks(query, key, value, cum_seq_q, dropout_p)
    heads = query.shape[-2]
    shape = (query.shape[0], heads, query.shape[1]) if cum_seq_q is None else (heads, len(query))
    assert logsumexp.shape == shape and logsumexp.dtype == torch.float32
    assert logsumexp.is_contiguous()
    assert rng_state.dtype == torch.uint64 and rng_state.shape == (2,) and int(rng_state[1]) == 0
    factors = _factors(dropout_p, int(rng_state[0]), len(query), heads, max_q, max_k)
    results = tuple(torch.full_like(x, math.nan) for x in (query, key, value))
    rows, columns = (
        _spans(starts, query.shape[0], most)
        for starts, most in ((cum_seq_q, max_q), (cum_seq_k, max_k))
    )
    for k, (r, c) in enumerate(zip(rows, columns, strict=True)):
        grad, q, o = _pieces((grad_out, query, out), cum_seq_q, k, r)
        keys, values = _pieces((key, value), cum_seq_k, k, c)
        logs = logsumexp[k] if cum_seq_q is None else logsumexp[:, r]
        offset = len(keys) - len(q) if is_causal else None
        drops = None if factors is None else factors[k]
        found = _gradients(grad, q, keys, values, o, logs, None, offset, scale, drops)
        places = (r, c, c) if cum_seq_q is not None else (k, k, k)
        for target, place, x in zip(results, places, found, strict=True):
            target[place] = x.to(target.dtype)
    return results


def _efficient_checks(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, starts: Any, dropout: float
) -> None:
    assert 0 <= dropout < 1
    assert dropout == 0 or starts is None, "positions are not those of the padded batch"
    assert query.dim() == key.dim() == value.dim() == 4
    assert query.dtype in (torch.float32, torch.float16, torch.bfloat16)
    assert query.shape[0] == key.shape[0] == value.shape[0]
    assert query.shape[2] == key.shape[2] == value.shape[2], "no grouped heads"
    assert query.shape[3] == key.shape[3] and key.shape[1] == value.shape[1]
    unit = 16 // query.element_size()
    for x in (query, key, value):
        assert x.dtype == query.dtype and x.stride(3) == 1
        assert all(x.stride(axis) % unit == 0 for axis in (1, 2)), "not aligned"
    if starts is not None:
        assert query.shape[0] == 1 and bias is None
    if bias is not None:
        assert bias.dtype == query.dtype and bias.stride(3) == 1
        assert bias.shape == (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
        assert all(bias.stride(axis) % unit == 0 for axis in range(3)), "not aligned"


def _weights_kept(query: Tensor, key: Tensor, p: float, seed: int) -> Tensor | None:
    return _factors(p, seed, query.shape[0], query.shape[2], query.shape[1], key.shape[1])


def _efficient_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, max_seqlen_q: int | None, max_seqlen_k: int | None,
    dropout_p: float, custom_mask_type: int, compute_log_sumexp: bool = False, *, scale: float,
    seqlen_k: Any = None, window_size: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    calls.append("efficient" if cu_seqlens_q is None else "efficient packed")
    _efficient_checks(query, key, value, bias, cu_seqlens_q, dropout_p)
    assert compute_log_sumexp and custom_mask_type in (0, 1)
    seed = torch.default_generator.initial_seed()
    factors = _weights_kept(query, key, dropout_p, seed)
    out = query.new_full((*query.shape[:3], value.shape[3]), math.nan)
    rows = _spans(cu_seqlens_q, query.shape[0], max_seqlen_q or 0)
    columns = _spans(cu_seqlens_k, query.shape[0], max_seqlen_k or 0)
    longest = query.shape[1] if cu_seqlens_q is None else max_seqlen_q
    assert longest is not None
    length = -(-longest // _LSE_ROWS) * _LSE_ROWS
    sums = torch.full((len(rows), query.shape[2], length), math.nan)
    offset = 0 if custom_mask_type else None  # aligned to the top left
    for k, (r, c) in enumerate(zip(rows, columns, strict=True)):
        batch = k if cu_seqlens_q is None else 0
        extra = None if bias is None else bias[k]
        drops = None if factors is None else factors[k]
        found, logs = _attend(
            query[batch, r], key[batch, c], value[batch, c], extra, offset, scale, drops
        )
        out[batch, r] = found.to(out.dtype)
        sums[k, :, : logs.shape[1]] = logs.float()
    state = torch.empty((), dtype=torch.long), torch.empty((), dtype=torch.long)
    return out, sums, *state, longest, max_seqlen_k or key.shape[1]


def _efficient_attention_backward(
    grad_out_: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, out: Tensor,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_seqlen_q: int, max_seqlen_k: int,
    logsumexp: Tensor, dropout_p: float, philox_seed: Tensor, philox_offset: Tensor,
    custom_mask_type: int, bias_requires_grad: bool, *, scale: float, num_splits_key: Any = None,
    window_size: Any = None, shared_storage_dqdkdv: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    calls.append("efficient backward" if cu_seqlens_q is None else "efficient packed backward")
    assert torch.are_deterministic_algorithms_enabled(), "the order of sums is free"
    assert not bias_requires_grad and num_splits_key is None
    _efficient_checks(query, key, value, bias, cu_seqlens_q, dropout_p)
    if cu_seqlens_q is not None:
        assert 0 < max_seqlen_q <= query.shape[1] and 0 < max_seqlen_k <= key.shape[1]
    rows = _spans(cu_seqlens_q, query.shape[0], max_seqlen_q)
    columns = _spans(cu_seqlens_k, query.shape[0], max_seqlen_k)
    longest = query.shape[1] if cu_seqlens_q is None else max_seqlen_q
    assert logsumexp.dtype == torch.float32 and logsumexp.is_contiguous()
    assert logsumexp.shape[:2] == (len(rows), query.shape[2])
    assert logsumexp.shape[2] >= longest and logsumexp.shape[2] % _LSE_ROWS == 0
    assert philox_seed.dtype == philox_offset.dtype == torch.int64
    assert philox_seed.dim() == philox_offset.dim() == 0 and int(philox_offset) == 0
    factors = _weights_kept(query, key, dropout_p, int(philox_seed))
    results = tuple(torch.full_like(x, math.nan) for x in (query, key, value))
    offset = 0 if custom_mask_type else None
    for k, (r, c) in enumerate(zip(rows, columns, strict=True)):
        batch = k if cu_seqlens_q is None else 0
        extra = None if bias is None else bias[k]
        part = query[batch, r]
        # Beyond the rows the kernel reads sums too, and takes them to be infinite.
        behind = logsumexp[k, :, len(part) :]
        assert is_capturing() or (behind == math.inf).all()
        found = _gradients(
            grad_out_[batch, r], part, key[batch, c], value[batch, c], out[batch, r],
            logsumexp[k, :, : len(part)], extra, offset, scale,
            None if factors is None else factors[k],
        )  # fmt: skip
        for target, place, x in zip(results, (r, c, c), found, strict=True):
            target[batch, place] = x.to(target.dtype)
    return *results, torch.empty(())
