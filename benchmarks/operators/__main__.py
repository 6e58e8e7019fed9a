"""Train every operator of `op_db` and module of `module_db` once: `python -m benchmarks.operators`.

Workers are processes; one that dies or takes too long costs its entry alone.
"""

from __future__ import annotations

import json
import os
import queue
import select
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.operators.judge import CRASH
from benchmarks.operators.worker import entries
from benchmarks.record import RESULTS, commit, write_result
from relax_disc.vm_builtins import native

_ROOT = Path(__file__).parents[2]


class Worker:
    """A process that judges entries, started again after it dies."""

    def __init__(self, limit_seconds: float) -> None:
        self._limit = limit_seconds
        self._process: subprocess.Popen[str] | None = None

    def judge(self, kind: str, name: str) -> dict[str, Any]:
        """Judge one entry."""
        if self._process is None:
            self._process = self._start()
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{kind} {name}\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], self._limit)
        line = process.stdout.readline() if ready else ""
        if line:
            return json.loads(line)
        why = "the process died" if ready else f"not done in {self._limit:.0f} s"
        self.close()
        return {"kind": kind, "name": name, "outcome": CRASH, "reason": why, "sample": ""}

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()  # which closes its pipes, too
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "RELAX_DISC_COMPILE_CACHE": "0",
        }
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.operators.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=_ROOT,
            env=environment,
        )


def judge_all(chosen: list[tuple[str, str]], jobs: int, limit_seconds: float) -> Any:
    """Yield the result of every entry as it comes, from so many processes."""
    waiting: queue.Queue[tuple[str, str]] = queue.Queue()
    found: queue.Queue[dict[str, Any]] = queue.Queue()
    for entry in chosen:
        waiting.put(entry)

    def serve() -> None:
        worker = Worker(limit_seconds)
        try:
            while True:
                found.put(worker.judge(*waiting.get_nowait()))
        except queue.Empty:
            pass
        finally:
            worker.close()

    with ThreadPoolExecutor(jobs) as pool:
        for _ in range(jobs):
            pool.submit(serve)
        for _ in chosen:
            yield found.get()


def main(
    only: Annotated[str, typer.Option(help="Words in the names of entries, by commas.")] = "",
    jobs: Annotated[int, typer.Option(help="Processes at once.")] = 2,
    limit_seconds: Annotated[float, typer.Option(help="Of one entry.")] = 300.0,
    again: Annotated[bool, typer.Option("--again", help="Only what was not right before.")] = False,
    name: Annotated[str, typer.Option(help="Of the file of results.")] = "operators",
) -> None:
    """Judge the entries; writes benchmarks/results/<name>.json, where others stay as they are."""
    console = Console()
    native.load()  # built once per machine
    at = commit()
    words = [word.strip() for word in only.split(",") if word.strip()]
    path = RESULTS / f"{name}.json"
    known = json.loads(path.read_text())["results"] if path.exists() else []
    by_entry = {(r["kind"], r["name"]): r for r in known}
    chosen = [e for e in entries() if not words or any(word in e[1] for word in words)]
    if again:
        chosen = [
            e for e in chosen if not by_entry.get(e, {}).get("outcome", "").startswith("right")
        ]
    with Progress(console=console) as progress:
        for result in progress.track(judge_all(chosen, jobs, limit_seconds), len(chosen)):
            by_entry[result["kind"], result["name"]] = {**result, "commit": at}
            if not result["outcome"].startswith("right"):
                text = (
                    f"{result['name']}: {result['outcome']} {result['sample']} {result['reason']}"
                )
                progress.console.print(text, markup=False, highlight=False)
            results = [by_entry[e] for e in entries() if e in by_entry]
            write_result(name, {"optimizer": "SGD", "threads": 1}, results)
    for kind in ("operator", "module"):
        console.print(kind, dict(Counter(r["outcome"] for r in results if r["kind"] == kind)))


if __name__ == "__main__":
    typer.run(main)
