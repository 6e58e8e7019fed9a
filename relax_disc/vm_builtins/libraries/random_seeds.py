"""Seeds for kernels of PyTorch that draw by themselves, without asking the device for its state.

Random operators read their state ``[seed, offset]`` on the device
(`relax_disc.frontend.random_ops`).  PyTorch's kernels take a generator of the host instead; so
whoever writes a state tells its numbers here, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from relax_disc.vm_builtins.capturing import refuse_capture

_known: dict[int, tuple[int, int]] = {}
"""Seed and offset, by the address of the state's tensor."""
_MASK = 2**64 - 1


def tell(state: torch.Tensor, seed: int, offset: int) -> None:
    """Say what a state holds; to be taken back by `forget` before its memory is another's."""
    _known[state.data_ptr()] = seed, offset


def forget(address: int) -> None:
    """Take back what was told of the state at an address."""
    _known.pop(address, None)


def seed_of(state: torch.Tensor, stream: int) -> int:
    """Mix a state and the number of an operator into a seed of 63 bits.

    A state of which nothing was told is read, which waits for its device.
    """
    refuse_capture("attention's kernel takes the seed of its dropout from the host")
    seed, offset = _known.get(state.data_ptr()) or state.tolist()
    mixed = seed
    for number in (offset, stream):
        mixed = _mixed(mixed ^ _mixed(number))
    return mixed >> 1


def _mixed(number: int) -> int:
    """One step of splitmix64 (Steele et al., OOPSLA 2014)."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


@contextmanager
def drawing_from(device: torch.device, seed: int) -> Iterator[None]:
    """Let kernels on a device draw from a seed; the user's generator stays what it was."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
    else:
        generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)
