"""Truths of data that the model's code asks for: they become assertions that each call looks at.

A branch that only raises, ``if labels.max() >= n: raise ...`` or ``assert (x > 0).all()``, need not
be compiled: the program goes the other way.  Any other goes the way of the example batch, and a
call with a batch that goes another way raises before it writes anything.  Which statement asks for
the truth of a tensor, and for which part of its condition, is told by the position of the
instruction that asks.

So is what a branch on ``torch.compiler.is_exporting()`` decides.  Where it asks for nothing else,
the model has another way for targets that lack an operator; we go eager PyTorch's.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import itertools
import linecache
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from relax_disc.frontend.capture import example_values
from relax_disc.frontend.capture.loops import recorded
from relax_disc.frontend.capture.source_lines import calling_line
from relax_disc.vm_builtins.guard import BRANCH

_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_LONGEST = 160  # characters of a condition in a message
Position = tuple[int | None, int | None, int | None, int | None]


@dataclass(frozen=True, slots=True)
class _Check:
    """A statement that raises unless its condition has the value ``wanted``."""

    condition: ast.expr
    wanted: bool


def assumed(x: Tensor) -> bool | None:
    """The truth without which the model would raise, else that of the example; it is asserted.

    None where neither is known.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_of_a_mode(frame.f_code):
        frame = frame.f_back
    found = None if frame is None else _found(frame)
    if found is None:
        return _as_the_example(x, frame)
    check, truth = found
    failure = f"`{_shown(check.condition)}` {'does not hold' if check.wanted else 'holds'}"
    _assert(x, truth, _own_check(failure))
    return truth


def assumed_of_number(condition: torch.SymBool) -> bool | None:
    """`assumed`, for a condition on numbers that were taken out of tensors."""
    example = example_values.active()
    x = None if example is None else example.condition(condition)
    return None if x is None else assumed(x)


def _as_the_example(x: Tensor, frame: FrameType | None) -> bool | None:
    """Go the way of the example batch, and assert that a call goes it too."""
    example = example_values.active()
    truth = None if example is None else example.truth(x)
    if truth is None:
        return None
    line = calling_line()
    asked = None if frame is None or frame.f_code.co_filename != line.file else _part(frame)
    text = "" if asked is None else f", `{_shown(asked)}`,"
    _assert(
        x,
        truth,
        f"{BRANCH}{line}{text} is {truth} for the example batch, which decided what was compiled, "
        f"and {not truth} for this one. Compile a second step with a batch like this one as the "
        "example and call the one that fits, or choose with torch.where.",
    )
    return truth


def _own_check(failure: str) -> str:
    return f"{calling_line()}: a check of the model's own fails: {failure}."


def _shown(condition: ast.expr) -> str:
    text = ast.unparse(condition)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def asserted(condition: Any, message: str) -> str | None:
    """An assertion that each call looks at before it writes; None where it is of no tensor."""
    if not isinstance(condition, Tensor):
        return None
    _assert(condition, True, _own_check(message))
    return message


@contextlib.contextmanager
def tensor_checks() -> Iterator[None]:
    """Assert what ``torch._check_tensor_all`` checks; PyTorch's own takes a number out of it."""
    before = torch._check_tensor_all_with

    def check(error_type: Any, condition: Any, message: Any = None) -> None:
        if not isinstance(condition, Tensor) or condition.dtype != torch.bool:
            before(error_type, condition, message)  # raises
        asserted(condition.all(), "torch._check_tensor_all")

    with patch.object(torch, "_check_tensor_all_with", check):
        yield


class EagerBranches:
    """Answers a model that asks whether it is exported, and nothing else: no."""

    def __init__(self) -> None:
        self._has_answered = self._is_off = False

    def give_up(self) -> bool:
        """Whether to export once more, by the way that the model has for exports."""
        again, self._is_off = self._has_answered and not self._is_off, True
        return again

    @contextlib.contextmanager
    def answered(self) -> Iterator[None]:
        """Answer while this is active."""
        before = torch.compiler.is_exporting

        def is_exporting() -> bool:
            if self._is_off or not _decides_alone(sys._getframe(1)):
                return before()
            self._has_answered = True
            return False

        with patch.object(torch.compiler, "is_exporting", is_exporting):
            yield


def _decides_alone(frame: FrameType | None) -> bool:
    """Whether the answer to a call is the whole condition of a branch, here or where it returns."""
    while frame is not None and not frame.f_code.co_filename.startswith(_TORCH):
        position = _asking(frame.f_code, frame.f_lasti // 2)
        use = _uses(frame.f_code.co_filename).get(position)
        if use is not ast.Return:
            return use is ast.If
        frame = frame.f_back
    return False


@functools.lru_cache(maxsize=256)
def _uses(file: str) -> dict[Position | None, type[ast.stmt]]:
    """List the calls of a file that are a branch's condition, or all that is returned."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return {}
    found: dict[Position | None, type[ast.stmt]] = {}
    for node in ast.walk(tree):
        value = {ast.If: "test", ast.Return: "value"}.get(type(node))
        call = value and getattr(node, value)
        if isinstance(call, ast.UnaryOp) and isinstance(node, ast.If):
            call = call.operand
        if isinstance(call, ast.Call):
            place = (call.lineno, call.end_lineno, call.col_offset, call.end_col_offset)
            found[place] = type(node)  # pyright: ignore[reportArgumentType]
    return found


def _assert(x: Tensor, truth: bool, message: str) -> None:
    holds = (x != 0).reshape(())
    holds = holds if truth else holds.logical_not()
    loops = recorded.active()
    if loops is not None and loops.inside is not None:
        loops.checks.append((holds, message))
    else:
        torch.ops.aten._assert_async.msg(holds, message)


def _is_of_a_mode(code: CodeType) -> bool:
    """Whether a frame stands between the code that asks and the answer."""
    of_a_number = code.co_name == "__bool__" and code.co_filename == torch.__file__
    is_mode = code.co_name == "__torch_function__" or code.co_filename.startswith(_HERE)
    return is_mode or of_a_number


def _found(frame: FrameType) -> tuple[_Check, bool] | None:
    """Find the check that asks, and the truth that it needs of the part of it that asks."""
    position = _asking(frame.f_code, frame.f_lasti // 2)
    if position is None:
        return None
    for check in _checks(frame.f_code.co_filename):
        truth = _needed(check.condition, check.wanted, position)
        if truth is not None:
            return check, truth
    return None


def _part(frame: FrameType) -> ast.expr | None:
    """Find the expression whose truth is asked for."""
    position = _asking(frame.f_code, frame.f_lasti // 2)
    if position is None:
        return None
    tree = _tree(frame.f_code.co_filename)
    parts = () if tree is None else (n for n in ast.walk(tree) if isinstance(n, ast.expr))
    return next((part for part in parts if _place(part) == position), None)


def _asking(code: CodeType, instruction: int) -> Position | None:
    """Where in the source stands a call of ``bool``, or what the operand of a jump was made by.

    A jump's own position is that of the whole condition, or of another part.
    """
    if sys.version_info < (3, 11):
        return None
    is_call = dis.opname[code.co_code[2 * instruction]].startswith(("CALL", "PRECALL"))
    at = instruction if is_call else instruction - 1
    return next(itertools.islice(code.co_positions(), at, None))


def _needed(condition: ast.expr, wanted: bool, asking: Position) -> bool | None:
    """Return the truth of the part at a position for which the condition is as wanted."""
    if isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
        return _needed(condition.operand, not wanted, asking)
    if isinstance(condition, ast.BoolOp):
        # All parts decide; or the last, once it is asked.
        decisive = isinstance(condition.op, ast.And) == wanted
        parts = condition.values if decisive else condition.values[-1:]
        found = (_needed(part, wanted, asking) for part in parts)
        return next((truth for truth in found if truth is not None), None)
    return wanted if _place(condition) == asking else None


def _place(node: ast.expr) -> Position:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


@functools.lru_cache(maxsize=256)
def _checks(file: str) -> tuple[_Check, ...]:
    """List the statements of a file that raise, or do nothing."""
    tree = _tree(file)
    return () if tree is None else tuple(_statements(tree))


def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


def _statements(node: ast.AST) -> Iterator[_Check]:
    if isinstance(node, ast.Assert):
        yield _Check(node.test, True)
    elif isinstance(node, ast.If):
        if _raises(node.body):
            yield _Check(node.test, False)
        elif _raises(node.orelse):
            yield _Check(node.test, True)
    for name, value in ast.iter_fields(node):
        if isinstance(node, ast.Try) and node.handlers and name == "body":
            continue  # what is raised may be caught
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _statements(child)


def _raises(body: list[Any]) -> bool:
    """Whether statements end in an error, whatever they do before."""
    leaves = (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.Await)
    return (
        bool(body)
        and isinstance(body[-1], ast.Raise)
        and not any(isinstance(inner, leaves) for part in body for inner in ast.walk(part))
    )
