"""Make the library functions exist that compiled code calls by name.

============================================ ====================================================
`relax_disc.aten.call`                       see `ops/aten.py`; every device
`relax_disc.aten.loop`                       see `ops/loop.py`; every device
`relax_disc.cpu.matmul`                      a, b, a_split, b_split, transpose_a, transpose_b, c
`relax_disc.cpu.matmul_add`                  a, b, addend, (as above), c
`relax_disc.cpu.batch_matmul`                a, b, a_axes, b_axes, c_axes, c
`relax_disc.cpu.own_matmul` and so on        the three above without the choice of PyTorch's kernels
                                             (`product_choice.py`)
`relax_disc.cpu.aten_matmul` and so on       by PyTorch's kernels, also bfloat16 and float16
`relax_disc.cpu.attention`                   q, k, v, options, out, lse
`relax_disc.cpu.attention_backward`          grad_out, q, k, v, out, lse, options, dq, dk, dv;
                                             options: scale, is_causal, layout
`.._masked`, `.._dropout`, `.._masked_dropout` of both: mask, rng before scale, where they are;
                                             p, stream after layout where there is rng
`.._backward_trained`, with dropout, too     as masked, dmask after dv; CPU only
`relax_disc.cpu.packed_attention..`          as these; starts, places of queries and of keys
                                             before mask and rng; the lengths of both in
                                             the padded batch after stream, on CUDA after layout
`relax_disc.cpu.ctc_loss`                    log_probs [T, N, C], targets [N, S], input_lengths [N],
                                             target_lengths [N], blank, loss [N],
                                             alpha [N, T, 2 S + 1]
`relax_disc.cpu.ctc_loss_backward`           grad [N], (the first four), loss, alpha, blank, result
`relax_disc.cpu.embedding_backward`          grad, ids, padding_idx, out
`relax_disc.cpu.embedding_backward_add`      grad, ids, addend, padding_idx, out
`.._rows` of both                            first row, rows in all before out (CPU only)
`relax_disc.cpu.grouped_matmul`              rows, matrices, ends, transposed, out
`relax_disc.cpu.grouped_outer`               left, right, ends, out
`relax_disc.cpu.recurrence`                  projected, state, weight, bias, kind, batch_first,
                                             reverse, out, last, reserve
`relax_disc.cpu.recurrence_backward`         grad_out, grad_last, state, weight, out, reserve, kind,
                                             batch_first, reverse, gradients, grad_state
`relax_disc.cpu.nonzero`, `.unique`          see `ops/counted.py`
`relax_disc.cpu.vocabulary_head`             see `vocabulary_head`, also for the suffixes
`relax_disc.cpu.workspace_bytes`             formula, parameters -> bytes beside the arguments
`relax_disc.cpu.library_bytes`               formula, parameters, whether they are bounds -> bytes
                                             that MKL takes beside them
`relax_disc.cpu.multiplies`                  name of a type -> whether the processor has products
                                             of it
`relax_disc.cpu.own_workspace_bytes`         () -> bytes kept for calls that were lent none
============================================ ====================================================

`relax_disc.cuda.*` take the same arguments; packed attention has no dropout there, and other
dropout draws other numbers (`cuda_attention.py`). All tensors are compact; results are written into
the last. On the CPU they are float32 or float64 alike within a call.

* A matrix operand of any rank counts its first `split` axes as rows and the others as columns.
* An `axes` code is a permutation, one hexadecimal digit an axis: logical axis i of a batched
  operand is axis `axes[i]` of the tensor as stored; the columns of c must be stored contiguously.
* Attention's `layout` has one bit per tensor of rank 4, in the order of the arguments without mask
  and lse, the first at the lowest bit: 0 if the tensor is stored [batch, heads, length, dim], 1 if
  it is stored [batch, length, heads, dim]; the same bit of the second byte is 1 if it is stored
  [length, batch, heads, dim]. `lse` is always [batch, heads, length]. The mask is bool
  (True takes part) or added to the scores, [B|1, H|1, Tq|1, Tk|1]; bit 16 tells CUDA's that finite
  numbers of it hide no row wholly. A row that sees nothing has
  out = 0 and lse = -inf. Dropout draws the numbers of a tensor [B, H, Tq, Tk] of
  `frontend/random_ops.py` with the seed and offset `rng` [2], int64.
* The integers of `ctc_loss` are int64. A loss is infinite where no path gives the target; its
  gradient is then NaN, but 0 where `grad` is 0. The gradient is PyTorch's, made for the results of
  a log-softmax.
* Ids equal to `padding_idx` add nothing; `out` of an addition may be the addend itself.
* Rows of a grouped product lie group by group; `ends`, int32 or int64, says where each group ends.
  Rows behind the last give 0.
* A recurrence's `kind` is the position of a name in `KINDS` of `relax_disc.ops.recurrence_steps`,
  which has the shapes.
"""

from __future__ import annotations

import torch
import tvm_ffi

from relax_disc.vm_builtins import native, product_choice


def install(device: str) -> None:
    """Register the library's functions, once per process.

    Whoever compiles code needs them, and whoever loads compiled code.

    ``device``: "cuda"; everything else runs on the CPU's library.
    """
    tvm_ffi.register_error("LinAlgError", torch._C._LinAlgError)
    native.load()  # the CPU's functions, and what serves every device
    product_choice.choose()
    if device == "cuda":
        # Imports torch, a second's work.
        from relax_disc.vm_builtins.libraries import cuda_library

        cuda_library.register()
