"""Numpy twins of the native connectionist temporal classification; formulas: `src/kernels/ctc.cc`.

================================== ==============================================================
`relax_disc.cpu.ctc_loss`          log_probs [T, N, C], targets [N, S], input_lengths [N],
                                   target_lengths [N], blank, loss [N], alpha [N, T, 2 S + 1]
`relax_disc.cpu.ctc_loss_backward` grad [N], (the first four), loss, alpha, blank, result
================================== ==============================================================

Integers are int64. `loss` is infinite where no path gives the target; its gradient is then NaN,
but 0 where `grad` is 0. The gradient is PyTorch's, made for the results of a log-softmax.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from relax_disc.vm_builtins.libraries.arrays import array_of


def ctc_loss(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int,
    loss: Any,
    alpha: Any,
) -> None:
    """Compute the loss of each sequence, and the logarithms of its paths' beginnings."""
    probs, losses, alphas = array_of(log_probs), array_of(loss), array_of(alpha)
    alphas[...] = -np.inf
    for n, (length, labels, skips) in enumerate(
        _sequences(targets, input_lengths, target_lengths, blank)
    ):
        count = len(labels)
        if length == 0:
            losses[n] = 0 if count == 1 else np.inf
            continue
        alphas[n, 0, : min(2, count)] = probs[0, n, labels[:2]]
        for t in range(1, length):
            before = alphas[n, t - 1, :count]
            skipped = np.where(skips, _shifted(before, 2), -np.inf)
            total = np.logaddexp(np.logaddexp(before, _shifted(before, 1)), skipped)
            alphas[n, t, :count] = total + probs[t, n, labels]
        losses[n] = -np.logaddexp.reduce(alphas[n, length - 1, max(count - 2, 0) : count])


def ctc_loss_backward(
    grad: Any,
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    loss: Any,
    alpha: Any,
    blank: int,
    result: Any,
) -> None:
    """Compute the gradient of the logarithms of the probabilities."""
    grads, probs, losses = array_of(grad), array_of(log_probs), array_of(loss)
    alphas, out = array_of(alpha), array_of(result)
    out[...] = 0
    for n, (length, labels, skips) in enumerate(
        _sequences(targets, input_lengths, target_lengths, blank)
    ):
        if np.isinf(losses[n]):
            out[:length, n] = np.nan if grads[n] != 0 else 0
            continue
        count = len(labels)
        beta = np.full(count, -np.inf, probs.dtype)
        for t in range(length - 1, -1, -1):
            if t == length - 1:
                beta[max(count - 2, 0) :] = 0
            else:
                back = beta[::-1]
                skipped = _shifted(np.where(skips, beta, -np.inf)[::-1], 2)
                beta = np.logaddexp(np.logaddexp(back, _shifted(back, 1)), skipped)[::-1].copy()
            beta += probs[t, n, labels]
            sums = np.full(probs.shape[2], -np.inf, probs.dtype)
            np.logaddexp.at(sums, labels, alphas[n, t, :count] + beta)
            with np.errstate(invalid="ignore"):
                share = np.exp(sums + losses[n] - probs[t, n])
            share = np.where(np.isneginf(sums), 0, share)
            out[t, n] = (np.exp(probs[t, n]) - share) * grads[n]


def _sequences(targets: Any, input_lengths: Any, target_lengths: Any, blank: int) -> list[Any]:
    """Length, labels of the states, and whether a state may follow the last but one, for each."""
    found = []
    lengths = zip(array_of(targets), array_of(input_lengths), array_of(target_lengths), strict=True)
    for target, length, count in lengths:
        labels = np.full(2 * int(count) + 1, blank, "int64")
        labels[1::2] = target[: int(count)]
        skips = np.zeros(len(labels), bool)
        skips[3::2] = labels[3::2] != labels[1:-2:2]
        found.append((int(length), labels, skips))
    return found


def _shifted(values: np.ndarray, places: int) -> np.ndarray:
    """Move values up by some places; -inf comes in."""
    return np.concatenate([np.full(places, -np.inf, values.dtype), values])[: len(values)]
