"""Relax operators that TVM does not have, one symbol each, so that a library or a kernel can match.

Importing this package registers the operators with TVM.  Each operator is pure, infers its type,
keeps its parameters in ``call.attrs`` (a ``DictAttrs``: ``call.attrs["scale"]``) and is turned into
kernels later, by a dispatch pass or by its ``FLegalize`` rule.
"""

from relax_disc.ops import legalize_attention as _legalize_attention  # noqa: F401
from relax_disc.ops import legalize_cross_entropy as _legalize_cross_entropy  # noqa: F401
from relax_disc.ops.attention import attention, attention_backward
from relax_disc.ops.cross_entropy import cross_entropy, cross_entropy_backward
from relax_disc.ops.ctc import ctc_loss, ctc_loss_backward
from relax_disc.ops.embedding import embedding_backward
from relax_disc.ops.logsumexp import logsumexp, logsumexp_backward
from relax_disc.ops.memory import evict, regenerate
from relax_disc.ops.recurrence import recurrence, recurrence_backward
from relax_disc.ops.sort import sort

__all__ = [
    "attention",
    "attention_backward",
    "cross_entropy",
    "cross_entropy_backward",
    "ctc_loss",
    "ctc_loss_backward",
    "embedding_backward",
    "evict",
    "logsumexp",
    "logsumexp_backward",
    "recurrence",
    "recurrence_backward",
    "regenerate",
    "sort",
]
