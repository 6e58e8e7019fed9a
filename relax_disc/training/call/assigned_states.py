"""Let a step write its state into tensors of its own, as assigning a new tensor does in eager.

``self.hidden = h.detach()`` leaves alone the tensor that lay there: who kept it, to start the next
epoch from or to look at later, finds it unchanged.  A program writes the new value into the old
tensor; so that this is nobody else's, a copy is put there first if somebody may hold it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

import torch

from relax_disc.errors import InputMismatchError
from relax_disc.frontend.capture.state.sources import ElementsAt, Place


class AssignedStates:
    """The places in which the user's code puts other tensors.

    ``places``: with what messages call them, and whether the code writes in place what is there
    before.
    """

    def __init__(self, places: Sequence[tuple[str, Place, bool]]) -> None:
        self._names = [(what, is_written) for what, _, is_written in places]
        self._places = [place for _, place, _ in places]
        # The copies that lie there, with how many hold them and what they lie in.
        self._made: list[tuple[torch.Tensor, list[int]] | None] = [None] * len(places)

    def renew(self) -> bool:
        """Put copies where others may hold what lies there; before the program is bound.

        Says whether there were any.

        Raises `InputMismatchError`: somebody does, and would have to see it written in place.
        """
        changed = False
        for index, place in enumerate(self._places):
            tensor, made = _at(place), self._made[index]
            if tensor is None:
                continue
            if made is not None and made[0] is tensor:
                counts = _counts(place)
                if counts == made[1]:
                    continue
                tensor = None  # an error keeps what its frames hold
                self._refuse_kept(index, counts, made[1])
            self._made[index] = None
            place.put(place.get().detach().clone())
            changed = True
        return changed

    def _refuse_kept(self, index: int, now: Sequence[int], noted: Sequence[int]) -> None:
        what, is_written = self._names[index]
        if is_written and any(count > before for count, before in zip(now, noted, strict=True)):
            raise InputMismatchError(
                f"{what} is kept elsewhere, too, and the step writes into it in place before it "
                "puts another tensor there: keep a .clone(), or let the model compute a new "
                "tensor alone."
            )

    def note(self) -> None:
        """Note who holds the copies now that the program is bound, and no user's code has run."""
        for index, place in enumerate(self._places):
            tensor = _at(place)
            if tensor is not None:
                counts: list[int] = []
                self._made[index] = tensor, counts
                counts += _counts(place)  # with this entry, as later

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Put back what lay in the places when the block ends."""
        bases = [_base(place) for place in self._places if _at(place) is not None]
        before = [base.get() for base in bases]
        try:
            yield
        finally:
            for base, held in zip(bases, before, strict=True):
                base.put(held)


def _at(place: Place) -> torch.Tensor | None:
    try:
        found = place.get()
    except (LookupError, ValueError):  # binding tells
        return None
    return found if isinstance(found, torch.Tensor) else None


def _base(place: Place) -> Place:
    """Return the place of the outermost container that is replaced with an element."""
    while isinstance(place.container, ElementsAt):
        place = place.container.place
    return place


def _counts(place: Place) -> list[int]:
    """Count the references to a tensor, to its memory, and to the containers around it."""
    tensor = place.get()
    counts = [torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)]
    counts.append(sys.getrefcount(tensor))
    while isinstance(place.container, ElementsAt):
        place = place.container.place
        counts.append(sys.getrefcount(place.get()))
    return counts
