"""Converters from ATen to Relax, one file for each family; importing it fills the table."""

from relax_disc.frontend.converters import (
    adaptive_pooling,
    convolution,
    creation,
    ctc,
    cumulation,
    diagonals,
    elementwise,
    experts,
    indexing,
    matrices,
    ordering,
    pooling,
    random,
    recurrence,
    reductions,
    scattering,
    shapes,
)
from relax_disc.frontend.converters.registry import TABLE

__all__ = [
    "TABLE",
    "adaptive_pooling",
    "convolution",
    "creation",
    "ctc",
    "cumulation",
    "diagonals",
    "elementwise",
    "experts",
    "indexing",
    "matrices",
    "ordering",
    "pooling",
    "random",
    "recurrence",
    "reductions",
    "scattering",
    "shapes",
]
