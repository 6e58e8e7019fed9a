"""The inverse of the short-time Fourier transform, of any number of frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from relax_disc.frontend.capture import model_checks

_LEAST_WEIGHT = 1e-11  # PyTorch's own bound


def _istft(
    input: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: Any = None,
    return_complex: bool = False,
) -> Tensor | None:
    """Add up transforms of frames where they overlap; PyTorch's own fixes how many there are."""
    sizes = (*input.shape, length)
    if return_complex or not any(isinstance(size, torch.SymInt) for size in sizes):
        return None
    count, start = input.shape[-1], n_fft // 2 if center else 0
    hop, width = hop_length or n_fft // 4, win_length or n_fft
    if window is None:
        window = torch.ones(width, dtype=input.real.dtype, device=input.device)
    before = (n_fft - width) // 2
    window = functional.pad(window, (before, n_fft - width - before))
    del onesided  # of two sides PyTorch takes the first, too
    half = input[..., : n_fft // 2 + 1, :].transpose(-1, -2)
    frames = torch.fft.irfft(half, n=n_fft, dim=-1, norm="ortho" if normalized else "backward")
    # What lies beyond the last frame is 0, as if windows weighed 1 there.
    sums = _overlapped((frames * window).reshape(-1, count, n_fft), hop)[:, start:]
    weights = _overlapped((window * window).expand(1, count, n_fft), hop)[0, start:]
    taken = weights.shape[0] - start if length is None else length
    if length is not None:
        sums = functional.pad(sums, (0, length))
        weights = functional.pad(weights, (0, length), value=1.0)
    weights = weights[:taken]
    model_checks.asserted((weights > _LEAST_WEIGHT).all(), "istft: a place lies in no window")
    return (sums[:, :taken] / weights).reshape(*input.shape[:-2], taken)


def _overlapped(frames: Tensor, hop: int) -> Tensor:
    """Add frames [rows, count, width] up, each ``hop`` places after the one before it."""
    count, width = frames.shape[1:]
    whole = width + hop * (count - 1)
    columns = frames.transpose(1, 2)
    added = functional.fold(columns, (1, whole), (1, width), stride=(1, hop))
    return added.reshape(frames.shape[0], whole)


REPLACED: dict[Any, Callable[..., Any]] = {torch.istft: _istft, Tensor.istft: _istft}
