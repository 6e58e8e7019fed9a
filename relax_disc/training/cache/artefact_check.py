"""Say what a saved step was made with and for, and refuse what differs, before its code loads."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import tvm
import tvm_ffi

from relax_disc.errors import ArtefactError
from relax_disc.frontend.optimizer.programs import programs_of, refuse_told_apart
from relax_disc.frontend.optimizer.several import groups_of, optimizers_of

_ADDRESS = re.compile(r"0x[0-9a-f]+")


def versions() -> dict[str, str]:
    """Versions of all that a compiled program relies on."""
    from relax_disc import __version__  # the package above imports this module

    return {
        "relax_disc": __version__,
        "tvm": str(tvm.__version__),
        "tvm_ffi": str(tvm_ffi.__version__),
        "torch": str(torch.__version__),
    }


def processor() -> dict[str, Any]:
    """Architecture of this processor and the names of its features, sorted."""
    features: set[str] = set()
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                features.update(value.split())
                break
    return {"machine": platform.machine(), "features": sorted(features)}


def check_environment(path: object, header: dict[str, Any]) -> None:
    """Refuse other library versions and a processor that lacks what the code may use.

    Raises `ArtefactError`: names what differs.
    """
    here = versions()
    for name, saved in header["versions"].items():
        if here.get(name) != saved:
            raise ArtefactError(
                f"{path} was saved with {name} {saved}, here is {here.get(name)}; install that "
                "version, or compile the step again and save it."
            )
    saved, now = header["processor"], processor()
    missing = sorted(set(saved["features"]) - set(now["features"]))
    if saved["machine"] != now["machine"] or missing:
        lacks = f"without {', '.join(missing[:8])}" if missing else "here"
        raise ArtefactError(
            f"{path} was compiled for another processor: {saved['machine']}, this is "
            f"{now['machine']} {lacks}. Compile the step again on this machine."
        )


def describe_model(model: torch.nn.Module) -> dict[str, Any]:
    """Describe modules, their modes and settings, and every tensor: name, type, shape, tying."""
    return {
        "modules": [
            [name, type(module).__name__, module.training, _ADDRESS.sub("", module.extra_repr())]
            for name, module in model.named_modules()
        ],
        "tensors": list(_tensors(model)),
    }


def _tensors(model: torch.nn.Module) -> Iterator[list[Any]]:
    owner: dict[int, str] = {}
    for kind, named in (
        ("parameter", model.named_parameters(remove_duplicate=False)),
        ("buffer", model.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in named:
            first = owner.setdefault(id(tensor), name)
            dtype, shape = str(tensor.dtype), list(tensor.shape)
            yield [name, kind, shape, dtype, str(tensor.device), tensor.requires_grad, first]


def check_model(path: object, saved: dict[str, Any], model: torch.nn.Module) -> None:
    """Refuse a model that differs from the one that the step was compiled for.

    Raises `ArtefactError`: names the first module or tensor that differs.
    """
    now = describe_model(model)
    for what, fields in (
        ("module", ("class", "training", "settings")),
        ("tensor", ("kind", "shape", "dtype", "device", "requires_grad", "owner")),
    ):
        _compare(path, what, fields, saved[f"{what}s"], now[f"{what}s"])


def _compare(
    path: object,
    what: str,
    fields: Sequence[str],
    saved: Sequence[Sequence[Any]],
    now: Sequence[Sequence[Any]],
) -> None:
    before = {str(entry[0]): entry[1:] for entry in saved}
    after = {str(entry[0]): entry[1:] for entry in now}
    for name in [*before, *after]:
        if name not in before or name not in after:
            verb = "has no" if name in before else "has besides a"
            raise ArtefactError(f"{path} does not fit: the model {verb} {what} {name!r}.")
        for field, old, new in zip(fields, before[name], after[name], strict=True):
            if old != new:
                raise ArtefactError(
                    f"{path} does not fit: {field} of the model's {what} {name!r} was {old!r}, "
                    f"now it is {new!r}. Make the model as it was, or compile the step again."
                )


def describe_optimizer(optimizer: Any, model: torch.nn.Module) -> dict[str, Any]:
    """Describe the optimizer's class and, for each group, hashes of its updates and its names."""
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    return {
        "class": " + ".join(type(member).__name__ for member in optimizers_of(optimizer))
        or "no optimizer",
        "groups": [
            [
                sorted({programs_of(owner).of(group, p).digest for p in group["params"]}),
                [names.get(id(p), "") for p in group["params"]],
            ]
            for owner, group in groups_of(optimizer)
        ],
    }


def check_optimizer(
    path: object, saved: dict[str, Any], optimizer: Any, model: torch.nn.Module
) -> None:
    """Refuse an optimizer that differs from the one that the step was compiled for.

    Raises `ArtefactError`: names what differs. Raises `UnsupportedOperatorError`: the optimizer
    could not be compiled at all.
    """
    now = describe_optimizer(optimizer, model)
    refuse_told_apart(optimizer, lambda parameter: parameter.requires_grad)
    if saved["class"] != now["class"]:
        raise ArtefactError(
            f"{path} was compiled with {saved['class']}, the optimizer is {now['class']}."
        )
    if len(saved["groups"]) != len(now["groups"]):
        raise ArtefactError(
            f"{path} was compiled for {len(saved['groups'])} parameter groups, the optimizer has "
            f"{len(now['groups'])}."
        )
    for index, (old, new) in enumerate(zip(saved["groups"], now["groups"], strict=True)):
        if old[0] != new[0]:
            raise ArtefactError(
                f"{path}: parameter group {index} was compiled for another update than "
                f"{now['class']} makes with these settings; does a flag differ, or a momentum or "
                "weight decay that was or is 0?"
            )
        if old[1] != new[1]:
            raise ArtefactError(
                f"{path}: parameter group {index} held {len(old[1])} parameters in another order "
                f"or with other names than the {len(new[1])} of the optimizer given."
            )
