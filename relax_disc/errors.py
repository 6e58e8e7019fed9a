"""Errors that users of `relax_disc` can meet; all derive from `RelaxDiscError`.

Each message says what went wrong, where, with which number, and what to do next.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


class RelaxDiscError(Exception):
    """Base class of every error that the package raises on purpose."""


class RelaxDiscWarning(UserWarning):
    """Something that eager PyTorch would do has no effect in a compiled step."""


class UnsupportedOperatorError(RelaxDiscError):
    """The model uses something that cannot be translated; nothing was compiled.

    Attributes
    ----------
    operators : tuple of (str, str)
        Pairs of an operator's name and the model's source line that calls it.
    """

    def __init__(self, message: str, operators: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.operators = operators


class InputMismatchError(RelaxDiscError, TypeError):
    """An argument of a step has the wrong structure, rank, dtype, device or layout."""


class ShapeRangeError(RelaxDiscError, ValueError):
    """A dim of an argument is outside its declared range, or two arguments contradict.

    Attributes
    ----------
    allowed : tuple of str, int and int or None
        Where one narrower range would do: the dim's name, its least and greatest size; else None.
    dims : tuple of str
        The dims that the condition is about, where one is known to be broken in their ranges.
    fails_at : dict of str to int
        Sizes of those dims, each at least 2, that break it; empty where none are known.
    """

    allowed: tuple[str, int, int | None] | None = None
    dims: tuple[str, ...] = ()
    fails_at: Mapping[str, int] = MappingProxyType({})


def narrower(message: str, dim: str, lower: int, upper: int | None) -> ShapeRangeError:
    """Make a `ShapeRangeError` that a narrower range of one dim avoids."""
    error = ShapeRangeError(message)
    error.allowed = dim, lower, upper
    return error


class IndexRangeError(ShapeRangeError, IndexError):
    """An index is outside the tensor that it reads or writes; nothing has been written."""


class MemoryBudgetError(RelaxDiscError, MemoryError):
    """A shape cannot run inside the memory budget; raised before any kernel has run.

    Attributes
    ----------
    least_bytes : int
        The least budget that the planner found for this shape; itself feasible.
    lower_bound_bytes : int
        No plan of this program can need less than this.
    """

    def __init__(self, message: str, least_bytes: int = 0, lower_bound_bytes: int = 0) -> None:
        super().__init__(message)
        self._thrown: Any = None
        self.least_bytes = least_bytes
        self.lower_bound_bytes = lower_bound_bytes

    @property
    def __tvm_ffi_error__(self) -> Any:
        """What C++ threw; tvm_ffi sets it, and looks for it on the way back through C++."""
        if self._thrown is None:
            raise AttributeError("__tvm_ffi_error__")
        return self._thrown

    @__tvm_ffi_error__.setter
    def __tvm_ffi_error__(self, thrown: Any) -> None:
        self._thrown = thrown
        for name, value in (thrown.extra_context or {}).items():
            setattr(self, str(name), value)


class OutOfMemoryError(RelaxDiscError, MemoryError):
    """The system refused the memory of a call; raised before any kernel has run."""


class ReentrantCallError(RelaxDiscError, RuntimeError):
    """A step was called from inside itself: by a signal handler, a finalizer or a kernel."""


class StepTornError(RelaxDiscError, RuntimeError):
    """A step failed after it had begun to write parameters; load a saved state to go on."""


class ModelCheckError(RelaxDiscError, ValueError, AssertionError):
    """A check that the model makes of its own data fails; raised before anything is written."""


class BranchError(InputMismatchError):
    """A branch on data goes another way than for the example; raised before anything is written."""


class NonFiniteLossError(RelaxDiscError, FloatingPointError):
    """The loss, or a buffer's new value, is NaN or infinite; raised before anything is written."""


class GraphError(RelaxDiscError, ValueError):
    """A tensor graph or its symbolic constraints are malformed or contradict each other."""


class ArtefactError(RelaxDiscError, ValueError):
    """A saved step is damaged, or was made by other versions or for another machine."""


class OffloadError(RelaxDiscError, RuntimeError):
    """Offloading a tensor to the host, or reloading it, failed."""


class UnsupportedEnvironmentError(RelaxDiscError, ImportError):
    """The platform, or a version of TVM, is one that the package cannot run with."""
