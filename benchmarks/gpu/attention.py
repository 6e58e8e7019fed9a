"""Whether PyTorch's kernels of attention do what the package takes them to do."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.device import Device
from relax_disc.vm_builtins.libraries.cuda_attention_kernels import Problem
from relax_disc.vm_builtins.libraries.packed_rows import PackedRows

_LENGTHS = (1, 17, 130, 96)
_HEADS, _KEY_HEADS, _WIDTH = 4, 2, 64
_FORMS = ("plain", "causal", "masked", "packed", "packed causal", "packed masked")


def attention_errors(device: Device) -> list[dict[str, Any]]:
    """Relative errors of results and gradients against float64, by type and form of the call.

    ``kernel`` is the one that was chosen; "math" where there is no GPU.
    """
    return [
        _errors(device, dtype, form)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for form in _FORMS
    ]


def _errors(device: Device, dtype: torch.dtype, form: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    rows = _packed_rows(device)
    is_packed = form.startswith("packed")
    outer = (1, rows.places.shape[1]) if is_packed else (len(_LENGTHS), max(_LENGTHS))

    def tensor(heads: int) -> Tensor:
        return torch.randn(*outer, heads, _WIDTH, generator=generator).to(dtype)

    given = [device.place(tensor(n)) for n in (_HEADS, _KEY_HEADS, _KEY_HEADS, _HEADS)]
    mask = None
    if form.endswith("masked"):
        mask = device.place(torch.rand(len(_LENGTHS), 1, 1, max(_LENGTHS), generator=generator))
        mask = mask > 0.3
    problem = Problem(1 / math.sqrt(_WIDTH), form.endswith("causal"), mask)
    sides = (rows, rows) if is_packed else ()
    found = _run(problem, given, sides)
    exact = _run(problem, [x.double() for x in given], sides)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "form": form,
        "kernel": problem.kernel(*given[:3]),
        "errors": {
            name: float((a.double() - b).norm() / b.norm())
            for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), found, exact, strict=True)
        },
    }


def _run(problem: Problem, given: list[Tensor], sides: tuple[PackedRows, ...]) -> list[Tensor]:
    query, key, value, grad = given
    forward, backward = problem.forward, problem.backward
    if sides:
        forward, backward = problem.packed_forward, problem.packed_backward
    with torch.no_grad():
        out, sums = forward(query, key, value, *sides)
        gradients = backward(grad, query, key, value, out, sums, *sides)
    return [out, sums.masked_fill(sums.isneginf(), 0), *gradients]


def _packed_rows(device: Device) -> PackedRows:
    """All rows of sequences of `_LENGTHS`, and some that fill up."""
    longest = max(_LENGTHS)
    kept = torch.arange(longest) < torch.tensor(_LENGTHS)[:, None]
    sequence, position = kept.nonzero(as_tuple=True)
    places = torch.stack([sequence * longest + position, sequence, position])
    places = torch.cat([places, places[:, :1].expand(3, -len(sequence) % 16)], 1)
    starts = torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0))
    return PackedRows(device.place(starts), device.place(places), longest)
