"""Sums of quotients in sizes, in one order everywhere: ``(t + 1) // 2 + t // 2``.

TVM 0.27's `FuseTIR` maps a kernel's sizes to its caller's by comparing shapes term by term.  Where
one has the other order it takes ``t`` to be ``t + 1``, and again, until the stack ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tvm
from tvm.ir import prim

from relax_disc.analysis.kernels.mutate import mutate, walk
from relax_disc.analysis.kernels.stages import constant
from relax_disc.transform.functions import copy_module, program_functions


def order_sums(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module with the terms of such sums, where shapes have any, in one order."""
    known: set[tuple[str, ...]] = set()

    def note(total: prim.Add) -> None:
        terms = list(_terms(total))
        quotients = [term for term in terms if isinstance(term, prim.FloorDiv)]
        if len(quotients) > 1:
            known.add(_key(terms))

    for _, function in program_functions(mod):
        walk(function, prim.Add, note)
    if not known:
        return mod

    def ordered(total: prim.Add, mutator: Any) -> Any:
        terms = list(_terms(total))
        if _key(terms) not in known:
            return mutator.default_mutate(total)
        first, *others = sorted(terms, key=_place)
        for term in others:
            first = first + term
        return first

    changed = {
        name: mutate(function, (prim.Add, ordered)) for name, function in mod.functions.items()
    }
    return copy_module(mod, changed)


def _terms(total: Any) -> Iterator[Any]:
    if isinstance(total, prim.Add):
        yield from _terms(total.a)
        yield from _terms(total.b)
    else:
        yield total


def _place(term: Any) -> tuple[bool, str]:
    """Numbers come last, as TVM has them."""
    return constant(term) is not None, str(term)


def _key(terms: list[Any]) -> tuple[str, ...]:
    return tuple(sorted(map(str, terms)))
