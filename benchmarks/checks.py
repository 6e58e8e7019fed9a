"""Time that the checks of a call take: `python -m benchmarks.checks`.

In processor time of one thread, with AdamW: the comparison of the Python values that were read at
compile, and of modes and hooks, for each call, of Hugging Face's Llama of four layers and of size S
of `benchmarks.training`, another one of four layers; and a step of S whose ids and labels come from
a table, so that the program itself checks them, next to the same step without these checks, in
turn, and the share that the kernels that check have in the time of all kernels.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
import typer
from torch.export import Dim

import relax_disc
from benchmarks.record import write_result
from benchmarks.training.batches import LONGEST, VOCABULARY, make_batch
from benchmarks.training.worker import peer_llama
from relax_disc.frontend.index_checks import IndexChecks

ROUNDS, GUARD_CALLS = 41, 1000
LENGTHS = [[60, 40], [120, 60, 130, 90]]


def compiled(loss_fn: Callable[..., Any] | None) -> relax_disc.TrainingStep:
    """Compile the model anew."""
    torch.manual_seed(0)
    model, batch = peer_llama("S"), make_batch([24, 16], seed=0)
    shape = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=1, max=LONGEST)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return relax_disc.compile(
        model, optimizer, batch, dynamic_shapes=(shape, shape), loss_fn=loss_fn
    )


def timed(call: Callable[[], Any]) -> float:
    """Nanoseconds of this process's processor time."""
    start = time.process_time_ns()
    call()
    return time.process_time_ns() - start


def quartiles(values: Sequence[float], digits: int) -> list[float]:
    """Return lower quartile, median and upper quartile."""
    return [round(value, digits) for value in statistics.quantiles(values, n=4)]


def guards(name: str, step: relax_disc.TrainingStep) -> dict[str, Any]:
    """Time the comparison of Python values, and of these with modes and hooks."""

    def micros(check: Callable[[], None]) -> list[float]:
        rounds = [timed(lambda: [check() for _ in range(GUARD_CALLS)]) for _ in range(ROUNDS)]
        return quartiles([nanos / GUARD_CALLS / 1e3 for nanos in rounds], 2)

    return {
        "check": "values",
        "model": name,
        "count": len(step._guards),
        "us": micros(step._guards.check),
        "us_with_modes_and_hooks": micros(step._check_mode),
    }


def hugging_face_llama() -> relax_disc.TrainingStep:
    """Compile `LlamaForCausalLM` of four layers, small: how wide it is makes no difference."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: Any = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 32}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_hidden_layers=4)
    model = LlamaForCausalLM(config)
    ids = torch.arange(12).reshape(2, 6)
    batch: Any = {"input_ids": ids, "labels": ids}
    shape = {0: Dim("batch", min=1, max=8), 1: Dim("length", min=2, max=64)}
    optimizer = torch.optim.AdamW(model.parameters())
    return relax_disc.compile(model, optimizer, batch, dynamic_shapes=dict.fromkeys(batch, shape))


def share(step: relax_disc.TrainingStep, batch: Sequence[torch.Tensor]) -> float:
    """Percent of the kernels' time that goes into the kernels that check."""
    shares = []
    for _ in range(ROUNDS):
        with step.session.profile():
            step(*batch)
        times = [nanos for _, nanos in step.session.kernel_times()]
        checks = ["index_outside" in name for name in step.session.kernel_names]
        assert any(checks)
        of_checks = sum(nanos for nanos, checked in zip(times, checks, strict=True) if checked)
        shares.append(100 * of_checks / sum(times))
    return round(statistics.median(shares), 4)


def flags(checked: relax_disc.TrainingStep, plain: relax_disc.TrainingStep) -> list[dict[str, Any]]:
    """Time steps with and without checks of computed indices."""
    results = []
    for lengths in LENGTHS:
        batch = make_batch(lengths, seed=1)
        steps, pairs = (checked, plain), []
        for each in range(-2, ROUNDS):
            turn = steps if each % 2 else steps[::-1]
            nanos = [timed(functools.partial(step, *batch)) for step in turn]
            if each >= 0:  # plans and pages are there
                pairs.append(nanos if each % 2 else nanos[::-1])
        results.append(
            {
                "check": "computed indices",
                "batch": list(batch[0].shape),
                "ms": quartiles([a / 1e6 for a, _ in pairs], 3),
                "ms_without": quartiles([b / 1e6 for _, b in pairs], 3),
                "percent_more": quartiles([100 * (a / b - 1) for a, b in pairs], 2),
                "percent_in_kernels_that_check": share(checked, batch),
            }
        )
    return results


def main() -> None:
    """Measure, print and write benchmarks/results/checks.json."""
    torch.set_num_threads(1)
    results = [guards("Hugging Face", hugging_face_llama()), guards("S", compiled(None))]
    table = torch.arange(VOCABULARY)

    def loss_fn(model: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model(table[ids], torch.where(labels < 0, labels, table[labels.clamp(min=0)]))

    checked = compiled(loss_fn)
    with patch.object(IndexChecks, "_flagged", lambda *_: None):
        plain = compiled(loss_fn)
    results += flags(checked, plain)
    for result in results:
        print(result)
    write_result("checks", {"optimizer": "AdamW", "threads": 1, "rounds": ROUNDS}, results)


if __name__ == "__main__":
    typer.run(main)
