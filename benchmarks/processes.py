"""Ways of doing one thing, each in a process of its own, that are asked in turn.

No way's threads, caches or memory touch another's; whatever else the machine does hits all alike.
A request is a line of JSON on the worker's stdin, its answer one on stdout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.checkout import LAUNCH
from benchmarks.malloc_counter import preload_environment

ROOT = Path(__file__).parents[1]


class WorkerEndedError(RuntimeError):
    """A worker ended instead of answering; `worker` is its name."""

    def __init__(self, worker: str, status: int) -> None:
        super().__init__(f"the worker of {worker} ended with {status}")
        self.worker = worker


class Worker:
    """The far end of one worker process."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self.prepared = self._answer()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request; the answer.

        Raises
        ------
        WorkerEndedError
            The process ended instead.
        """
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin)
        self._process.stdin.flush()
        return self._answer()

    def cpu_seconds(self) -> float:
        """Processor time that the process has taken so far, of all its threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerEndedError(self.name, self._process.wait())
        return json.loads(line)


def machine_cpu_seconds() -> float:
    """Processor time that all processes have taken since the machine started, and its host's."""
    user, nice, system, _, _, interrupts, soft, stolen = Path("/proc/stat").read_text().split()[1:9]
    ticks = sum(map(int, (user, nice, system, interrupts, soft, stolen)))
    return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def started(
    name: str,
    module: str,
    arguments: Sequence[str],
    threads: int,
    tree: Path = ROOT,
    limit_seconds: float | None = None,
) -> Iterator[Worker]:
    """Start a worker of a checkout and wait until it is ready; it ends with the context."""
    environment = {
        **os.environ,
        **preload_environment(),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": str(tree),
        "TVM_NUM_THREADS": str(threads),  # checkouts before the one pool
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "RELAX_DISC_COMPILE_CACHE": "0",
        "HF_HUB_OFFLINE": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tree,
        env=environment,
    )
    limit = threading.Timer(limit_seconds or threading.TIMEOUT_MAX, process.kill)
    limit.daemon = True
    limit.start()
    try:
        yield Worker(name, process)
    finally:
        limit.cancel()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.terminate()
        process.wait()
        process.stdout.close()


def serve(prepare: Callable[[], tuple[dict[str, Any], Callable[..., dict[str, Any]]]]) -> None:
    """Be a worker: answer what was prepared, then each request by what answers requests."""
    # Whatever libraries print goes to stderr: stdout belongs to the protocol.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        prepared, answer = prepare()
        print(json.dumps(prepared), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(**json.loads(line))), file=answers, flush=True)
