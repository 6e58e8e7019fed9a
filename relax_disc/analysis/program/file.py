"""Read `tensor-graph/1` and `/2` files; write `/2`.

Both are JSON, compressed where the name ends in ``.gz``.  `/2` has, beyond `/1` (``bytes``,
``inputs``, ``outputs``, ``ops`` with ``name``, ``time_ns``, ``inputs``, ``outputs``, ``views``;
``recorded_peak_bytes`` and ``source`` at the top):

* ``dims``: a list of ``{"name", "range": [lower, upper or null], "divisor"}``;
* ``names``: one per tensor;
* sizes that are numbers or text such as ``"4*batch*seq"``, as `SymbolicExpr` prints them;
* per op ``inplace`` (pairs), ``after`` (op numbers), ``workspace_bytes``, ``flops``,
  ``moved_bytes``, ``recomputable``, ``source``.

A field that equals its default is not written.  A field that is not known is an error, so that
nothing that a newer writer meant is dropped in silence.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from relax_disc.analysis.program.tensor_graph import Kernel, Size, TensorGraph
from relax_disc.analysis.program.workspace import LibraryWorkspace
from relax_disc.analysis.symbolic.expr import SymbolicDim, SymbolicExpr
from relax_disc.errors import GraphError

_TOP = {"format", "source", "bytes", "inputs", "outputs", "recorded_peak_bytes", "ops"}
_OP = {"name", "time_ns", "inputs", "outputs", "views"}
_KNOWN = {
    "tensor-graph/1": (_TOP, _OP),
    "tensor-graph/2": (_TOP | {"dims", "names"}, {field.name for field in fields(Kernel)}),
}


def load_graph(path: str | Path) -> TensorGraph:
    """Read a graph.

    Raises `GraphError`: the file is no tensor graph, has an unknown or missing field, or describes
    a malformed graph.
    """
    raw = Path(path).read_bytes()
    try:
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        data = json.loads(text)
    except (OSError, EOFError, ValueError) as error:
        raise GraphError(f"{path}: not a JSON file: {error}") from error
    try:
        return _graph_of(data)
    except GraphError as error:
        raise GraphError(f"{path}: {error}") from error


def save_graph(graph: TensorGraph, path: str | Path) -> None:
    """Write a graph as `tensor-graph/2`.

    Raises `GraphError`: a workspace is no expression; ``graph.at(shape)`` has numbers.
    """
    for kernel in graph.kernels:
        if isinstance(kernel.workspace_bytes, LibraryWorkspace):
            raise GraphError(f"{kernel.name}: the workspace of a library's kernel is no expression")
    data: dict[str, Any] = {
        "format": "tensor-graph/2",
        "source": graph.origin,
        "dims": [
            {"name": dim.name, "range": [dim.lower, dim.upper], "divisor": dim.divisor}
            for dim in graph.dims
        ],
        "bytes": graph.sizes,
        "names": graph.tensor_names,
        "inputs": graph.inputs,
        "outputs": graph.outputs,
        "recorded_peak_bytes": graph.recorded_peak_bytes,
        "ops": [_changed_fields(kernel) for kernel in graph.kernels],
    }
    needed = ("bytes", "inputs", "outputs", "ops")
    data = {name: value for name, value in data.items() if value or name in needed}
    text = json.dumps(data, separators=(",", ":"), default=str).encode()  # str: of expressions
    if str(path).endswith(".gz"):
        text = gzip.compress(text, mtime=0)
    Path(path).write_bytes(text)


def _changed_fields(kernel: Kernel) -> dict[str, Any]:
    """Return the fields of a kernel that do not equal their default."""
    values = ((field, getattr(kernel, field.name)) for field in fields(kernel))
    return {field.name: value for field, value in values if value != field.default}


def _graph_of(data: object) -> TensorGraph:
    """Make a graph of parsed JSON."""
    if not isinstance(data, dict):
        raise GraphError("a tensor graph is a JSON object")
    version = str(data.get("format"))
    if version not in _KNOWN:
        raise GraphError(f"unknown format {data.get('format')!r}; known are {', '.join(_KNOWN)}")
    top, op_fields = _KNOWN[version]
    _check_fields(data, top, ("bytes", "inputs", "outputs", "ops"), "the graph")
    dims = tuple(_read_dim(dim) for dim in _read_list(data.get("dims", []), "dims"))
    needed = ("inputs", "outputs") if op_fields > _OP else ("name", "time_ns", "inputs", "outputs")
    kernels = []
    for index, op in enumerate(_read_list(data["ops"], "ops")):
        if not isinstance(op, dict):
            raise GraphError(f"op {index} is no JSON object")
        _check_fields(op, op_fields, needed, f"op {index}")
        read: dict[str, Any] = {"name": ""}
        for name, value in op.items():
            read[name] = _READ.get(name, _read_text)(value, f"op {index}: {name}")
        for name in ("workspace_bytes", "flops", "moved_bytes"):
            read[name] = _read_size(op.get(name, 0), dims, f"op {index}: {name}")
        kernels.append(Kernel(**read))
    return TensorGraph(
        dims=dims,
        sizes=tuple(
            _read_size(size, dims, f"size of tensor {tensor}")
            for tensor, size in enumerate(_read_list(data["bytes"], "bytes"))
        ),
        inputs=_read_tuple(data["inputs"], "inputs"),
        outputs=_read_tuple(data["outputs"], "outputs"),
        kernels=tuple(kernels),
        tensor_names=tuple(map(str, _read_list(data.get("names", []), "names"))),
        recorded_peak_bytes=data.get("recorded_peak_bytes"),
        origin=str(data.get("source", "")),
    )


def _check_fields(
    data: Mapping[str, object], known: set[str], needed: tuple[str, ...], where: str
) -> None:
    unknown = sorted(set(data) - known)
    if unknown:
        raise GraphError(f"{where} has unknown field {unknown[0]!r}; known are {sorted(known)}")
    for field in needed:
        if field not in data:
            raise GraphError(f"{where} has no field {field!r}")


def _read_list(value: object, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise GraphError(f"{what} must be a list, not {value!r}")
    return value


def _read_tuple(value: object, what: str) -> tuple[Any, ...]:
    return tuple(_read_list(value, what))


def _read_pairs(value: object, what: str) -> tuple[Any, ...]:
    return tuple(_read_tuple(pair, what) for pair in _read_list(value, what))


def _read_flag(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise GraphError(f"{what} is {value!r}, not true or false")
    return value


def _read_text(value: object, _: str) -> str:
    return str(value)


_READ: dict[str, Callable[[object, str], Any]] = {
    **dict.fromkeys(("inputs", "outputs", "after", "views"), _read_tuple),
    "inplace": _read_pairs,
    "recomputable": _read_flag,
    "time_ns": lambda value, _: value,  # the graph refuses what is no whole number
}


def _read_dim(data: object) -> SymbolicDim:
    if not isinstance(data, dict) or not {"name", "range"} <= set(data):
        raise GraphError(f"a dim needs 'name' and 'range': {data!r}")
    _check_fields(data, {"name", "range", "divisor"}, (), f"dim {data['name']!r}")
    bounds = data["range"]
    if not isinstance(bounds, list) or len(bounds) != 2:
        raise GraphError(f"dim {data['name']!r}: a range is [lower, upper or null]: {bounds!r}")
    return SymbolicDim(str(data["name"]), bounds[0], bounds[1], data.get("divisor", 1))


def _read_size(value: object, dims: tuple[SymbolicDim, ...], what: str) -> Size:
    if not isinstance(value, str):
        return value  # type: ignore[return-value]  # the graph refuses what is no whole number
    try:
        size = SymbolicExpr.parse(value, dims)
    except ValueError as error:
        raise GraphError(f"{what}: {error}") from error
    unknown = sorted({dim.name for dim in size.free_dims} - {dim.name for dim in dims})
    if unknown:
        raise GraphError(f"{what}: {value!r} names the unknown dim {unknown[0]!r}")
    return size.as_int() if size.is_constant else size
