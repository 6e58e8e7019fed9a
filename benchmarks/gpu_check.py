"""See where the CUDA step stands: correct against float64, time and peak next to torch.compile.

`scripts/gpu_check.sh` runs it where there is a GPU.  Losses and gradients are compared at several
lengths from one build; gradients through one step of plain SGD, whose change of a parameter is its
gradient times the rate.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.export import Dim

import relax_disc
from benchmarks.record import write_result
from benchmarks.training_batches import LONGEST, VOCABULARY, make_batch
from tutorials._llama import Llama, LlamaSizes

_LENGTHS = (512, 16, 141, 328, 77)
_REPEATS = 5
# A power of two, so large that the old parameter costs the gradient no digits.
_RATE = 2.0**20


def _model(hidden: int) -> Llama:
    torch.manual_seed(0)
    sizes = LlamaSizes(
        vocabulary=VOCABULARY,
        hidden=hidden,
        layers=4,
        heads=8,
        feed_forward=hidden * 43 // 16,
        longest=LONGEST,
    )
    return Llama(sizes).cuda()


def _batch(count: int, length: int) -> tuple[Tensor, Tensor]:
    ids, labels = make_batch([length] * count, seed=length)
    return ids.cuda(), labels.cuda()


def _compile(model: Llama, optimizer: torch.optim.Optimizer) -> relax_disc.TrainingStep:
    shape = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=1, max=LONGEST)}
    return relax_disc.compile(
        model,
        optimizer,
        _batch(3, 24),
        dynamic_shapes={"ids": shape, "labels": shape},
        target="cuda",
    )


def compare_numbers(hidden: int, count: int) -> list[dict[str, float]]:
    """Errors of loss and gradient against float64, ours and torch float32's, by length."""
    model = _model(hidden)
    initial = copy.deepcopy(model.state_dict())
    step = _compile(model, torch.optim.SGD(model.parameters(), lr=_RATE))
    exact = copy.deepcopy(model).double()
    rows = []
    for length in _LENGTHS:
        ids, labels = _batch(count, length)
        model.load_state_dict(initial)
        single = model(ids, labels)
        single_gradients = torch.autograd.grad(single, list(model.parameters()))
        double = exact(ids, labels)
        double_gradients = torch.autograd.grad(double, list(exact.parameters()))
        ours = step(ids, labels)
        gradients = [
            (initial[name].double() - value.detach().double()) / _RATE
            for name, value in model.named_parameters()
        ]
        rows.append(
            {
                "length": length,
                "loss_error": abs(float(ours) - float(double)),
                "torch_loss_error": abs(float(single) - float(double)),
                "gradient_error": _relative_error(gradients, double_gradients),
                "torch_gradient_error": _relative_error(single_gradients, double_gradients),
            }
        )
    return rows


def _relative_error(found: Any, exact: Any) -> float:
    difference = sum(
        float((a.double() - b).square().sum()) for a, b in zip(found, exact, strict=True)
    )
    return (difference / sum(float(b.square().sum()) for b in exact)) ** 0.5


def compare_speed(hidden: int, count: int) -> dict[str, dict[str, Any]]:
    """Median milliseconds and peak bytes of a step by length: eager, torch.compile, ours."""
    results = {}
    for variant in ("eager", "compile", "relax_disc"):
        model = _model(hidden)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        step = _variant(variant, model, optimizer)
        for length in _LENGTHS:
            step(*_batch(count, length))
        results[variant] = {str(length): _time(step, _batch(count, length)) for length in _LENGTHS}
        del model, optimizer, step
        torch.cuda.empty_cache()
    return results


def _variant(
    name: str, model: Llama, optimizer: torch.optim.Optimizer
) -> Callable[[Tensor, Tensor], Tensor]:
    if name == "relax_disc":
        return _compile(model, optimizer)
    run = torch.compile(model, dynamic=True) if name == "compile" else model

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        loss = run(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _time(
    step: Callable[[Tensor, Tensor], Tensor], batch: tuple[Tensor, Tensor]
) -> dict[str, float]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step(*batch)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return {
        "milliseconds": statistics.median(times),
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def main(
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = 512,
    batch: Annotated[int, typer.Option(help="Records in a batch.")] = 8,
) -> None:
    """Check numbers, time steps, print both, write benchmarks/results/gpu_check.json."""
    console = Console()
    numbers = compare_numbers(hidden, batch)
    table = Table(title="relative errors against float64")
    for heading in numbers[0]:
        table.add_column(heading.replace("_", " "), justify="right")
    for row in numbers:
        table.add_row(*(f"{value:.3g}" for value in row.values()))
    console.print(table)
    speed = compare_speed(hidden, batch)
    table = Table(title="one step: milliseconds, peak MiB")
    table.add_column("variant")
    for length in _LENGTHS:
        table.add_column(str(length), justify="right")
    for variant, row in speed.items():
        cells = (f"{c['milliseconds']:.1f}, {c['peak_bytes'] / 2**20:,.0f}" for c in row.values())
        table.add_row(variant, *cells)
    console.print(table)
    settings = {
        "hidden": hidden,
        "batch": batch,
        "lengths": _LENGTHS,
        "gpu": torch.cuda.get_device_name(),
    }
    console.print(f"written to {write_result('gpu_check', settings, [numbers, speed])}")


if __name__ == "__main__":
    typer.run(main)
