"""Recurrent layers, in C++ and for CUDA, against PyTorch's own layers in float64."""

import numpy as np
import pytest
import torch
from torch import nn

from relax_disc.ops.recurrence_steps import KINDS
from tests.vm_builtins.library_calls import LIBRARIES, call

# (length, batch, width): single steps and rows, no whole vectors, several tiles and depth blocks.
SIZES = [(1, 1, 1), (3, 2, 5), (7, 17, 33), (2, 3, 130)]


def layer_of(kind, width, dtype):
    options = {"dtype": dtype}
    if kind.startswith("rnn"):
        options["nonlinearity"] = kind.removeprefix("rnn_")
    made = {"lstm": nn.LSTM, "gru": nn.GRU}.get(kind, nn.RNN)(width, width, **options)
    with torch.no_grad():
        made.weight_ih_l0.copy_(torch.eye(width).repeat(KINDS[kind].gates, 1))
        made.bias_ih_l0.zero_()
    return made


def compare(found, wanted, tolerance):
    size = max(1.0, float(np.abs(wanted).max(initial=0)))
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max(initial=0) <= tolerance * size


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_equals_pytorch(library, kind, reverse):
    counts = KINDS[kind]
    for index, (length, batch, width) in enumerate(SIZES):
        dtype, batch_first = ("float32", "float64")[index % 2], index // 2 % 2
        rng = np.random.default_rng(index)
        layer = layer_of(kind, width, torch.float64)
        # The same projected input for all gates: then PyTorch's weights are identities.
        x = rng.standard_normal((length, batch, width))
        state = rng.standard_normal((counts.states, batch, width)) * 0.5
        grads = rng.standard_normal((length, batch, width)), rng.standard_normal(state.shape)

        inputs = [torch.tensor(x, requires_grad=True), torch.tensor(state, requires_grad=True)]
        first = (inputs[1][:1], inputs[1][1:]) if kind == "lstm" else inputs[1]
        timed = inputs[0].flip(0) if reverse else inputs[0]
        out, last = layer(timed, first)
        out = out.flip(0) if reverse else out
        last = torch.cat(last) if kind == "lstm" else last
        wanted = torch.autograd.grad((out, last), inputs, [torch.tensor(g) for g in grads])

        def stored(array, swap=batch_first, dtype=dtype):
            return np.ascontiguousarray(array.swapaxes(0, 1) if swap else array, dtype)

        def made(parts, size=(length, batch, width), swap=batch_first, dtype=dtype):
            shape = (size[0], size[1], parts * size[2])
            return np.full((shape[1], shape[0], shape[2]) if swap else shape, np.nan, dtype)

        weight = np.ascontiguousarray(layer.weight_hh_l0.detach().numpy(), dtype)
        bias = np.ascontiguousarray(layer.bias_hh_l0.detach().numpy(), dtype)
        start, flags = state.astype(dtype), (list(KINDS).index(kind), batch_first, int(reverse))
        results = made(1), np.full_like(start, np.nan), made(counts.reserve)
        projected = stored(np.tile(x, counts.gates))
        call(library, "recurrence", projected, start, weight, bias, *flags, *results)
        tolerance = 1e-6 if dtype == "float32" else 1e-13
        compare(results[0], stored(out.detach().numpy()), tolerance)
        compare(results[1], last.detach().numpy(), tolerance)

        gradients, grad_state = made(counts.gradients), np.full_like(start, np.nan)
        call(
            library,
            "recurrence_backward",
            stored(grads[0]),
            grads[1].astype(dtype),
            start,
            weight,
            results[0],
            results[2],
            *flags,
            gradients,
            grad_state,
        )
        parts = np.split(gradients, counts.gradients, -1)
        by_input = sum([parts[k] for k in ((0, 1, 3) if kind == "gru" else range(len(parts)))])
        compare(by_input, stored(wanted[0].numpy()), 5 * tolerance)
        compare(grad_state, wanted[1].numpy(), 5 * tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_native_results_do_not_depend_on_the_batch(kind):
    """A sequence gives the same bits alone and among others, so also on any number of threads."""
    counts, (length, batch, width) = KINDS[kind], (5, 37, 72)
    rng = np.random.default_rng(7)

    def random(*shape):
        return rng.standard_normal(shape).astype("float32")

    projected, state = random(batch, length, counts.gates * width), random(counts.states, batch, 72)
    weight, bias = random(counts.gates * width, width) * 0.1, random(counts.gates * width)

    def run(rows):
        start = np.ascontiguousarray(state[:, rows])
        inputs = np.ascontiguousarray(projected[rows])
        results = (
            np.empty((len(inputs), length, width), "float32"),
            np.empty_like(start),
            np.empty((len(inputs), length, counts.reserve * width), "float32"),
        )
        code = list(KINDS).index(kind)
        call("native", "recurrence", inputs, start, weight, bias, code, 1, 0, *results)
        gradients = np.empty((len(inputs), length, counts.gradients * width), "float32")
        grads = np.ones_like(results[0]), np.ones_like(start)
        call(
            "native",
            "recurrence_backward",
            *grads,
            start,
            weight,
            results[0],
            results[2],
            code,
            1,
            0,
            gradients,
            np.empty_like(start),
        )
        return results[0], gradients

    whole = run(slice(None))
    for row in (0, 13, 36):
        for one, many in zip(run(slice(row, row + 1)), whole, strict=True):
            assert np.array_equal(one[0], many[row])
