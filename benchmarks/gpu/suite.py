"""Measure on a GPU, the most valuable first, in parts of at most nine minutes that resume.

`scripts/gpu_suite.sh` calls it.  Every part has a process of its own and writes each row into
``benchmarks/results/gpu_<gpu>_<part>.json`` at once; a part that is run again measures what is
missing.  A part whose process ends is run again, without a row that ended it twice.  With
``--rehearse`` the same code runs on the host, with small models.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.gpu import device as devices
from benchmarks.gpu.llama import TINY
from benchmarks.gpu.parts import PARTS, bandwidth, budgets, llama_errors, numbers, paper
from benchmarks.gpu.rows import Rows
from benchmarks.models.catalogue import ENTRIES, entry_named
from benchmarks.models.worker import judge

PART_SECONDS = 540
_LAST_ROW_SECONDS = 60  # that a row may take which begins last
_MOST_RUNS = 5  # of a part whose process ends


def run_part(part: str, rows: Rows, device: devices.Device, *, rehearse: bool) -> None:
    """Run one part in this process."""
    if not rehearse:
        PARTS[part](device, rows)
    elif part == "numbers":
        numbers(device, rows, TINY, ENTRIES[:1])
    elif part == "paper":
        paper(device, rows, TINY, batches=(2,), ways=("relax_disc", "eager", "checkpoint"), count=2)
    elif part == "bandwidth":
        bandwidth(device, rows, TINY, records=2)
    elif part == "budgets":
        budgets(device, rows, TINY, records=2)
    else:
        PARTS[part](device, rows)


def judge_model(name: str, device: devices.Device) -> None:
    """Judge a model of the table; the answer is a line of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes to stderr
    warnings.simplefilter("ignore")
    print(json.dumps(judge(entry_named(name), device)), file=answers, flush=True)


def _ended(name: str, options: list[str], seconds: float) -> int | str:
    """Run a part in a process of its own until it ends well; return how it ended."""
    until = time.monotonic() + min(PART_SECONDS, seconds)
    code: int | str = 0
    for _ in range(_MOST_RUNS):
        left = until - time.monotonic()
        if left <= 0:
            return code
        here = ["--parts", name, "--here", f"{left - min(_LAST_ROW_SECONDS, left / 2)}"]
        command = [sys.executable, "-m", "benchmarks.gpu.suite", *here, *options]
        try:
            code = subprocess.run(command, timeout=left, check=False).returncode
        except subprocess.TimeoutExpired:
            return "out of time; run it again to go on"
        if code == 0:
            break
    return code


def main(
    parts: Annotated[
        str, typer.Option(help=f"Of {', '.join(PARTS)}; separated by commas.")
    ] = ",".join(PARTS),
    seconds: Annotated[float, typer.Option(help="After so many the run has ended.")] = 1e6,
    copy_to: Annotated[
        Path | None, typer.Option(help="A folder that gets every row at once, too.")
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Measure again what has failed.")] = False,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="On the host, with small models.")
    ] = False,
    inner: Annotated[bool, typer.Option("--inner", help="Only a small Llama, printed.")] = False,
    model: Annotated[str, typer.Option(help="Only one model of the table, printed.")] = "",
    here: Annotated[float, typer.Option(help="In this process, within so many seconds.")] = 0.0,
    spent: Annotated[float, typer.Option(help="Of the seconds, spent already.")] = 0.0,
) -> None:
    """Run parts one after the other; a part that fails does not keep the next from running."""
    start = time.monotonic() - spent
    console = Console()
    names = parts.split(",")
    for name in names:
        if name not in PARTS:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(PARTS)}")
    if inner or model or here:
        device = devices.host() if rehearse else devices.gpu()
        if inner:
            console.print(llama_errors(device, TINY, (17, 5)))
        elif model:
            judge_model(model, device)
        for name in names if here else ():
            rows = Rows(device, name, here, retry=retry, copy_to=copy_to)
            run_part(name, rows, device, rehearse=rehearse)
        return
    failed = []
    options = ["--rehearse"] * rehearse + ["--retry"] * retry
    if copy_to is not None:
        copy_to.mkdir(parents=True, exist_ok=True)
        options += ["--copy-to", str(copy_to)]
    for name in names:
        left = seconds - (time.monotonic() - start)
        if left < _LAST_ROW_SECONDS:
            console.print(f"{name}: no time left; run it again to go on")
            continue
        console.rule(name)
        code = _ended(name, options, left)
        if code != 0:
            failed.append(name)
            console.print(f"{name}: {code}")
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
