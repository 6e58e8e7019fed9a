"""Operators of this package, which are traced whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax

from relax_disc import ops  # noqa: F401  fills the table
from relax_disc.frontend.converters.registry import converts
from relax_disc.frontend.emitter import Emitter
from relax_disc.ops.registry import TRACED


def _enter(operator: str, build: Callable[..., relax.Call], keywords: tuple[str, ...]) -> None:
    def convert(emitter: Emitter, *args: Any) -> Any:
        count = len(args) - len(keywords)
        call = build(*args[:count], **dict(zip(keywords, args[count:], strict=True)))
        whole = emitter.emit(call)
        return emitter.elements(whole) if isinstance(whole.ty, relax.TupleType) else whole

    convert.__doc__ = f"The operator ``{operator.removesuffix('.default')}``, whole."
    converts(operator)(convert)


for _operator, (_build, _keywords) in TRACED.items():
    _enter(_operator, _build, _keywords)
