"""Schedule rules for CPUs."""

from __future__ import annotations

from typing import Any

from relax_disc.tir_kernels.cpu.columns import Columns
from relax_disc.tir_kernels.cpu.elementwise import Elementwise
from relax_disc.tir_kernels.cpu.parallel_blocks import ParallelBlocks
from relax_disc.tir_kernels.cpu.raw_loops import RawLoops
from relax_disc.tir_kernels.cpu.rows import Rows
from relax_disc.tir_kernels.cpu.totals import Totals
from relax_disc.tir_kernels.cpu.transpose import Transpose
from relax_disc.tir_kernels.loops import DEFAULTS, Settings


def cpu_rules(settings: Settings = DEFAULTS) -> list[Any]:
    """List the rules in the order in which they are tried."""
    tunable = [rule(settings) for rule in (Transpose, Elementwise, Totals, Columns, Rows)]
    return [*tunable, RawLoops(), ParallelBlocks()]


__all__ = [
    "Columns",
    "Elementwise",
    "ParallelBlocks",
    "RawLoops",
    "Rows",
    "Totals",
    "Transpose",
    "cpu_rules",
]
