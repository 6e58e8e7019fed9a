"""Count the launches of a CUDA step beside the kernels that torch.compile makes of the same model.

`python -m tests.cuda.launches` writes `benchmarks/results/cuda_launches.json`. Ours are launched on
the emulator. torch.compile for CUDA needs a GPU, so its count stands in: of what Inductor's
scheduler leaves, fused for a CPU, for forward and backward; it decides for Triton by other rules.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any
from unittest import mock

import torch
from torch._inductor import config as inductor_config
from torch._inductor.scheduler import Scheduler

from benchmarks.models.catalogue import entry_named
from benchmarks.record import write_result
from tests.cuda.test_traffic import LISTED, step_calls

_UPDATE = re.compile(r"(^|_)updates?\d*$")
_NO_KERNELS = ("NopKernelSchedulerNode",)
_LIBRARY = ("ExternKernelSchedulerNode",)


def ours(name: str) -> dict[str, int]:
    """Count the launches of one step with AdamW, those that update parameters apart."""
    calls, events = step_calls(name)
    launches = [call.function for call in calls for _ in call.launches]
    updates = sum(bool(_UPDATE.search(function)) for function in launches)
    libraries = sum(event.startswith("library") for event in events)
    return {
        "launches": len(launches) - updates,
        "updates": updates,
        "library_calls": libraries,
    }


def inductors(name: str) -> dict[str, int]:
    """Count what Inductor leaves of forward and backward at the same shape."""
    entry = entry_named(name)
    found: Counter[str] = Counter()
    plain = Scheduler.codegen

    def counted(scheduler: Any) -> Any:
        found.update(type(node).__name__ for node in scheduler.nodes)
        return plain(scheduler)

    torch.manual_seed(0)
    model = entry.make().train()

    def loss(**batch: Any) -> torch.Tensor:
        result = model(**batch)
        return getattr(result, "loss", result)

    uncached = inductor_config.patch(force_disable_caches=True)  # else nothing is scheduled
    with mock.patch.object(Scheduler, "codegen", counted), uncached:
        torch.compile(loss, dynamic=True)(**entry.batch(*entry.sizes[-1])).backward()
    libraries = sum(found.pop(kind, 0) for kind in _LIBRARY)
    for kind in _NO_KERNELS:
        found.pop(kind, None)
    return {"kernels": sum(found.values()), "library_calls": libraries}


def main() -> None:
    """Count for the models of `traffic.json`."""
    rows = []
    for name in LISTED:
        mine, theirs = ours(name), inductors(name)
        ratio = round(mine["launches"] / theirs["kernels"], 2)
        rows.append({"model": name, "ours": mine, "inductor_cpu": theirs, "ratio": ratio})
        print(rows[-1], flush=True)
        write_result("cuda_launches", {"arch": "sm_90", "torch": torch.__version__}, rows)


if __name__ == "__main__":
    main()
