"""Attention over sequences of different lengths that lie one after the other, without padding.

The operators are those of :mod:`relax_disc.ops.attention` on a batch of one whose length axis holds
the rows of all sequences: sequence ``b`` is rows ``starts[b]`` to ``starts[b + 1]``, rows see rows
of their own sequence, and what lies behind ``starts[-1]`` belongs to none: its results are 0, its
``lse`` is ``-inf``.  Rows of a sequence are in the order of their positions.  Keys have starts and
places of their own: they may be those of other sequences than the queries are, as where a decoder
reads what an encoder has made of its source; there are as many of both.

A mask is that of the padded batch, ``[B|1, H|1, T|1, T|1]``: it is read at the positions of the
rows, so nothing of the size of packed rows by packed rows exists.  Dropout, too, draws the numbers
of the padded batch.

Only libraries compute these operators: the native kernels, and PyTorch's on CUDA but for dropout
and the gradient of a mask; `RemovePadding` emits them where those do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import relax

from relax_disc.ops import registry


def packed_attention(
    operands: Sequence[relax.Expr], rest: Sequence[relax.Expr], attrs: Mapping[str, Any]
) -> relax.Call:
    """Build ``relax_disc.packed_attention``.

    Parameters
    ----------
    operands : sequence of relax.Expr
        ``q [1, H, N, D]``, ``k [1, Hk, M, D]``, ``v [1, Hk, M, Dv]``; of the queries ``starts
        [B + 1]`` int64 and ``places [3, N]`` int64, whose last row is the position of each row in
        its sequence; the same of the keys, ``[B + 1]`` and ``[3, M]``.
    rest : sequence of relax.Expr
        The mask, if there is one; with dropout the state of the random operators; the lengths of
        queries and keys of the padded batch, integers.
    attrs : mapping
        Of `attention`.

    Returns
    -------
    relax.Call
        Of type ``Tuple(out [1, H, N, Dv], lse [1, H, N])``.
    """
    return registry.call("relax_disc.packed_attention", [*operands, *rest], attrs)


def packed_attention_backward(
    operands: Sequence[relax.Expr], rest: Sequence[relax.Expr], attrs: Mapping[str, Any]
) -> relax.Call:
    """Build ``relax_disc.packed_attention_backward``: gradients of q, k and v, in their shapes.

    Parameters
    ----------
    operands : sequence of relax.Expr
        ``grad_out``, ``q``, ``k``, ``v``, ``out``, ``lse``, and starts and places of queries and
        keys.
    rest, attrs
        As given to `packed_attention`.
    """
    return registry.call("relax_disc.packed_attention_backward", [*operands, *rest], attrs)


def packed_attention_backward_trained(
    operands: Sequence[relax.Expr], rest: Sequence[relax.Expr], attrs: Mapping[str, Any]
) -> relax.Call:
    """Build ``relax_disc.packed_attention_backward_trained``, with the gradient of the mask.

    That is one of the padded batch, ``[B, H, T, T]``, and zero where rows are left out.
    """
    return registry.call("relax_disc.packed_attention_backward_trained", [*operands, *rest], attrs)


def _infer(call: relax.Call, builder: relax.BlockBuilder) -> relax.TupleType:
    del builder
    q, _, v = (registry.tensor_type(arg, "relax_disc.packed_attention", 4) for arg in call.args[:3])
    registry.tensor_type(call.args[3], "relax_disc.packed_attention: starts", 1)
    shape = registry.extents(q)
    return relax.TupleType(
        [
            relax.TensorType([*shape[:3], registry.extents(v)[3]], registry.dtype_name(q)),
            relax.TensorType(shape[:3], registry.statistics_dtype(q)),
        ]
    )


def _infer_backward(call: relax.Call, builder: relax.BlockBuilder) -> relax.TupleType:
    del builder
    registry.tensor_type(call.args[6], "relax_disc.packed_attention_backward: starts", 1)
    return relax.TupleType(
        [
            registry.tensor_type(arg, "relax_disc.packed_attention_backward", 4)
            for arg in call.args[1:4]
        ]
    )


def _infer_backward_trained(call: relax.Call, builder: relax.BlockBuilder) -> relax.TupleType:
    mask = registry.tensor_type(call.args[10], "relax_disc.packed_attention_backward: mask", 4)
    return relax.TupleType([*_infer_backward(call, builder).fields, mask])


registry.register("relax_disc.packed_attention", _infer, "Attention over packed sequences.")
registry.register(
    "relax_disc.packed_attention_backward",
    _infer_backward,
    "Gradients of attention over packed sequences.",
)
registry.register(
    "relax_disc.packed_attention_backward_trained",
    _infer_backward_trained,
    "Gradients of attention over packed sequences, that of its mask among them.",
)
