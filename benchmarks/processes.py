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
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from benchmarks.checkout import LAUNCH
from benchmarks.malloc_counter import preload_environment

ROOT = Path(__file__).parents[1]


class WorkerEndedError(RuntimeError):
    """A worker ended instead of answering; `worker` is its name."""

    def __init__(self, worker: str, reason: str) -> None:
        super().__init__(f"the worker of {worker} {reason}")
        self.worker = worker


class Worker:
    """The far end of one worker process, killed at `deadline` of the monotonic clock."""

    def __init__(
        self, name: str, process: subprocess.Popen[str], stderr: IO[str], deadline: float
    ) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._stderr = stderr
        self._deadline = deadline

    @cached_property
    def prepared(self) -> dict[str, Any]:
        """What it answers first, when it is ready."""
        return self._answer()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request; the answer.

        Raises
        ------
        WorkerEndedError
            The process ended instead.
        """
        _ = self.prepared  # which comes first
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # of one that has ended: it will not answer either
            print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._answer()

    def cpu_seconds(self) -> float:
        """Processor time that the process has taken so far, of all its threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerEndedError(self.name, self._reason())
        return json.loads(line)

    def _reason(self) -> str:
        """Why it ended; what it told goes to stderr."""
        status = self._process.wait()
        self._stderr.seek(0)
        told = self._stderr.read()
        print(told, end="", file=sys.stderr)
        if time.monotonic() >= self._deadline:
            return "was not done within its limit of time"
        last = (told.strip().splitlines() or ["nothing on stderr"])[-1]
        return f"ended with {status}: {last}"


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
    wait: bool = True,
) -> Iterator[Worker]:
    """Start a worker of a checkout and wait until it is ready, if asked; it ends with the context.

    Raises `WorkerEndedError`: it ended before it was ready.
    """
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
    limit_seconds = limit_seconds or threading.TIMEOUT_MAX
    with tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=tree,
            env=environment,
        )
        deadline = time.monotonic() + limit_seconds
        limit = threading.Timer(limit_seconds, process.kill)
        limit.daemon = True
        limit.start()
        try:
            worker = Worker(name, process, stderr, deadline)
            if wait:
                _ = worker.prepared
            yield worker
        finally:
            limit.cancel()
            assert process.stdin is not None and process.stdout is not None
            process.terminate()
            process.wait()
            with suppress(BrokenPipeError):  # of a request that one that ended never read
                process.stdin.close()
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
