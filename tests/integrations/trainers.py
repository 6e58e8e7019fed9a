"""What the tests of the compiled Trainers share."""

from typing import Any

import torch
from torch import Tensor

ARGUMENTS: dict[str, Any] = {
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
}
"""A short run on the CPU that logs each update and writes nothing."""


def weights(trainer: Any) -> Tensor:
    """Return all parameters of a Trainer's model, one after the other."""
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
