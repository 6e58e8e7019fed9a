"""Kinds of recurrent layers and how many parts of width H their tensors have.

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

from dataclasses import dataclass


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
