"""Operators that TVM does not have, and those that libraries compute: one file says all about each.

Importing this package registers the operators with TVM and with torch, and fills the tables of
`registry`.  Each Relax operator is pure, infers its type, keeps its parameters in ``call.attrs`` (a
``DictAttrs``: ``call.attrs["scale"]``) and is turned into kernels later, by a dispatch rule or by
its ``FLegalize`` rule; the torch operator of the same name keeps it whole while a step is traced.
"""

from relax_disc.ops import batch_norm as _batch_norm  # noqa: F401
from relax_disc.ops import cumprod as _cumprod  # noqa: F401
from relax_disc.ops import loop as _loop  # noqa: F401
from relax_disc.ops import matmul as _matmul  # noqa: F401
from relax_disc.ops import reshape as _reshape  # noqa: F401
from relax_disc.ops import softmax as _softmax  # noqa: F401
from relax_disc.ops import vocabulary_head as _vocabulary_head  # noqa: F401
from relax_disc.ops.attention import attention, attention_backward, attention_backward_trained
from relax_disc.ops.convolution import convolution, convolution_input, convolution_weight
from relax_disc.ops.cross_entropy import cross_entropy, cross_entropy_backward
from relax_disc.ops.ctc import ctc_loss, ctc_loss_backward
from relax_disc.ops.embedding import embedding_backward
from relax_disc.ops.grouped_matmul import grouped_matmul, grouped_outer
from relax_disc.ops.logsumexp import logsumexp, logsumexp_backward
from relax_disc.ops.memory import await_gradient, evict, join_rows, regenerate, rows
from relax_disc.ops.recurrence import recurrence, recurrence_backward

__all__ = [
    "attention",
    "attention_backward",
    "attention_backward_trained",
    "await_gradient",
    "convolution",
    "convolution_input",
    "convolution_weight",
    "cross_entropy",
    "cross_entropy_backward",
    "ctc_loss",
    "ctc_loss_backward",
    "embedding_backward",
    "evict",
    "grouped_matmul",
    "grouped_outer",
    "join_rows",
    "logsumexp",
    "logsumexp_backward",
    "recurrence",
    "recurrence_backward",
    "regenerate",
    "rows",
]
