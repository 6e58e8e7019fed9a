"""Workspaces by formulas of the native library: numbers, and orders that keep room for them."""

from dataclasses import replace

import numpy as np
import pytest
import tvm_ffi

from relax_disc.analysis import Kernel, SymbolicDim, SymbolicExpr, TensorGraph
from relax_disc.analysis.memory.peak import peak_bytes
from relax_disc.analysis.memory.symbolic_peak import symbolic_peak
from relax_disc.analysis.program.tensor_graph import evaluate_sizes
from relax_disc.analysis.program.workspace import LibraryWorkspace
from relax_disc.analysis.schedule.order import schedule_ops
from relax_disc.errors import GraphError
from relax_disc.vm_builtins import runtime

ROWS = SymbolicDim("rows", 1, 512)
N = SymbolicExpr.dim(ROWS)


def numbers(*values):
    return tuple(
        value if isinstance(value, SymbolicExpr) else SymbolicExpr(value) for value in values
    )


def test_is_what_the_library_says():
    product = LibraryWorkspace("matmul", numbers(4, N, 96, 2 * N))
    formula = runtime.function("relax_disc.cpu.workspace_bytes")
    rows = [1, 7, 300]
    expected = [int(formula("matmul", tvm_ffi.Shape((4, n, 96, 2 * n)))) for n in rows]
    assert [product.evaluate({"rows": n}) for n in rows] == expected
    assert product.evaluate({"rows": np.array(rows)}).tolist() == expected
    fixed = LibraryWorkspace("aten", numbers(1, 4096))
    found = evaluate_sizes([product, 5, fixed, N], [{"rows": n} for n in rows])
    assert found.tolist() == [[e, 5, 4096, n] for e, n in zip(expected, rows, strict=True)]


def two_branches(workspace):
    """`wide` and `narrow` read the input; what `wide` makes is small, and it works in much."""
    kernels = (
        Kernel("narrow", (0,), (1,)),
        Kernel("wide", (0,), (2,), workspace_bytes=workspace),
        Kernel("join", (1, 2), (3,)),
    )
    return TensorGraph((ROWS,), (64, 40 * N, 8 * N, 4), (0,), (3,), kernels)


def test_an_order_keeps_room_for_it():
    """First what works in much, as long as little else is live."""
    graph = two_branches(LibraryWorkspace("aten", numbers(1, 64 * N)))
    found = schedule_ops(graph)
    assert found.order == (1, 0, 2)
    for n in (1, 100, 512):
        numeric = graph.at({"rows": n})
        assert numeric.is_numeric and not graph.is_numeric
        worked_in = -(-64 * n // 64) * 64
        assert peak_bytes(numeric, found.order) == 64 + 8 * n + worked_in
        assert peak_bytes(numeric) == 64 + 48 * n + worked_in
    plain = replace(graph, kernels=tuple(replace(k, workspace_bytes=0) for k in graph.kernels))
    assert schedule_ops(plain).order == (0, 1, 2)


def test_is_no_expression(tmp_path):
    graph = two_branches(LibraryWorkspace("aten", numbers(1, 64 * N)))
    with pytest.raises(GraphError, match="wide: the workspace"):
        symbolic_peak(graph)
    with pytest.raises(GraphError, match="wide: the workspace"):
        graph.save(tmp_path / "graph.json")
    graph.at({"rows": 3}).save(tmp_path / "graph.json")
    assert TensorGraph.load(tmp_path / "graph.json").kernels[1].workspace_bytes == 192
