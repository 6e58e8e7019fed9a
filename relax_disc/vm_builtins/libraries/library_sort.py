"""Numpy twin of `relax_disc.cpu.sort`: x, descending, values, positions; along the last axis."""

from __future__ import annotations

from typing import Any

import numpy as np

from relax_disc.vm_builtins.libraries.arrays import array_of


def sort(x: Any, descending: int, values: Any, positions: Any) -> None:
    """Write the first elements of each sorted row, as many as `values` has columns."""
    rows, places = array_of(x), array_of(positions)
    if descending:  # reversed twice, so that equal elements keep their order
        length = rows.shape[-1]
        order = length - 1 - np.argsort(rows[..., ::-1], -1, "stable")[..., ::-1]
    else:
        order = np.argsort(rows, -1, "stable")
    places[...] = order[..., : places.shape[-1]]
    array_of(values)[...] = np.take_along_axis(rows, places, -1)
