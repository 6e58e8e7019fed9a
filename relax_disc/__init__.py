"""Train PyTorch models at every shape from one compilation, inside a memory budget in bytes.

>>> step = relax_disc.compile(model, optimizer, (ids, labels), dynamic_shapes=shapes)
>>> loss = step(ids, labels)        # any shape in the declared ranges; updates model and optimizer

The names below load what stands behind them at first use.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_disc import errors
from relax_disc.compatibility import check_environment

try:
    check_environment()
except errors.UnsupportedEnvironmentError as error:
    # The command, also as `python -m relax_disc`, says it without a traceback.
    if Path(sys.argv[0]).name in ("relax-disc", "-m"):
        sys.exit(f"error: {error}")
    raise
else:
    from relax_disc.tvm_loading import load_tvm

    load_tvm()

from tvm import relax

from relax_disc import devices

if TYPE_CHECKING:
    from tvm.ir.transform import Pass

    from relax_disc import analysis, frontend, ops, pipeline, tir_kernels, transform
    from relax_disc.compiler import compile, compile_forward
    from relax_disc.forward_function import ForwardFunction
    from relax_disc.memory_analysis import analyze_memory, largest
    from relax_disc.pipeline import PipelineOptions
    from relax_disc.training_step import TrainingStep
    from relax_disc.verification import verify
    from relax_disc.vm_builtins.tier import FileTier, HostTier

__version__ = "0.1.0"

__all__ = [
    "FileTier",
    "ForwardFunction",
    "HostTier",
    "PipelineOptions",
    "TrainingStep",
    "analysis",
    "analyze_memory",
    "compile",
    "compile_forward",
    "errors",
    "frontend",
    "largest",
    "ops",
    "pipeline",
    "tir_kernels",
    "transform",
    "verify",
]

_HOME = {
    "FileTier": "relax_disc.vm_builtins.tier",
    "ForwardFunction": "relax_disc.forward_function",
    "HostTier": "relax_disc.vm_builtins.tier",
    "PipelineOptions": "relax_disc.pipeline",
    "TrainingStep": "relax_disc.training_step",
    "analyze_memory": "relax_disc.memory_analysis",
    "compile": "relax_disc.compiler",
    "compile_forward": "relax_disc.compiler",
    "largest": "relax_disc.memory_analysis",
    "verify": "relax_disc.verification",
}
_SUBMODULES = frozenset({"analysis", "frontend", "ops", "pipeline", "tir_kernels", "transform"})


def _pipeline() -> Pass:
    """Make the passes of `relax.build(mod, target, relax_pipeline="relax_disc")`."""
    return importlib.import_module("relax_disc.pipeline").pipeline()


devices.register_tags()
if "relax_disc" not in relax.pipeline.PIPELINE_MAP:
    relax.register_pipeline("relax_disc")(_pipeline)


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"relax_disc.{name}")
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'relax_disc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
