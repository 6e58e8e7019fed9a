"""Tell the sizes that a model's own code compares from those that PyTorch compares inside.

Exported at one size, ``if x.shape[1] == 12`` takes one branch for good: the program is wrong at 12,
and the condition ``m != 12`` must hold. PyTorch compares sizes as well, to see whether the slice
``mask[:m, :m]`` of a table of 12 columns is contiguous; there "not equal" is the general way, which
is right for equal sizes too.

Lines such as ``for i in range(x.shape[1])`` fix a dim to the size of the example: they run as often
as the example is long.  Later torch.export says which dim is fixed; the line is seen here only, in
the moment when it happens.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import sympy
import torch
import torch._prims_common as prims
from sympy.core.relational import Relational
from torch._subclasses.fake_impls import op_implementations_dict
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from relax_disc.frontend.capture import model_checks
from relax_disc.frontend.capture.sizes.squeezes import Squeezes
from relax_disc.frontend.capture.sizes.ways import Ways
from relax_disc.frontend.capture.source_lines import SourceLine, calling_line, parse_stack

_UNKNOWN = SourceLine("", 0)
_BETWEEN = ("__bool__", "__int__", "__xor__")
_INSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


class SizeBranches:
    """The equalities of sizes on which a model's own code branched.

    ``ways``: of conditions that differ within the range of a dim. ``ones_are_general``: traced so
    that sizes of 1 take the way of all others, as declared dims do: what PyTorch alone compared
    with 1 need not hold.
    """

    def __init__(self, ways: Ways) -> None:
        self.ways = ways
        self._differences: dict[Any, SourceLine] = {}
        self._inequalities: set[Any] = set()
        self.asked: dict[Any, SourceLine] = {}
        self.numbers: dict[Any, SourceLine] = {}  # that an expression became, and where
        self.ones_are_general = False
        self.squeezes = Squeezes()

    def add(self, condition: Any, line: SourceLine) -> None:
        """Note a condition, whether it held or not, and the line that asked."""
        self.asked.setdefault(condition, line)
        for equality in condition.atoms(sympy.Eq, sympy.Ne):
            self._differences.setdefault(difference_of(equality), line)
        for inequality in condition.atoms(sympy.Ge, sympy.Gt, sympy.Le, sympy.Lt):
            self._inequalities |= {inequality.canonical, inequality.negated.canonical}

    def line(self, condition: Any) -> SourceLine:
        """Return the line that asked for a condition; one without a file where none is known."""
        found = (difference_of(e) for e in condition.atoms(sympy.Eq, sympy.Ne))
        return next((self._differences[d] for d in found if d in self._differences), _UNKNOWN)

    def decides(self, condition: Any) -> bool:
        """Whether a condition must hold: all but inequalities that PyTorch alone looked at.

        Sizes of 1 must not be mistaken, since they broadcast, unless the trace was told so.
        """
        if not isinstance(condition, sympy.Ne):
            return True
        if 1 in condition.args and not self.ones_are_general:
            return True
        return difference_of(condition) in self._differences

    def required(self, condition: Any) -> Any:
        """What must hold of a condition; the code of the model is taken by its word."""
        if isinstance(condition, sympy.And | sympy.Or):
            return condition.func(*map(self.required, condition.args))
        if not isinstance(condition, Relational):
            return condition
        taken_by_word = not self.ones_are_general or condition.canonical in self._inequalities
        return condition if taken_by_word else general(condition)


def general(condition: Any) -> Any:
    """What must hold where PyTorch alone took a size to be 2 or more: the way holds for 1 as well.

    The size 0 stays apart, but in strides, which PyTorch writes as ``Max(1, n)``. They are in order
    where some are equal.
    """
    if isinstance(condition, sympy.Lt | sympy.Gt) and not any(x.is_number for x in condition.args):
        ones = [sympy.Le(size, 1) for size in sorted(condition.free_symbols, key=str)]
        weak = sympy.Le if isinstance(condition, sympy.Lt) else sympy.Ge
        return sympy.And(weak(*condition.args), sympy.Or(condition, *ones))
    if isinstance(condition, sympy.Ge | sympy.Gt) and condition.rhs.is_Integer:
        size, least = condition.lhs, int(condition.rhs)
    elif isinstance(condition, sympy.Le | sympy.Lt) and condition.lhs.is_Integer:
        size, least = condition.rhs, int(condition.lhs)
    else:
        return condition
    least += isinstance(condition, sympy.Gt | sympy.Lt)
    factor, rest = size.primitive()
    if factor.is_Integer and factor > 1 and least > 0:  # a stride is a multiple of a size
        size, least = rest, -(-least // int(factor))
    return size >= 1 if least == 2 else condition


def difference_of(equality: Any) -> Any:
    """Bring an equality into a form that does not depend on how it was written."""
    left, right = equality.args
    _, difference = sympy.expand(left - right).primitive()
    return -difference if difference.could_extract_minus_sign() else difference


def asked_for_model(condition: Any) -> bool:
    """Ask for a condition of sizes in the name of the model's line that runs, as if that asked."""
    return bool(condition)


def decided(value: Any) -> Any:
    """Branch on a condition of sizes as the model's line that runs; anything else stays."""
    return asked_for_model(value) if isinstance(value, torch.SymBool) else value


def _outside(frame: Any) -> SourceLine | None:
    """Return the line of a frame outside PyTorch and this package; None inside."""
    if frame is None or frame.f_code.co_filename.startswith(_INSIDE):
        return None
    return SourceLine(frame.f_code.co_filename, frame.f_lineno)


@contextlib.contextmanager
def size_branches(ways: Ways) -> Iterator[SizeBranches]:
    """Collect the equalities that code outside PyTorch asks for while this is active.

    ``ways``: of conditions that differ within the range of a dim.
    """
    found = SizeBranches(ways)
    before = torch.SymBool.__bool__

    def noting(self: Any) -> bool:
        frame: Any = sys._getframe(1)
        is_between = frame.f_code.co_name in _BETWEEN  # of another symbolic number
        outer = frame.f_back if is_between else frame
        is_of_sizes = isinstance(self.node.expr, sympy.Basic)
        if frame.f_code is asked_for_model.__code__:
            asks = line = calling_line()
        else:
            asks, line = _outside(outer), _outside(frame)
        if asks is not None and is_of_sizes:
            truth = ways.truth(self, asks)
            if truth is not None:
                return truth
        if line is not None and is_of_sizes:
            found.add(self.node.expr, line)
        try:
            return before(self)
        except GuardOnDataDependentSymNode:
            truth = model_checks.assumed_of_number(self) if asks is not None else None
            if truth is None:
                raise
            return truth

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(torch.SymBool, "__bool__", noting))
        stack.enter_context(patch.object(torch.SymBool, "__int__", __int__))
        stack.enter_context(patch.object(torch.SymBool, "__xor__", __xor__, create=True))
        stack.enter_context(patch.object(torch.SymBool, "__rxor__", __xor__, create=True))
        stack.enter_context(patch.object(torch.SymFloat, "__bool__", __bool__))
        for kind, name in (
            (torch.SymInt, "__int__"),
            (torch.SymInt, "__index__"),
            (torch.SymFloat, "__float__"),
        ):
            numbering = _numbering(getattr(kind, name), found)
            stack.enter_context(patch.object(kind, name, numbering))
        for name in ("guard_int", "guard_float"):
            given = _given_to_operators(getattr(SymNode, name), found)
            stack.enter_context(patch.object(SymNode, name, given))
        yield found


def __bool__(number: torch.SymFloat) -> bool:
    """Compare a number with 0, since PyTorch's own would note nothing."""
    return bool(number != 0)


def __int__(truth: torch.SymBool) -> int:
    """Branch on a condition, since PyTorch's own would note nothing."""
    return int(bool(truth))


def __xor__(truth: torch.SymBool, other: Any) -> Any:
    """Branch on conditions of which one must hold, since PyTorch's have no such operator."""
    return bool(truth) ^ (bool(other) if isinstance(other, torch.SymBool) else other)


def _numbering(before: Any, found: SizeBranches) -> Any:
    """Return a conversion that notes which number the user's code made of which sizes."""

    def number(self: Any) -> Any:
        value = before(self)
        frame = sys._getframe(1)
        outer = frame.f_back if frame.f_code.co_name == "__int__" else frame  # of a SymFloat
        file = "" if outer is None else outer.f_code.co_filename
        if outer is not None and not file.startswith(_INSIDE):
            if isinstance(self.node.expr, sympy.Basic):
                made = sympy.Eq(self.node.expr, sympy.sympify(value), evaluate=False)
                found.numbers.setdefault(made, SourceLine(file, outer.f_lineno))
        return value

    return number


def _given_to_operators(before: Any, found: SizeBranches) -> Any:
    """Return a conversion that notes which number an operator took which sizes for.

    So PyTorch's parsing of arguments does with a size where it has a plain number, as of
    ``scaled_dot_product_attention(q, k, v, scale=length**-0.5)``.
    """

    def number(self: Any, file: str, line: int) -> Any:
        value = before(self, file, line)
        if isinstance(self.expr, sympy.Basic) and self.expr.free_symbols:
            made = sympy.Eq(self.expr, sympy.sympify(value), evaluate=False)
            found.numbers.setdefault(made, calling_line())
        return value

    return number


@contextlib.contextmanager
def layouts_by_stride() -> Iterator[None]:
    """Tell by strides whether a tensor overlaps itself, or is contiguous, which fixes no size.

    PyTorch asks whether each size is 1, and whether there are two elements; here a size that is a
    symbol counts as more than that.
    """
    before: Any = vars(torch)["_debug_has_internal_overlap"]
    contiguous, dense = prims.is_contiguous, prims._is_non_overlapping_and_dense_or_false

    def overlap(x: torch.Tensor) -> int:
        if all(isinstance(size, int) for size in x.shape):
            return before(x)
        pairs = zip(x.shape, x.stride(), strict=True)
        repeated = any(_is(stride, 0) and not _is(size, 1) for size, stride in pairs)
        return 1 if repeated else 2  # MemOverlap: Yes, TooHard

    def is_contiguous(x: Any, false_if_dde: bool = False) -> bool:
        if all(isinstance(size, int) for size in x.shape):
            return contiguous(x, false_if_dde)
        return prims.check_contiguous_sizes_strides(x.shape, x.stride(), false_if_dde)

    def is_dense(sizes: Any, strides: Any) -> bool:
        if all(isinstance(size, int) for size in sizes):
            return dense(sizes, strides)
        pairs = sorted(map(prims.K, sizes, strides))[::-1]
        in_order = [pair.size for pair in pairs], [pair.stride for pair in pairs]
        return prims.check_contiguous_sizes_strides(*in_order, false_if_dde=True)

    with (
        patch.object(prims, "is_contiguous", is_contiguous),
        patch.object(prims, "_is_non_overlapping_and_dense_or_false", is_dense),
        patch.object(torch, "_debug_has_internal_overlap", overlap),
        patch.dict(op_implementations_dict, {torch.ops.aten.copy.default: _copied}),
    ):
        yield


def _copied(mode: Any, _: Any, into: torch.Tensor, source: torch.Tensor, *__: Any) -> torch.Tensor:
    """``copy``, the form of ``copy_`` that writes nothing, which asks it in C++ otherwise."""
    with mode:
        torch._refs.expand(source, into.shape)  # checks that it broadcasts
        return into.new_empty_strided(into.shape, into.stride())


def _is(size: Any, number: int) -> bool:
    expression = size.node.expr if isinstance(size, torch.SymInt) else size
    return bool(expression == number)


_WRAPPER = "frontend/capture/exported/export.py"


@contextlib.contextmanager
def lines_that_fix_sizes() -> Iterator[list[SourceLine]]:
    """Collect, in the list that is yielded, the lines at which a symbol became a number."""
    found: dict[SourceLine, None] = {}
    lines: list[SourceLine] = []
    before: Any = ShapeEnv._set_replacement

    def noting(self: Any, symbol: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(value, "is_number", False):
            # What called the capture lies above the wrapped model's frame and is no line of it.
            _, _, inside = "".join(traceback.format_stack()).rpartition(_WRAPPER)
            line = parse_stack(inside)
            if line.file and line not in found:
                found[line] = None
                lines.append(line)
        return before(self, symbol, value, *args, **kwargs)

    with patch.object(ShapeEnv, "_set_replacement", noting):
        yield lines


def places(lines: Sequence[SourceLine]) -> str:
    """Word such lines as a remark in an error's message; empty where there are none."""
    listed = ", ".join(str(line) for line in lines[:4])
    return f" (sizes become fixed numbers at {listed})" if lines else ""
