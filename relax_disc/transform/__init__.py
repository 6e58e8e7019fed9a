"""Passes over Relax modules, one a file; each usable alone in `tvm.transform.Sequential`."""

from __future__ import annotations

from relax_disc.transform.fusion.fuse_kernels import FuseKernels
from relax_disc.transform.fusion.inline_producers import InlineProducers
from relax_disc.transform.fusion.repeat_for_late_readers import RepeatForLateReaders
from relax_disc.transform.fusion.rewrite_reshapes import RewriteReshapes
from relax_disc.transform.libraries.chunk_vocabulary_head import ChunkVocabularyHead
from relax_disc.transform.libraries.dispatch_library import DispatchLibrary
from relax_disc.transform.memory.hoist_workspace import HoistWorkspace
from relax_disc.transform.memory.plan_arena import PlanArena
from relax_disc.transform.memory.rematerialization import (
    InsertRematerialization,
    LowerRematerialization,
)
from relax_disc.transform.memory.schedule_ops import ScheduleOps
from relax_disc.transform.schedule_kernels import ScheduleKernels
from relax_disc.transform.simplify.canonicalize_extents import CanonicalizeExtents
from relax_disc.transform.simplify.channels_last import ChannelsLast
from relax_disc.transform.simplify.empty_constants import EmptyConstants
from relax_disc.transform.simplify.simplify import Simplify
from relax_disc.transform.simplify.unify_dims import UnifyDims

__all__ = [
    "CanonicalizeExtents",
    "ChannelsLast",
    "ChunkVocabularyHead",
    "DispatchLibrary",
    "EmptyConstants",
    "FuseKernels",
    "HoistWorkspace",
    "InlineProducers",
    "InsertRematerialization",
    "LowerRematerialization",
    "PlanArena",
    "RepeatForLateReaders",
    "RewriteReshapes",
    "ScheduleKernels",
    "ScheduleOps",
    "Simplify",
    "UnifyDims",
]
