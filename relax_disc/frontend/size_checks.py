"""Conditions on the dims that calls check: what layers, tensors and branches of a model need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.functions import Mod

from relax_disc.analysis.symbolic.expr import SymbolicExpr
from relax_disc.errors import GraphError, ShapeRangeError, UnsupportedOperatorError
from relax_disc.frontend.capture.sizes.counted import CountedSize
from relax_disc.frontend.capture.sizes.dims import DimTable
from relax_disc.frontend.capture.sizes.guards import SizeBranch, everywhere
from relax_disc.frontend.capture.source_lines import at_line, source_line
from relax_disc.frontend.spec import SizeCheck
from relax_disc.frontend.symbols import SymbolTranslator

_MEANS_OF = {
    "aten.batch_norm.default": "Expected more than 1 value per channel",
    "aten.instance_norm.default": "Expected more than 1 spatial element",
    "aten.group_norm.default": "Expected more than 1 value per channel",
}


def normalization_checks(program: ExportedProgram, symbols: SymbolTranslator) -> list[SizeCheck]:
    """Find the layers that PyTorch refuses to train on one value for each mean.

    Batch and instance normalization look at the axes behind the channels, batch normalization at
    the batch, too; group normalization at a group's channels as well.
    """
    checks = []
    for node in program.graph.nodes:
        name = str(node.target)
        text = _MEANS_OF.get(name)
        if text is None:
            continue
        if name != "aten.group_norm.default" and not node.args[5]:
            continue  # in inference
        shape = [symbols.text(n) for n in node.args[0].meta["val"].shape]
        if name == "aten.group_norm.default":
            shape[:2] = f"({shape[0]})*({shape[1]})//{node.args[1]}", node.args[1]
        counted = shape[2:] if name == "aten.instance_norm.default" else [shape[0], *shape[2:]]
        size = "*".join(f"({n})" for n in counted) or "1"
        extents = ", ".join(f"{{shape[{k}]}}" for k in range(len(shape)))
        extents = f"[{extents}]" if "group" in name else f"torch.Size([{extents}])"
        message = f"{text} when training, got input size {extents}{at_line(node)}"
        checks.append(SizeCheck(size, "!=", 1, message, tuple(shape)))
    return checks


_OF_SOME = frozenset(
    f"aten.{name}"
    for name in (
        "amax.default",
        "amin.default",
        "max.default",
        "max.dim",
        "min.default",
        "min.dim",
        "argmax.default",
        "argmin.default",
    )
)
"""Reductions that PyTorch refuses of no elements."""


def emptiness_checks(
    program: ExportedProgram, dims: DimTable, symbols: SymbolTranslator
) -> list[SizeCheck]:
    """Find the reductions that PyTorch refuses where there is nothing to reduce."""
    checks = []
    for node in program.graph.nodes:
        if str(node.target) not in _OF_SOME:
            continue
        shape = node.args[0].meta["val"].shape
        axes = node.args[1] if len(node.args) > 1 else None
        axes = [axes] if isinstance(axes, int) else axes or range(len(shape))
        sizes = [shape[axis] for axis in axes]
        exprs = [size.node.expr for size in sizes if isinstance(size, torch.SymInt)]
        if any(free_unbacked_symbols(expr) for expr in exprs):
            continue
        if any(everywhere(expr >= 1, dims) is False for expr in exprs):
            size = "*".join(f"({symbols.text(n)})" for n in sizes)
            message = f"Expected reduction over one element or more, got none{at_line(node)}"
            checks.append(SizeCheck(size, "!=", 0, message))
    return checks


def extent_checks(graph: fx.Graph, dims: DimTable, symbols: SymbolTranslator) -> list[SizeCheck]:
    """Find the sizes that would be negative somewhere in the declared ranges.

    PyTorch traces with sizes of 2 or more and writes them so: ``x[:, 1:]`` twice has ``t - 2``
    positions, where for ``t = 1`` it has none.
    """
    checks, seen = [], set()
    for node in graph.nodes:
        for size in getattr(node.meta.get("val"), "shape", ()):
            expr = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
            if expr in seen or expr.is_nonnegative:
                continue
            seen.add(expr)
            if everywhere(expr >= 0, dims) is False:
                message = (
                    f"traced with longer batches, the model has a tensor of {{limit}} elements "
                    f"along an axis{at_line(node)}. Crop or pad the batch, or declare the dim "
                    "with a larger min."
                )
                checks.append(SizeCheck(0, "<=", symbols.arithmetic(expr), message))
    return checks


def branch_checks(branches: Sequence[SizeBranch], symbols: SymbolTranslator) -> list[SizeCheck]:
    """Write what calls must fulfil to go the example's way where the model branches on sizes.

    Raises `ShapeRangeError`: a condition is none between whole numbers.
    """
    checks = []
    for branch in branches:
        asked = symbols.arithmetic(branch.condition)
        if branch.raises:
            left, right = (_shown(side, symbols) for side in branch.condition.args)
            needs = f"{left} {branch.condition.rel_op} {right}"
            message = f"the model raises {branch.raises} at {branch.line}: it needs {needs}"
        else:
            message = (
                f"the model {branch.what} at {branch.line}, and goes the example's way where "
                f"{asked}. Crop or pad the batch, or compile a second step with such a batch as "
                "the example."
            )
        message = message.replace("{", "{{").replace("}", "}}")
        try:
            checks += _checks_of(branch.condition, message, symbols)
        except GraphError as error:
            raise ShapeRangeError(
                f"{branch.line}: the model goes one way where {asked} and another elsewhere, which "
                "calls cannot check; write it without division and max, or declare ranges that "
                "decide it."
            ) from error
    return checks


def count_checks(sizes: Sequence[CountedSize], symbols: SymbolTranslator) -> list[SizeCheck]:
    """Write what the sizes that a function counts must fulfil beyond their ranges.

    Raises `UnsupportedOperatorError`: a condition is none between whole numbers.
    """
    checks = []
    for size in sizes:
        for condition in dict.fromkeys(size.conditions):
            for symbol in condition.free_symbols:
                symbols.variable(symbol)  # a call is told its size
            try:
                left, right = (_shown(side, symbols) for side in condition.args)
                message = f"needs {left} {condition.rel_op} {right}{at_line(size.node)}"
                checks += _checks_of(condition, message, symbols)
            except GraphError as error:
                line = source_line(size.node)
                raise UnsupportedOperatorError(
                    f"{line}: the model needs {condition}, which calls cannot check.",
                    ((str(size.node.target), str(line)),),
                ) from error
    return checks


def _shown(size: Any, symbols: SymbolTranslator) -> str:
    """Write a size for a message, a remainder as one."""
    parts = [symbols.arithmetic(x) for x in (size.args if isinstance(size, Mod) else [size])]
    return str(SymbolicExpr.parse(" % ".join(f"({part})" for part in parts)))


def _checks_of(condition: Any, message: str, symbols: SymbolTranslator) -> list[SizeCheck]:
    """Write a relation of two sizes as checks.

    Raises `GraphError`: they are no arithmetic of whole numbers.
    """
    less, more = condition.args
    if isinstance(condition, sympy.Ge | sympy.Gt):
        less, more = more, less
    if isinstance(condition, sympy.Gt | sympy.Lt):
        less += 1
    left, right = (symbols.arithmetic(side) for side in (less, more))
    for side in (left, right):
        SymbolicExpr.parse(side)
    relation = "!=" if isinstance(condition, sympy.Ne) else "<="
    checks = [SizeCheck(left, relation, right, message)]
    if isinstance(condition, sympy.Eq):
        checks.append(SizeCheck(right, "<=", left, message))
    return checks
