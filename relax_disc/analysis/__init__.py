"""Facts about programs: symbolic sizes, tensor graphs, peaks and plans; nothing here rewrites."""

from __future__ import annotations

from relax_disc.analysis.memory.offsets import plan_offsets
from relax_disc.analysis.memory.peak import LiveRange, live_ranges, live_trace, peak_bytes
from relax_disc.analysis.memory.rematerialization import (
    RematerializationPlan,
    plan_rematerialization,
)
from relax_disc.analysis.memory.report import MemoryAnalysis, ShapeMemory, report_memory
from relax_disc.analysis.program.tensor_graph import Kernel, TensorGraph
from relax_disc.analysis.schedule.hoist import hoist_sinks
from relax_disc.analysis.schedule.order import Schedule, SchedulePoint, schedule_ops
from relax_disc.analysis.symbolic.comparison.compare import Comparison, Order, compare
from relax_disc.analysis.symbolic.dim import SymbolicDim
from relax_disc.analysis.symbolic.expr import SymbolicExpr
from relax_disc.analysis.symbolic.shape_graph.graph import SymbolicShapeGraph

__all__ = [
    "Comparison",
    "Kernel",
    "LiveRange",
    "MemoryAnalysis",
    "Order",
    "RematerializationPlan",
    "Schedule",
    "SchedulePoint",
    "ShapeMemory",
    "SymbolicDim",
    "SymbolicExpr",
    "SymbolicShapeGraph",
    "TensorGraph",
    "compare",
    "hoist_sinks",
    "live_ranges",
    "live_trace",
    "peak_bytes",
    "plan_offsets",
    "plan_rematerialization",
    "report_memory",
    "schedule_ops",
]
