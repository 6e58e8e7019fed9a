"""Seconds of processor time that compiling a training step takes, by phase.

    python -m benchmarks.compile_time --models llama resnet18 densenet121 ghostnet_100

Each model is compiled in a process of its own, on one core and with one thread, without the caches
of captures and of programs; imports and the native library's build are left out.  `llama` is size S
of `benchmarks.training`; names of `benchmarks.models --speed` are its models; the others are
timm's, with dynamic batch, height and width; AdamW.  Results of other models stay in the file.

`--compare` also takes the first step (forward, backward, fused AdamW) of
`torch.compile(dynamic=True)` with an empty cache and one compiling process: its processor time,
less a second step's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, TypeVar
from unittest.mock import patch

MODELS = ("llama", "resnet18", "densenet121", "ghostnet_100", "mobilenetv3_small_100")
PHASES = ("export", "trace", "import", "simplify", "libraries", "fusion", "kernels", "memory")
PHASES += ("finalize", "code", "link")
_Result = TypeVar("_Result")


def _model(name: str) -> tuple[Any, Any, Any]:
    """Return a model, a batch, and its dynamic shapes."""
    import torch
    from torch import nn
    from torch.export import Dim

    torch.manual_seed(0)
    if name == "llama":
        from benchmarks.training.batches import LONGEST, make_batch
        from benchmarks.training.worker import peer_llama

        shape = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=1, max=LONGEST)}
        return peer_llama("S"), make_batch([24, 16], seed=0), {"ids": shape, "labels": shape}
    from benchmarks.models.wide import WIDE

    for entry in WIDE:
        if entry.name == name and entry.source != "timm":
            return entry.make().train(), entry.batch(*entry.sizes[0]), entry.dynamic_shapes()
    import timm  # pyright: ignore[reportMissingImports]  an extra: bench

    class Classified(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = timm.create_model(name, num_classes=10)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.model(x), labels)

    batch, sides = Dim("batch", min=1, max=64), [Dim(n, min=64, max=256) for n in ("high", "wide")]
    example = torch.randn(3, 3, 65, 67), torch.randint(0, 10, (3,))
    return Classified(), example, {"x": {0: batch, 2: sides[0], 3: sides[1]}, "labels": {0: batch}}


class Clock:
    """Sums processor time, that of child processes included, by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    def run(self, phase: str, work: Callable[[], _Result]) -> _Result:
        """Do something and book its time."""
        start = self.now()
        result = work()
        self.seconds[phase] += self.now() - start
        return result

    @staticmethod
    def now() -> float:
        """Seconds that this process and its children have computed."""
        spent = os.times()
        return spent.user + spent.system + spent.children_user + spent.children_system


def _instrument(clock: Clock) -> Any:
    """Make the instrument that books the passes of the pipeline's phases."""
    from tvm.ir.instrument import pass_instrument

    started: list[float] = []

    @pass_instrument
    class Phases:
        def run_before_pass(self, mod: Any, info: Any) -> None:
            started.append(clock.now())

        def run_after_pass(self, mod: Any, info: Any) -> None:
            spent = clock.now() - started.pop()
            phase = str(info.name).removeprefix("relax_disc.")
            if phase in PHASES and phase != str(info.name):
                clock.seconds[phase] += spent

    return Phases()


def measure(name: str) -> dict[str, Any]:
    """Compile a model in this process; return its seconds by phase, and sizes of the program."""
    import torch
    import tvm

    from relax_disc import compiler
    from relax_disc.frontend.capture import step
    from relax_disc.frontend.capture.tracing import tracing
    from relax_disc.tir_kernels.target import cpu_target
    from relax_disc.training.cache import artefact
    from relax_disc.vm_builtins import native

    torch.set_num_threads(1)
    native.load()
    model, example, shapes = _model(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    clock, target = Clock(), cpu_target()
    wall = time.perf_counter()
    with tracing():  # as in relax_disc.compile
        exported = clock.run(
            "export", lambda: compiler.export_step(model, optimizer, example, dynamic_shapes=shapes)
        )
        trace = step.trace_step
        with patch.object(
            step, "trace_step", lambda *args: clock.run("trace", lambda: trace(*args))
        ):
            captured = clock.run("import", exported.capture)
        clock.seconds["import"] -= clock.seconds["trace"]
        with tvm.transform.PassContext(opt_level=2, instruments=[_instrument(clock)]):
            built = clock.run("code", lambda: compiler.build(captured.module, target))
        inside = sum(clock.seconds[phase] for phase in PHASES[3:9])
        clock.seconds["code"] -= inside
        library = clock.run("link", lambda: artefact.export_library(built))
    seconds = {phase: round(clock.seconds[phase], 2) for phase in PHASES}
    return {
        "seconds": seconds,
        "total": round(sum(seconds.values()), 2),
        "wall": round(time.perf_counter() - wall, 2),
        "library_bytes": len(library),
    }


def measure_torch_compile(name: str) -> dict[str, Any]:
    """Take the first step of `torch.compile` in this process; return its seconds."""
    import torch

    torch.set_num_threads(1)
    model, example, _ = _model(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    compiled = torch.compile(model, dynamic=True)

    def step() -> None:
        output = compiled(**example) if isinstance(example, dict) else compiled(*example)
        (output if isinstance(output, torch.Tensor) else output.loss).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    clock, wall = Clock(), time.perf_counter()
    clock.run("code", step)
    wall = time.perf_counter() - wall
    start = clock.now()
    step()
    seconds = clock.seconds["code"] - (clock.now() - start)
    return {"total": round(seconds, 2), "wall": round(wall, 2)}


def main() -> None:
    """Measure models, each in a process of its own, and write them down."""
    from benchmarks.record import RESULTS, commit, write_result

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--compare", action="store_true", help="torch.compile, too")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        way, name = chosen.worker
        print(json.dumps((measure if way == "relax_disc" else measure_torch_compile)(name)))
        return
    path = RESULTS / "compile_time.json"
    results = json.loads(path.read_text())["results"] if path.exists() else {}
    for name in chosen.models:
        results[name] = {"commit": commit(), **_in_process("relax_disc", name)}
        if chosen.compare:
            results[name]["torch_compile"] = theirs = _in_process("torch_compile", name)
            results[name]["ratio"] = round(results[name]["total"] / theirs["total"], 2)
        print(f"{name:24}", results[name], flush=True)
        write_result("compile_time", {"cores": 1}, results)


def _in_process(way: str, name: str) -> dict[str, Any]:
    """Measure one way of compiling one model, on one core and with empty caches."""
    core = min(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as cache:
        settings = {
            "OMP_NUM_THREADS": "1",
            "RELAX_DISC_COMPILE_CACHE": "0",
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.compile_time", "--worker", way, name],
            env={**os.environ, **settings},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
