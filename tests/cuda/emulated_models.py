"""Train every model of docs/models.md for CUDA on the emulator, in one run that can be resumed.

`python -m tests.cuda.emulated_models` judges each model in a process of its own and writes
`benchmarks/results/cuda_emulated_models.json` after each; models that stand there are left out.
"""

from __future__ import annotations

import json
import os
import resource
import warnings
from dataclasses import replace
from typing import Annotated, Any
from unittest import mock

import torch
import typer

from benchmarks.models import worker
from benchmarks.models.__main__ import told_by
from benchmarks.models.catalogue import ENTRIES, entry_named
from benchmarks.models.entry import Entry
from benchmarks.record import RESULTS, commit, write_result
from relax_disc.compiler import build_or_reuse
from relax_disc.tir_kernels.target import cuda_target
from tests.cuda.emulator import Emulator
from tests.cuda.stand_in import cuda_stand_in

MOST_PARAMETERS = 1_000_000
"""An element of an emulated kernel takes a thousand times a CPU's: larger models run one shape."""

NAME = "cuda_emulated_models"


def judge(entry: Entry) -> dict[str, Any]:
    """Judge a model as `benchmarks.models.worker.judge` does, its kernels emulated.

    Findings of the emulator make the verdict ``"WRONG"`` and are listed; ``"kernels"`` counts the
    different kernels that ran, ``"launches"`` all launches.
    """
    emulator = Emulator.load()
    emulator.take_findings()
    emulator.forget()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with cuda_stand_in(emulator), mock.patch.object(worker, "build_or_reuse", _for_cuda):
            found = worker.judge(entry)
    finally:
        torch.set_num_threads(threads)
    findings = emulator.take_findings()
    launched = [event for event in emulator.events if event.startswith("launch ")]
    return {
        **found,
        "verdict": "WRONG" if findings else found["verdict"],
        "kernels": len(set(launched)),
        "launches": len(launched),
        "findings": [str(finding) for finding in findings],
    }


def _for_cuda(module: Any, target: Any) -> Any:
    del target
    return build_or_reuse(module, cuda_target("sm_90"))


def _at_small_shapes(entry: Entry) -> Entry:
    size = sum(p.numel() for p in entry.make().parameters())
    if size <= MOST_PARAMETERS:
        return entry
    return replace(entry, sizes=(min(entry.sizes, key=lambda sizes: torch.tensor(sizes).prod()),))


def _work(name: str, sizes: str) -> None:
    """Judge one model; the answer is a line of JSON."""
    entry = _at_small_shapes(entry_named(name))
    if sizes:
        shapes = [tuple(map(int, shape.split(","))) for shape in sizes.split(";")]
        entry = replace(entry, sizes=shapes)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes to stderr
    warnings.simplefilter("ignore")
    found = judge(entry)
    found["seconds"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_utime, 1)
    print(json.dumps(found), file=answers, flush=True)


def _judged(entry: Entry, limit_seconds: float) -> dict[str, Any]:
    facts = {"model": entry.name, "source": entry.source, "commit": commit()}
    module = "tests.cuda.emulated_models"
    found = told_by(module, "--work", entry.name, limit_seconds=limit_seconds)
    wanted = ("parameters", "verdict", "kernels", "launches", "findings", "ratio", "seconds")
    told = ("error", "message", "shapes") if found["verdict"] != "trains" else ()
    return {**facts, **{key: found[key] for key in (*wanted, *told) if key in found}}


def main(
    only: Annotated[str, typer.Option(help="Words in the names of models, by commas.")] = "",
    again: Annotated[bool, typer.Option("--again", help="Judge recorded models, too.")] = False,
    limit_seconds: Annotated[float, typer.Option(help="Of one model's process.")] = 900.0,
    sizes: Annotated[
        str, typer.Option(help="Shapes such as 1,2,3;4,5,6: judge there, print, record nothing.")
    ] = "",
    work: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Judge the models that have no result yet; write as it goes."""
    if work:
        _work(work, sizes)
        return
    path = RESULTS / f"{NAME}.json"
    rows = json.loads(path.read_text())["results"] if path.exists() else []
    found = {row["model"]: row for row in rows}
    words = [word.strip().lower() for word in only.split(",") if word.strip()]
    for entry in ENTRIES:
        wanted = not words or any(word in entry.name.lower() for word in words)
        if not wanted or (entry.name in found and not again and not sizes):
            continue
        if sizes:
            told = told_by(
                "tests.cuda.emulated_models",
                *("--work", entry.name, "--sizes", sizes),
                limit_seconds=limit_seconds,
            )
            for shape in told.get("shapes", []):
                print(entry.name, shape["sizes"], round(shape["ratio"], 2), flush=True)
            continue
        found[entry.name] = row = _judged(entry, limit_seconds)
        print(f"{entry.name}: {row['verdict']} {row.get('message', '')}", flush=True)
        settings = {"arch": "sm_90", "limit_seconds": limit_seconds}
        results = [found[known.name] for known in ENTRIES if known.name in found]
        write_result(NAME, settings, results)


if __name__ == "__main__":
    typer.run(main)
