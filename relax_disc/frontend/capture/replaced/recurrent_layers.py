"""Export `nn.LSTM`, `nn.GRU` and `nn.RNN` as whole layers over a symbolic length.

PyTorch's own tracing writes such a layer step by step, which fixes its length.  Here it becomes
products of the inputs, one operator for the recurrent part of each layer and direction, and dropout
in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from relax_disc import ops  # noqa: F401  registers torch.ops.relax_disc
from relax_disc.frontend.capture.loops.recorded import active
from relax_disc.frontend.capture.refusals import refusal
from relax_disc.frontend.capture.replaced.packed_sequences import Packing, packing_of
from relax_disc.ops.recurrence_steps import KINDS

_BIG = 1e4
"""Added up with anything finite, the logistic function of it is exactly 1, and of -_BIG 0."""

_AT_PADDING = {
    "lstm": (-_BIG, _BIG, 0.0, 0.0),  # gates: input, forget, cell, output
    "gru": (0.0, _BIG, 0.0),  # reset, update, new
    "rnn_tanh": (0.0,),
    "rnn_relu": (-1e30,),
}
"""Products of inputs beyond the end of a sequence, of each gate: the state stays, or is 0."""


def layers(kind: str, *args: Any) -> tuple[Tensor, ...]:
    """``torch.lstm`` and its like, of a padded tensor or of the rows of a packed sequence.

    Raises `UnsupportedOperatorError`: as `recurrent_layers`, or the sequence was packed elsewhere.
    """
    data, batch_sizes, *rest = args
    if not isinstance(rest[1], list | tuple):  # weights, which come one later
        return recurrent_layers(kind, *args)
    packing = packing_of(batch_sizes)
    out, *lasts = recurrent_layers(kind, packing.padded(data), *rest, packing=packing)
    return packing.pack(out), *lasts


def recurrent_layers(
    kind: str,
    x: Tensor,
    first: Any,
    weights: Any,
    has_biases: Any,
    num_layers: Any,
    dropout: Any,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
    packing: Packing | None = None,
) -> tuple[Tensor, ...]:
    """Stacked layers, each in one or two directions; ``packing``: where each sequence ends.

    Raises `UnsupportedOperatorError`: the layer projects its hidden state.
    """
    directions = 2 if bidirectional else 1
    each = len(weights) // (num_layers * directions)
    if each != (4 if has_biases else 2):
        raise refusal(kind, "proj_size is not supported; put a linear layer behind the layer")
    states = first if kind == "lstm" else (first,)  # each [layers * directions, B, H]
    dtype = _result_dtype(kind, x)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    lasts = []
    for layer in range(num_layers):
        outs = []
        for direction in range(directions):
            index = layer * directions + direction
            own = weights[index * each : (index + 1) * each]
            state = torch.stack([s[index] for s in states]).to(wide)
            out, last = _one(kind, x, state, own, batch_first, direction == 1, wide, packing)
            outs.append(out.to(dtype))
            lasts.append(last)
        x = outs[0] if directions == 1 else torch.cat(outs, -1)
        if dropout and train and layer < num_layers - 1:
            x = functional.dropout(x, dropout, True)
    final = torch.stack(lasts, 1).to(dtype)
    return (x, *(final[k] for k in range(KINDS[kind].states)))


def _one(
    kind: str,
    x: Tensor,
    state: Tensor,
    weights: Sequence[Tensor],
    batch_first: bool,
    reverse: bool,
    wide: torch.dtype,
    packing: Packing | None,
) -> tuple[Tensor, Tensor]:
    """Trace one layer in one direction; the recurrent part in float32 for short floats."""
    loops, axis = active(), int(batch_first)
    if loops is not None and loops.inside is not None and isinstance(x.shape[axis], int):
        order = -1 if reverse else 1
        rows = x.to(wide).unbind(axis)[::order]
        outs, last = _by_cells(kind, rows, state, [weight.to(wide) for weight in weights])
        return torch.stack(outs[::order], axis), last
    input_weight, weight, *biases = weights
    projected = functional.linear(x, input_weight, biases[0] if biases else None).to(wide)
    bias = biases[1].to(wide) if biases else weight.new_zeros(weight.shape[0], dtype=wide)
    turned = packing if reverse else None  # each sequence round its own end, not all at once
    if packing is not None:
        gates = projected.new_tensor(_AT_PADDING[kind]).repeat_interleave(weight.shape[1])
        projected = packing.only(projected, gates)
    if turned is not None:
        projected, reverse = turned.flipped(projected), False
    out, last, _ = torch.ops.relax_disc.recurrence(
        projected, state, weight.to(wide), bias, kind, batch_first, reverse
    )
    if packing is not None:
        last = torch.cat([packing.at_last(out)[None], last[1:]])
    return (out if turned is None else turned.flipped(out)), last


def _by_cells(
    kind: str, rows: Sequence[Tensor], state: Tensor, weights: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor]:
    """Trace positions one by one: what a loop's step repeats has no operator of ours.

    ``state``: before them and, returned behind their outputs, after them.
    """
    cell, outs = getattr(torch, f"{kind}_cell"), []
    for row in rows:
        made = cell(row, tuple(state) if kind == "lstm" else state[0], *weights)
        state = torch.stack(made if kind == "lstm" else (made,)).to(state.dtype)
        outs.append(state[0])
    return outs, state


def _result_dtype(kind: str, x: Tensor) -> torch.dtype:
    """Type that the layer returns: autocast's, which a GRU of PyTorch does not heed on the CPU."""
    if torch.is_autocast_enabled("cpu") and kind != "gru" and x.dtype != torch.float64:
        return torch.get_autocast_dtype("cpu")
    return x.dtype
