"""Find the rows of a batch that a step computes, before it runs.

The labels and the mask of the batch say which: see :mod:`relax_disc.analysis.padding.demand`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from relax_disc.analysis.padding.values import OVER
from relax_disc.frontend.spec import Packing

UNIT = 16
"""The number of rows is rounded up to a multiple of this, so that plans are used again."""


def rounded(count: int, most: int) -> int:
    """Return the number of rows that are computed where ``count`` are needed, of ``most``."""
    return min(-(-max(count, 1) // UNIT) * UNIT, most)


def place_rows(
    packing: Packing, leaves: Mapping[int, Tensor], sizes: Mapping[str, int]
) -> tuple[Tensor, Tensor]:
    """Make the two tensors that say where the rows of a packed batch come from.

    ``packing``: which rows are needed. ``leaves``: the batch, by the places of its leaves.
    ``sizes``: the dims of the batch. Returned: places, ``[3, tokens]`` int64: row, sequence and
    position of each row that is computed; starts, ``[batch + 1]`` int64: the first of each
    sequence, and the end of the last.
    """
    batch, length = packing.sequences(sizes), sizes[packing.length]
    some = next(iter(leaves.values()))
    indices = {
        "batch": torch.arange(batch, device=some.device)[:, None],
        "length": torch.arange(length, device=some.device)[None],
    }

    def read(expression: Any) -> Tensor:
        found = torch.as_tensor(_evaluate(expression, leaves, sizes, known), device=some.device)
        return found.bool().expand(batch, length)

    known: dict[Any, Any] = {("index", name): index for name, index in indices.items()}

    needed = counted = read(packing.counted)
    if packing.is_prefix:
        last = ((indices["length"] + 1) * counted).amax(1, keepdim=True)
        needed = indices["length"] < last
    if packing.kept is not None:
        kept = read(packing.kept) | counted
        needed = needed & kept if packing.is_prefix else kept
    if packing.shown is not None:  # a position that sees no key sees all
        shown = read(packing.shown)
        blind = needed & (~shown if packing.is_near else shown.cumsum(1) == 0)
        if not packing.is_prefix:  # and queries may be those of another length
            blind = blind | ~shown.any(1, keepdim=True)
        needed = needed | blind.any(1, keepdim=True)
    sequence, position = needed.nonzero(as_tuple=True)
    count = sequence.numel()
    places = torch.empty(3, rounded(count, batch * length), dtype=torch.int64, device=some.device)
    places[0, :count] = sequence * length + position
    places[1, :count] = sequence
    places[2, :count] = position
    # What fills up repeats a row that is needed, so that its values are as finite as that one's.
    places[:, count:] = places[:, :1] if count else 0
    starts = torch.zeros(batch + 1, dtype=torch.int64, device=some.device)
    torch.cumsum(needed.sum(1), 0, out=starts[1:])
    return places, starts


def _evaluate(
    value: Any, leaves: Mapping[int, Tensor], sizes: Mapping[str, int], known: dict[Any, Any]
) -> Any:
    """Evaluate an expression of `relax_disc.analysis.padding.values` for all rows at once."""
    if not isinstance(value, tuple):
        return value
    if value not in known:
        kind, *parts = value
        if kind == "size":
            known[value] = sizes[parts[0]]
        elif kind == "load":
            tensor = leaves[parts[0]]
            where = [_evaluate(part, leaves, sizes, known) for part in parts[1:]]
            # A choice evaluates both of its sides: what is outside is not chosen.
            bounds = zip(where, tensor.shape, strict=True)
            known[value] = tensor[tuple(torch.as_tensor(i).clamp(0, n - 1) for i, n in bounds)]
        elif kind in OVER:
            indices = {key: index for key, index in known.items() if key[0] == "index"}
            batch = indices["index", "batch"]
            inner = torch.arange(_evaluate(parts[1], leaves, sizes, known), device=batch.device)
            found = _evaluate(parts[0], leaves, sizes, {**indices, ("index", "inner"): inner[None]})
            found = torch.as_tensor(found, device=batch.device).expand(len(batch), len(inner))
            if kind == "cumsum":
                at = torch.as_tensor(_evaluate(parts[2], leaves, sizes, known), device=batch.device)
                at = at.clamp(0, len(inner) - 1).expand(len(batch), -1)
                known[value] = found.long().cumsum(1).gather(1, at)
            else:
                known[value] = getattr(found.long(), kind)(1, keepdim=True)
        else:
            arguments = [_evaluate(part, leaves, sizes, known) for part in parts]
            known[value] = _OPERATORS[kind](*arguments)
    return known[value]


def _choose(condition: Any, yes: Any, no: Any) -> Any:
    if isinstance(condition, bool):
        return yes if condition else no
    return torch.where(condition, yes, no)


_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "min": lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
    "max": lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "and": lambda *parts: _all(parts),
    "or": lambda *parts: ~_all([~_truth(part) for part in parts]),
    "not": lambda a: ~_truth(a),
    "truth": lambda a: a != 0,
    "choose": _choose,
}


def _truth(value: Any) -> Tensor:
    return torch.as_tensor(value).bool()


def _all(parts: Any) -> Tensor:
    result = _truth(parts[0])
    for part in parts[1:]:
        result = result & _truth(part)
    return result
