"""Converters from ATen to Relax, one file for each family; importing it fills the table."""

from relax_disc.frontend.converters import (
    convolution,
    creation,
    elementwise,
    experts,
    indexing,
    matrices,
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
    "convolution",
    "creation",
    "elementwise",
    "experts",
    "indexing",
    "matrices",
    "pooling",
    "random",
    "recurrence",
    "reductions",
    "scattering",
    "shapes",
]
