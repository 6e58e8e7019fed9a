"""The parts of the suite, the most valuable first; each takes a device and writes rows.

smoke      versions, one layer, attention's kernels, one step of a small Llama against PyTorch,
           CUDA graphs
numbers    losses and gradients against float64: a Llama at several lengths, then every model
paper      Llama-2-1b, batches 14, 16, 18: tokens a second and peak, beside PyTorch's ways
bandwidth  each kernel's share of the bandwidth of a copy
budgets    predicted against measured peak and time at budgets, results bit by bit; the same with
           tensors offloaded to the host, and how fast copies there are
sanitizer  the smoke part under compute-sanitizer
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from tempfile import gettempdir
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

import relax_disc
from benchmarks.gpu.attention import attention_errors
from benchmarks.gpu.device import Device
from benchmarks.gpu.llama import (
    MIDDLE,
    PAPER,
    TINY,
    WAYS,
    batch_of,
    compiled,
    make_model,
    way_of_training,
)
from benchmarks.gpu.rows import Rows
from benchmarks.models.__main__ import told_by
from benchmarks.models.catalogue import ENTRIES
from benchmarks.record import machine
from benchmarks.training.batches import real_batches
from relax_disc import FileTier, HostTier
from relax_disc.vm_builtins.libraries.cuda_memory import host_copy_times
from tutorials._llama import LlamaSizes

# A power of two, so large that the old parameter costs the gradient no digits.
_RATE = 2.0**20
_LENGTHS = (512, 16, 141, 328, 77)
_FRACTIONS = (0.75, 0.5, 0.4)
_OFFLOADED = (0.5, 0.4)
_LINK_BYTES = 1 << 28
_COPY_BYTES = 1 << 31
_SANITIZER = "/usr/local/cuda/bin/compute-sanitizer"
_SANITIZER_SECONDS = 230  # of each of two checks
_TOGETHER = 8  # processes of models; each takes half a gigabyte of the GPU for itself
_MODEL_SECONDS = 240.0


def smoke(device: Device, rows: Rows, sizes: LlamaSizes = TINY) -> None:
    """Tell the versions, and whether a layer and a small Llama train as PyTorch's do."""
    rows.measure("versions", lambda: {**machine(), "cuda": torch.version.cuda})
    rows.measure("layer", lambda: compare_layer(device))
    rows.measure("attention", lambda: {"calls": attention_errors(device)})
    rows.measure("llama", lambda: {"lengths": llama_errors(device, sizes, (17, 5))})
    rows.measure("graphs", lambda: compare_graphs(device, sizes))


def compare_layer(device: Device) -> dict[str, float]:
    """Compile one layer, and compare its loss with PyTorch's."""
    torch.manual_seed(0)
    model = device.place(nn.Linear(16, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = device.place(torch.randn(4, 16))
    loss = model(x).square().mean()
    step = relax_disc.compile(
        *(model, optimizer, (x,)),
        dynamic_shapes=({0: Dim("rows", min=1, max=64)},),
        loss_fn=lambda model, x: model(x).square().mean(),
        target=device.target,
    )
    return {"loss": loss.item(), "ours": step(x).item()}


def compare_graphs(device: Device, sizes: LlamaSizes, calls: int = 5) -> dict[str, Any]:
    """Losses and times of calls in turns of two shapes, plainly and in CUDA graphs."""
    batches = [batch_of(lengths, device, sizes) for lengths in ([17, 9], [5, 5])]
    found: dict[str, Any] = {}
    for name, graphs in (("plain", False), ("graphs", True)):
        model = make_model(sizes, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = compiled(model, optimizer, device, graphs=graphs)
        losses = [step(*batch).item() for _ in range(calls) for batch in batches]
        times = [device.milliseconds(lambda b=b, s=step: s(*b)) for b in batches]
        found[name] = {"losses": losses, "milliseconds": times, "report": str(step.graph_report())}
    return found


def llama_errors(
    device: Device, sizes: LlamaSizes, lengths: Sequence[int], *, autocast: bool = False
) -> list[dict[str, float]]:
    """Errors of loss and gradient against float64, ours and PyTorch's, at lengths of one build.

    Gradients come from one step of plain SGD: the change of a parameter is its gradient times the
    rate.
    """
    model = make_model(sizes, device)
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    step = compiled(model, optimizer, device, autocast=autocast)
    exact = make_model(sizes, device).double()
    found = []
    for length in lengths:
        batch = batch_of([length, max(1, length // 2), 1], device, sizes)
        model.load_state_dict(initial)
        with torch.autocast(device.kind, torch.bfloat16, enabled=autocast):
            theirs = model(*batch)
        their_gradients = torch.autograd.grad(theirs, list(model.parameters()))
        double = exact(*batch)
        gradients = torch.autograd.grad(double, list(exact.parameters()))
        ours = step(*batch)
        our_gradients = [
            (initial[name].double() - value.detach().double()) / _RATE
            for name, value in model.named_parameters()
        ]
        found.append(
            {
                "length": length,
                "loss_error": abs(ours.item() - double.item()),
                "torch_loss_error": abs(theirs.item() - double.item()),
                "gradient_error": _relative(our_gradients, gradients),
                "torch_gradient_error": _relative(their_gradients, gradients),
            }
        )
    return found


def _relative(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    pairs = list(zip(found, exact, strict=True))
    difference = sum(float((a.double() - b).square().sum()) for a, b in pairs)
    return (difference / sum(float(b.square().sum()) for _, b in pairs)) ** 0.5


def numbers(
    device: Device, rows: Rows, sizes: LlamaSizes = MIDDLE, models: Sequence[Any] = ENTRIES
) -> None:
    """Compare with float64, the models of docs/models.md included.

    Models have processes of their own, several at a time: most of their time is a compiler's.
    """
    for autocast in (False, True):
        rows.measure(
            "llama, bf16 autocast" if autocast else "llama",
            lambda autocast=autocast: {
                "lengths": llama_errors(device, sizes, _LENGTHS, autocast=autocast)
            },
        )
    device.clear()
    with ThreadPoolExecutor(max(1, min(_TOGETHER, (os.cpu_count() or 1) // 2))) as pool:
        begun = [
            pool.submit(rows.measure, entry.name, partial(_judged_apart, device, entry.name))
            for entry in models
        ]
        for each in begun:
            each.result()


def _judged_apart(device: Device, name: str) -> dict[str, Any]:
    found = told_by(
        *("benchmarks.gpu.suite", "--model", name),
        *(["--rehearse"] if device.target == "llvm" else []),
        limit_seconds=_MODEL_SECONDS,
        OMP_NUM_THREADS="1",
    )
    return {"failed": found["message"]} if found["verdict"] == "failed" else found


def paper(
    device: Device,
    rows: Rows,
    sizes: LlamaSizes = PAPER,
    batches: Sequence[int] = (14, 16, 18),
    ways: Sequence[str] = WAYS,
    count: int = 8,
) -> None:
    """Train the paper's model each way; medians over batches of real lengths."""
    for autocast in (True, False):
        for batch in batches:
            for way in ways:
                row = f"batch {batch}, {'bf16 autocast' if autocast else 'float32'}, {way}"
                lengths = real_batches(batch, count)
                rows.measure(row, _train(device, sizes, way, lengths, autocast=autocast))
                gc.collect()
                device.clear()


def _train(
    device: Device, sizes: LlamaSizes, way: str, batches: list[list[int]], *, autocast: bool
) -> Callable[[], dict[str, Any]]:
    def run() -> dict[str, Any]:
        before = device.used_bytes()
        model = make_model(sizes, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        step = way_of_training(way, model, optimizer, device, autocast=autocast)
        given = [batch_of(lengths, device, sizes) for lengths in batches]
        compile_ms = sum(device.milliseconds(lambda b=b: step(*b)) for b in given[:2])
        state = 3 * sum(p.numel() * p.element_size() for p in model.parameters())
        peaks = [device.peak_bytes(lambda b=b: step(*b)) - before for b in given]
        if way.endswith("graphs"):  # the second call of a shape captures it
            for b in given:
                step(*b)
        times = [device.milliseconds(lambda b=b: step(*b)) for b in given]
        seconds = sum(times) / 1e3
        found: dict[str, Any] = {
            "loss": step(*given[0]).item(),
            "tokens_per_second": sum(map(sum, batches)) / seconds,
            "milliseconds": statistics.median(times),
            "peak_bytes": max(peaks),
            "activation_peak_bytes": max(peaks) - state,
            "first_two_steps_ms": compile_ms,
            "bytes_before": before,
        }
        if isinstance(step, relax_disc.TrainingStep):
            shapes: list[dict[str, Any]] = [step.shape_of(*b) for b in given]
            found["planned_peak_bytes"] = max(step.plan(**shape).peak_bytes for shape in shapes)
        return found

    return run


def bandwidth(device: Device, rows: Rows, sizes: LlamaSizes = MIDDLE, records: int = 32) -> None:
    """Compare the bytes that each kernel must move, and its time, with a copy."""
    rows.measure("copy", lambda: _copy_speed(device))
    rows.measure("kernels", lambda: _kernel_speeds(device, sizes, records))


def _copy_speed(device: Device) -> dict[str, float]:
    size = _COPY_BYTES if device.kind == "cuda" else 1 << 24
    source = device.place(torch.empty(size, dtype=torch.uint8))
    target = torch.empty_like(source)
    times = [device.milliseconds(lambda: target.copy_(source)) for _ in range(9)]
    return {"bytes_per_s": 2e3 * size / statistics.median(times)}


def _kernel_speeds(device: Device, sizes: LlamaSizes, records: int) -> dict[str, Any]:
    model = make_model(sizes, device)
    step = compiled(model, torch.optim.AdamW(model.parameters(), lr=1e-4), device)
    batch = batch_of([512] * records, device, sizes)
    step(*batch)
    with step.session.profile():
        for _ in range(5):
            step(*batch)
    shape: dict[str, Any] = step.shape_of(*batch)
    metadata = step.session.metadata
    values = step.session.values([step.plan(**shape).shape[name] for name in metadata.dims])
    kernels = []
    for kernel, (runs, time_ns) in zip(metadata.kernels, step.session.kernel_times(), strict=True):
        moved = values[kernel.moved_bytes]
        each = time_ns / max(runs, 1)
        kernels.append(
            {"kernel": kernel.name, "bytes": moved, "ns": each, "bytes_per_s": 1e9 * moved / each}
        )
    kernels.sort(key=lambda kernel: -kernel["ns"])
    return {"note": "each waited for, launch included", "kernels": kernels}


def budgets(device: Device, rows: Rows, sizes: LlamaSizes = MIDDLE, records: int = 16) -> None:
    """Hold the plan of each budget against a run: peak, time, and the loss to the last bit."""
    if device.kind == "cuda":
        rows.measure("copies to the host", lambda: _host_copy_speeds(device))
    cases = {f"{fraction}": (fraction, False) for fraction in (1.0, *_FRACTIONS)}
    cases |= {f"{fraction}, offloaded": (fraction, True) for fraction in _OFFLOADED}
    if not any(map(rows.wanted, cases)):
        return
    # A rehearsal on the host has a file in its place.
    on_host = device.target == "llvm"
    tier = FileTier(gettempdir(), bytes_per_s=1e10) if on_host else HostTier()
    model = make_model(sizes, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = compiled(model, optimizer, device)
    batch = batch_of([512] * records, device, sizes)
    shape: dict[str, Any] = step.shape_of(*batch)
    step.calibrate(*batch)
    free = step.plan(**shape)

    def case(fraction: float, offloaded: bool) -> dict[str, Any]:
        step.offload_to = tier if offloaded else None
        with step.restored():
            if fraction < 1.0:
                step.memory_budget = free.state_bytes + int(fraction * free.activation_peak_bytes)
            plan = step.plan(**shape)
            if not plan.fits:
                step.memory_budget = plan.least_bytes
                plan = step.plan(**shape)
            step.session.release()
            device.clear()
            before = device.used_bytes()
            peak = device.peak_bytes(lambda: step(*batch))
            times = [device.milliseconds(lambda: step(*batch)) for _ in range(7)]
        with step.restored():
            loss = step(*batch).item()
        return {
            "budget_bytes": step.memory_budget,
            "planned_arena_bytes": plan.arena_bytes,
            "planned_peak_bytes": plan.peak_bytes,
            "measured_growth_bytes": peak - before,
            "milliseconds": statistics.median(times),
            "modelled_time_ratio": plan.time_ratio,
            "modelled_stall_ratio": plan.stall_ratio,
            "reloaded_bytes": plan.reloaded_bytes,
            "offload_space_bytes": plan.offload_space_bytes,
            "loss": loss.hex(),
        }

    for row, (fraction, offloaded) in cases.items():
        rows.measure(row, partial(case, fraction, offloaded))


def _host_copy_speeds(device: Device) -> dict[str, Any]:
    out, back = host_copy_times(torch.device(device.kind), _LINK_BYTES, 9)
    return {"bytes_per_ns": [_LINK_BYTES / out, _LINK_BYTES / back]}


def sanitizer(device: Device, rows: Rows) -> None:
    """Run the smoke part under compute-sanitizer's memcheck and racecheck."""
    tool = shutil.which("compute-sanitizer") or shutil.which(_SANITIZER)
    for check in ("memcheck", "racecheck"):
        rows.measure(check, partial(_sanitized, device, tool, check))


def _sanitized(device: Device, tool: str | None, check: str) -> dict[str, Any]:
    if tool is None or device.kind != "cuda":
        return {"skipped": "no compute-sanitizer, or no GPU, here"}
    command = [tool, "--tool", check, sys.executable, "-m", "benchmarks.gpu.suite", "--inner"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_SANITIZER_SECONDS, check=False
    )
    return {"code": done.returncode, "end": (done.stdout + done.stderr)[-2000:]}


PARTS: dict[str, Callable[[Device, Rows], None]] = {
    "smoke": smoke,
    "numbers": numbers,
    "paper": paper,
    "bandwidth": bandwidth,
    "budgets": budgets,
    "sanitizer": sanitizer,
}
