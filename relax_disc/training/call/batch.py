"""Check a batch against what was captured and find the value of every dim, before anything runs.

A batch has the structure (pytree) of the example inputs.  Each tensor leaf has a dtype, a device
and a shape of numbers and expressions over the dims; every dim is solved from the first leaf that
shows it alone or multiplied, and all other extents must then agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from relax_disc.analysis.symbolic.dim import SymbolicDim
from relax_disc.analysis.symbolic.expr import SymbolicExpr
from relax_disc.errors import InputMismatchError, ShapeRangeError
from relax_disc.frontend.capture.batch_spec import BatchSpec

Extent = int | SymbolicExpr

_MOST_SHAPES = 1024


@dataclass(frozen=True, slots=True)
class BatchLeaf:
    """One tensor of the batch.

    Attributes
    ----------
    name : str
        What to call it in messages.
    position : int
        Its place among the leaves of the flattened batch.
    shape : tuple of int or SymbolicExpr
        Extents over the dims.
    dtype : torch.dtype
        Element type; never converted silently.
    index_range : tuple of (int, int) or None
        Allowed values, inclusive, of ids that index a table; None where any value goes.
    ignored_value : int or None
        A value outside ``index_range`` that is allowed too (a loss's ``ignore_index``).
    """

    name: str
    position: int
    shape: tuple[Extent, ...]
    dtype: torch.dtype
    index_range: tuple[int, int] | None = None
    ignored_value: int | None = None


@dataclass(frozen=True)
class BatchSchema:
    """The structure, types and shapes that every batch must have.

    Attributes
    ----------
    spec : BatchSpec
        The structure, and the leaves that are no tensors.
    leaves : tuple of BatchLeaf
        The tensors that the program reads.
    dims : tuple of SymbolicDim
        Every dim with its range.
    device : torch.device
        Where the tensors must be.
    """

    spec: BatchSpec
    leaves: tuple[BatchLeaf, ...]
    dims: tuple[SymbolicDim, ...]
    device: torch.device
    # Values of the dims by the shapes of the leaves: lengths come back, and to solve them again
    # takes longer than all else that is done before a step.
    _solved: dict[tuple[torch.Size, ...], dict[str, int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def bind(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[torch.Tensor], dict[str, int]]:
        """Return the tensors in leaf order and the value of each dim.

        Raises
        ------
        InputMismatchError
            The structure, a rank, dtype, device or a leaf that is no tensor differs from the
            example's.
        ShapeRangeError
            An extent or an id is outside its range, or two extents contradict each other.
        """
        flat = self.spec.flatten(tuple(args), kwargs)
        tensors = [self._check_type(leaf, flat[leaf.position]) for leaf in self.leaves]
        shapes = tuple(tensor.shape for tensor in tensors)
        values = self._solved.get(shapes)
        if values is None:
            if len(self._solved) >= _MOST_SHAPES:
                self._solved.clear()
            values = self._solved[shapes] = self._solve(tensors)
        for leaf, tensor in zip(self.leaves, tensors, strict=True):
            _check_ids(leaf, tensor)
        return tensors, dict(values)

    def _check_type(self, leaf: BatchLeaf, value: object) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise InputMismatchError(
                f"{leaf.name} must be a torch.Tensor of dtype {leaf.dtype}, "
                f"got {type(value).__name__}."
            )
        if value.dim() != len(leaf.shape):
            raise InputMismatchError(
                f"{leaf.name} must have rank {len(leaf.shape)} ({_shape_text(leaf.shape)}), got "
                f"shape {tuple(value.shape)}."
            )
        if value.dtype != leaf.dtype:
            raise InputMismatchError(
                f"{leaf.name} must have dtype {leaf.dtype}, got {value.dtype}; convert it with "
                f"`.to({leaf.dtype})`."
            )
        if value.device != self.device:
            raise InputMismatchError(
                f"{leaf.name} must be on {self.device}, it is on {value.device}; move it with "
                f"`.to({str(self.device)!r})`."
            )
        if value.layout != torch.strided:
            raise InputMismatchError(f"{leaf.name} must be a dense tensor, got {value.layout}.")
        return value.detach()

    def _solve(self, tensors: Sequence[torch.Tensor]) -> dict[str, int]:
        """Find the dims' values and check every extent against them."""
        values: dict[str, int] = {}
        shown: dict[str, str] = {}
        by_name = {dim.name: dim for dim in self.dims}
        for leaf, tensor in zip(self.leaves, tensors, strict=True):
            for axis, (extent, size) in enumerate(zip(leaf.shape, tensor.shape, strict=True)):
                name, value = _solve_extent(extent, size)
                if name is None or name in values:
                    continue
                where = f"dim {axis} of {leaf.name}"
                if value is None:
                    raise ShapeRangeError(
                        f"{where} is {size}; it must be of the form {extent} for a whole {name}."
                    )
                if value not in by_name[name]:
                    raise ShapeRangeError(
                        f"{where} is {size}, so {name} = {value}; allowed is {by_name[name]}. "
                        f"Crop or pad the batch, or declare a wider Dim and compile again."
                    )
                values[name], shown[name] = value, where
        for leaf, tensor in zip(self.leaves, tensors, strict=True):
            for axis, (extent, size) in enumerate(zip(leaf.shape, tensor.shape, strict=True)):
                wanted = extent if isinstance(extent, int) else int(extent.evaluate(values))
                if wanted != size:
                    raise ShapeRangeError(
                        f"dim {axis} of {leaf.name} is {size}, expected "
                        f"{_expectation(extent, wanted, shown)}."
                    )
        return values


def _solve_extent(extent: Extent, size: int) -> tuple[str | None, int | None]:
    """Solve ``a * dim + b == size``; (None, None) for other forms, a None value if not whole."""
    if isinstance(extent, int) or len(extent.free_dims) != 1:
        return None, None
    (dim,) = extent.free_dims
    name = dim if isinstance(dim, str) else dim.name
    offset, one, two = (int(extent.evaluate({name: k})) for k in (0, 1, 2))
    slope = one - offset
    if slope == 0 or two - one != slope:
        return None, None
    value, rest = divmod(size - offset, slope)
    return name, value if rest == 0 else None


def _expectation(extent: Extent, wanted: int, shown: Mapping[str, str]) -> str:
    if isinstance(extent, int):
        return f"{wanted} (it is fixed)"
    names = sorted(dim if isinstance(dim, str) else dim.name for dim in extent.free_dims)
    seen = ", ".join(f"{name} was read from {shown[name]}" for name in names if name in shown)
    return f"{wanted} = {extent}" + (f"; {seen}" if seen else "")


def _check_ids(leaf: BatchLeaf, tensor: torch.Tensor) -> None:
    """Check that ids index inside their table; on CUDA the kernels set a flag instead."""
    if leaf.index_range is None or tensor.numel() == 0 or tensor.device.type != "cpu":
        return
    low, high = leaf.index_range
    least, greatest = (int(bound) for bound in torch.aminmax(tensor))
    if least >= low and greatest <= high:
        return
    outside = (tensor < low) | (tensor > high)
    if leaf.ignored_value is not None:
        outside &= tensor != leaf.ignored_value
    if bool(outside.any()):
        place = tuple(int(index) for index in outside.nonzero()[0])
        also = "" if leaf.ignored_value is None else f" (or {leaf.ignored_value}, ignored)"
        raise ShapeRangeError(
            f"{leaf.name}{list(place)} is {int(tensor[place])}; ids must be in {low} .. "
            f"{high}{also}."
        )


def _shape_text(shape: Sequence[Extent]) -> str:
    return "[" + ", ".join(str(extent) for extent in shape) + "]"
