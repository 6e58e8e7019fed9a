"""The operators by which an export records a step, and the one that takes their place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LIBRARY = (
    "loop_index(int loop, SymInt count) -> Tensor",
    "loop_carry(Tensor index, Tensor first) -> Tensor",
    "loop_end(Tensor index, Tensor[] olds, Tensor[] news, Tensor[] fresh, Tensor[] stacked, "
    "SymInt count) -> Tensor[]",
    "dynamic_loop(int loop, str body, Tensor[] operands) -> Tensor[]",
)


def _define() -> None:
    if hasattr(torch.ops.relax_disc, "loop_index"):
        return
    for schema in _LIBRARY:
        name, rest = schema.split("(", 1)
        torch.library.define(f"relax_disc::{name}", f"({rest}")

    def index(loop: int, count: Any) -> Tensor:
        return torch.empty((), dtype=torch.int64)

    def carry(index: Tensor, first: Tensor) -> Tensor:
        return torch.empty(first.shape, dtype=first.dtype, device=first.device)

    def end(
        index: Tensor, olds: Any, news: Any, fresh: Any, stacked: Any, count: Any
    ) -> list[Tensor]:
        made = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (*news, *fresh)]
        return made + [x.new_empty((count, *x.shape)) for x in stacked]

    for name, fake in (("loop_index", index), ("loop_carry", carry), ("loop_end", end)):
        torch.library.register_fake(f"relax_disc::{name}", fake)


_define()
