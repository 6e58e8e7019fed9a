"""The device that the suite runs on: a GPU, or the host for a rehearsal."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Device:
    """Where models run.

    Attributes
    ----------
    name : str
        As results tell it; a part of their files' names.
    kind : str
        "cuda", or "cpu" for a rehearsal.
    target : object
        What `relax_disc.compile` gets.
    """

    name: str
    kind: str
    target: Any

    def place(self, value: _T) -> _T:
        """Bring a module, a tensor or a tuple of tensors there."""
        if isinstance(value, tuple):
            return tuple(each.to(self.kind) for each in value)  # pyright: ignore[reportReturnType]
        return value.to(self.kind)  # pyright: ignore[reportAttributeAccessIssue]

    def milliseconds(self, run: Callable[[], object]) -> float:
        """Time of a call, until the device has done it."""
        self.wait()
        start = time.perf_counter()
        run()
        self.wait()
        return 1e3 * (time.perf_counter() - start)

    def wait(self) -> None:
        """Let the device do all that it was asked for."""
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def answers(self) -> bool:
        """Say whether the device still works: after some errors it answers only with them."""
        try:
            self.wait()
        except RuntimeError:
            return False
        return True

    def used_bytes(self) -> int:
        """Bytes of tensors on the device now; 0 on the host, which does not count them."""
        return torch.cuda.memory_allocated() if self.kind == "cuda" else 0

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Most bytes of tensors on the device during a call; 0 on the host."""
        if self.kind != "cuda":
            run()
            return 0
        self.wait()
        torch.cuda.reset_peak_memory_stats()
        run()
        self.wait()
        return torch.cuda.max_memory_allocated()

    def clear(self) -> None:
        """Give back what PyTorch keeps for later."""
        if self.kind == "cuda":
            torch.cuda.empty_cache()


def gpu() -> Device:
    """Return this machine's first GPU.

    Raises `SystemExit`: PyTorch sees none.
    """
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here; nothing was measured (--rehearse needs none)")
    name = torch.cuda.get_device_name().lower().replace("nvidia ", "")
    major, minor = torch.cuda.get_device_capability()
    from relax_disc.tir_kernels.target import cuda_target

    word = "".join(letter if letter.isalnum() else "-" for letter in name).strip("-")
    return Device(word, "cuda", cuda_target(f"sm_{major}{minor}"))


def host() -> Device:
    """Return the processor, for a rehearsal."""
    return Device("rehearsal", "cpu", "llvm")
