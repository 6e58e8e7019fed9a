"""The recurrent part of RNN, GRU and LSTM layers, step by step, for PyTorch's tracer and CUDA.

Gates lie in PyTorch's order along the last axis.

=========== ================= ============================ =============================
kind        gates             reserve for the gradient     gradients
=========== ================= ============================ =============================
`rnn_tanh`  1                 none                         1
`rnn_relu`  1                 none                         1
`gru`       3: r, z, n        4: r, z, n, q                4: r, z, q, n
`lstm`      4: i, f, g, o     5: i, f, g, o, cell          4: i, f, g, o
=========== ================= ============================ =============================

`q = W_n h + b_n` is what a GRU's reset gate multiplies.  The first `gates` parts of the gradients
belong to the recurrent product, which makes the gradients of weight and bias; for a GRU the
gradient of the projected input is parts r, z and n.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, from_dlpack, sigmoid, tanh


@dataclass(frozen=True, slots=True)
class Kind:
    """Counts of the parts of one kind of layer, in units of the hidden width H."""

    gates: int
    states: int
    reserve: int
    gradients: int


KINDS: dict[str, Kind] = {
    "rnn_tanh": Kind(gates=1, states=1, reserve=0, gradients=1),
    "rnn_relu": Kind(gates=1, states=1, reserve=0, gradients=1),
    "gru": Kind(gates=3, states=1, reserve=4, gradients=4),
    "lstm": Kind(gates=4, states=2, reserve=5, gradients=4),
}
"""By name; the position of a name is its code in the library functions."""


def forward(
    projected: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor,
    kind: str,
    batch_first: bool,
    reverse: bool,
    out: Tensor,
    last: Tensor,
    reserve: Tensor,
) -> None:
    """Run a layer in one direction.

    ``projected``: input times input weights plus their bias, ``[T, B, gates H]``, or ``[B, T,
    ...]`` if `batch_first`, as all arrays with a time axis. ``state``: first state ``[states, B,
    H]``: hidden, and the cell of an LSTM. ``weight``, ``bias``: of the recurrent product, ``[gates
    H, H]`` and ``[gates H]``. ``kind``: a key of `KINDS`. ``batch_first``, ``reverse``: whether the
    batch is the first axis; whether time runs from the end to the start. ``out``, ``last``,
    ``reserve``: results: hidden states ``[T, B, H]``, state after the last step like `state`, and
    what the gradient needs, ``[T, B, reserve H]``.
    """
    width = weight.shape[1]
    projected, out, reserve = (_by_time(x, batch_first) for x in (projected, out, reserve))
    hidden = state[0]
    cell: Any = state[1] if kind == "lstm" else None
    for t in _times(projected.shape[0], reverse):
        product = hidden @ weight.T + bias
        if kind == "lstm":
            i, f, g, o = _parts(projected[t] + product, width)
            i, f, g, o = sigmoid(i), sigmoid(f), tanh(g), sigmoid(o)
            cell = f * cell + i * g
            hidden = o * tanh(cell)
            _store(reserve[t], width, (i, f, g, o, cell))
        elif kind == "gru":
            (r, z, n), (by_r, by_z, q) = _parts(projected[t], width), _parts(product, width)
            r, z = sigmoid(r + by_r), sigmoid(z + by_z)
            n = tanh(n + r * q)
            hidden = n + z * (hidden - n)
            _store(reserve[t], width, (r, z, n, q))
        else:
            value = projected[t] + product
            hidden = tanh(value) if kind == "rnn_tanh" else value * (value > 0)
        out[t] = hidden
    last[0] = hidden
    if kind == "lstm":
        last[1] = cell


def backward(
    grad_out: Tensor,
    grad_last: Tensor,
    state: Tensor,
    weight: Tensor,
    out: Tensor,
    reserve: Tensor,
    kind: str,
    batch_first: bool,
    reverse: bool,
    gradients: Tensor,
    grad_state: Tensor,
) -> None:
    """Run the gradient of `forward` against its direction of time.

    ``grad_out``, ``grad_last``: gradients of `out` and `last`. ``state``, ``weight``, ``out``,
    ``reserve``, ``kind``, ``batch_first``, ``reverse``: as in `forward`. ``gradients``,
    ``grad_state``: results: gradients before the activations, ``[T, B, gradients H]`` (see the
    module), and those of `state`.
    """
    width = weight.shape[1]
    grad_out, out, reserve, gradients = (
        _by_time(x, batch_first) for x in (grad_out, out, reserve, gradients)
    )
    by_hidden = grad_last[0]
    by_cell: Any = grad_last[1] if kind == "lstm" else None
    recurrent = KINDS[kind].gates * width
    steps = _times(out.shape[0], reverse)
    for k in range(len(steps) - 1, -1, -1):
        t = steps[k]
        by_hidden = by_hidden + grad_out[t]
        kept: Any = 0
        if kind == "lstm":
            i, f, g, o, cell = _parts(reserve[t], width)
            before = reserve[steps[k - 1]][..., 4 * width :] if k > 0 else state[1]
            bent = tanh(cell)
            by_cell = by_cell + by_hidden * o * (1 - bent * bent)
            parts = (
                by_cell * g * i * (1 - i),
                by_cell * before * f * (1 - f),
                by_cell * i * (1 - g * g),
                by_hidden * bent * o * (1 - o),
            )
            by_cell = by_cell * f
        elif kind == "gru":
            r, z, n, q = _parts(reserve[t], width)
            before = out[steps[k - 1]] if k > 0 else state[0]
            by_n = by_hidden * (1 - z) * (1 - n * n)
            by_r = by_n * q * r * (1 - r)
            by_z = by_hidden * (before - n) * z * (1 - z)
            kept = by_hidden * z
            parts = (by_r, by_z, by_n * r, by_n)
        elif kind == "rnn_tanh":
            parts = (by_hidden * (1 - out[t] * out[t]),)
        else:
            parts = (by_hidden * (out[t] > 0),)
        _store(gradients[t], width, parts)
        by_hidden = gradients[t][..., :recurrent] @ weight + kept
    grad_state[0] = by_hidden
    if kind == "lstm":
        grad_state[1] = by_cell


def library_function(function: Callable[..., None], options: int) -> Callable[..., None]:
    """Make a library function of `forward` or `backward`, over torch tensors.

    It takes `kind` as its position in `KINDS` and integers for truth values.

    ``function``: `forward` or `backward`. ``options``: position of `kind` among its arguments.
    """
    names = tuple(KINDS)

    def run(*arguments: Any) -> None:
        kind, batch_first, reverse = arguments[options : options + 3]
        inputs, results = arguments[:options], arguments[options + 3 :]
        tensors = ([from_dlpack(x) for x in part] for part in (inputs, results))
        function(*next(tensors), names[kind], bool(batch_first), bool(reverse), *next(tensors))

    return run


def _times(length: int, reverse: bool) -> range:
    return range(length - 1, -1, -1) if reverse else range(length)


def _by_time(tensor: Tensor, batch_first: bool) -> Tensor:
    return tensor.swapaxes(0, 1) if batch_first else tensor


def _parts(tensor: Tensor, width: int) -> list[Tensor]:
    return [tensor[..., k : k + width] for k in range(0, tensor.shape[-1], width)]


def _store(target: Tensor, width: int, parts: tuple[Tensor, ...]) -> None:
    for k, part in enumerate(parts):
        target[..., k * width : (k + 1) * width] = part
