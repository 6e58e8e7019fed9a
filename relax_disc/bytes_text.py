"""Numbers of bytes as people write them: ``8589934592``, ``"8GiB"``, ``"1.5 GB"``."""

from __future__ import annotations

import re
from fractions import Fraction

from relax_disc.errors import InputMismatchError

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_MOST = 2**63 - 1
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(value: int | str, *, name: str = "memory_budget") -> int:
    """Read a number of bytes; a fraction of a byte is dropped.

    ``value``: a positive count of bytes, or text: a number and one of B, kB, MB, GB, TB (powers of
    1000), KiB, MiB, GiB, TiB (powers of 1024), in any case. ``name``: how the error message calls
    the value. Returned: bytes, at least 1.

    Raises `InputMismatchError`: for a float (is 0.5 half a byte, or half of the memory?), any other
    type, a count below 1, or text in another form.
    """
    if isinstance(value, float):
        raise InputMismatchError(
            f"{name}={value!r} is a float, which does not say bytes of what: give an int of bytes "
            'or text such as "8GiB".'
        )
    if isinstance(value, str):
        match = _TEXT.fullmatch(value)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise InputMismatchError(
                f"{name}={value!r} is no number of bytes: write a number and one of B, kB, MB, GB, "
                'TB, KiB, MiB, GiB, TiB, such as "8GiB".'
            )
        if "." in match[1] and not match[2]:
            raise InputMismatchError(
                f'{name}={value!r} has no unit: say of what, as in "{match[1]} GB", or write '
                "whole bytes."
            )
        count = int(Fraction(match[1]) * unit)
    elif isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InputMismatchError(
            f"{name}={value!r} has type {type(value).__name__}: give an int of bytes or text such "
            'as "8GiB".'
        )
    else:
        try:
            count = value.__index__()
        except TypeError as error:  # an array of one number
            raise InputMismatchError(
                f'{name}={value!r} is no whole number: give an int of bytes or text such as "8GiB".'
            ) from error
    if count < 1:
        raise InputMismatchError(f"{name}={value!r} is less than one byte.")
    if count > _MOST:
        raise InputMismatchError(f"{name}={value!r} is more than {_MOST} bytes, 8 EiB.")
    return count


def format_bytes(count: int) -> str:
    """Write bytes for a reader, with three significant digits or more: ``"1.50 GiB"``."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= scale:
            amount = count / scale
            digits = max(0, 3 - len(str(int(abs(amount)))))
            return f"{amount:.{digits}f} {unit}"
    return f"{count} B"
