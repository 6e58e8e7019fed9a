"""A call of one of PyTorch's own operators on planned memory, by a recipe in text.

``call_dps_packed("relax_disc.aten.call", (recipe, bytes, *operands), results)`` is a kernel like
any other to the planners.  ``bytes`` bounds what the operator allocates meanwhile.  The recipe is
JSON, of a version of its own, so that a saved step is refused rather than misread::

    {"version": 2, "operator": "aten::roll", "overload": "", "out": null,
     "arguments": [["operand", 0], ["list", [["operand", 1]]], ["list", [["int", 0]]]],
     "channels_last": false, "results": [0]}

An argument of the operator's schema, all of them in order, is written as

================== ==============================================================================
``operand``, k     the k-th operand: a tensor, or an integer that depends on sizes
``complex``, k     the k-th operand, float pairs along its last axis, seen as complex numbers
``scalar``, k      the number in the k-th operand, a tensor of one element on the host
``result``, k      the memory of the k-th result, where only its sizes are read
``none``
``int``, ``bool``  and the value
``float``, text    as ``repr`` writes it, so that infinities and NaN survive
``pair``, re, im   a complex number, parts as of ``float``
``dtype``, text    such as ``"float32"``
``text``, text
``device``         that of the results
``list``, items    arguments again
================== ==============================================================================

``results`` says for each tensor that the operator returns, lists flattened, which result of the
call it is copied into, or -1.  With ``out``, the name of an overload, the operator writes them
itself.  With ``channels_last`` tensors of four or more axes are stored ``[n, *p, c]`` and the
operator sees ``[n, c, *p]``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tvm import relax
from tvm.ir import StringImm

CALL = "relax_disc.aten.call"
VERSION = 2

Encoded = list[Any]


def plain(value: Any) -> Encoded | None:
    """Write an argument that is the same in every call; None where it is of another kind."""
    match value:
        case None:
            return ["none"]
        case bool():
            return ["bool", value]
        case int():
            return ["int", value]
        case float():
            return ["float", repr(value)]
        case complex():
            return ["pair", repr(value.real), repr(value.imag)]
        case str():
            return ["text", value]
        case torch.dtype():
            return ["dtype", str(value).removeprefix("torch.")]
    return None


@dataclass(slots=True)
class Recipe:
    """How to call an operator; operands are collected while arguments are written."""

    operator: str
    overload: str
    out: str | None
    channels_last: bool = False
    arguments: list[Encoded] = field(default_factory=list)
    operands: list[relax.Expr] = field(default_factory=list)
    fakes: list[Any] = field(default_factory=list)

    def operand(self, kind: str, value: relax.Expr, fake: Any) -> Encoded:
        """Add an operand of kind ``"operand"``, ``"complex"`` or ``"scalar"``."""
        self.operands.append(value)
        self.fakes.append(fake)
        return [kind, len(self.operands) - 1]

    def text(self, results: Sequence[int]) -> str:
        """Write the recipe down."""
        return json.dumps(
            {
                "version": VERSION,
                "operator": self.operator,
                "overload": self.overload,
                "out": self.out,
                "channels_last": self.channels_last,
                "arguments": self.arguments,
                "results": list(results),
            },
            separators=(",", ":"),
        )

    def call(
        self, results: Sequence[int], types: Sequence[relax.TensorType], scratch_bytes: relax.Expr
    ) -> relax.Call:
        """Build the call; its type is the only one of ``types``, or their tuple."""
        kind = types[0] if len(types) == 1 else list(types)
        return relax.call_dps_packed(
            CALL, [StringImm(self.text(results)), scratch_bytes, *self.operands], kind
        )
