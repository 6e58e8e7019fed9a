"""Search for schedules of one kernel at fixed sizes with TVM's MetaSchedule.

Two design spaces: ``"rules"``, the numbers of the rule that takes the kernel, and ``"tvm"``,
MetaSchedule's own space for the target.  Candidates are made and timed in worker processes; what
was timed lies in a folder, where an interrupted search goes on.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from math import inf, prod
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import tvm
from tvm import s_tir, tirx
from tvm.target import Target

from relax_disc.errors import UnsupportedEnvironmentError
from relax_disc.tir_kernels.tuning import judgement, workers
from relax_disc.tir_kernels.tuning.replay import ANNOTATION, plain

Space = Literal["rules", "tvm"]
CostModel = Literal["xgb", "random"]

CHOICES = {
    "lanes": (8, 16, 32, 64),
    "reduction_lanes": (16, 32, 64),
    "tile_rows": (8, 16, 32, 64),
    "tile_columns": (16, 32, 64, 128, 256),
}
"""Values of `Settings` that are tried."""

NEEDED = {"xgb": ("cloudpickle", "psutil", "xgboost"), "random": ("cloudpickle", "psutil")}
_PER_ROUND = 8


@dataclass(frozen=True, slots=True)
class Search:
    """How to search.

    ``trials``: candidates that are timed at most, in each design space. ``cost_model``: what says
    which candidates are worth a measurement. ``seed``: of the candidates that are drawn.
    """

    trials: int = 32
    cost_model: CostModel = "xgb"
    seed: int = 1


class Processes:
    """A process that makes candidates' code and one that times them, started when first needed.

    They end with this object, or when a candidate takes longer than a minute; then others start.
    A stand-in for another device than this machine's processor replaces all members.
    """

    most_verified_bytes = 16 * 2**20
    """Of a kernel's operands where values are compared, unless all its sizes are fixed."""
    most_ratio = inf
    """Of the rule's time that a search may tell of a candidate that is worth judging."""
    differences = staticmethod(judgement.differences)
    time_kernels = staticmethod(judgement.time_kernels)

    @functools.cached_property
    def builder(self) -> Any:
        """MetaSchedule's builder; its own starts processes anew for every few candidates."""
        from tvm.ir.utils import derived_object
        from tvm.s_tir.meta_schedule.builder import BuilderResult, PyBuilder
        from tvm.support.popen_pool import PopenPoolExecutor, StatusKind

        pool = PopenPoolExecutor(max_workers=1, timeout=60, initializer=workers.start)

        @derived_object
        class Builder(PyBuilder):
            def build(self, build_inputs: Any) -> list[Any]:
                inputs = [(each.mod, each.target) for each in build_inputs]
                return [
                    BuilderResult(done.value, None)
                    if done.status == StatusKind.COMPLETE
                    else BuilderResult(None, str(done.value))
                    for done in pool.map_with_error_catching(workers.build, inputs)
                ]

        return Builder()

    @functools.cached_property
    def runner(self) -> Any:
        """MetaSchedule's runner."""
        from tvm.s_tir.meta_schedule.runner import EvaluatorConfig, LocalRunner

        return LocalRunner(
            timeout_sec=60,
            evaluator_config=EvaluatorConfig(repeat=5, min_repeat_ms=3),
            f_alloc_argument=workers.operands,
            initializer=workers.start,
        )


def require(cost_model: CostModel) -> None:
    """Raise `UnsupportedEnvironmentError` where a package that MetaSchedule needs is missing."""
    missing = [name for name in NEEDED[cost_model] if find_spec(name) is None]
    if missing:
        raise UnsupportedEnvironmentError(
            f'tuning needs {", ".join(missing)}: pip install "relax-disc[tune]"'
        )


def search(
    kernel: tirx.PrimFunc,
    target: Target,
    space: Space,
    tunes: tuple[str, ...],
    folder: Path,
    how: Search,
    processes: Processes,
) -> list[tuple[float, Any]]:
    """Time candidates of one kernel.

    ``kernel``: of fixed sizes, with a root block. ``target``: what `processes` stands for.
    ``space``: which design space. ``tunes``: fields of `Settings` that the rule of the kernel
    uses, for the space ``"rules"``. ``folder``: for MetaSchedule's own records; those of an
    earlier search there count. ``how``: how many candidates, and how they are chosen.
    ``processes``: what makes and times them; for one search after the other. Returned: seconds and
    traces as JSON, the fastest first.
    """
    # MetaSchedule takes half a second to import.
    from tvm.s_tir import meta_schedule as ms

    points = prod(len(CHOICES[name]) for name in tunes) if space == "rules" else how.trials
    trials = min(how.trials, points)
    folder.mkdir(parents=True, exist_ok=True)
    database = ms.Database.create("json", work_dir=str(folder))
    left = trials - len(database.get_all_tuning_records())
    if left > 0:
        context = _without_intrinsics(space, target, ms.TuneContext)(
            mod=kernel.with_attr("global_symbol", "main"),
            target=target,
            space_generator=_generator(ms, space, tunes, target),
            search_strategy=ms.search_strategy.EvolutionarySearch(
                population_size=min(64, points),
                init_min_unmeasured=min(_PER_ROUND, points),
                max_fail_count=2,
                genetic_num_iters=2,
            ),
            rand_state=how.seed,
            num_threads=1,
            logger=_quiet(),
        ).clone()
        ms.tune.tune_tasks(
            tasks=[context],
            task_weights=[1.0],
            work_dir=str(folder),
            max_trials_global=left,
            num_trials_per_iter=_PER_ROUND,
            builder=processes.builder,
            runner=processes.runner,
            database=database,
            cost_model=_cost_model(ms, space, how.cost_model),
            task_scheduler=ms.task_scheduler.RoundRobin(),
        )
    found = []
    for record in database.get_all_tuning_records():
        seconds = [float(each) for each in record.run_secs or ()]
        if seconds and min(seconds) < 1e9:  # TVM's time of a candidate that failed
            found.append((float(np.median(seconds)), plain(record.trace.as_json())))
    return sorted(found, key=lambda pair: pair[0])


def _without_intrinsics(
    space: Space, target: Target, make: Callable[..., Any]
) -> Callable[..., Any]:
    """Keep TVM's instructions for tensor cores out, which only its space for CPUs uses here.

    A context imports them, which takes half a minute where torch is imported: TVM looks at every
    module for the source of each of 248 functions.
    """
    name = "tvm.s_tir.tensor_intrin"
    if (space != "rules" and target.kind.name == "llvm") or name in sys.modules:
        return make

    def made(**arguments: Any) -> Any:
        sys.modules[name] = ModuleType(name)
        try:
            return make(**arguments)
        finally:
            del sys.modules[name]  # who needs it later imports it

    return made


def _quiet() -> logging.Logger:
    """Make MetaSchedule's loggers say what is wrong only."""
    logging.getLogger("tvm.s_tir.meta_schedule").setLevel(logging.ERROR)
    return logging.getLogger("tvm.s_tir.meta_schedule")


def _generator(ms: Any, space: Space, tunes: tuple[str, ...], target: Target) -> Any:
    if space == "tvm" and target.kind.name != "llvm":
        # By name, because TVM adds rules for tensor cores by itself; products go to libraries.
        kind = target.kind.name
        return ms.space_generator.PostOrderApply(sch_rules=kind, postprocs=kind, mutator_probs=kind)
    if space == "tvm":
        return ms.space_generator.PostOrderApply()
    return ms.space_generator.ScheduleFn(
        _settings_space(tunes), sch_rules=[], postprocs=[], mutator_probs={}
    )


def _settings_space(tunes: tuple[str, ...]) -> Callable[[s_tir.Schedule], None]:
    def sample(schedule: s_tir.Schedule) -> None:
        root = schedule.get_sblock("root", func_name="main")
        for name in tunes:
            values = CHOICES[name]
            value = schedule.sample_categorical(list(values), [1 / len(values)] * len(values))
            schedule.annotate(root, ANNOTATION + name, value)

    return sample


def _cost_model(ms: Any, space: Space, kind: CostModel) -> Any:
    if kind == "random":
        return ms.cost_model.RandomModel()
    extractor = _decisions_extractor(ms) if space == "rules" else "per-store-feature"
    return ms.cost_model.XGBModel(
        extractor=extractor, num_warmup_samples=_PER_ROUND, num_tuning_cores=1
    )


def _decisions_extractor(ms: Any) -> Any:
    """Make what shows a cost model the decisions: until it is built the kernel has no loops."""
    from tvm.ir.utils import derived_object

    @derived_object
    class Decisions(ms.feature_extractor.PyFeatureExtractor):
        def extract_from(self, context: Any, candidates: Any) -> list[Any]:
            del context
            rows = []
            for candidate in candidates:
                marks = candidate.sch.mod["main"].body.block.annotations
                row = [float(np.log2(int(marks[name]))) for name in sorted(map(str, marks))]
                rows.append(tvm.runtime.tensor(np.array([row], dtype="float64")))
            return rows

    return Decisions()
