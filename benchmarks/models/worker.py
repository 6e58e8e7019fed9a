"""Compile one model of the table, train it and judge it; the answer is a line of JSON.

`python -m benchmarks.models.worker "GPT-2"`, one process for each model, so that what one does
cannot touch another.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.device import Device, host
from benchmarks.models.catalogue import entry_named
from benchmarks.models.entry import Batch, Entry
from benchmarks.models.numerics import reference, relative_error
from relax_disc.compiler import build_or_reuse
from relax_disc.errors import RelaxDiscError, UnsupportedOperatorError
from relax_disc.frontend import capture_step
from relax_disc.training.memory_plan import MemoryReport
from relax_disc.training_step import TrainingStep

LEARNING_RATE = 1e-2
HOST = host()

FACTOR = 2.0
"""Gradients may be off this many times as far as PyTorch's own in float32."""

MOST = 2e-6
"""And at most this far, relative in norm, unless PyTorch itself is not better than half of it."""

LEAST = 2e-7
"""Errors below this, less than two units in the last place of float32, are no difference."""


def _cpu_seconds() -> float:
    own, children = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def judge(entry: Entry, device: Device = HOST) -> dict[str, Any]:
    """Compile, train and compare one model on a device.

    Returns
    -------
    dict
        What the table shows; ``"verdict"`` is ``"trains"``, ``"refused"`` or ``"WRONG"``.
    """
    torch.manual_seed(0)
    model = device.place(entry.make().train())
    found: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "symbols": list(entry.ranges),
    }
    # With momentum, the buffer of a step that begins with zeros is its gradient, bit for bit.
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    start = _cpu_seconds()
    try:
        step = _compiled(entry, model, optimizer, found, device)
    except RelaxDiscError as error:
        operators = error.operators if isinstance(error, UnsupportedOperatorError) else ()
        message = str(error).strip()
        return {
            **found,
            "capture_seconds": found.get("capture_seconds", _cpu_seconds() - start),
            "verdict": "refused",
            "error": type(error).__name__,
            "message": message if len(message) < 600 else message[:600] + " ...",
            "operators": [list(pair) for pair in operators],
        }
    found["shapes"] = [
        _train(step, model, optimizer, _batch(entry, sizes, device), entry, sizes)
        for sizes in entry.sizes
    ]
    right = all(shape["right"] for shape in found["shapes"])
    found["ratio"] = max(shape["ratio"] for shape in found["shapes"])
    found["worst_error"] = max(shape["gradient_error"] for shape in found["shapes"])
    found["beyond_float32"] = any(shape["torch_error"] > MOST / FACTOR for shape in found["shapes"])
    return {**found, "verdict": "trains" if right else "WRONG"}


def _batch(entry: Entry, sizes: tuple[int, ...], device: Device) -> Batch:
    return {name: device.place(value) for name, value in entry.batch(*sizes).items()}


def _compiled(
    entry: Entry,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    found: dict[str, Any],
    device: Device,
) -> TrainingStep:
    """Do what `relax_disc.compile` does, its two halves timed apart."""
    start = _cpu_seconds()
    captured = capture_step(
        model,
        optimizer,
        _batch(entry, entry.sizes[0], device),
        dynamic_shapes=entry.dynamic_shapes(),
    )
    found["capture_seconds"] = _cpu_seconds() - start
    start = _cpu_seconds()
    built = build_or_reuse(captured.module, device.target)
    step = TrainingStep(captured, built.executable, model, optimizer, built.library)
    found["compile_seconds"] = _cpu_seconds() - start
    return step


def _is_as_planned(report: MemoryReport, entry: Entry) -> bool:
    """Whether the peak is the plan's; a plan for a size that data tell is for that rounded up."""
    if report.shape.keys() - entry.ranges.keys() - {"tokens"}:
        return report.peak_bytes <= report.planned_peak_bytes
    return report.peak_bytes == report.planned_peak_bytes


def _train(
    step: TrainingStep,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    entry: Entry,
    sizes: tuple[int, ...],
) -> dict[str, Any]:
    """Take one step at one shape and compare it with PyTorch's from the same weights."""
    exact = reference(model, batch, torch.float64)
    theirs = reference(model, batch, torch.float32)
    before = {name: p.detach().double() for name, p in model.named_parameters()}
    for state in optimizer.state.values():
        state["momentum_buffer"].zero_()
    named: dict[str, Any] = dict(batch)
    result = step(**named)
    loss = result[0] if isinstance(result, tuple) else result
    named = dict(model.named_parameters())
    gradients = {
        name: optimizer.state[named[name]]["momentum_buffer"].clone() for name in exact.gradients
    }
    updated, own_updated = (
        {n: before[n] - LEARNING_RATE * g.double() for n, g in found.gradients.items()}
        for found in (exact, theirs)
    )
    ours, own = (relative_error(g, exact.gradients) for g in (gradients, theirs.gradients))
    loss_error, own_loss_error = (
        abs(value - exact.loss) / max(1.0, abs(exact.loss)) for value in (loss.item(), theirs.loss)
    )
    parameter_error = relative_error({n: named[n].detach() for n in updated}, updated)
    own_parameter_error = relative_error(own_updated, updated)
    buffer_error = error_of_buffers(dict(model.named_buffers()), exact.buffers)
    own_buffer_error = error_of_buffers(theirs.buffers, exact.buffers)
    report = step.memory_report()
    right = (
        ours <= max(FACTOR * own, LEAST)
        and ours <= max(FACTOR * own if own > MOST / FACTOR else MOST, LEAST)
        and loss_error <= max(FACTOR * own_loss_error, MOST)
        and parameter_error <= max(FACTOR * own_parameter_error, MOST)
        and buffer_error <= max(FACTOR * own_buffer_error, MOST)
        and _is_as_planned(report, entry)
    )
    return {
        "sizes": dict(zip(entry.ranges, sizes, strict=True)),
        "loss": loss.item(),
        "loss_error": loss_error,
        "gradient_error": ours,
        "torch_error": own,
        "ratio": ours / max(own, LEAST / FACTOR),
        "parameter_error": parameter_error,
        "buffer_error": buffer_error,
        "torch_loss_error": own_loss_error,
        "torch_parameter_error": own_parameter_error,
        "torch_buffer_error": own_buffer_error,
        "peak_bytes": report.peak_bytes,
        "planned_peak_bytes": report.planned_peak_bytes,
        "right": right,
    }


def error_of_buffers(mine: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Largest relative error of a module's buffers after the step, running statistics above all.

    The buffers of one module are measured together: a running mean that is zero but for rounding
    (a normalized input through a linear layer) has no relative error of its own.
    """
    modules: dict[str, dict[str, Tensor]] = {}
    for name, value in exact.items():
        if value.is_floating_point():
            modules.setdefault(name.rpartition(".")[0], {})[name] = value
    errors = [relative_error({n: mine[n] for n in own}, own) for own in modules.values()]
    return max(errors, default=0.0)


def main() -> None:
    """Judge the model named on the command line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes to stderr
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(json.dumps(judge(entry_named(sys.argv[1]))), file=answers, flush=True)


if __name__ == "__main__":
    main()
