"""Connectionist temporal classification, in C++ and for CUDA, against PyTorch."""

import numpy as np
import pytest
import torch

from relax_disc.errors import IndexRangeError
from tests.vm_builtins.library_calls import LIBRARIES, call

# (steps, sequences, classes, room for labels)
SIZES = [(1, 1, 2, 1), (12, 5, 7, 4), (30, 3, 4, 9)]


def sequences(steps, count, classes, room, blank):
    """Lengths that reach the ends, repeated labels, empty targets, and too long ones."""
    rng = np.random.default_rng(steps)
    labels = np.array([c for c in range(classes) if c != blank])
    targets = rng.choice(labels, (count, room))
    targets[0] = targets[0, 0]
    inputs, goals = rng.integers(1, steps + 1, count), rng.integers(0, room + 1, count)
    inputs[-1], goals[-1] = steps, room
    if count > 2:
        inputs[1], goals[1] = 1, room  # no path is so short
        goals[2] = 0
    return targets, inputs, goals


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_equals_pytorch(library, dtype):
    tolerance = {"rtol": 2e-5, "atol": 2e-5} if dtype == "float32" else {"rtol": 1e-9, "atol": 1e-9}
    for index, (steps, count, classes, room) in enumerate(SIZES):
        blank = index % classes
        rng = np.random.default_rng(index)
        targets, inputs, goals = sequences(steps, count, classes, room, blank)
        scores = torch.tensor(rng.standard_normal((steps, count, classes)))
        probs = torch.log_softmax(scores, -1).requires_grad_()
        given = [torch.tensor(x) for x in (targets, inputs, goals)]
        wanted = torch.nn.functional.ctc_loss(probs, *given, blank, reduction="none")
        grad = torch.tensor(rng.standard_normal(count))
        grad[torch.isinf(wanted)] = 0.0
        (by_probs,) = torch.autograd.grad(wanted, probs, grad)
        by_probs[:, torch.isinf(wanted)] = 0.0

        log_probs = probs.detach().numpy().astype(dtype)
        loss = np.empty(count, dtype)
        alpha = np.full((count, steps, 2 * room + 1), np.nan, dtype)
        result = np.full(log_probs.shape, np.nan, dtype)
        call(library, "ctc_loss", log_probs, targets, inputs, goals, blank, loss, alpha)
        np.testing.assert_allclose(loss, wanted.detach().numpy(), **tolerance)
        call(
            library,
            "ctc_loss_backward",
            grad.numpy().astype(dtype),
            log_probs,
            targets,
            inputs,
            goals,
            loss,
            alpha,
            blank,
            result,
        )
        np.testing.assert_allclose(result, by_probs.numpy(), **tolerance)


def test_a_length_beyond_the_tensor_is_refused():
    log_probs, loss = np.zeros((3, 1, 2), "float32"), np.empty(1, "float32")
    alpha = np.empty((1, 3, 5), "float32")
    targets, goals = np.ones((1, 2), "int64"), np.array([2])
    with pytest.raises(IndexRangeError, match=r"input_lengths = 4, allowed is 0 \.\. 3"):
        call("native", "ctc_loss", log_probs, targets, np.array([4]), goals, 0, loss, alpha)
