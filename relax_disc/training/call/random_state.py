"""The state of the random operators, which follows PyTorch's default generator."""

from __future__ import annotations

import weakref

import torch

from relax_disc.vm_builtins.libraries import random_seeds


class RandomState:
    """``[seed, offset]`` for a call: one number drawn from PyTorch's default generator.

    So ``torch.manual_seed`` and ``torch.set_rng_state`` decide what a step draws, as in eager
    PyTorch.  Once `state` has been read or set, calls go on from that instead, counting, until the
    generator gets another seed.

    ``device``: where the kernels run.

    ``tensor``: what they read, int64.
    """

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros(2, dtype=torch.int64, device=device)
        self._numbers = 0, 0  # what it holds
        weakref.finalize(self, random_seeds.forget, self.tensor.data_ptr())
        self._counts_from: int | None = None  # the generator's seed when counting began

    @property
    def state(self) -> torch.Tensor:
        """What the coming calls draw from; settable."""
        if not self._is_counting():
            self._draw()
            self._counts_from = torch.initial_seed()
        return self.tensor.clone()

    @state.setter
    def state(self, state: torch.Tensor) -> None:
        self._write(*state.tolist())
        self._counts_from = torch.initial_seed()

    def begin(self) -> None:
        """Draw for a call, unless counting."""
        if not self._is_counting():
            self._draw()

    def end(self) -> None:
        """Count a finished call."""
        if self._counts_from is not None:
            self._write(self._numbers[0], self._numbers[1] + 1)

    def mark(self) -> tuple[torch.Tensor, int | None, torch.Tensor]:
        """Return what `restore` takes."""
        return self.tensor.clone(), self._counts_from, torch.get_rng_state()

    def restore(self, mark: tuple[torch.Tensor, int | None, torch.Tensor]) -> None:
        """Go back to a mark, the default generator too."""
        tensor, self._counts_from, generator = mark
        self._write(*tensor.tolist())
        torch.set_rng_state(generator)

    def _is_counting(self) -> bool:
        if self._counts_from is not None and self._counts_from != torch.initial_seed():
            self._counts_from = None
        return self._counts_from is not None

    def _draw(self) -> None:
        self._write(int(torch.randint(2**62, ())), 0)

    def _write(self, seed: int, offset: int) -> None:
        self._numbers = seed, offset
        self.tensor[0], self.tensor[1] = seed, offset
        random_seeds.tell(self.tensor, seed, offset)
