"""The pass pipeline from operators to an executable module: what runs, in which order.

`pipeline(options)` is what `relax.build(mod, target, relax_pipeline="relax_disc")` uses.  It has
six phases; `PipelineOptions(dump_to=...)` shows the module after each.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import tvm
from tvm import relax

from relax_disc.errors import InputMismatchError
from relax_disc.tir_kernels import accepts_chain, rules_for
from relax_disc.tir_kernels.tuning.database import USER, load
from relax_disc.tir_kernels.tuning.replay import Tuned
from relax_disc.transform.fusion.annotate_means import AnnotateMeans
from relax_disc.transform.fusion.fold_constants import FoldConstants
from relax_disc.transform.fusion.fuse_kernels import FuseKernels
from relax_disc.transform.fusion.inline_producers import InlineProducers
from relax_disc.transform.fusion.join_sizes import JoinSizes
from relax_disc.transform.fusion.join_updates import JoinUpdates
from relax_disc.transform.fusion.legalize import Legalize
from relax_disc.transform.fusion.repeat_for_late_readers import RepeatForLateReaders
from relax_disc.transform.fusion.rewrite_reshapes import RewriteReshapes
from relax_disc.transform.fusion.share_kernels import ShareKernels
from relax_disc.transform.libraries.chunk_vocabulary_head import ChunkVocabularyHead
from relax_disc.transform.libraries.dispatch_library import DispatchLibrary
from relax_disc.transform.memory.count_at_entry import CountAtEntry
from relax_disc.transform.memory.hoist_workspace import HoistWorkspace
from relax_disc.transform.memory.plan_arena import PlanArena
from relax_disc.transform.memory.rematerialization import (
    InsertRematerialization,
    LowerRematerialization,
)
from relax_disc.transform.memory.schedule_ops import ScheduleOps
from relax_disc.transform.memory.split_gradients import SplitGradients
from relax_disc.transform.schedule_kernels import ScheduleKernels
from relax_disc.transform.simplify.canonicalize_extents import CanonicalizeExtents
from relax_disc.transform.simplify.channels_last import ChannelsLast
from relax_disc.transform.simplify.empty_constants import EmptyConstants
from relax_disc.transform.simplify.simplify import Simplify
from relax_disc.transform.simplify.unify_dims import UnifyDims
from relax_disc.vm_builtins import runtime

# TVM's decorators make passes of classes and functions, which a type checker cannot see.
Pass = Any


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """What the pipeline does beyond what is needed to run.

    Attributes
    ----------
    remove_padding : bool
        Leave rows of a padded batch out that provably cannot reach the loss (CPU).  This is done
        to a captured step before all else, by `relax_disc.compile`: it changes what the function
        takes.  A module lowered by `pipeline` alone stays as it is.
    chunk_vocabulary_head : bool
        Compute a linear head with cross-entropy in chunks of rows (CPU).
    fuse : bool
        Fuse element-wise operators into one kernel.
    inline_producers : bool
        With fusion: compute cheap values again in each kernel that reads them, and what little work
        makes of parameters again before late readers.
    join_kernels : bool
        With fusion: one kernel for several that read the same values, which may also make again
        what an earlier one made of those; for CUDA also one for reductions and what follows them,
        and one for updates of parameters.
    schedule_kernels : bool
        Give kernels loops for the target; off: as they were legalized, serial.
    schedule_ops : bool
        Reorder kernels so that less is live at once.
    rematerialize : bool
        Prepare tensors to be given up and computed again where a memory budget asks for it.
    split_gradients : bool
        With `plan_arena`: beside a function with a vocabulary head or embedding table of 1 MiB or
        more compile one that makes the gradients of these by rows, for budgets that the plain one
        exceeds (CPU).
    plan_arena : bool
        Plan the memory of each call at entry; off: TVM's own memory planning, for programs that
        run on `relax.VirtualMachine`. `compile` needs the plan.
    verify_schedules : bool
        Put kernels back whose schedule makes no code: lowers each once more.  `compile` does so
        only after code generation has failed.
    tuning_database : path-like, optional
        A file that `relax-disc tune` wrote: schedules that were measured to be faster here than
        the rules'.  ``"user"``: the user's own for this target, threads and version, if there is
        one; None: the rules alone.
    dump_to : path-like, optional
        A folder, made if need be, for the module's text after each phase: `01-simplify.py`,
        `02-libraries.py`, `03-fusion.py`, `04-kernels.py`, `05-memory.py`, `06-finalize.py`; files
        of an earlier run are replaced.  Such a program is compiled, never taken from the cache of
        compiled programs, nor kept there.
    """

    remove_padding: bool = True
    chunk_vocabulary_head: bool = True
    fuse: bool = True
    inline_producers: bool = True
    join_kernels: bool = True
    schedule_kernels: bool = True
    schedule_ops: bool = True
    rematerialize: bool = True
    split_gradients: bool = True
    plan_arena: bool = True
    verify_schedules: bool = True
    tuning_database: str | os.PathLike[str] | None = USER
    dump_to: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type == "bool" and not isinstance(value, bool | np.bool_):
                raise InputMismatchError(f"{each.name} is True or False, not {value!r}.")


def pipeline(options: PipelineOptions | None = None) -> Pass:
    """Make the pass that lowers a module for the target at hand.

    Parameters
    ----------
    options : PipelineOptions, optional
        Defaults: everything.

    Returns
    -------
    tvm.transform.Pass
        A module pass for `relax.build(..., relax_pipeline=...)`, run under the target.
    """
    chosen = PipelineOptions() if options is None else options

    @tvm.transform.module_pass(opt_level=0, name="relax_disc")
    def lower(mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        target = tvm.target.Target.current(allow_none=True) or tvm.target.Target("llvm")
        with target, ctx:
            return tvm.transform.Sequential(passes(target, chosen))(mod)

    return lower


def passes(target: tvm.target.Target, options: PipelineOptions) -> list[Pass]:
    """List the phases, each a pass, in order; with `dump_to`, what writes the module after each."""
    result: list[Pass] = []
    if options.dump_to is not None:
        try:
            Path(options.dump_to).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputMismatchError(f"dump_to={options.dump_to!r}: {error}") from error
    for number, (name, stages) in enumerate(phases(target, options).items(), 1):
        result.append(tvm.transform.Sequential(stages, name=f"relax_disc.{name}"))
        if options.dump_to is not None:
            result.append(_dump(Path(options.dump_to) / f"{number:02}-{name}.py"))
    return result


def phases(target: tvm.target.Target, options: PipelineOptions) -> dict[str, list[Pass]]:
    """List the passes of each phase, by its name, in order."""
    split = options.split_gradients and options.plan_arena and target.kind.name == "llvm"
    runtime.load()  # before code is loaded that the passes make: it takes the pool of threads there
    return {
        "simplify": [*([CountAtEntry()] if options.plan_arena else []), *simplify_passes()],
        "libraries": library_passes(target, options),
        "fusion": [*legalize_passes(target, options), *alias_passes()],
        "kernels": [
            *([SplitGradients()] if split else []),
            *(kernel_passes(target, options) if options.schedule_kernels else []),
            *(workspace_passes() if options.plan_arena else []),
        ],
        "memory": [
            *(order_passes() if options.schedule_ops else []),
            *(rematerialization_passes() if options.rematerialize else []),
            *(memory_passes() if options.plan_arena else []),
            *leftover_passes(),
        ],
        "finalize": finalize_passes(),
    }


def _dump(path: Path) -> Pass:
    """Make the pass that writes a module's text and changes nothing."""

    @tvm.transform.module_pass(opt_level=0, name=f"relax_disc.dump.{path.stem}")
    def write(mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        del ctx
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(mod.script(show_meta=True))
        draft.replace(path)  # whole or not at all
        return mod

    return write


def simplify_passes() -> list[Pass]:
    """Fewer dims, views, powers, casts, broadcasts; TVM fuses inside dataflow blocks only."""
    return [
        UnifyDims(),
        relax.transform.ConvertToDataflow(),
        Simplify(),
        ChannelsLast(),
        Simplify(),
    ]


def library_passes(target: tvm.target.Target, options: PipelineOptions) -> list[Pass]:
    """Calls of libraries in place of operators."""
    chunked = options.chunk_vocabulary_head and target.kind.name == "llvm"
    return [
        *([ChunkVocabularyHead()] if chunked else []),
        DispatchLibrary(target),
        *relax.pipeline.library_dispatch_passes(target),
    ]


def legalize_passes(target: tvm.target.Target, options: PipelineOptions) -> list[Pass]:
    """Operators to kernels, fused."""
    if options.fuse:
        stock = list(relax.pipeline.legalize_passes(target))
        if options.schedule_kernels:  # TVM's rules for CUDA raise on kernels that are not theirs
            stock = [stage for stage in stock if stage.info.name != "ApplyDefaultSchedule"]
        ours: dict[str, list[Pass]] = {"LegalizeOps": [Legalize()]}
        ours["FoldConstant"] = [FoldConstants(), relax.transform.FoldConstant()]
        stock = [own for stage in stock for own in ours.get(stage.info.name, [stage])]
        fusion = next(k for k, stage in enumerate(stock) if stage.info.name == "FuseOps")
        assert stock[fusion + 1].info.name == "FuseTIR"
        inlined = [InlineProducers(), RepeatForLateReaders()] if options.inline_producers else []
        accepts = accepts_chain(target) if options.schedule_kernels else None
        fuse = FuseKernels(options.join_kernels, accepts)
        for_launches = [AnnotateMeans(), JoinSizes()] if accepts is not None else []
        updates = [JoinUpdates()] if accepts is not None and options.join_kernels else []
        fused = [CanonicalizeExtents(), *for_launches, *inlined, fuse, *updates]
        return [*stock[:fusion], *fused, *stock[fusion + 2 :]]
    return [Legalize(), FoldConstants(), relax.transform.FoldConstant()]


def alias_passes() -> list[Pass]:
    """Reshapes that cost nothing; one name for each value."""
    return [
        EmptyConstants(),
        RewriteReshapes(),
        relax.transform.ToNonDataflow(),
        relax.transform.RemovePurityChecking(),
        relax.transform.CanonicalizeBindings(),
    ]


def kernel_passes(target: tvm.target.Target, options: PipelineOptions | None = None) -> list[Pass]:
    """One kernel for those that differ in sizes; parallel, vectorised loops."""
    chosen = options or PipelineOptions()
    database = load(target, chosen.tuning_database)
    tuned = [Tuned(database)] if database is not None and database.decisions() else []
    rules = [*tuned, *rules_for(target)] if tuned else None
    return [ShareKernels(), ScheduleKernels(target, verify=chosen.verify_schedules, rules=rules)]


def unscheduled(
    module: tvm.IRModule, target: tvm.target.Target, options: PipelineOptions | None = None
) -> tvm.IRModule:
    """Lower a module as far as its kernels are there and not yet scheduled, which tuning takes."""
    done = phases(target, options or PipelineOptions())
    before = [stage for name in ("simplify", "libraries", "fusion") for stage in done[name]]
    with target:
        return tvm.transform.Sequential([*before, ShareKernels()])(module)


def workspace_passes() -> list[Pass]:
    """Scratch memory of kernels as tensors of the plan."""
    return [HoistWorkspace()]


def order_passes() -> list[Pass]:
    """One order of the kernels for all shapes."""
    return [ScheduleOps()]


def rematerialization_passes() -> list[Pass]:
    """What a plan may give up and compute again."""
    return [InsertRematerialization(), LowerRematerialization()]


def memory_passes() -> list[Pass]:
    """One arena per call, planned when the shapes are known."""
    return [PlanArena()]


def leftover_passes() -> list[Pass]:
    """TVM's own lowering, for functions that an arena cannot hold (control flow)."""
    return [
        relax.transform.CallTIRRewrite(),
        relax.transform.StaticPlanBlockMemory(),
        relax.transform.LowerAllocTensor(),
        relax.transform.KillAfterLastUse(),
    ]


def finalize_passes() -> list[Pass]:
    """To the virtual machine's own instructions."""
    return [
        relax.transform.LowerRuntimeBuiltin(),
        relax.transform.ComputePrimValue(),
        relax.transform.VMShapeLower(),
        relax.transform.AttachGlobalSymbol(),
    ]


class _CallableModule(ModuleType):
    """Lets `relax_disc.pipeline(options)` mean the function that has its module's name."""

    def __call__(self, options: PipelineOptions | None = None) -> Pass:
        return pipeline(options)


sys.modules[__name__].__class__ = _CallableModule
