"""Facts about programs: symbolic sizes, tensor graphs, peaks and plans; nothing here rewrites."""

from __future__ import annotations

from relax_disc.analysis.comparison import Comparison, Order, compare
from relax_disc.analysis.hoist import hoist_sinks
from relax_disc.analysis.memory import MemoryAnalysis, ShapeMemory, report_memory
from relax_disc.analysis.offsets import plan_offsets
from relax_disc.analysis.peak import LiveRange, live_ranges, live_trace, peak_bytes
from relax_disc.analysis.rematerialization import RematerializationPlan, plan_rematerialization
from relax_disc.analysis.schedule import Schedule, SchedulePoint, schedule_ops
from relax_disc.analysis.shape_graph import SymbolicShapeGraph
from relax_disc.analysis.symbolic_dim import SymbolicDim
from relax_disc.analysis.symbolic_expr import SymbolicExpr
from relax_disc.analysis.tensor_graph import Kernel, TensorGraph

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
