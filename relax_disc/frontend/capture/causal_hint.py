"""Do not let nn.Transformer look into a mask to find out whether it is causal.

Its layers compare the mask with a causal one to pass a hint on, which decides nothing where the
mask itself is applied; one compiled program cannot decide from data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.nn.modules import transformer


@contextlib.contextmanager
def masks_unread() -> Iterator[None]:
    """Take a mask for causal only where the model says so."""
    module: Any = transformer
    before = module._detect_is_causal_mask
    module._detect_is_causal_mask = lambda mask, is_causal=None, size=None: bool(is_causal)
    try:
        yield
    finally:
        module._detect_is_causal_mask = before
