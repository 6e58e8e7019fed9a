"""Sizes that a model's own code refuses: ``assert queue_size % batch == 0``.

Its other sizes are compiled, and calls refuse these as the model does.
"""

from __future__ import annotations

import dis
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy

from relax_disc.frontend.capture.sizes.dims import DimTable, Sizes, symbol_of
from relax_disc.frontend.capture.sizes.evaluation import holds
from relax_disc.frontend.capture.sizes.guards import SizeBranch
from relax_disc.frontend.capture.source_lines import SourceLine, is_models


@dataclass(frozen=True, slots=True)
class ModelsError:
    """An error that an ``assert`` or ``raise`` of the model makes, and where."""

    text: str
    line: SourceLine


def models_own(error: BaseException) -> ModelsError | None:
    """Return what the model's own code raised, if that is what kept it from being exported."""
    cause = error.__cause__ or error
    last = cause.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or not is_models(last.tb_frame.f_code.co_filename):
        return None
    code = last.tb_frame.f_code
    if dis.opname[code.co_code[last.tb_lasti]] != "RAISE_VARARGS":
        return None  # an operation that fails, of symbols in place of numbers perhaps
    if isinstance(cause, TypeError | AttributeError):
        return None  # of a symbol that is no number perhaps
    said = str(cause).strip()
    if re.search(r"\b[su]\d+\b", said):  # PyTorch's names of sizes
        said = ""
    text = f"{type(cause).__name__}: {said}" if said else type(cause).__name__
    return ModelsError(text, SourceLine(code.co_filename, last.tb_lineno))


class RefusedSizes:
    """Classes of sizes that the model refuses, with its errors."""

    def __init__(self) -> None:
        self._parts: list[tuple[Sizes, ModelsError]] = []

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, part: Sizes, error: ModelsError) -> None:
        """Note that the model refuses a class of sizes."""
        self._parts.append((part, error))

    def holds(self, part: Sizes) -> bool:
        """Whether a class, of as many dims or more, lies in a refused one."""
        return any(
            all(
                name in part and np.isin(part[name], sizes).all() for name, sizes in refused.items()
            )
            for refused, _ in self._parts
        )

    def branches(
        self, asked: Mapping[Any, SourceLine], kept: Sequence[Sizes], dims: DimTable
    ) -> list[SizeBranch] | None:
        """Write what tells the refused sizes from the ``kept`` ones, for calls to check.

        ``asked``: conditions of the model, which the example fulfils, over the dims' names.
        None: nothing does, or the refused sizes are an end of a range, which ought to be declared.
        """
        found = {}
        for part, error in self._parts:
            tells = [
                condition
                for condition in asked
                if isinstance(condition, sympy.Eq | sympy.Ne)
                and _truth(condition, part) is False
                and all(_truth(condition, each) for each in kept)
            ]
            if not tells:
                return None
            found.setdefault(tells[0], error)
        symbols = {symbol_of(name): sympy.Symbol(key) for key, name in dims.names.items()}
        if any(not condition.free_symbols <= symbols.keys() for condition in found):
            return None  # one size alone is taken
        return [
            SizeBranch(condition.xreplace(symbols), error.line, raises=error.text)
            for condition, error in found.items()
        ]


def _truth(condition: Any, part: Sizes) -> bool | None:
    """Return what a condition is at the sizes of a class; None where that differs or is unknown."""
    names = {str(symbol) for symbol in condition.free_symbols}
    if len(names) != 1 or not names <= part.keys():
        return None
    (symbol,), (name,) = condition.free_symbols, names
    answers = np.broadcast_to(holds(condition, {symbol: part[name]}), len(part[name]))
    return bool(answers[0]) if answers.all() or not answers.any() else None
