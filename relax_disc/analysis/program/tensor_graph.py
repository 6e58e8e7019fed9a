"""The tensor graph: the plain data that every planning algorithm works on.

A graph lists kernels in a valid order, the tensors they read and write, and sizes and costs that
are numbers or `SymbolicExpr` over the graph's dims.  It knows nothing of TVM, so that the planners
run on graphs from elsewhere too.

Two uses of in-place pairs ``(input, output)`` of a kernel:

* the input is made by another kernel: the output *may* take the input's place when the input dies
  there (the planner decides);
* the input is a graph input (a parameter, optimizer state): the output *is* the input's new value
  and takes no memory of its own.  Every other reader of the old value must be ordered before the
  kernel, by data or by its `after` edges.

Limits: straight-line programs; one size per tensor for its whole life.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from relax_disc.analysis.program.workspace import LibraryWorkspace
from relax_disc.analysis.symbolic.expr import SymbolicDim, SymbolicExpr
from relax_disc.errors import GraphError, ShapeRangeError

Size = int | SymbolicExpr


@dataclass(frozen=True, slots=True)
class Kernel:
    """One step of the program.

    Attributes
    ----------
    name : str
        What to call it in reports.
    inputs, outputs : tuple of int
        Tensors read and written.  An output that nobody uses is still written.
    inplace : tuple of (int, int)
        Pairs of an input and an output that may share memory; see the module's description.
    after : tuple of int
        Indices of kernels that must have run before, beyond what the data says.
    workspace_bytes : int, SymbolicExpr or LibraryWorkspace
        Scratch memory that exists only while the kernel runs.
    time_ns : int or None
        Measured or estimated time; None where nobody knows yet.
    flops, moved_bytes : int or SymbolicExpr
        Arithmetic operations, and bytes read and written, for the cost model.
    views : tuple of int
        Tensors that this kernel makes free views of; its time is paid again when one is
        regenerated.
    recomputable : bool
        Whether running it a second time gives the same result (false for in-place updates).
    source : str
        The line of the user's model that made it.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    inplace: tuple[tuple[int, int], ...] = ()
    after: tuple[int, ...] = ()
    workspace_bytes: Size | LibraryWorkspace = 0
    time_ns: int | None = None
    flops: Size = 0
    moved_bytes: Size = 0
    views: tuple[int, ...] = ()
    recomputable: bool = True
    source: str = ""


@dataclass(frozen=True, slots=True)
class TensorGraph:
    """Kernels in a valid order, their tensors and sizes.

    Attributes
    ----------
    dims : tuple of SymbolicDim
        The free dims that sizes may name; empty in a numeric graph.
    sizes : tuple of int or SymbolicExpr
        Bytes of each tensor.
    inputs : tuple of int
        Tensors that are there from the start and stay (parameters, constants, the batch).
    outputs : tuple of int
        Tensors that must be there at the end.
    kernels : tuple of Kernel
        The program; the tuple's order is a valid order.
    tensor_names : tuple of str
        Names for reports, one per tensor, or empty.
    recorded_peak_bytes : int or None
        What a recording of the program used, where there is one.
    origin : str
        Where the graph comes from, in words.

    Raises
    ------
    GraphError
        At construction, when the graph is malformed: see `validate_graph`.
    """

    dims: tuple[SymbolicDim, ...]
    sizes: tuple[Size, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    kernels: tuple[Kernel, ...]
    tensor_names: tuple[str, ...] = ()
    recorded_peak_bytes: int | None = None
    origin: str = ""

    def __post_init__(self) -> None:
        """Refuse a malformed graph."""
        from relax_disc.analysis.program.checks import validate_graph

        validate_graph(self)

    @property
    def is_numeric(self) -> bool:
        """Whether every size, workspace and cost is a number."""
        return not self.dims and not any(
            not isinstance(size, int)
            for size in (*self.sizes, *(w for k in self.kernels for w in _kernel_sizes(k)))
        )

    def numbers(self) -> list[int]:
        """Return the sizes of a numeric graph in bytes.

        Raises
        ------
        GraphError
            If a size is an expression.
        """
        sizes = [size for size in self.sizes if isinstance(size, int)]
        if len(sizes) != len(self.sizes):
            raise GraphError("live bytes need a numeric graph: use graph.at(shape)")
        return sizes

    def tensor_name(self, tensor: int) -> str:
        """Return the name of a tensor for messages."""
        return self.tensor_names[tensor] if self.tensor_names else f"tensor {tensor}"

    def producers(self) -> tuple[int | None, ...]:
        """Return, for each tensor, the kernel that makes it; None where no kernel does."""
        made: list[int | None] = [None] * len(self.sizes)
        for index, kernel in enumerate(self.kernels):
            for tensor in kernel.outputs:
                made[tensor] = index
        return tuple(made)

    def written_in_place(self) -> frozenset[int]:
        """Return the tensors that live in a graph input's memory, as its new value."""
        held = set(self.inputs)
        written: set[int] = set()
        for kernel in self.kernels:
            for source, target in kernel.inplace:
                if source in held:
                    held.add(target)
                    written.add(target)
        return frozenset(written)

    def at(self, shape: Mapping[str, int]) -> TensorGraph:
        """Return the numeric graph at one shape.

        Parameters
        ----------
        shape : mapping of str to int
            A value for each dim of the graph.

        Raises
        ------
        ShapeRangeError
            If a dim is missing, unknown, outside its range or not divisible as declared.
        GraphError
            If a size is negative at this shape.
        """
        check_shape(self.dims, shape)
        cache: dict[SymbolicExpr | LibraryWorkspace, int] = {}

        def number(size: Size | LibraryWorkspace) -> int:
            if isinstance(size, int):
                return size
            if size not in cache:
                cache[size] = int(size.evaluate(shape))
            return cache[size]

        kernels = tuple(
            replace(
                kernel,
                workspace_bytes=number(kernel.workspace_bytes),
                flops=number(kernel.flops),
                moved_bytes=number(kernel.moved_bytes),
            )
            for kernel in self.kernels
        )
        sizes = tuple(number(size) for size in self.sizes)
        return replace(self, dims=(), sizes=sizes, kernels=kernels)

    def reordered(self, order: Sequence[int]) -> TensorGraph:
        """Return the same program with its kernels in another valid order.

        Parameters
        ----------
        order : sequence of int
            Kernel indices, each once; `after` edges are renumbered.

        Raises
        ------
        GraphError
            If `order` is no permutation or breaks an edge.
        """
        if sorted(order) != list(range(len(self.kernels))):
            raise GraphError(f"an order must name each of the {len(self.kernels)} kernels once")
        position = {kernel: k for k, kernel in enumerate(order)}
        kernels = tuple(
            replace(kernel, after=tuple(position[j] for j in kernel.after))
            for kernel in (self.kernels[index] for index in order)
        )
        return replace(self, kernels=kernels)

    @staticmethod
    def load(path: str | Path) -> TensorGraph:
        """Read a `tensor-graph/1` or `tensor-graph/2` file; see `tensor_graph_file`."""
        from relax_disc.analysis.program.file import load_graph

        return load_graph(path)

    def save(self, path: str | Path) -> None:
        """Write the graph as `tensor-graph/2`, compressed where the name ends in ``.gz``."""
        from relax_disc.analysis.program.file import save_graph

        save_graph(self, path)


def _kernel_sizes(kernel: Kernel) -> tuple[Size | LibraryWorkspace, Size, Size]:
    return kernel.workspace_bytes, kernel.flops, kernel.moved_bytes


def check_shape(dims: Iterable[SymbolicDim], shape: Mapping[str, int]) -> None:
    """Check that a shape gives every dim a value inside its range, and names no other.

    Raises `ShapeRangeError`: naming the dim, its value and its range.
    """
    known = {dim.name: dim for dim in dims}
    for name in shape:
        if name not in known:
            names = ", ".join(sorted(known)) or "none"
            raise ShapeRangeError(f"unknown dim {name!r}; the graph's dims are: {names}")
    for name, dim in known.items():
        if name not in shape:
            raise ShapeRangeError(f"the shape gives no value for dim {name!r}")
        value = shape[name]
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise ShapeRangeError(f"dim {name!r} needs a whole number, not {value!r}")
        if value < dim.lower or (dim.upper is not None and value > dim.upper):
            upper = "no limit" if dim.upper is None else dim.upper
            raise ShapeRangeError(f"dim {name!r} is {value}, outside {dim.lower} .. {upper}")
        if value % dim.divisor:
            raise ShapeRangeError(f"dim {name!r} is {value}, not a multiple of {dim.divisor}")


def evaluate_sizes(
    sizes: Sequence[Size | LibraryWorkspace], shapes: Sequence[Mapping[str, int]]
) -> np.ndarray:
    """Evaluate sizes at several shapes at once.

    ``sizes``: expressions over the dims that the shapes name. ``shapes``: the points; at least one.
    Returned: int64, one row per shape and one column per size.

    Raises `GraphError`: a size is negative at one of the shapes.
    """
    names = sorted(shapes[0])
    values = {name: np.array([shape[name] for shape in shapes], dtype=np.int64) for name in names}
    result = np.zeros((len(shapes), len(sizes)), dtype=np.int64)
    cache: dict[SymbolicExpr | LibraryWorkspace, np.ndarray] = {}
    for column, size in enumerate(sizes):
        if not isinstance(size, int):
            if size not in cache:
                cache[size] = np.asarray(size.evaluate(values), dtype=np.int64)
            result[:, column] = cache[size]
        else:
            result[:, column] = size
    if result.size and result.min() < 0:
        row, column = divmod(int(result.argmin()), len(sizes))
        raise GraphError(
            f"size {sizes[column]} is {result[row, column]} bytes at {dict(shapes[row])}"
        )
    return result
