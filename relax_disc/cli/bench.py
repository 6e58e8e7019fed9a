"""``relax-disc bench``: the user's step next to the same step in eager PyTorch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
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
    resized,
    with_options,
)
from relax_disc.frontend.capture.exported.export import wrap_step
from relax_disc.frontend.optimizer.several import optimizers_of

EXAMPLES = (
    "Example: relax-disc bench my.py:step --dim batch=8 --dim seq=256 --budget 2GiB. The two take "
    "turns in one process; the ratio is the median of pairs. Other programs on the machine "
    "disturb both."
)


def bench(
    context: typer.Context,
    source: Source,
    dim: Sizes = None,
    budget: Annotated[
        str | None, typer.Option(help='All memory of a compiled step, such as "8GiB".')
    ] = None,
    offload_to: OffloadTo = None,
    offload: Offload = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each.")] = 10,
    as_json: Json = False,
) -> None:
    """Time a compiled step and the same step in eager PyTorch, in turns."""
    check_options(budget, offload_to, offload)
    make = load(source)
    arguments = with_options(make(), budget, offload_to, offload)
    step = compiled(source, arguments)
    sizes = parse_sizes(dim, step.dims)
    batch = resized(arguments["example_inputs"], arguments["dynamic_shapes"], sizes)
    eager = _eager(make(), batch)
    named = batch if isinstance(batch, Mapping) else {}
    placed = () if named else batch
    if step.optimizer is None:
        raise typer.BadParameter(f"{source} has no optimizer: there is no whole step to time")

    def ours() -> None:
        step(*placed, **named)

    for run in (ours, eager):
        run()
        run()
    pairs = [(_seconds(ours), _seconds(eager)) for _ in range(steps)]
    ratios = sorted(mine / theirs for mine, theirs in pairs)
    facts = {
        "shape": sizes,
        "threads": torch.get_num_threads(),
        "steps": steps,
        "relax_disc_seconds": statistics.median(mine for mine, _ in pairs),
        "eager_seconds": statistics.median(theirs for _, theirs in pairs),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [ratios[steps // 4], ratios[(3 * steps) // 4]],
        "peak_bytes": step.memory_report().peak_bytes,
    }
    if as_json:
        print_json(context, facts)
        return
    table = Table(title=f"{steps} steps each, {facts['threads']} threads", show_header=False)
    table.add_row("compiled", f"{1e3 * facts['relax_disc_seconds']:.1f} ms")
    table.add_row("eager PyTorch", f"{1e3 * facts['eager_seconds']:.1f} ms")
    low, high = facts["ratio_quartiles"]
    table.add_row("compiled / eager, median", f"{facts['ratio']:.2f} ({low:.2f}-{high:.2f})")
    table.add_row("peak of the compiled step", format_bytes(facts["peak_bytes"]))
    Console().print(table)


def _eager(arguments: dict[str, Any], batch: Any) -> Callable[[], None]:
    """Return PyTorch's own step on the user's model."""
    model, optimizers = arguments["model"], optimizers_of(arguments["optimizer"])
    wrapped = wrap_step(model, arguments.get("loss_fn"))
    named = batch if isinstance(batch, Mapping) else {}
    placed = () if named else batch
    most = arguments.get("max_grad_norm")

    def run() -> None:
        loss, _ = wrapped.eager(*placed, **named)
        loss.backward()
        if most is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), most)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return run


def _seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
