"""One trace at a time, without the words of PyTorch's own tools.

torch.export and make_fx patch what the whole process shares, so that two threads that trace at once
mislead each other.  What they log and warn of is about their own insides; this package's errors say
what the user can change.  With the environment variable ``TORCH_LOGS`` set, all of it is heard.

They also note the line of each operator, but of functions called ``forward`` alone; here it is the
innermost line of the user's, in ``loss_fn`` and in helper functions too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import traceback
import warnings
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch.export._trace
from torch.fx.proxy import TracerBase

from relax_disc.frontend.capture.lean_tracing import lean_tracing
from relax_disc.frontend.capture.source_lines import users_frames

_LOCK = threading.RLock()
_EXPORT: Any = torch.export._trace
_INSIDE = r"(torch\.(_dynamo|_export|_functorch|_higher_order_ops|export|fx|utils)\b|copyreg$)"


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Hold the process's right to trace, and keep PyTorch's tools quiet meanwhile.

    A context and, written as ``@tracing()``, a decorator.
    """
    with _LOCK, warnings.catch_warnings():
        is_inner = getattr(_EXPORT, "print", None) is _say_nothing
        if is_inner or os.environ.get("TORCH_LOGS"):
            yield
            return
        warnings.filterwarnings("ignore", module=_INSIDE)
        loggers = list(_loggers())
        for logger in loggers:
            logger.addFilter(_hear_nothing)
        try:
            with (
                # torch.export prints what it has traced of a model that it refuses.
                patch.object(_EXPORT, "print", _say_nothing, create=True),
                patch.object(TracerBase, "_filter_traceback_frames", _innermost),
                lean_tracing(),
            ):
                yield
        finally:
            for logger in loggers:
                logger.removeFilter(_hear_nothing)


def _innermost(_: TracerBase, summary: traceback.StackSummary) -> traceback.StackSummary:
    """Keep the user's innermost frame."""
    return traceback.StackSummary.from_list(users_frames(summary)[-1:])


def _hear_nothing(_: logging.LogRecord) -> bool:
    """Reject every record."""
    return False


def _say_nothing(*_: object, **__: object) -> None:
    """Stand in for ``print``."""


def _loggers() -> Iterator[logging.Logger]:
    """PyTorch's loggers: a filter holds for the records of one logger alone."""
    for name in ("torch", *logging.root.manager.loggerDict):
        if name.partition(".")[0] == "torch":
            yield logging.getLogger(name)
