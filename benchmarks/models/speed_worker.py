"""One way of training one wide model in one process; asked by `benchmarks.models.speed`."""

from __future__ import annotations

import ctypes
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
from relax_disc.training_step import TrainingStep

VARIANTS = ("eager", "compile", "relax_disc")


class Worker:
    """A model, its optimizer and one way of taking a step with them."""

    def __init__(self, variant: str, name: str, autocast: bool = False) -> None:
        self._entry = next(entry for entry in WIDE if entry.name == name)
        torch.manual_seed(0)
        self._model: Any = self._entry.make().train()
        if autocast:
            self._model.forward = torch.autocast("cpu", torch.bfloat16)(self._model.forward)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        self._make_optimizer_state()
        self._counter = MallocCounter()
        self._compiled: TrainingStep | None = None
        self._batches: dict[tuple[int, ...], Batch] = {
            sizes: self._entry.batch(*sizes) for sizes in self._entry.sizes
        }
        start = time.perf_counter()
        self._step = self._relax_disc() if variant == "relax_disc" else self._eager(variant)
        self.prepare_seconds = time.perf_counter() - start

    def _make_optimizer_state(self) -> None:
        for parameter in self._model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer.param_groups[0]["lr"] = 0.0
        self._optimizer.step()
        self._optimizer.param_groups[0]["lr"] = 1e-4
        self._optimizer.zero_grad(set_to_none=True)

    def _relax_disc(self) -> Callable[..., Any]:
        example: Any = self._batches[self._entry.sizes[0]]
        self._compiled = relax_disc.compile(
            self._model, self._optimizer, example, dynamic_shapes=self._entry.dynamic_shapes()
        )
        return self._compiled

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
        """Take steps at one shape; wall and processor seconds of the fastest."""
        batch: dict[str, Any] = self._batches[tuple(sizes)]
        seconds = []
        for _ in range(repeat):
            cpu, start = _cpu_seconds(), time.perf_counter()
            result = self._step(**batch)
            loss = (result[0] if isinstance(result, tuple) else result).item()
            seconds.append((time.perf_counter() - start, _cpu_seconds() - cpu))
        return {"seconds": min(seconds)[0], "cpu_seconds": min(seconds)[1], "loss": loss}

    def memory(self, memory: Sequence[int]) -> dict[str, Any]:
        """Take a step of a shape; what it held at most, gradients included.

        Parameters, optimizer state and batch do not count, nor what steps of other shapes keep; but
        MKL's buffers do, which eager PyTorch keeps once it has them.
        """
        _free_mkl_buffers()
        if self._compiled is not None:
            self._compiled.session.release()
        base = self._counter.live_bytes()
        self._counter.reset_peak()
        self.step(memory)
        found = {"activation_peak_bytes": self._counter.peak_bytes() - base}
        if self._compiled is not None:
            planned = self._compiled.memory_report()
            # What a mask picks, as PyG's loops, is planned by its bound: fewer bytes may be used.
            is_exact = not any(name.startswith(("selected", "distinct")) for name in planned.shape)
            less = planned.planned_peak_bytes - planned.peak_bytes
            if less < 0 or (is_exact and less):
                raise AssertionError(f"used {planned.peak_bytes}: {planned.planned_peak_bytes=}")
            found["planned_activation_bytes"] = planned.activation_peak_bytes
        return found

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


def _free_mkl_buffers() -> None:
    """Have MKL give its packing buffers back, where PyTorch has MKL."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    if hasattr(library, "mkl_serv_free_buffers"):
        library.mkl_serv_free_buffers()


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Prepare the variant and the model that the command line names, then take steps."""
    warnings.simplefilter("ignore")
    variant, name, threads, *precision = sys.argv[1:]
    torch.set_num_threads(int(threads))

    def prepare() -> tuple[dict[str, Any], Callable[..., dict[str, Any]]]:
        try:
            worker = Worker(variant, name, bool(precision))
        except RelaxDiscError as error:
            message = " ".join(str(error).split())[:600]
            return {"refused": f"{type(error).__name__}: {message}"}, lambda: {}

        def answer(**request: Any) -> dict[str, Any]:
            if "memory" in request:
                return worker.memory(**request)
            return worker.step(**request) if request else worker.account()

        return {"prepare_seconds": worker.prepare_seconds}, answer

    serve(prepare)


if __name__ == "__main__":
    main()
