"""What a compiled step does with the padding of its batches."""

from __future__ import annotations

from dataclasses import dataclass

from relax_disc.frontend.spec import PaddingReason


@dataclass(frozen=True, slots=True)
class PaddingReport:
    """Whether positions that nothing needs are left out, and if not, why.

    Attributes
    ----------
    tokens : tuple of str
        Names of the dims that count the positions which are computed, for `TrainingStep.plan`, one
        for each length that sequences have; empty: all positions are.
    reasons : tuple of PaddingReason
        What needs positions that count nowhere, by line of the model.  Where padding is left out,
        these are small tensors that are computed for all positions beside.
    """

    tokens: tuple[str, ...]
    reasons: tuple[PaddingReason, ...]

    @property
    def is_left_out(self) -> bool:
        """Whether padding is left out."""
        return bool(self.tokens)

    def __str__(self) -> str:
        count = "counts" if len(self.tokens) == 1 else "count"
        head = (
            f"Padding is left out: {' and '.join(self.tokens)} {count} the positions that are "
            "computed."
            if self.is_left_out
            else "All positions are computed."
        )
        lines = [
            "  " + ": ".join(filter(None, (each.line, each.operator, each.reason)))
            for each in self.reasons
        ]
        return "\n".join([head, *lines])
