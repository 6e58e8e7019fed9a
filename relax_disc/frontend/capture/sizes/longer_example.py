"""Sizes for an example that is too short to tell: what is made of them is 1 by chance.

Of 12 positions in chunks of 16 there is one chunk, and PyTorch's operators take another way for one
than for several.  What holds at several holds at one as well, the other way round it need not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import sympy
import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from relax_disc.errors import UnsupportedOperatorError
from relax_disc.frontend.capture.sizes.dims import DimTable, sizes_of
from relax_disc.frontend.capture.sizes.evaluation import evaluate, example_among


def sizes_beyond_one(program: ExportedProgram, dims: DimTable) -> dict[str, int]:
    """Choose sizes at which no extent is 1 that is more at others; empty where none is.

    By the names of dims; extents of several dims, or of what data decide, are left as they are.
    """
    found: dict[str, np.ndarray] = {}  # by dim, the declared sizes that are long enough
    for extent in _ones(program):
        if {str(symbol) for symbol in extent.free_symbols} - set(dims.names):
            continue
        specs = {dims[symbol].name: dims[symbol] for symbol in extent.free_symbols}
        if len(specs) != 1:
            continue
        ((name, spec),) = specs.items()
        sizes: Any = found.get(name)
        sizes = sizes_of(spec) if sizes is None else sizes
        try:
            values = evaluate(extent, {symbol: sizes for symbol in extent.free_symbols})
        except UnsupportedOperatorError:
            continue
        beyond = sizes[np.broadcast_to(values, sizes.shape) > 1]
        if len(beyond):
            found[name] = beyond
    return {name: int(example_among(sizes)) for name, sizes in found.items()}


def _ones(program: ExportedProgram) -> Iterator[sympy.Expr]:
    """List extents of tensors that are 1 at the example's sizes."""
    seen = set()
    for node in program.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            for extent in value.shape if isinstance(value, torch.Tensor) else ():
                if isinstance(extent, torch.SymInt) and extent.node.expr not in seen:
                    seen.add(extent.node.expr)
                    if extent.node.hint == 1:
                        yield extent.node.expr
