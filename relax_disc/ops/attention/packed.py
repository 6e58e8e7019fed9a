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

Operands of ``relax_disc.packed_attention``: ``q [1, H, N, D]``, ``k [1, Hk, M, D]``, ``v [1, Hk, M,
Dv]``; of the queries ``starts [B + 1]`` int64 and ``places [3, N]`` int64, whose last row is the
position of each row in its sequence; the same of the keys, ``[B + 1]`` and ``[3, M]``; the mask, if
there is one; with dropout the state of the random operators; the lengths of queries and keys of the
padded batch, integers.  The gradients' begin with ``grad_out``, and ``out`` and ``lse`` follow
``v``.  The trained mask's gradient is one of the padded batch, ``[B, H, T, T]``, and zero where
rows are left out.

Only libraries compute these operators: the native kernels, and PyTorch's on CUDA but for dropout
and the gradient of a mask; `RemovePadding` emits them where those do.
"""

from __future__ import annotations

from tvm import relax

from relax_disc.ops import registry


def _infer(call: relax.Call, builder: relax.BlockBuilder) -> relax.TupleType:
    del builder
    q, _, v = (registry.tensor_type(arg, "relax_disc.packed_attention", 4) for arg in call.args[:3])
    registry.tensor_type(call.args[3], "relax_disc.packed_attention: starts", 1)
    shape, dtype = registry.extents(q), registry.dtype_name(q)
    out = relax.TensorType([*shape[:3], registry.extents(v)[3]], dtype)
    return relax.TupleType([out, relax.TensorType(shape[:3], registry.statistics_dtype(q))])


def _infer_backward(call: relax.Call, builder: relax.BlockBuilder) -> relax.TupleType:
    del builder
    name = call.op.name
    registry.tensor_type(call.args[6], f"{name}: starts", 1)
    masks = call.args[10:11] if name.endswith("_trained") else []
    return relax.TupleType([registry.tensor_type(x, name, 4) for x in (*call.args[1:4], *masks)])


registry.register("relax_disc.packed_attention", _infer, "Attention over packed sequences.")
registry.register(
    "relax_disc.packed_attention_backward",
    _infer_backward,
    "Gradients of attention over packed sequences.",
)
registry.register(
    "relax_disc.packed_attention_backward_trained",
    _infer_backward,
    "Gradients of attention over packed sequences, that of its mask among them.",
)
