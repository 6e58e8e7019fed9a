"""Save a run so that it continues exactly, however it ended.

One safetensors file holds parameters, optimizer state and the generator's state; its metadata holds
the step and the settings that the numbers depend on.  It is written beside its final name and then
renamed: whoever is killed meanwhile leaves the previous file whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

_FORMAT = "finetune-llama/1"


def save(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    settings: Mapping[str, Any],
    rng_state: Tensor | None = None,
) -> None:
    """Write everything that the rest of the run depends on; `step` steps are done.

    `rng_state` is the compiled step's own generator, where there is one.
    """
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            tensors[f"optimizer.{index}.{key}"] = torch.as_tensor(value)
    tensors["rng.torch"] = torch.get_rng_state()
    if rng_state is not None:
        tensors["rng.step"] = rng_state
    metadata = {"format": _FORMAT, "step": str(step), "settings": json.dumps(dict(settings))}
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        save_file({k: v.detach().contiguous() for k, v in tensors.items()}, partial, metadata)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    settings: Mapping[str, Any],
) -> tuple[int, Tensor | None]:
    """Read a saved run into `model` and `optimizer`; returns the steps done and the step's RNG.

    Raises
    ------
    ValueError
        If the file is damaged, of another kind, or of a run with other settings; names those.
    """
    try:
        reader = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file ({error})") from error
    with reader as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != _FORMAT:
            raise ValueError(f"{path} was not saved by this program")
        saved = json.loads(metadata["settings"])
        differing = [
            f"{key} was {saved.get(key)!r}, is {value!r}"
            for key, value in settings.items()
            if saved.get(key) != value
        ]
        if differing:
            raise ValueError(f"{path} is of another run: {'; '.join(differing)}")
        tensors = {key: file.get_tensor(key) for key in file.keys()}
    model.load_state_dict(_below(tensors, "model."))
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in _below(tensors, "optimizer.").items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    torch.set_rng_state(tensors["rng.torch"])
    return int(metadata["step"]), tensors.get("rng.step")


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
