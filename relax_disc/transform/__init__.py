"""Passes over Relax modules, one a file; each usable alone in `tvm.transform.Sequential`."""

from __future__ import annotations

from relax_disc.transform.canonicalize_extents import CanonicalizeExtents
from relax_disc.transform.chunk_vocabulary_head import ChunkVocabularyHead
from relax_disc.transform.dispatch_library import DispatchLibrary
from relax_disc.transform.fuse_kernels import FuseKernels
from relax_disc.transform.hoist_workspace import HoistWorkspace
from relax_disc.transform.inline_producers import InlineProducers
from relax_disc.transform.insert_rematerialization import InsertRematerialization
from relax_disc.transform.lower_rematerialization import LowerRematerialization
from relax_disc.transform.plan_arena import PlanArena
from relax_disc.transform.schedule_kernels import ScheduleKernels
from relax_disc.transform.schedule_ops import ScheduleOps
from relax_disc.transform.simplify import Simplify

__all__ = [
    "CanonicalizeExtents",
    "ChunkVocabularyHead",
    "DispatchLibrary",
    "FuseKernels",
    "HoistWorkspace",
    "InlineProducers",
    "InsertRematerialization",
    "LowerRematerialization",
    "PlanArena",
    "ScheduleKernels",
    "ScheduleOps",
    "Simplify",
]
