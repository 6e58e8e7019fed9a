"""Converters from ATen to Relax, one file for each family; importing it fills the table."""

from relax_disc.frontend.converters import (
    convolution,
    creation,
    cumulation,
    elementwise,
    experts,
    indexing,
    matrices,
    ordering,
    pooling,
    random,
    reductions,
    scattering,
    shapes,
    whole,
)
from relax_disc.frontend.converters.registry import TABLE

__all__ = [
    "TABLE",
    "convolution",
    "creation",
    "cumulation",
    "elementwise",
    "experts",
    "indexing",
    "matrices",
    "ordering",
    "pooling",
    "random",
    "reductions",
    "scattering",
    "shapes",
    "whole",
]
