"""Branches of a model's own code on the size of one dim that go two ways within its range.

``if pad > 0: y = y[:, :length]`` is written for speed: where the padding is 0, the slice takes all
of ``y``.  torch.export keeps the way of the example and would be right for some sizes alone; of
``length == 1`` it does not even note that, since its symbols are 2 or more.  Each way is exported
for the sizes that take it, and where all are one program (:mod:`.same_program`) that program is
right for all sizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import sympy
import torch
from torch.export import Dim

from relax_disc.errors import UnsupportedOperatorError
from relax_disc.frontend.capture.sizes.dims import (
    Sizes,
    root_of,
    size_at,
    sizes_of,
    spec_of,
    symbol_of,
)
from relax_disc.frontend.capture.sizes.evaluation import evaluate, example_among
from relax_disc.frontend.capture.source_lines import SourceLine


class Ways:
    """The conditions on one dim that a model's code asked for and that not all its sizes fulfil.

    ``by_source``: what is declared of each axis, by the name that PyTorch has for its size.
    ``are_free``: whether the example's answer is given without a note that it must hold.
    ``asked``: the conditions, over symbols named after the dims, as the example has them, with the
    lines that asked. ``example_sizes``: at which the last export was made, by dim. ``part``: the
    sizes for which the model is exported, where these are not all.
    """

    def __init__(self, by_source: Mapping[str, Any]) -> None:
        self._by_source = by_source
        self._tables: dict[str, dict[bytes, np.ndarray]] = {}  # truth at each size, by dim
        self.joint: dict[Any, SourceLine] = {}  # conditions on several dims, as ``asked`` has them
        self.example_sizes: dict[str, int] = {}
        self.asked: dict[Any, SourceLine] = {}
        self.are_free = False
        self.part: Sizes = {}

    def __bool__(self) -> bool:
        """Whether there is more than one way."""
        return bool(self._tables)

    @property
    def are_unseen(self) -> bool:
        """Whether there are others than the way that is exported."""
        return bool(self._tables) and not self.are_free

    def begin(self) -> None:
        """Forget what was asked, before another export; where ways are free it adds up."""
        if not self.are_free:
            self._tables.clear()
            self.asked.clear()

    def truth(self, condition: torch.SymBool, line: SourceLine) -> bool | None:
        """Note a condition; return its truth where ways are free and it has two."""
        expr: Any = condition.node.expr
        env = condition.node.shape_env
        found = self._root(expr, env)
        if found is None:
            named = self.named(condition)
            if named is not None:
                self.joint.setdefault(named, line)
            return None
        root, dims = found
        sizes = sizes_of(spec_of(root))
        values = {symbol: size_at(dim, sizes) for symbol, dim in dims.items()}
        undefined: list[Any] = []
        try:
            table = np.broadcast_to(evaluate(expr, values, undefined), sizes.shape)
        except UnsupportedOperatorError as error:
            # PyTorch's own note of it may be lost, and with it that the way is the example's.
            raise UnsupportedOperatorError(f"{line}: {error}") from None
        if undefined and not self.are_free:
            return None
        at_example = {symbol: env.backed_var_to_val[symbol] for symbol in dims}
        truth = bool(expr.xreplace(at_example))
        for divides_by_0 in undefined:  # at which no way leads here
            table = np.where(divides_by_0, truth, table)
        if table.all() or not table.any():
            return None
        asked = self.named(condition)
        self.asked.setdefault(asked if truth else sympy.Not(asked), line)
        self._tables.setdefault(root.__name__, {})[table.tobytes()] = table
        at = [values[symbol] == int(size) for symbol, size in at_example.items()]
        self.example_sizes[root.__name__] = int(sizes[np.logical_and.reduce(at).argmax()])
        return truth if self.are_free else None

    def named(self, condition: torch.SymBool) -> Any:
        """Write a condition over symbols named after the dims; None: it is of other sizes too."""
        env = condition.node.shape_env
        dims = {symbol: self._dim(env, symbol) for symbol in condition.node.expr.free_symbols}
        if not dims or None in dims.values():
            return None
        return condition.node.expr.xreplace(
            {symbol: size_at(dim, symbol_of(root_of(dim).__name__)) for symbol, dim in dims.items()}
        )

    def is_never_zero(self, expr: Any, env: Any) -> bool:
        """Say whether an expression is 0 at no size of the part, which is of its one dim."""
        found = self._root(expr, env) if self.part else None
        if found is None or found[0].__name__ not in self.part:
            return False
        root, dims = found
        sizes = self.part[root.__name__]
        try:
            values = {symbol: size_at(dim, sizes) for symbol, dim in dims.items()}
            return bool(np.all(evaluate(expr, values)))
        except UnsupportedOperatorError:
            return False

    def clamped(self, size: Any) -> Any:
        """Return a difference of sizes as it is."""
        return size

    def _root(self, expr: Any, env: Any) -> tuple[Any, dict[Any, Any]] | None:
        """Return the one dim that an expression is of, and what each symbol is declared as."""
        dims = {symbol: self._dim(env, symbol) for symbol in expr.free_symbols}
        roots = {root_of(dim) for dim in dims.values()}
        root = roots.pop() if len(roots) == 1 else None
        return None if root is None else (root, dims)

    def _dim(self, env: Any, symbol: sympy.Symbol) -> Any:
        sources = (source.name for source in env.var_to_sources.get(symbol, ()))
        dims = (self._by_source.get(name) for name in sources)
        return next((dim for dim in dims if type(root_of(dim)) is Dim), None)

    def dims(self) -> dict[str, Any]:
        """Return the declared dims by name."""
        roots = map(root_of, self._by_source.values())
        return {root.__name__: root for root in roots if type(root) is Dim}

    def classes(self) -> list[Sizes]:
        """Split the sizes so that each part answers alike; that with most sizes is the first."""
        dims = self.dims()
        split = [
            [(name, part) for part in _parts(sizes_of(spec_of(dims[name])), list(tables.values()))]
            for name, tables in self._tables.items()
        ]
        classes: list[Sizes] = [dict(combination) for combination in itertools.product(*split)]
        return sorted(classes, key=lambda part: math.prod(map(len, part.values())))[::-1]

    def example(self, part: Sizes) -> dict[str, int]:
        """Choose sizes of a class to export at.

        Each is beyond the first size of every way, if it can be: what the ways count, such as
        chunks, is more than 1 there, which PyTorch would take for a number.
        """
        firsts: dict[str, int] = dict.fromkeys(part, 2)
        for other in self.classes():
            for name, sizes in other.items():
                firsts[name] = max(firsts[name], int(sizes[0]))
        return {name: _size_of(sizes, firsts[name]) for name, sizes in part.items()}


def _size_of(sizes: np.ndarray, least: int) -> int:
    beyond = sizes[sizes >= least]
    return int(example_among(beyond)) if len(beyond) else int(sizes[len(sizes) * 3 // 4])


def _parts(sizes: np.ndarray, tables: list[np.ndarray]) -> list[np.ndarray]:
    _, part = np.unique(np.stack(tables), axis=1, return_inverse=True)
    return [sizes[part.reshape(-1) == k] for k in range(int(part.max()) + 1)]
