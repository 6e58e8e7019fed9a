"""How often a tensor of the trace has been written into."""

from __future__ import annotations

import torch
from torch import Tensor


def times_written(x: Tensor) -> int:
    """Count the writes into a tensor and its views; the watch over the user's code is not told."""
    with torch._C.DisableTorchFunction():
        return x._version
