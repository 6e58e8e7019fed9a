"""Names and ranges of the free dims: from PyTorch's symbols back to the user's ``Dim`` objects."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import sympy
import torch
from torch._dynamo.source import TensorProperty, TensorPropertySource
from torch._export.non_strict_utils import key_path_to_source, make_sourced_prefixes
from torch.export import ExportedProgram
from torch.export.dynamic_shapes import _DerivedDim, _DimHint, _tree_map_with_path
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_with_path

from relax_disc.errors import InputMismatchError, ShapeRangeError, UnsupportedOperatorError
from relax_disc.frontend.capture.sizes.counted import CountedSize
from relax_disc.frontend.capture.sizes.evaluation import OPEN_END
from relax_disc.frontend.spec import DimSpec

Sizes = Mapping[str, np.ndarray]
"""Some of the declared sizes of each dim, ascending, by the dim's name."""


@dataclass(frozen=True, slots=True)
class DimTable:
    """Maps each free symbol of a traced graph to a dim."""

    names: Mapping[str, str]  # from the symbol's name in the trace (``"s27"``) to the dim's
    specs: Mapping[str, DimSpec]  # by the dim's name
    counted: frozenset[str] = frozenset()  # dims that the function counts
    sizes: Sizes = field(default_factory=dict)  # at which conditions have to hold, where not at all
    where: tuple[Any, ...] = ()  # and where these hold, over symbols named after the dims

    def __getitem__(self, symbol: sympy.Symbol) -> DimSpec:
        """Return the dim of a symbol; one that the example did not declare is data-dependent."""
        name = self.names.get(str(symbol))
        if name is None:
            raise UnsupportedOperatorError(
                f"The model computes a size from data ({symbol}); only sizes that follow from the "
                "shapes of the batch can be compiled."
            )
        return self.specs[name]

    def with_counted(self, counted: Sequence[CountedSize]) -> DimTable:
        """Return the table with the sizes that a trace counts."""
        names = {str(symbol): size.name for size in counted for symbol in size.symbols}
        specs = {}
        for size in counted:
            upper = None if not isinstance(size.bound, int) else size.bound
            specs[size.name] = DimSpec(size.name, size.least, upper)
        return DimTable({**self.names, **names}, {**self.specs, **specs}, frozenset(specs))


def dim_table(
    program: ExportedProgram,
    leaves: Sequence[Any],
    declared: Mapping[int, Mapping[int, Any]],
    sizes: Sizes,
    where: tuple[Any, ...] = (),
) -> DimTable:
    """Match the symbols of an exported program with the user's dims.

    ``declared`` is what `declared_dims` found; ``sizes``, ``where``: of the table. A lower bound of
    0 becomes 1: a step over an empty batch means nothing.
    """
    names: dict[str, str] = {}
    specs: dict[str, DimSpec] = {}
    for fake, leaf in zip(_user_fakes(program), leaves, strict=True):
        dims = declared.get(id(leaf), {})
        for axis, extent in enumerate(getattr(fake, "shape", ())):
            if isinstance(extent, torch.SymInt):
                _note(extent.node.expr, dims.get(axis), program, names, specs)
    return DimTable(names, specs, sizes=sizes, where=where)


def named_dims(dynamic_shapes: Any) -> Any:
    """Write a name in the place of a dim, as in ``{0: "batch"}``, as a dim without a range.

    Raises `InputMismatchError`: the name is none, or a dim is left to PyTorch (``Dim.AUTO``,
    ``Dim.DYNAMIC``), which would tell neither its range nor which others are equal.
    """
    dims: dict[str, Any] = {}

    def named(path: Any, dim: Any) -> Any:
        if isinstance(dim, str):
            if not dim.isidentifier():
                raise InputMismatchError(
                    f"dynamic_shapes{keystr(path)} is {dim!r}, which is no name; say 'batch', or "
                    "Dim('batch', min=1, max=64)."
                )
            return dims.setdefault(dim, torch.export.Dim(dim))
        if isinstance(dim, _DimHint) and dim != torch.export.Dim.STATIC:
            raise InputMismatchError(
                f"dynamic_shapes{keystr(path)} is Dim.{dim.type.name}, which leaves open how large "
                "the axis gets and which others are as large. Name it, the same for all axes that "
                "are always equal, with its range: Dim('batch', min=1, max=64)."
            )
        return dim

    return tree_map_with_path(named, dynamic_shapes)


def declared_dims(combined: Mapping[str, Any], dynamic_shapes: Any) -> dict[int, Mapping[int, Any]]:
    """Find what ``dynamic_shapes`` says about each tensor, axis by axis.

    By ``id`` of the tensor, and axis; static axes are left out. No tensor is there twice.
    """
    if dynamic_shapes is None:
        return {}
    if isinstance(dynamic_shapes, tuple | list):
        dynamic_shapes = dict(zip(combined, dynamic_shapes, strict=False))
    found: dict[int, Mapping[int, Any]] = {}

    def note(path: Any, leaf: Any, dims: Any = None) -> None:
        if isinstance(leaf, torch.Tensor):
            by_axis = dict(enumerate(dims)) if isinstance(dims, Sequence) else dims or {}
            found[id(leaf)] = {axis: dim for axis, dim in by_axis.items() if _is_dynamic(dim)}
            if any(axis < leaf.dim() and leaf.shape[axis] == 0 for axis in found[id(leaf)]):
                raise InputMismatchError(
                    f"example_inputs hold an empty tensor of shape {tuple(leaf.shape)}; give a "
                    "batch with something in it."
                )
            beyond = [axis for axis in by_axis if not 0 <= axis < leaf.dim()]
            if beyond:
                raise InputMismatchError(
                    f"dynamic_shapes name axis {beyond[0]} of {keystr(path)}, whose example of "
                    f"shape {tuple(leaf.shape)} has no such axis: the first one is 0."
                )
            for axis, dim in found[id(leaf)].items():
                if isinstance(dim, torch.export.Dim):
                    _check_example(path, leaf, axis, dim)

    _tree_map_with_path(note, dict(combined), dict(dynamic_shapes), tree_name="inputs")
    return found


def dims_by_source(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    declared: Mapping[int, Mapping[int, Any]],
) -> dict[str, Any]:
    """Return what is declared of each axis, by the name that PyTorch has for its size."""
    prefixes = make_sourced_prefixes(module, args, kwargs)
    found = {}
    for path, leaf in tree_flatten_with_path((args, kwargs))[0]:
        tensor = key_path_to_source(path, prefixes)
        for axis, dim in declared.get(id(leaf), {}).items():
            found[TensorPropertySource(tensor, TensorProperty.SIZE, axis).name] = dim
    return found


def root_of(dim: Any) -> Any:
    """Return the dim by which another is declared, such as ``T`` for ``T - 1``; else itself."""
    return dim.root if isinstance(dim, _DerivedDim) else dim


def size_at(dim: Any, root_size: Any) -> Any:
    """Return what a declared size is where its root's is ``root_size``: numbers, or a symbol."""
    return dim.fn(root_size) if isinstance(dim, _DerivedDim) else root_size


def least_size(dim: Any) -> int:
    """Return the least size that a declaration allows; 1 where it does not say."""
    if root_of(dim) is not dim:
        return int(size_at(dim, least_size(root_of(dim))))
    return max(int(getattr(dim, "min", 1)), 1)


def symbol_of(name: str) -> sympy.Symbol:
    """Return the symbol of a dim, for conditions that are written over the dims' names."""
    return sympy.Symbol(name, integer=True, positive=True)


def spec_of(dim: torch.export.Dim) -> DimSpec:
    """Return a dim's name and range, whose end is open where it is beyond `OPEN_END`."""
    upper = None if dim.max > OPEN_END else int(dim.max)
    return DimSpec(dim.__name__, least_size(dim), upper)


def sizes_of(spec: DimSpec) -> np.ndarray:
    """List the sizes of a dim, to `OPEN_END` at most."""
    return np.arange(spec.lower, min(spec.upper or OPEN_END, OPEN_END) + 1)


@contextlib.contextmanager
def roots_stay(by_source: Mapping[str, Any]) -> Iterator[None]:
    """Let sizes that are declared as ``T - 1`` be written in ``T``, never the other way round.

    torch.export solves for the larger of two sizes that prove to be related, and the smaller one's
    symbol would be taken for the dim ``T``.
    """
    derived = {name for name, dim in by_source.items() if isinstance(dim, _DerivedDim)}
    before: Any = ShapeEnv._set_replacement

    def replacing(self: Any, symbol: Any, value: Any, *reason: Any, **named: Any) -> Any:
        def is_derived(size: Any) -> bool:
            return any(source.name in derived for source in self.var_to_sources.get(size, ()))

        others = list(getattr(value, "free_symbols", ()))
        if len(others) == 1 and is_derived(others[0]) and not is_derived(symbol):
            difference = value - others[0]
            if difference.is_Integer:
                symbol, value = others[0], symbol - difference
                # Kept apart from 1, which T - 1 may be, it would not be replaced.
                self.size_like.discard(symbol)
        return before(self, symbol, value, *reason, **named)

    with patch.object(ShapeEnv, "_set_replacement", replacing) if derived else _AS_IT_IS:
        yield


_AS_IT_IS = contextlib.nullcontext()


def _check_example(path: Any, leaf: torch.Tensor, axis: int, dim: Any) -> None:
    """Refuse an example outside the declared range: torch.export would blame the model."""
    if isinstance(dim, _DerivedDim):
        return
    first, last, size = int(dim.min), _finite(dim.max), max(leaf.shape[axis], 2)  # see `enlarge`
    if size < first or (last is not None and size > last):
        raise ShapeRangeError(
            f"example_inputs: {keystr(path)} of shape {tuple(leaf.shape)} has {leaf.shape[axis]} "
            f"on axis {axis}, of which {dim.__name__} allows {first} .. {last or '...'}; declare a "
            "wider Dim, or give an example inside it."
        )


def _is_dynamic(dim: Any) -> bool:
    return dim is not None and not isinstance(dim, int) and dim != torch.export.Dim.STATIC


def enlarge(
    tensor: torch.Tensor, dims: Mapping[int, Any], sizes: Mapping[str, int]
) -> torch.Tensor:
    """Repeat an example along its dynamic axes of size 1, which torch.export would make static.

    ``sizes``: what some dims are to be, by name.
    """
    for axis, dim in dims.items():
        if axis >= tensor.dim():
            continue
        root = getattr(root_of(dim), "__name__", "")
        size = size_at(dim, sizes[root]) if root in sizes else max(tensor.shape[axis], 2)
        if size != tensor.shape[axis]:
            place = torch.arange(size, device=tensor.device) % tensor.shape[axis]
            tensor = tensor.index_select(axis, place)
    return tensor


def _note(
    expr: sympy.Expr,
    dim: Any,
    program: ExportedProgram,
    names: dict[str, str],
    specs: dict[str, DimSpec],
) -> None:
    root = root_of(dim)
    if (
        root is dim
        and isinstance(dim, torch.export.Dim)
        and not expr.is_Symbol
        and expr.free_symbols
    ):
        raise ShapeRangeError(
            f"The model relates {dim.__name__} to another size, as {expr}; declare that one by "
            f"{dim.__name__}, such as {dim.__name__} - 1, or crop it inside the model."
        )
    for symbol in sorted(expr.free_symbols, key=str):
        key = str(symbol)
        named = isinstance(root, torch.export.Dim) and len(expr.free_symbols) == 1
        if key in names and (not named or names[key] != key):
            continue
        interval = program.range_constraints.get(symbol)  # pyright: ignore[reportArgumentType]
        bounds = [] if interval is None else [(interval.lower, interval.upper)]
        if named:
            bounds = [(root.min, root.max)]
            specs.pop(names.get(key, ""), None)
        name = root.__name__ if named else key
        names[key] = name
        lower, upper = bounds[0] if bounds else (1, None)
        specs[name] = DimSpec(name, max(int(lower), 1), _finite(upper))


def _finite(bound: Any) -> int | None:
    number = sympy.sympify(bound)
    return int(number) if bound is not None and number.is_Integer and number < 2**62 else None


def _user_fakes(program: ExportedProgram) -> list[Any]:
    by_name = {n.name: n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"}
    return [
        by_name.get(spec.arg.name)
        for spec in program.graph_signature.input_specs
        if spec.kind.name == "USER_INPUT"
    ]
