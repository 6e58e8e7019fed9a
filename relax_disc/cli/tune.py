"""``relax-disc tune``: search for faster schedules of a step's kernels on this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from math import prod, sqrt
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tvm.target import Target

from relax_disc import progress
from relax_disc.analysis.symbolic.dim import SymbolicDim
from relax_disc.cli.user_step import Json, Sizes, Source, load, parse_sizes, print_json, writable
from relax_disc.errors import InputMismatchError
from relax_disc.frontend import export_step
from relax_disc.frontend.padding import without_padding
from relax_disc.pipeline import PipelineOptions, unscheduled
from relax_disc.tir_kernels.target import resolve_target
from relax_disc.tir_kernels.tuning import database as databases
from relax_disc.tir_kernels.tuning.search import Search, Space, require
from relax_disc.tir_kernels.tuning.tasks import Task, tasks
from relax_disc.tir_kernels.tuning.tune import BENCHES, Plan, Verdict, tune_kernels

EXAMPLES = (
    "Example: relax-disc tune my.py:step --dim batch=4 --dim seq=128 --trials 64. An "
    "interrupted run goes on where it stopped. Other programs on the machine disturb it."
)
_UNBOUNDED = 1024
"""Greatest size that is tried of a dim without a limit."""
_RECORDED = 4
"""Recorded shapes at which candidates are timed, about."""


class Spaces(str, Enum):
    """Design spaces by name."""

    rules = "rules"
    tvm = "tvm"
    both = "both"


class CostModels(str, Enum):
    """Cost models by name."""

    xgb = "xgb"
    random = "random"


def tune(
    context: typer.Context,
    source: Source,
    dim: Sizes = None,
    lengths: Annotated[
        Path | None,
        typer.Option(
            help='Recorded shapes, a line each: {"batch": 4, "seq": 128}.',
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Candidates timed for a kernel.")] = 32,
    kernels: Annotated[
        int, typer.Option(min=1, help="How many kernels: those that move most bytes.")
    ] = 20,
    space: Annotated[
        Spaces | None,
        typer.Option(
            help="Numbers of our rules (the default on a CPU), TVM's own design space, or both."
        ),
    ] = None,
    for_target: Annotated[
        str | None, typer.Option("--target", help="Such as relax_disc/h100; by default the step's.")
    ] = None,
    cost_model: Annotated[
        CostModels, typer.Option(help="What chooses candidates.")
    ] = CostModels.xgb,
    database: Annotated[
        Path | None, typer.Option(help="A file; by default your own in the cache directory.")
    ] = None,
    again: Annotated[bool, typer.Option(help="Tune what the database knows, too.")] = False,
    as_json: Json = False,
) -> None:
    """Search for faster schedules of a step's kernels, and keep what beats the rules.

    A kernel's schedule is kept where it computes the same at every shape that was tried, is faster
    than the rule at the tuned shape and slower at none.  Later compilations on this machine use it.
    """
    require(cost_model.value)
    try:
        asked = resolve_target(for_target) if for_target else None
    except InputMismatchError as error:
        raise typer.BadParameter(str(error), param_hint="--target") from error
    arguments = load(source)()
    target = asked or resolve_target(arguments.get("target", "llvm"))
    if target.kind.name not in BENCHES:
        raise InputMismatchError(
            f"no times of {target.kind.name} are measured yet: in a checkout, `python -m "
            "tests.cuda.tuning` takes the same arguments and ranks by a model."
        )
    path = database or databases.user_path(target)
    try:  # before anything long begins
        path.parent.mkdir(parents=True, exist_ok=True)
        writable(path)
    except OSError as error:
        raise typer.BadParameter(str(error), param_hint="--database") from error
    known = databases.TuningDatabase(databases.environment(target))
    if path.exists():
        known = databases.read(path)
        databases.check(path, known, target)
    with progress.shown():
        found, dims = _tasks(arguments, target)
        own = Spaces.rules if target.kind.name == "llvm" else Spaces.tvm
        plan = _plan(dims, dim, lengths, space or own, Search(trials, cost_model.value))
        chosen = _largest(found, plan, kernels)
        verdicts: list[tuple[Task, Verdict]] = []
        tune_kernels(
            chosen,
            target,
            plan,
            known,
            path,
            lambda task, verdict: verdicts.append((task, verdict)),
            again=again,
        )
    facts = {
        "database": str(path),
        "shape": dict(plan.shape),
        "known_before": len(chosen) - len(verdicts),
        "kernels": [{"key": task.key, **verdict.entry()} for task, verdict in verdicts],
    }
    if as_json:
        print_json(context, facts)
    else:
        _show(facts, verdicts)


def _tasks(
    arguments: Mapping[str, Any], target: Target
) -> tuple[list[Task], tuple[SymbolicDim, ...]]:
    """Capture a step; return its kernels and its dims."""
    options = arguments.get("options") or PipelineOptions()
    used = ("model", "optimizer", "example_inputs", "dynamic_shapes", "loss_fn", "max_grad_norm")
    given = {name: arguments[name] for name in used if name in arguments}
    with progress.phase("trace the step"):
        exported = export_step(given.pop("model"), given.pop("optimizer"), **given)
        captured = (
            exported.capture_gradients() if exported.optimizer is None else exported.capture()
        )
        if options.remove_padding:
            (captured,) = without_padding((captured,), target)
    with progress.phase("find the kernels"):
        found = tasks(unscheduled(captured.module, target, options), target)
    dims = tuple(SymbolicDim(each.name, each.lower, each.upper) for each in captured.dims)
    return found, dims


def _plan(
    dims: tuple[SymbolicDim, ...],
    given: list[str] | None,
    lengths: Path | None,
    space: Spaces,
    search: Search,
) -> Plan:
    """Choose the shape to search at, and those to time at."""
    ranges = {dim.name: (dim.first, dim.last or _UNBOUNDED) for dim in dims}
    recorded = [] if lengths is None else _recorded(lengths, dims)
    if given:
        shape = parse_sizes(given, dims)
    elif recorded:
        shape = sorted(recorded, key=lambda each: prod(each.values()))[len(recorded) // 2]
    else:
        shape = {name: round(sqrt(low * high)) for name, (low, high) in ranges.items()}
    others = [{name: low for name, (low, _) in ranges.items()}]
    for factor in (0.25, 0.5, 2, 4):
        others.append(
            {name: _within(shape[name] * factor, limits) for name, limits in ranges.items()}
        )
    spaces: tuple[Space, ...] = (space.value,) if space is not Spaces.both else ("rules", "tvm")
    step = max(1, len(recorded) // _RECORDED)
    return Plan(shape, [*recorded[::step], *others], ranges, spaces, search)


def _within(size: float, limits: tuple[int, int]) -> int:
    return min(max(round(size), limits[0]), limits[1])


def _recorded(path: Path, dims: tuple[SymbolicDim, ...]) -> list[dict[str, int]]:
    """Read recorded shapes, each once."""
    found: list[dict[str, int]] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            shape = json.loads(line)
            sizes = parse_sizes([f"{name}={size}" for name, size in shape.items()], dims)
        except (ValueError, AttributeError, typer.BadParameter) as error:
            raise typer.BadParameter(f"{path}:{number}: {error}", param_hint="--lengths") from error
        if sizes not in found:
            found.append(sizes)
    return found


def _largest(found: list[Task], plan: Plan, count: int) -> list[Task]:
    """Choose the kernels whose calls move most bytes at the shape to tune at."""

    def moved(task: Task) -> int:
        return sum(task.bytes(sizes) for sizes in task.sizes(plan.shape))

    return sorted(found, key=moved, reverse=True)[:count]


def _show(facts: dict[str, Any], verdicts: list[tuple[Task, Verdict]]) -> None:
    console = Console()
    shape = ", ".join(f"{name}={size}" for name, size in facts["shape"].items())
    table = Table(title=f"Kernels tuned at {shape or 'their shape'}")
    for title in ("kernel", "rule, us", "tuned / rule", "kept"):
        table.add_column(title, justify="left" if title in ("kernel", "kept") else "right")
    for task, verdict in verdicts:
        first = verdict.measured[0] if verdict.measured else None
        table.add_row(
            escape(task.name[:48]),
            f"{first.rule_us:.1f}" if first else "",
            f"{first.ratio:.2f}" if first else "",
            f"{verdict.space}" if verdict.trace is not None else f"rule: {escape(verdict.reason)}",
        )
    console.print(table)
    if facts["known_before"]:
        console.print(f"{facts['known_before']} kernels were known; --again tunes those, too.")
    console.print(f"database: {facts['database']}", soft_wrap=True)
