"""Converters from ATen to Relax, one file for each family; importing it fills the table."""

from relax_disc.frontend.converters import (  # noqa: F401
    convolution,
    counted,
    creation,
    cumulation,
    elementwise,
    experts,
    indexing,
    loop,
    normalization,
    random,
    reductions,
    scattering,
    shapes,
    whole,
)
from relax_disc.frontend.converters.registry import TABLE

__all__ = ["TABLE"]
