"""Measure on a GPU, the most valuable first, in parts of at most nine minutes that resume.

`scripts/gpu_suite.sh` calls it.  Every part has a process of its own and writes each row into
``benchmarks/results/gpu_<gpu>_<part>.json`` at once; a part that is run again measures what is
missing.  With ``--rehearse`` the same code runs on the host, with small models.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.gpu import device as devices
from benchmarks.gpu.llama import TINY
from benchmarks.gpu.parts import PARTS, bandwidth, budgets, llama_errors, numbers, paper
from benchmarks.gpu.rows import Rows
from benchmarks.models.catalogue import ENTRIES

PART_SECONDS = 540


def run_part(part: str, *, rehearse: bool) -> None:
    """Run one part in this process."""
    device = devices.host() if rehearse else devices.gpu()
    rows = Rows(device, part, PART_SECONDS - 60)
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


def main(
    parts: Annotated[
        str, typer.Option(help=f"Of {', '.join(PARTS)}; separated by commas.")
    ] = ",".join(PARTS),
    seconds: Annotated[int, typer.Option(help="No part begins after so many.")] = 10**6,
    rehearse: Annotated[bool, typer.Option(help="On the host, with small models.")] = False,
    inner: Annotated[bool, typer.Option(help="Only a small Llama, printed.")] = False,
    here: Annotated[bool, typer.Option(help="In this process: one part.")] = False,
) -> None:
    """Run parts one after the other; a part that fails does not keep the next from running."""
    console = Console()
    names = parts.split(",")
    for name in names:
        if name not in PARTS:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(PARTS)}")
    if inner:
        device = devices.host() if rehearse else devices.gpu()
        console.print(llama_errors(device, TINY, (17, 5)))
        return
    if here:
        for name in names:
            run_part(name, rehearse=rehearse)
        return
    start, failed = time.monotonic(), []
    for name in names:
        if time.monotonic() - start > seconds:
            console.print(f"{name}: no time left")
            continue
        console.rule(name)
        command = [sys.executable, "-m", "benchmarks.gpu.suite", "--here", "--parts", name]
        try:
            code = subprocess.run(
                command + ["--rehearse"] * rehearse, timeout=PART_SECONDS, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = "out of time; run it again to go on"
        if code != 0:
            failed.append(name)
            console.print(f"{name}: {code}")
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
