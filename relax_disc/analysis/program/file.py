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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_disc.analysis.program.tensor_graph import Kernel, Size, TensorGraph
from relax_disc.analysis.symbolic.expr import SymbolicDim, SymbolicExpr
from relax_disc.errors import GraphError

_TOP_1 = {"format", "source", "bytes", "inputs", "outputs", "recorded_peak_bytes", "ops"}
_OP_1 = {"name", "time_ns", "inputs", "outputs", "views"}
_TOP = {1: _TOP_1, 2: _TOP_1 | {"dims", "names"}}
_OP = {
    1: _OP_1,
    2: _OP_1
    | {"inplace", "after", "workspace_bytes", "flops", "moved_bytes", "recomputable", "source"},
}
_REQUIRED_TOP = ("bytes", "inputs", "outputs", "ops")


def load_graph(path: str | Path) -> TensorGraph:
    """Read a graph.

    Raises
    ------
    GraphError
        If the file is no tensor graph, has an unknown or missing field, or describes a malformed
        graph.
    """
    raw = Path(path).read_bytes()
    try:
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        data = json.loads(text)
    except (OSError, EOFError, ValueError) as error:
        raise GraphError(f"{path}: not a JSON file: {error}") from error
    try:
        return graph_from_json(data)
    except GraphError as error:
        raise GraphError(f"{path}: {error}") from error


def save_graph(graph: TensorGraph, path: str | Path) -> None:
    """Write a graph as `tensor-graph/2`."""
    text = json.dumps(graph_to_json(graph), separators=(",", ":")).encode()
    if str(path).endswith(".gz"):
        text = gzip.compress(text, mtime=0)
    Path(path).write_bytes(text)


def graph_from_json(data: object) -> TensorGraph:
    """Make a graph of parsed JSON; see the module's description and `load_graph`."""
    if not isinstance(data, dict):
        raise GraphError("a tensor graph is a JSON object")
    versions = {"tensor-graph/1": 1, "tensor-graph/2": 2}
    version = versions.get(str(data.get("format")))
    if version is None:
        known = ", ".join(versions)
        raise GraphError(f"unknown format {data.get('format')!r}; known are {known}")
    _refuse_unknown(data, _TOP[version], "the graph")
    for field in _REQUIRED_TOP:
        if field not in data:
            raise GraphError(f"the graph has no field {field!r}")
    dims = tuple(_read_dim(dim) for dim in _read_list(data.get("dims", []), "dims"))
    kernels = []
    for index, op in enumerate(_read_list(data["ops"], "ops")):
        if not isinstance(op, dict):
            raise GraphError(f"op {index} is no JSON object")
        _refuse_unknown(op, _OP[version], f"op {index}")
        kernels.append(_read_kernel(op, index, dims, version))
    return TensorGraph(
        dims=dims,
        sizes=tuple(
            _read_size(size, dims, f"size of tensor {tensor}")
            for tensor, size in enumerate(_read_list(data["bytes"], "bytes"))
        ),
        inputs=tuple(_read_list(data["inputs"], "inputs")),
        outputs=tuple(_read_list(data["outputs"], "outputs")),
        kernels=tuple(kernels),
        tensor_names=tuple(str(name) for name in _read_list(data.get("names", []), "names")),
        recorded_peak_bytes=data.get("recorded_peak_bytes"),
        origin=str(data.get("source", "")),
    )


def graph_to_json(graph: TensorGraph) -> dict[str, Any]:
    """Return the `/2` form of a graph as JSON data."""
    data: dict[str, Any] = {"format": "tensor-graph/2"}
    if graph.origin:
        data["source"] = graph.origin
    if graph.dims:
        data["dims"] = [
            {"name": dim.name, "range": [dim.lower, dim.upper], "divisor": dim.divisor}
            for dim in graph.dims
        ]
    data["bytes"] = [_write_size(size) for size in graph.sizes]
    if graph.tensor_names:
        data["names"] = list(graph.tensor_names)
    data["inputs"] = list(graph.inputs)
    data["outputs"] = list(graph.outputs)
    if graph.recorded_peak_bytes is not None:
        data["recorded_peak_bytes"] = graph.recorded_peak_bytes
    data["ops"] = [_write_kernel(kernel) for kernel in graph.kernels]
    return data


def _refuse_unknown(data: Mapping[str, object], known: set[str], where: str) -> None:
    unknown = sorted(set(data) - known)
    if unknown:
        raise GraphError(f"{where} has unknown field {unknown[0]!r}; known are {sorted(known)}")


def _read_list(value: object, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise GraphError(f"{what} must be a list, not {value!r}")
    return value


def _read_dim(data: object) -> SymbolicDim:
    if not isinstance(data, dict) or not {"name", "range"} <= set(data):
        raise GraphError(f"a dim needs 'name' and 'range': {data!r}")
    _refuse_unknown(data, {"name", "range", "divisor"}, f"dim {data['name']!r}")
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


def _read_kernel(
    op: Mapping[str, Any], index: int, dims: tuple[SymbolicDim, ...], version: int
) -> Kernel:
    for field in (
        ("inputs", "outputs") if version == 2 else ("name", "time_ns", "inputs", "outputs")
    ):
        if field not in op:
            raise GraphError(f"op {index} has no field {field!r}")
    where = f"op {index}"

    def numbers(field: str) -> tuple[Any, ...]:
        return tuple(_read_list(op.get(field, []), f"{where}: {field}"))

    def size(field: str) -> Size:
        return _read_size(op.get(field, 0), dims, f"{where}: {field}")

    recomputable = op.get("recomputable", True)
    if not isinstance(recomputable, bool):
        raise GraphError(f"{where}: recomputable is {recomputable!r}, not true or false")
    return Kernel(
        name=str(op.get("name", "")),
        inputs=numbers("inputs"),
        outputs=numbers("outputs"),
        inplace=tuple((p[0], p[1]) for p in _read_pairs(op, where)),
        after=numbers("after"),
        workspace_bytes=size("workspace_bytes"),
        time_ns=op.get("time_ns"),
        flops=size("flops"),
        moved_bytes=size("moved_bytes"),
        views=numbers("views"),
        recomputable=recomputable,
        source=str(op.get("source", "")),
    )


def _read_pairs(op: Mapping[str, Any], where: str) -> list[Any]:
    pairs = _read_list(op.get("inplace", []), f"{where}: inplace")
    for pair in pairs:
        if len(_read_list(pair, f"{where}: an in-place pair")) != 2:
            raise GraphError(f"{where}: an in-place pair has two tensors, not {pair!r}")
    return pairs


def _write_size(size: Size) -> int | str:
    return str(size) if isinstance(size, SymbolicExpr) else size


def _write_kernel(kernel: Kernel) -> dict[str, Any]:
    data: dict[str, Any] = {"name": kernel.name}
    if kernel.time_ns is not None:
        data["time_ns"] = kernel.time_ns
    data["inputs"] = list(kernel.inputs)
    data["outputs"] = list(kernel.outputs)
    if kernel.views:
        data["views"] = list(kernel.views)
    if kernel.inplace:
        data["inplace"] = [list(pair) for pair in kernel.inplace]
    if kernel.after:
        data["after"] = list(kernel.after)
    for field in ("workspace_bytes", "flops", "moved_bytes"):
        size = getattr(kernel, field)
        if size != 0:
            data[field] = _write_size(size)
    if not kernel.recomputable:
        data["recomputable"] = False
    if kernel.source:
        data["source"] = kernel.source
    return data
