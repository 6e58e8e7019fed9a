"""A dimension whose size is known only as a range and a divisor."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import lcm

from relax_disc.errors import GraphError


@dataclass(frozen=True, slots=True)
class SymbolicDim:
    """One symbolic dim: the whole multiples of ``divisor`` in ``lower .. upper``.

    Two dims of one name are the same dim; where their declarations differ, both hold.

    Parameters
    ----------
    name : str
        An identifier.
    lower : int
        Least size, inclusive; 1 where nothing was declared, because an empty tensor is a special
        case that has to be asked for (torch.export specialises it as well).
    upper : int or None
        Greatest size, inclusive; ``None`` where there is no limit.
    divisor : int
        Every size is a multiple of it.

    Attributes
    ----------
    first : int
        Least size that is a multiple of the divisor.
    last : int or None
        Greatest size that is a multiple of the divisor, ``None`` without a limit.

    Raises
    ------
    GraphError
        The name is no identifier, a bound is negative, or no size is left in the range.
    """

    name: str
    lower: int = 1
    upper: int | None = None
    divisor: int = 1
    first: int = field(init=False, repr=False, compare=False)
    last: int | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise GraphError(
                f"The name of a symbolic dim must be an identifier, not {self.name!r}."
            )
        if self.lower < 0:
            raise GraphError(
                f"Dim {self.name}: lower bound {self.lower} is negative; use 0 or more."
            )
        if self.divisor < 1:
            raise GraphError(f"Dim {self.name}: divisor {self.divisor} must be 1 or more.")
        first = -(-self.lower // self.divisor) * self.divisor
        last = None if self.upper is None else self.upper // self.divisor * self.divisor
        if last is not None and first > last:
            raise GraphError(
                f"Dim {self.name}: no multiple of {self.divisor} lies in "
                f"{self.lower} .. {self.upper}; widen the range or drop a constraint."
            )
        object.__setattr__(self, "first", first)
        object.__setattr__(self, "last", last)

    def intersect(self, other: SymbolicDim) -> SymbolicDim:
        """Return the dim for which the declarations of both hold.

        Raises
        ------
        GraphError
            The declarations contradict each other.
        """
        if self == other:
            return self
        uppers = [upper for upper in (self.upper, other.upper) if upper is not None]
        try:
            return SymbolicDim(
                self.name,
                max(self.lower, other.lower),
                min(uppers, default=None),
                lcm(self.divisor, other.divisor),
            )
        except GraphError as error:
            raise GraphError(f"{self} and {other} contradict each other. {error}") from error

    def __contains__(self, size: int) -> bool:
        return (
            self.lower <= size
            and (self.upper is None or size <= self.upper)
            and size % self.divisor == 0
        )

    def __str__(self) -> str:
        upper = "..." if self.upper is None else f"{self.upper}"
        step = "" if self.divisor == 1 else f" by {self.divisor}"
        return f"{self.name} in {self.lower} .. {upper}{step}"
