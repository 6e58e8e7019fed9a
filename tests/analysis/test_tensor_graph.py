"""Graphs refuse what is malformed; their traces agree with a plain replay."""

import dataclasses

import pytest

from relax_disc.analysis import Kernel, SymbolicDim, SymbolicExpr, TensorGraph, live_ranges
from relax_disc.analysis.memory.peak import check_order, live_trace, peak_bytes
from relax_disc.analysis.program.tensor_graph import evaluate_sizes
from relax_disc.errors import GraphError, ShapeRangeError
from tests.analysis.tensor_graphs import irregular_graph, replayed_peak, small_graph, training_graph

N = SymbolicDim("n", 2, 64, 2)


def graph(kernels, sizes=(1, 2, 4, 8), inputs=(0,), outputs=(), dims=(), **rest):
    return TensorGraph(dims, sizes, inputs, outputs, tuple(kernels), **rest)


A, B = Kernel("a", (0,), (1,)), Kernel("b", (1,), (2,))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: graph([A, Kernel("b", (9,), (2,))]), r"kernel 1 \(b\): inputs: unknown tensor 9"),
        (lambda: graph([A, Kernel("b", (-1,), (2,))]), "unknown tensor -1"),
        (lambda: graph([A, Kernel("b", (1,), (1,))]), "made twice: by kernel 0"),
        (lambda: graph([Kernel("a", (), (0,))]), "makes graph input"),
        (lambda: graph([Kernel("a", (), (1, 1))]), "listed twice"),
        (lambda: graph([A], outputs=(3,)), "graph output tensor 3 is never made"),
        (lambda: graph([Kernel("a", (3,), (1,))]), "reads tensor 3, which is never made"),
        (lambda: graph([Kernel("a", (2,), (1,)), B]), "cycle: kernel"),
        (lambda: graph([B, A]), "not in a valid order: kernel 0"),
        (lambda: graph([Kernel("a", (1,), (1,))]), "cycle: kernel 0"),
        (lambda: graph([dataclasses.replace(A, after=(1,)), B]), "cycle"),
        (lambda: graph([dataclasses.replace(A, after=(7,)), B]), "after unknown kernel 7"),
        (lambda: graph([A], sizes=(1, -2)), "tensor 1: size is negative: -2"),
        (lambda: graph([A], sizes=(1, 2.5)), "2.5; it must be a whole number"),
        (lambda: graph([A], sizes=(1, True)), "True; it must be a whole number"),
        (
            lambda: graph([dataclasses.replace(A, workspace_bytes=-1)]),
            "workspace_bytes is negative",
        ),
        (lambda: graph([A], tensor_names=("x",)), "1 tensor names for 4 tensors"),
        (lambda: graph([dataclasses.replace(A, inplace=((2, 1),))]), r"\(2, 1\) is no \(input"),
        (lambda: graph([dataclasses.replace(A, inplace=((0,),))]), "pair has two tensors"),
        (lambda: graph([], inputs=(0, 0)), "listed twice"),
        (lambda: graph([], dims=(N, N)), "two dims have the same name"),
    ],
)
def test_refuses(make, message):
    with pytest.raises(GraphError, match=message):
        make()


def test_refuses_to_overwrite_what_is_read_later():
    update = Kernel("update", (0,), (1,), inplace=((0, 1),))
    reader = Kernel("reader", (0,), (2,))
    with pytest.raises(GraphError, match=r"overwrites tensor 0, but kernel 1 \(reader\), a reader"):
        graph([update, reader])
    graph([reader, dataclasses.replace(update, after=(0,))])
    graph([reader, Kernel("update", (0, 2), (1,), inplace=((0, 1),))])  # ordered by data
    with pytest.raises(GraphError, match="overwritten twice"):
        again = dataclasses.replace(update, outputs=(3,), inplace=((0, 3),), after=(0,))
        graph([update, again])


def test_trace_of_views_workspaces_and_places():
    chain = [
        Kernel("a", (0,), (1,), workspace_bytes=100),
        Kernel("b", (1,), (2,), inplace=((1, 2),)),
        Kernel("c", (2, 1), (3,), inplace=((2, 3), (1, 3))),
    ]
    numeric = graph(chain, sizes=(1, 10, 10, 10), outputs=(3,))
    # b cannot take the place of a's output, which c still reads; c can take one place.
    assert live_trace(numeric).tolist() == [111, 21, 21]
    assert peak_bytes(numeric) == 111
    assert [(r.tensor, r.first, r.last_use) for r in live_ranges(numeric)] == [
        (0, 0, 2), (1, 0, 2), (2, 1, 2), (3, 2, 2),
    ]  # fmt: skip
    assert peak_bytes(graph([])) == 1


@pytest.mark.parametrize("order", [[0], [0, 0], [1, 0], [0, 2]])
def test_refuses_orders(order):
    with pytest.raises(GraphError, match="kernel"):
        check_order(graph([A, B]), order)


def test_trace_agrees_with_replay():
    for seed in range(200):
        small = small_graph(seed)
        assert peak_bytes(small) == replayed_peak(small, range(len(small.kernels)))
    large = irregular_graph(1, 300)
    assert peak_bytes(large) == replayed_peak(large, range(300))
    step = training_graph(3).at({"batch": 3, "seq": 40})
    assert peak_bytes(step) == replayed_peak(step, range(len(step.kernels)))


def test_at_a_shape():
    size = SymbolicExpr.parse("4*n*n", [N])
    symbolic = graph([A], sizes=(1, size), dims=(N,))
    numeric = symbolic.at({"n": 6})
    assert numeric.sizes == (1, 144) and numeric.dims == () and numeric.is_numeric
    assert not symbolic.is_numeric
    assert evaluate_sizes(symbolic.sizes, [{"n": 2}, {"n": 4}]).tolist() == [[1, 16], [1, 64]]
    with pytest.raises(GraphError, match="numeric graph"):
        live_trace(symbolic)
    for shape, message in [
        ({}, "no value for dim 'n'"),
        ({"n": 66}, "66, outside 2 .. 64"),
        ({"n": 3}, "not a multiple of 2"),
        ({"n": 4, "m": 1}, "unknown dim 'm'"),
        ({"n": 4.0}, "whole number"),
    ]:
        with pytest.raises(ShapeRangeError, match=message):
            symbolic.at(shape)
    negative = graph([A], sizes=(1, SymbolicExpr.parse("n - 10", [N])), dims=(N,))
    with pytest.raises(GraphError, match="negative: -8"):
        negative.at({"n": 2})
    with pytest.raises(GraphError, match="is -8 bytes at"):
        evaluate_sizes(negative.sizes, [{"n": 12}, {"n": 2}])


def test_reordered_keeps_edges():
    kernels = [A, Kernel("c", (0,), (2,)), Kernel("d", (), (3,), after=(0,))]
    moved = graph(kernels).reordered([1, 0, 2])
    assert [kernel.name for kernel in moved.kernels] == ["c", "a", "d"]
    assert moved.kernels[2].after == (1,)
    with pytest.raises(GraphError, match="each of the 3 kernels once"):
        graph(kernels).reordered([0, 1])
    with pytest.raises(GraphError, match="valid order"):
        graph(kernels).reordered([2, 0, 1])
