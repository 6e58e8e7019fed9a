"""One way of training one wide model in one process; asked by `benchmarks.models.speed`."""

from __future__ import annotations

import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import relax_disc
from benchmarks.malloc_counter import MallocCounter
from benchmarks.models.entry import Batch
from benchmarks.models.wide import WIDE
from benchmarks.processes import serve
from relax_disc.errors import RelaxDiscError

VARIANTS = ("eager", "compile", "relax_disc")


class Worker:
    """A model, its optimizer and one way of taking a step with them."""

    def __init__(self, variant: str, name: str) -> None:
        self._entry = next(entry for entry in WIDE if entry.name == name)
        torch.manual_seed(0)
        self._model = self._entry.make().train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        self._make_optimizer_state()
        self._counter = MallocCounter()
        self._base_bytes: int | None = None
        self._batches: dict[tuple[int, ...], Batch] = {
            sizes: self._entry.batch(*sizes) for sizes in self._entry.sizes
        }
        start = time.perf_counter()
        self._step = self._compiled() if variant == "relax_disc" else self._eager(variant)
        self.prepare_seconds = time.perf_counter() - start

    def _make_optimizer_state(self) -> None:
        for parameter in self._model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer.param_groups[0]["lr"] = 0.0
        self._optimizer.step()
        self._optimizer.param_groups[0]["lr"] = 1e-4
        self._optimizer.zero_grad(set_to_none=True)

    def _compiled(self) -> Callable[..., Any]:
        example = self._batches[self._entry.sizes[0]]
        step = relax_disc.compile(
            self._model, self._optimizer, example, dynamic_shapes=self._entry.dynamic_shapes()
        )
        # The arena stays between calls; measured from here, it counts as used.
        self._base_bytes = self._counter.live_bytes()
        return step

    def _eager(self, variant: str) -> Callable[..., Any]:
        run = self._model
        if variant == "compile":
            run = torch.compile(run, dynamic=True)

        def step(**batch: Any) -> Any:
            output = run(**batch)
            loss = output if isinstance(output, torch.Tensor) else output.loss
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return step

    def step(self, sizes: Sequence[int], repeat: int = 1) -> dict[str, Any]:
        """Take steps at one shape; seconds of the fastest, memory of the last."""
        batch: dict[str, Any] = self._batches[tuple(sizes)]
        seconds = []
        for _ in range(repeat):
            base = self._counter.live_bytes() if self._base_bytes is None else self._base_bytes
            self._counter.reset_peak()
            cpu, start = _cpu_seconds(), time.perf_counter()
            result = self._step(**batch)
            loss = (result[0] if isinstance(result, tuple) else result).item()
            seconds.append(time.perf_counter() - start)
        return {
            "seconds": min(seconds),
            "cpu_seconds": _cpu_seconds() - cpu,
            "loss": loss,
            # Gradients included; parameters and optimizer state not.
            "activation_peak_bytes": self._counter.peak_bytes() - base,
        }

    def account(self) -> dict[str, Any]:
        """What the process computes with."""
        status = Path("/proc/self/status").read_text().splitlines()
        return {
            "threads": torch.get_num_threads(),
            "affinity": sorted(os.sched_getaffinity(0)),
            "process_threads": int(next(x for x in status if x.startswith("Threads")).split()[1]),
            "wait_policy": os.environ.get("OMP_WAIT_POLICY", "unset"),
            "parameters": sum(p.numel() for p in self._model.parameters()),
        }


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Prepare the variant and the model that the command line names, then take steps."""
    warnings.simplefilter("ignore")
    variant, name, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))

    def prepare() -> tuple[dict[str, Any], Callable[..., dict[str, Any]]]:
        try:
            worker = Worker(variant, name)
        except RelaxDiscError as error:
            message = " ".join(str(error).split())[:600]
            return {"refused": f"{type(error).__name__}: {message}"}, lambda: {}

        def answer(**request: Any) -> dict[str, Any]:
            return worker.step(**request) if request else worker.account()

        return {"prepare_seconds": worker.prepare_seconds}, answer

    serve(prepare)


if __name__ == "__main__":
    main()
