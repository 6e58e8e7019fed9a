"""Check a batch against what was captured and find the value of every dim, before anything runs.

A batch has the structure (pytree) of the example inputs.  Each tensor leaf has a dtype, a device
and a shape of numbers and expressions over the dims; every dim is solved from the first leaf that
shows it alone or multiplied, and all other extents must then agree.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import tvm

from relax_disc.analysis.symbolic.dim import SymbolicDim
from relax_disc.analysis.symbolic.expr import SymbolicExpr
from relax_disc.errors import IndexRangeError, InputMismatchError, ShapeRangeError
from relax_disc.frontend.capture.batch_spec import BatchSpec
from relax_disc.frontend.capture.state.outer import Layouts, strides_of
from relax_disc.frontend.spec import CapturedStep, IndexCheck, Packing, SizeCheck
from relax_disc.training.call.packing import place_rows
from relax_disc.vm_builtins.runtime import function

Extent = int | SymbolicExpr

_MOST_SHAPES = 1024


@dataclass(frozen=True, slots=True)
class BatchLeaf:
    """One tensor of the batch."""

    name: str  # what to call it in messages
    position: int  # its place among the leaves of the flattened batch
    shape: tuple[Extent, ...]  # extents over the dims
    dtype: torch.dtype  # element type; never converted silently


@dataclass(frozen=True)
class BatchSchema:
    """The structure, types and shapes that every batch must have."""

    spec: BatchSpec  # the structure, and the leaves that are no tensors
    leaves: tuple[BatchLeaf, ...]  # the tensors that the program reads
    dims: tuple[SymbolicDim, ...]  # every dim with its range
    device: torch.device  # where the tensors must be
    index_checks: tuple[IndexCheck, ...] = ()  # on the values of tensors that are used as indices
    size_checks: tuple[SizeCheck, ...] = ()  # on the dims, beyond their ranges
    packings: tuple[Packing, ...] = ()  # which rows are computed; empty: all
    layouts: Layouts | None = None  # strides that the model has asked for
    # Values of the dims by the shapes of the leaves: lengths come back, and to solve them again
    # takes longer than all else that is done before a step.
    _solved: dict[tuple[torch.Size, ...], dict[str, int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def bind(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[torch.Tensor], dict[str, int]]:
        """Return the tensors in leaf order and the value of each dim.

        For each of `packings` two more tensors follow, which say where its rows come from; how many
        there are is a dim, too.

        Raises `InputMismatchError`: the structure, a rank, dtype, device or a leaf that is no
        tensor differs from the example's. Raises `ShapeRangeError`: an extent is outside its range,
        two extents contradict each other, or the model cannot run at these sizes. Raises
        `IndexRangeError`: a value that is used as an index is outside its range.
        """
        flat = self._flat(args, kwargs) or self.spec.flatten(tuple(args), kwargs)
        tensors = [self._check_type(leaf, flat[leaf.position]) for leaf in self.leaves]
        shapes = tuple(tensor.shape for tensor in tensors)
        values = self._solved.get(shapes)
        if values is None:
            if len(self._solved) >= _MOST_SHAPES:
                self._solved.clear()
            values = self._solved[shapes] = self._solve(tensors)
        if self.index_checks:
            self._check_indices(flat, values)
        values = dict(values)
        leaves = {leaf.position: x for leaf, x in zip(self.leaves, tensors, strict=True)}
        for packing in self.packings:
            places, starts = place_rows(packing, leaves, values)
            tensors += [places, starts]
            values[packing.tokens] = places.shape[1]
        return tensors, values

    @functools.cached_property
    def _plain_arguments(self) -> tuple[int, tuple[str, ...]] | None:
        """How many arguments are given by place, and which by name, if each is a tensor."""
        return self.spec.plain_arguments()

    def _flat(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """List the leaves of a batch of tensors given as in the example; None for any other."""
        if self._plain_arguments is None:
            return None
        count, names = self._plain_arguments
        if not count and len(args) == 1 and not kwargs and type(args[0]) is dict:
            args, kwargs = (), args[0]
        if len(args) != count or kwargs.keys() != set(names):
            return None
        flat = [*args, *[kwargs[name] for name in names]]
        return flat if all(isinstance(leaf, torch.Tensor) for leaf in flat) else None

    def _check_type(self, leaf: BatchLeaf, value: object) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise InputMismatchError(
                f"{leaf.name} must be a torch.Tensor of dtype {leaf.dtype}, "
                f"got {type(value).__name__}; convert it with `torch.as_tensor`."
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
        if value.requires_grad:
            raise InputMismatchError(
                f"{leaf.name} requires a gradient, which a compiled function does not take: give "
                "its `.detach()`, or make what computed it a part of the model that is compiled."
            )
        if self.layouts is not None:
            self._check_layout(self.layouts, leaf, value)
        return value

    def _check_layout(self, layouts: Layouts, leaf: BatchLeaf, value: torch.Tensor) -> None:
        was, now = layouts.strides[leaf.position], strides_of(value)
        if now != was:
            known = "contiguous" if was is None else f"of strides {was}"
            found = "contiguous" if now is None else f"of strides {now}"
            remedy = "give its `.contiguous()`" if was is None else "give one of these strides"
            raise InputMismatchError(
                f"{leaf.name} was {known} in the example and is {found} now, and {layouts.where} "
                f"asks how tensors lie in memory: {remedy}, or compile again."
            )

    def _check_indices(self, flat: Sequence[Any], values: Mapping[str, int]) -> None:
        """Look at the ids; a device is waited for once."""
        names = {leaf.position: leaf.name for leaf in self.leaves}
        looked_at = []
        for check in self.index_checks:
            part = flat[check.leaf].detach()
            for view, *numbers in check.views:
                part = VIEWS[view](part, *(_number(n, values) for n in numbers))
            if part.numel() and not _are_inside(check, part, values):
                looked_at.append((check, part))
        if looked_at:
            ends = [
                end.long()
                for check, part in looked_at
                for end in torch.aminmax(_without_ignored(check, part, values))
            ]
            numbers = torch.stack(ends).tolist()
            for k, (check, part) in enumerate(looked_at):
                least, greatest = numbers[2 * k : 2 * k + 2]
                _check_values(check, part, least, greatest, names[check.leaf], values)

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
        for check in self.size_checks:
            size, limit = (_number(x, values) for x in (check.size, check.limit))
            if size > limit if check.relation == "<=" else size == limit:
                shape = [_number(n, values) for n in check.shape]
                sizes = ", ".join(f"{name}={value}" for name, value in values.items())
                text = check.message.format(size=size, limit=limit, shape=shape)
                raise ShapeRangeError(f"At {sizes}: {text}" if sizes else text)
        return values


def placed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a batch tensor as programs take it; one with odd strides or address is copied."""
    tensor = tensor.contiguous().resolve_neg()
    if tensor.numel() and tensor.data_ptr() % 64:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def batch_argument(tensor: torch.Tensor) -> tvm.runtime.Tensor:
    """Share a batch tensor with the program, or a copy: see `placed`."""
    return tvm.runtime.from_dlpack(placed(tensor))


def device_of(model: torch.nn.Module) -> torch.device:
    """Where a model lies: the capture refuses more than one device."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def describe_batch(captured: CapturedStep, model: torch.nn.Module) -> BatchSchema:
    """Describe the batch that a captured function takes."""
    leaves = tuple(
        BatchLeaf(
            name=f"batch argument {spec.target} ({spec.name})",
            position=int(spec.target),
            shape=tuple(n if isinstance(n, int) else SymbolicExpr.parse(n) for n in spec.shape),
            dtype=getattr(torch, spec.dtype),
        )
        for spec in captured.inputs
        if spec.kind == "batch"
    )
    return BatchSchema(
        captured.batch,
        leaves,
        tuple(SymbolicDim(dim.name, dim.lower, dim.upper) for dim in captured.dims),
        device_of(model),
        captured.index_checks,
        captured.size_checks,
        captured.packings,
        captured.outer.layouts,
    )


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


VIEWS: dict[str, Callable[..., torch.Tensor]] = {
    "reshape": lambda x, *sizes: x.reshape(sizes),
    "permute": lambda x, *axes: x.permute(axes),
    "select": lambda x, axis, index: x.select(axis, index),
    "slice": lambda x, *numbers: torch.ops.aten.slice.Tensor(x, *numbers),
}
"""Parts of a batch tensor that an `IndexCheck` may be about, by name, with their numbers."""


def _number(value: int | str, dims: Mapping[str, int]) -> int:
    return value if isinstance(value, int) else int(_expression(value).evaluate(dims))


@functools.lru_cache(maxsize=1024)
def _expression(text: str) -> SymbolicExpr:
    return SymbolicExpr.parse(text)


_INT64 = torch.iinfo(torch.int64)


def _are_inside(check: IndexCheck, part: torch.Tensor, dims: Mapping[str, int]) -> bool:
    """Say whether one look, without a copy, finds indices on the host allowed."""
    if not part.is_cpu or not part.is_contiguous():
        return False
    low = _INT64.min if check.lower is None else _number(check.lower, dims)
    high = _INT64.max if check.upper is None else _number(check.upper, dims)
    other = low if check.ignored is None else check.ignored
    return function("relax_disc.indices_are_inside")(part, low, high, other)


def _without_ignored(
    check: IndexCheck, part: torch.Tensor, dims: Mapping[str, int]
) -> torch.Tensor:
    """Put a value that is allowed for the one that selects nothing."""
    bound = check.lower if check.lower is not None else check.upper
    if check.ignored is None or bound is None:
        return part
    return part.masked_fill(part == check.ignored, _number(bound, dims))


def _check_values(
    check: IndexCheck,
    part: torch.Tensor,
    least: int,
    greatest: int,
    name: str,
    dims: Mapping[str, int],
) -> None:
    low = least if check.lower is None else _number(check.lower, dims)
    high = greatest if check.upper is None else _number(check.upper, dims)
    if least >= low and greatest <= high:
        return
    outside = (part < low) | (part > high)
    if check.ignored is not None:
        outside &= part != check.ignored
    if bool(outside.any()):
        place = tuple(int(index) for index in outside.nonzero()[0])
        also = "" if check.ignored is None else f" (or {check.ignored}, ignored)"
        of_part = " (of the part that is read)" if check.views else ""
        bounds = f"{'' if check.lower is None else low} .. {'' if check.upper is None else high}"
        raise IndexRangeError(
            f"{name}{list(place)}{of_part} is {int(part[place])}; ids must be in {bounds}{also}: "
            f"{check.where} uses them as indices."
        )


def _shape_text(shape: Sequence[Extent]) -> str:
    return "[" + ", ".join(str(extent) for extent in shape) + "]"
