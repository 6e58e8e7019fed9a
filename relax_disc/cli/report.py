"""``relax-disc report``: what a step needs of memory at a shape, where, and what would fit."""

from __future__ import annotations

from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from relax_disc.bytes_text import format_bytes
from relax_disc.cli.user_step import (
    Json,
    Offload,
    OffloadTo,
    Sizes,
    Source,
    check_options,
    compiled,
    load,
    parse_sizes,
    print_json,
    with_options,
    writable,
)
from relax_disc.report.page import code_of
from relax_disc.training.memory_plan import WholeGradient

EXAMPLES = (
    "Example: relax-disc report my.py:step --dim batch=14 --dim seq=512 --budget 8GiB --html "
    "report.html. Exit code 1: the shape does not fit the budget."
)


def _picture(path: Path | None) -> Path | None:
    """Check that a picture can be drawn before anything long begins."""
    if path is not None and path.suffix not in (".png", ".svg", ".pdf"):
        raise typer.BadParameter(f"{path} does not end in .png, .svg or .pdf")
    if path is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter('there is no matplotlib; run: pip install "relax-disc[plot]"')
    return writable(path)


def report(
    context: typer.Context,
    source: Source,
    dim: Sizes = None,
    budget: Annotated[
        str | None, typer.Option(help='All memory of a step, such as "8GiB".')
    ] = None,
    offload_to: OffloadTo = None,
    offload: Offload = None,
    lines: Annotated[int, typer.Option(min=0, help="Lines of the model to name.")] = 10,
    plot: Annotated[
        Path | None, typer.Option(help="Write a picture: .png, .svg, .pdf.", callback=_picture)
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page to look into, offline.", callback=writable)
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace for ui.perfetto.dev.", callback=writable)
    ] = None,
    snapshot: Annotated[
        Path | None,
        typer.Option(help="Write a snapshot for pytorch.org/memory_viz.", callback=writable),
    ] = None,
    as_json: Json = False,
) -> None:
    """Peak memory of a step at a shape, what is alive there, by which line of the model.

    Compiles the step, without running it.
    """
    check_options(budget, offload_to, offload)
    step = compiled(source, with_options(load(source)(), budget, offload_to, offload))
    sizes = parse_sizes(dim, step.dims)
    plan = step.plan(**sizes)
    limit, step.memory_budget = step.memory_budget, None
    free = step.plan(**sizes)
    step.memory_budget = limit
    # What does not fit has no timeline: then the table tells of the step without a budget.
    timeline = (plan if plan.fits else free).timeline
    at_peak = {name: row[timeline.peak_step] for name, row in timeline.live_bytes.items()}
    if timeline.unused_bytes:
        at_peak["between tensors"] = timeline.unused_bytes
    facts: dict[str, Any] = {
        "shape": sizes,
        "budget_bytes": limit,
        "fits": plan.fits,
        "peak_bytes": plan.peak_bytes if plan.fits else None,
        "activation_peak_bytes": plan.activation_peak_bytes if plan.fits else None,
        "peak_without_budget_bytes": free.peak_bytes,
        "least_bytes": plan.least_bytes,
        "time_ratio": plan.time_ratio if plan.fits else None,
        "kernels_run_again": len(plan.evicted) if plan.fits else None,
        "offloaded_bytes": plan.offloaded_bytes if plan.fits else None,
        "offloaded_state_bytes": plan.offloaded_state_bytes if plan.fits else None,
        "by_rows": plan.by_rows,
        "whole_gradients": [asdict(gradient) for gradient in plan.whole_gradients],
        "unbounded_calls": list(plan.unbounded_calls),
        "at_peak_bytes": at_peak,
        "lines_at_peak": [
            {"line": line, "bytes": size, "tensors": count, "code": code_of(line)}
            for line, size, count in timeline.lines(timeline.peak_step)[:lines]
        ],
        "largest": {
            each.name: step.largest(
                each.name, **{name: size for name, size in sizes.items() if name != each.name}
            )
            for each in step.dims
            if limit is not None and each.last is not None
        },
    }
    shown, before = (plan, free) if plan.fits and limit is not None else (free, None)
    if plot:
        shown.plot(plot, before=before)
    if html:
        shown.write_html(html, before=before)
    if trace:
        shown.write_trace(trace)
    if snapshot:
        shown.write_snapshot(snapshot)
    if as_json:
        print_json(context, facts)
    else:
        _show(facts)
    if not plan.fits:
        raise typer.Exit(1)


def _show(facts: dict[str, Any]) -> None:
    console = Console()
    shape = ", ".join(f"{name}={size}" for name, size in facts["shape"].items())
    budget = facts["budget_bytes"]
    table = Table(title=f"One step at {shape or 'its shape'}", show_header=False)
    fits = facts["fits"]
    peak = facts["peak_bytes"] if fits else facts["peak_without_budget_bytes"]
    table.add_row("peak" if fits else "peak without a budget", format_bytes(peak))
    for name, size in facts["at_peak_bytes"].items():
        table.add_row(f"  {name}", format_bytes(size))
    if budget is not None:
        table.add_row("budget", format_bytes(budget))
        table.add_row("fits", "yes" if fits else "NO")
    if budget is not None and fits:
        table.add_row("peak without a budget", format_bytes(facts["peak_without_budget_bytes"]))
        table.add_row("kernels that run again", str(facts["kernels_run_again"]))
        table.add_row("time, modelled", f"x {facts['time_ratio']:.3f}")
    for name, key in (("activations", "offloaded_bytes"), ("state", "offloaded_state_bytes")):
        if facts[key]:
            table.add_row(f"offloaded {name}", format_bytes(facts[key]))
    table.add_row("least budget for this shape", format_bytes(facts["least_bytes"]))
    if facts["by_rows"]:
        table.add_row("largest gradients", "made and used in blocks of rows")
    for name, size in facts["largest"].items():
        table.add_row(f"largest {name} in the budget", str(size) if size else "none fits")
    console.print(table)
    unlimited = "" if fits else " without a budget"
    alive = Table(title=f"Alive at the peak{unlimited}, by the line of the model that made it")
    for title in ("bytes", "tensors"):
        alive.add_column(title, justify="right")
    alive.add_column("line")
    for entry in facts["lines_at_peak"]:
        where = "/".join(entry["line"].split("/")[-3:])
        text = f"{where}  {entry['code']}" if entry["code"] else where
        alive.add_row(format_bytes(entry["bytes"]), str(entry["tensors"]), escape(text))
    console.print(alive)
    if facts["unbounded_calls"]:
        names = ", ".join(facts["unbounded_calls"])
        console.print(escape(f"Note: not all memory that these take is counted: {names}."))
    for gradient in facts["whole_gradients"]:
        console.print(escape(f"Note: {WholeGradient(**gradient)}."))
