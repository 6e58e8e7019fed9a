"""One way of training in one process: takes batches on stdin, answers with measurements.

Started by `benchmarks.training`, one process per variant, so that no variant's threads, caches or
memory touch another's.  `compile:0.5` is torch.compile with that activation_memory_budget,
`backend` torch.compile with ours, `checkpoint` eager PyTorch that computes every layer twice,
`packed` and `packed-compile` a model packed by hand (`:padded`: but for attention).

Size `1b` is the paper's model, four layers of Llama-2-7B; it trains by SGD, so that weights are all
that lasts and several ways fit a machine of 24 GB.
"""

from __future__ import annotations

import argparse
import functools
import resource
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch._functorch.config as functorch_config
from torch import Tensor
from torch.export import Dim
from torch.utils.checkpoint import checkpoint

import relax_disc
from benchmarks.malloc_counter import MallocCounter
from benchmarks.processes import serve
from benchmarks.training.batches import LONGEST, VOCABULARY, make_batch
from benchmarks.training.packed_llama import Kind, PackedLlama, places
from relax_disc.integrations import torch_compile
from relax_disc.pipeline import PipelineOptions
from relax_disc.training.memory_plan import MemoryPlan
from relax_disc.training_step import TrainingStep
from tutorials._llama import Llama, LlamaSizes

# `relax_disc:padded` computes all positions, needed or not.
VARIANTS = (
    "eager",
    "eager-fused",
    "checkpoint",
    "compile",
    "compile-fused",
    "backend",
    "packed",
    "packed-compile",
    "relax_disc",
)
SIZES = {
    "S": {"hidden": 256, "feed_forward": 688, "heads": 8},
    "M": {"hidden": 512, "feed_forward": 1376, "heads": 8},
    "1b": {"hidden": 4096, "feed_forward": 11008, "heads": 32},
}
_BY_SGD = ("1b",)

Step = Callable[[Tensor, Tensor], Tensor]


def peer_llama(size: str, attention: Literal["fused", "math"] = "fused") -> Llama:
    """Make the four-layer Llama of a size; see `tutorials._llama` for kinds of attention."""
    sizes = LlamaSizes(
        vocabulary=VOCABULARY,
        layers=4,
        longest=LONGEST,
        attention=attention,
        **SIZES[size],
    )
    return Llama(sizes)


class Worker:
    """A model, its optimizer and one way of taking a step with them."""

    def __init__(self, variant: str, size: str) -> None:
        torch.manual_seed(0)
        kind, _, knob = variant.partition(":")
        # "Fused" attention is scaled_dot_product_attention; else it is written out, as much code
        # still does. Which is the stronger baseline differs: both can be measured.
        written_out = kind in ("eager", "checkpoint", "compile")
        self.model = peer_llama(size, "math" if written_out else "fused")
        self.optimizer: torch.optim.Optimizer
        if size in _BY_SGD:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
            self._make_optimizer_state()
        self._counter = MallocCounter()
        self._base_bytes: int | None = None
        self._planned: Callable[[Tensor, Tensor], int] | None = None
        self._compiled: TrainingStep | None = None
        start = time.perf_counter()
        self._step = self._prepare(kind, knob)
        self.prepare_seconds = time.perf_counter() - start

    def _make_optimizer_state(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        rate = self.optimizer.param_groups[0]["lr"]
        self.optimizer.param_groups[0]["lr"] = 0.0
        self.optimizer.step()
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)

    def _prepare(self, kind: str, knob: str) -> Step:
        if kind == "relax_disc":
            shape = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=1, max=LONGEST)}
            step = relax_disc.compile(
                self.model,
                self.optimizer,
                make_batch([24, 16], seed=0),
                dynamic_shapes={"ids": shape, "labels": shape},
                options=PipelineOptions(remove_padding=knob != "padded"),
            )
            # The arena stays between calls; measured from here, it counts as used.
            self._base_bytes = self._counter.live_bytes()
            self._compiled = step

            def planned(ids: Tensor, labels: Tensor) -> int:
                shape: dict[str, Any] = step.shape_of(ids, labels)
                return step.plan(**shape).peak_bytes

            self._planned = planned
            return step
        run: Any = self.model
        if kind.startswith("packed"):
            run = self._packed(kind, "padded" if knob == "padded" else "split")
        if kind == "checkpoint":
            for block in self.model.blocks:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        if kind.startswith("compile"):
            if knob:
                functorch_config.activation_memory_budget = float(knob)
            run = torch.compile(self.model, dynamic=True)
        if kind == "backend":
            run = torch.compile(self.model, dynamic=True, backend="relax_disc")
            self._base_bytes = self._bytes_without_arena(run)

        def eager_step(ids: Tensor, labels: Tensor) -> Tensor:
            loss = run(ids, labels)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return eager_step

    def _packed(self, kind: str, attention: Kind) -> Step:
        """Make the model packed by hand; the rows are found anew for each batch, as a user must."""
        packed: Any = PackedLlama(self.model, attention)
        if kind == "packed-compile":
            packed = torch.compile(packed, dynamic=True)
        return lambda ids, labels: packed(ids, labels, *places(labels))

    def _bytes_without_arena(self, run: Any) -> int:
        """Compile the backend's program with a small batch; what is in use but for its arena."""
        run(*make_batch([24, 16], seed=0)).backward()
        self.optimizer.zero_grad(set_to_none=True)
        for program in torch_compile.programs():
            program.session.release()
        return self._counter.live_bytes()

    def step(
        self, lengths: list[int], seed: int, budget: dict[str, float] | None = None
    ) -> dict[str, Any]:
        """Take one step and say what it cost.

        With `budget` (``{}``: none; ``{"own": 0.5}``: a part of this shape's unlimited activation
        peak; ``{"activation_bytes": n}``) a compiled step takes one more before, so that the arena
        of that budget is there, and says more about its memory.
        """
        ids, labels = make_batch(lengths, seed)
        plan = None if budget is None else self._limit(budget, ids, labels)
        if plan is not None:
            self._step(ids, labels)
        base = self._counter.live_bytes() if self._base_bytes is None else self._base_bytes
        self._counter.reset_peak()
        cpu = _cpu_seconds()
        start = time.perf_counter()
        loss = self._step(ids, labels).item()
        seconds = time.perf_counter() - start
        return {
            "records": ids.shape[0],
            "length": ids.shape[1],
            "tokens": sum(lengths),
            "loss": loss,
            "seconds": seconds,
            "cpu_seconds": _cpu_seconds() - cpu,
            # Gradients included; parameters and optimizer state not.
            "activation_peak_bytes": self._counter.peak_bytes() - base,
            # Those included.
            "planned_peak_bytes": self._planned(ids, labels) if self._planned else None,
            **({} if plan is None else self._account(plan)),
        }

    def _limit(self, budget: dict[str, float], ids: Tensor, labels: Tensor) -> MemoryPlan:
        """Set the budget, or the least that is feasible; return the plan."""
        step = self._compiled
        if step is None:
            raise ValueError("only relax_disc takes a budget")
        step.session.release()
        step.memory_budget = None
        shape: dict[str, Any] = step.shape_of(ids, labels)
        plan = step.plan(**shape)
        if budget:
            activations = budget.get("activation_bytes", 0)
            activations += int(budget.get("own", 0) * plan.activation_peak_bytes)
            step.memory_budget = plan.state_bytes + int(activations)
            plan = step.plan(**shape)
            if not plan.fits:
                step.memory_budget = plan.least_bytes
        return plan

    def _account(self, wanted: MemoryPlan) -> dict[str, Any]:
        """What the last step did within its budget."""
        assert self._compiled is not None
        report = self._compiled.memory_report()
        shape: dict[str, Any] = dict(wanted.shape)
        plan = self._compiled.plan(**shape)
        if not report.peak_bytes == report.planned_peak_bytes == plan.peak_bytes:
            raise AssertionError(f"planned {plan.peak_bytes} bytes, used {report.peak_bytes}")
        return {
            "fits": wanted.fits,
            "accounted_activation_bytes": report.activation_peak_bytes,
            "recomputations": report.recomputations,
            "modelled_time_ratio": plan.time_ratio,
        }


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Answer each line `{"lengths": [...], "seed": n}` with a line of measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--size", choices=sorted(SIZES), required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    if arguments.variant.partition(":")[0] not in VARIANTS:
        parser.error(f"{arguments.variant!r} is none of {', '.join(VARIANTS)}")
    torch.set_num_threads(arguments.threads)

    def prepare() -> tuple[dict[str, Any], Callable[..., dict[str, Any]]]:
        worker = Worker(arguments.variant, arguments.size)
        return {"prepare_seconds": worker.prepare_seconds}, worker.step

    serve(prepare)


if __name__ == "__main__":
    main()
