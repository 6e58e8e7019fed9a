"""Converters from ATen to Relax, one file for each family; importing it fills the table."""

from relax_disc.frontend.converters import (
    creation,
    elementwise,
    indexing,
    matrices,
    reductions,
    scattering,
    shapes,
)
from relax_disc.frontend.converters.registry import TABLE

__all__ = [
    "TABLE",
    "creation",
    "elementwise",
    "indexing",
    "matrices",
    "reductions",
    "scattering",
    "shapes",
]
