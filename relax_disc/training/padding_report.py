"""What a compiled step does with the padding of its batches."""

from __future__ import annotations

from dataclasses import dataclass

from relax_disc.frontend.spec import PaddingReason


@dataclass(frozen=True, slots=True)
class PaddingReport:
    """Whether positions that nothing needs are left out, and if not, why.

    Attributes
    ----------
    tokens : str or None
        Name of the dim that counts the positions which are computed, for `TrainingStep.plan`; None:
        all positions are.
    reasons : tuple of PaddingReason
        What needs positions that count nowhere, by line of the model.  Where padding is left out,
        these are small tensors that are computed for all positions beside.
    """

    tokens: str | None
    reasons: tuple[PaddingReason, ...]

    @property
    def is_left_out(self) -> bool:
        """Whether padding is left out."""
        return self.tokens is not None

    def __str__(self) -> str:
        head = (
            f"Padding is left out: {self.tokens} counts the positions that are computed."
            if self.is_left_out
            else "All positions are computed."
        )
        lines = [
            "  " + ": ".join(filter(None, (each.line, each.operator, each.reason)))
            for each in self.reasons
        ]
        return "\n".join([head, *lines])
