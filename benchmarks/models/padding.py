"""Gradient errors of steps that leave padding out, next to those of steps that compute it.

Each language model of the table is compiled twice, with and without `remove_padding`, and trained
from the same weights on the same batches, padded on the right, on the left, and with one label in
each sequence.  An error is measured against float64 PyTorch on the padded batch, as the greatest
of all gradients and as the root of the sum of squares.  In one batch rounding falls either way, so
the ratio is the geometric mean over seeds.

    python -m benchmarks.models.padding [--seeds 24] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import relax_disc
from benchmarks.models import families, language
from benchmarks.models.entry import Batch, Entry, seeded
from benchmarks.models.numerics import reference
from benchmarks.record import write_result
from relax_disc.pipeline import PipelineOptions

KINDS = ("right", "left", "one label")
_IGNORED = -100


def _mask(kind: str, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Make the mask of a padded batch; its longest sequence is full."""
    lengths = torch.randint(2, columns + 1, (rows, 1), generator=generator)
    lengths[0] = columns
    mask = (torch.arange(columns) < lengths).long()
    return mask.flip(1) if kind == "left" else mask


def padded_batch(entry: Entry, kind: str, seed: int) -> Batch:
    """Make a batch of ids, mask and labels of a kind."""
    generator = seeded(seed, len(kind))
    rows, found = 3, {}
    for key, axes in entry.axes.items():
        columns = 24 if axes[1] != "target" else 17
        ids = torch.randint(3, language.VOCABULARY, (rows, columns), generator=generator)
        found[key] = ids
    mask = _mask(kind, rows, 24, generator)
    labelled = mask
    if "target" in entry.ranges:
        labelled = _mask(kind, rows, 17, generator)
    if kind == "one label":
        labelled = (torch.arange(labelled.shape[1]) == labelled.sum(1, keepdim=True) - 1).long()
    found["attention_mask"] = mask
    found["input_ids"] = found["input_ids"].where(mask == 1, 1)
    found["labels"] = found["labels"].masked_fill(labelled == 0, _IGNORED)
    return found


def _errors(step: Any, wanted: Mapping[str, Tensor], batch: Batch) -> tuple[float, float]:
    step.model.zero_grad()
    step(**batch, update=False)
    found = {name: p.grad for name, p in step.model.named_parameters() if p.grad is not None}
    differences = [found[name].double() - exact for name, exact in wanted.items()]
    greatest = max(float(each.abs().max()) for each in differences)
    return greatest, math.sqrt(sum(float(each.square().sum()) for each in differences))


def measure(entry: Entry, seeds: int) -> dict[str, Any]:
    """Compile a model with and without its padding, and compare the errors of both."""
    torch.manual_seed(0)
    model = entry.make().train()
    example: Any = entry.batch(*entry.sizes[0])
    shapes = entry.dynamic_shapes()

    def compiled(remove_padding: bool) -> Any:
        chosen = PipelineOptions(remove_padding=remove_padding)
        return relax_disc.compile(model, None, example, dynamic_shapes=shapes, options=chosen)

    steps = [compiled(True)]
    report = steps[0].padding_report()
    if not report.is_left_out:
        reasons = list(dict.fromkeys(each.reason for each in report.reasons))
        return {"model": entry.name, "is_left_out": False, "reasons": reasons}
    steps.append(compiled(False))
    ratios: dict[str, list[float]] = {}
    for kind in KINDS:
        logs = []
        for seed in range(seeds):
            torch.manual_seed(seed)
            model.load_state_dict(entry.make().state_dict())
            batch = padded_batch(entry, kind, seed)
            exact = reference(model, batch, torch.float64).gradients
            packed, padded = (_errors(step, exact, batch) for step in steps)
            logs.append([math.log(a / b) for a, b in zip(packed, padded, strict=True)])
        ratios[kind] = [round(float(x), 3) for x in torch.tensor(logs).mean(0).exp()]
    return {"model": entry.name, "is_left_out": True, "ratios": ratios}


def main() -> None:
    """Measure the models of the table that read a batch of sequences."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--only", nargs="*", default=())
    options = parser.parse_args()
    entries = [
        entry
        for entry in (*language.ENTRIES, *families.OF_TRANSFORMERS)
        if set(entry.axes) == {"input_ids", "attention_mask", "labels"}
        and set(entry.ranges) in ({"batch", "length"}, {"batch", "source", "target"})
        and (not options.only or entry.name in options.only)
    ]
    results = []
    for entry in entries:
        results.append(measure(entry, options.seeds))
        print(results[-1], flush=True)
        if not options.only:
            write_result("padding_errors", {"seeds": options.seeds, "kinds": KINDS}, results)


if __name__ == "__main__":
    main()
