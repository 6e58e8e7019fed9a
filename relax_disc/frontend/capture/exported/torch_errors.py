"""Word what torch.export refuses as this package's errors, with the line of the model."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._dynamo.exc import UserError, UserErrorType
from torch._subclasses.fake_tensor import UnsupportedOperatorException

from relax_disc.errors import InputMismatchError, ShapeRangeError, UnsupportedOperatorError
from relax_disc.frontend.capture.sizes.branches import places
from relax_disc.frontend.capture.source_lines import SourceLine, parse_stack

_SMALL = 8
"""Up to this size an example may be too short to tell: of 2 positions ``x[:, 1:]`` has 1, which
torch.export takes for a number. Then a longer one is tried."""


def translated(
    error: UserError,
    lines: Sequence[SourceLine] = (),
    numbers: Sequence[tuple[Any, SourceLine]] = (),
) -> Exception:
    """Translate a refusal of torch.export.

    ``lines``: those that fixed sizes. ``numbers``: equalities of an expression of sizes and the
    plain number that it became, and where.
    """
    if error.error_type is UserErrorType.CONSTRAINT_VIOLATION:
        said, _, fixes = str(error).partition("Suggested fixes:")
        bounds = dict.fromkeys(_BOUNDS.findall(said))
        least = _LEAST.findall(fixes) or [
            (name, low, high)
            for factor, name, offset, low, high in bounds
            if low != high and not factor + offset
        ]
        if least:
            dims = ", ".join(
                f"Dim({name!r}, min={low}{f', max={high}' if high else ''})"
                for name, low, high in least
            )
            outside = "others" if any(high for _, _, high in least) else "shorter ones"
            reason = f"of the batches {outside} do not go the example's way: give {dims}"
            if numbers:
                equality, line = numbers[0]
                reason += (
                    f". {line} makes the plain number {equality.args[1]} of the example's sizes: "
                    "compute with the sizes themselves, // for a floor"
                )
            found = contradiction(reason, lines)
            highest = {name: int(high) for name, _, high in least if high}
            if highest and max(highest.values()) <= _SMALL * 8:
                found.dims = tuple(highest)
                found.fails_at = {name: 2 * high + 3 for name, high in highest.items()}
            return found
        elif multiples := _MULTIPLE.findall(fixes):
            name, divisor = multiples[0]
            reason = (
                f"the remainder of {name} by {divisor} decides which way it goes: give an example "
                f"whose {name} is a multiple of {divisor}, declare it as {divisor} * Dim(...), and "
                "pad batches to multiples"
            )
        elif fixed := _FIXED.findall(fixes) or _fixed_roots(bounds):
            dims = " and ".join(f"{name} becomes the number {size}" for name, size in fixed)
            reason = (
                f"{dims}, by a Python loop over it or another use of its value; write that with "
                "operators over the whole axis, declare the dim static and give one size always, "
                'or use torch.compile(model, backend="relax_disc"), which makes a program for each '
                "size"
            )
            found = contradiction(reason, lines)
            found.dims = tuple(name for name, _ in fixed)
            if all(int(size) <= _SMALL for _, size in fixed):
                found.fails_at = {name: 2 * int(size) + 3 for name, size in fixed}
            return found
        else:
            reason = first_part(error)
        return contradiction(reason, lines)
    if error.error_type is UserErrorType.INVALID_INPUT:
        return InputMismatchError(f"dynamic_shapes do not fit the example inputs: {error}")
    return data_dependent(error)


def _fixed_roots(bounds: Iterable[tuple[str, ...]]) -> list[tuple[str, int]]:
    """List dims, with their sizes, by which others that torch.export took for one number are made.

    Of ``4*h``, fixed to 8: ``h``, 2.
    """
    found = {
        name: (int(low) - int(offset.replace(" ", "") or 0)) // int(factor or 1)
        for factor, name, offset, low, high in bounds
        if low == high
    }
    return list(found.items())


def contradiction(reason: str, lines: Sequence[SourceLine]) -> ShapeRangeError:
    """Make the error of a model for which the declared ranges are too wide."""
    return ShapeRangeError(f"The model contradicts dynamic_shapes{places(lines)}: {reason}")


_ADVICE_OF_TORCH = re.compile(
    r"The error above occurred.*|While executing %.*|Use tlparse to see.*"
    r"|For more information, run with TORCH_LOGS\S*"
    r"|(Please )?file an issue on github\.?|For the potential source, you can refer[^.]*\.",
    re.IGNORECASE | re.DOTALL,
)
_FIXED = re.compile(r"^\s*(\w+) = (\d+)\s*$", re.M)
_MULTIPLE = re.compile(r"^\s*(\w+) = (\d+)\*_\w+(?: [+-] \d+)?\s*$", re.M)
_BOUNDS = re.compile(  # of a dim, or of one that is made of it, such as 4*h or 2*T - 1
    r"Not all values of (?:(\d+)\*)?(\w+)((?: [+-] \d+)?) = .* the generated guard "
    r"(\d+) <= .* <= (\d+)$",
    re.M,
)
_LEAST = re.compile(r"^\s*([^\W_]\w*) = Dim\('\w+', min=(\d+)(?:, max=(\d+))?\)", re.M)


def first_part(error: Exception) -> str:
    """Cut torch's advice about tools of its own off an error's message."""
    return _ADVICE_OF_TORCH.sub("", str(error)).strip()


def data_dependent(error: Exception) -> UnsupportedOperatorError:
    """Make the error of a model that decides from data."""
    line, trace = parse_stack(str(error)), traceback_text(error)
    if not line.file:
        line = parse_stack(trace)
    if "/torch/distributions/" in trace:
        advice = (
            "torch.distributions checks its arguments so; say validate_args=False, or "
            "torch.distributions.Distribution.set_default_validate_args(False) before compile"
        )
    else:
        advice = "leave the branch out, write it with torch.where, or compute it in loss_fn"
    return UnsupportedOperatorError(
        f"{line}: the model decides from data (control flow or a shape that depends on the values "
        f"of a tensor), which one compiled program cannot follow; {advice}.",
        (("data-dependent control flow", str(line)),),
    )


def untraceable(error: UnsupportedOperatorException) -> UnsupportedOperatorError:
    """Make the error of an operator that has no symbolic sizes."""
    line, name = parse_stack(traceback_text(error)), str(error.func)
    reason = f"PyTorch cannot trace {name} with symbolic sizes"
    if torch.Tag.nondeterministic_seeded in getattr(error.func, "tags", ()):
        reason = (
            f"{name} draws random numbers in a way that cannot be compiled; draw them before the "
            "call, and give them as a tensor of the batch"
        )
    return UnsupportedOperatorError(f"{line}: {reason}.", ((name, str(line)),))


def is_of_torch(error: BaseException) -> bool:
    """Say whether PyTorch's own code raised an error."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return last.filename.startswith(torch.__path__[0])


def traceback_text(error: BaseException) -> str:
    """Write an error's frames as `parse_stack` reads them."""
    frames = inspect.getinnerframes(error.__traceback__) if error.__traceback__ else []
    return "".join(f'File "{f.filename}", line {f.lineno}, in {f.function}\n' for f in frames)
