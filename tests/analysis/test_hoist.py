"""Sinks move early, the order stays valid, and no sampled peak rises."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_disc.analysis.memory.peak import check_order, live_trace
from relax_disc.analysis.program.tensor_graph import Kernel, TensorGraph
from relax_disc.analysis.schedule.hoist import hoist_sinks
from relax_disc.analysis.symbolic.dim import SymbolicDim
from relax_disc.analysis.symbolic.expr import SymbolicExpr


def chain(layers, activation, weight, dims=()):
    """Forward and backward of a chain; gradients of all weights are left to the end.

    Tensors: weights, then activations, output gradients, weight gradients, new weights.
    """
    w, a, d, g, n = (k * layers for k in range(5))
    sizes = [weight] * layers + [activation] * (2 * layers) + [weight] * (2 * layers)
    kernels = []
    for k in range(layers):
        inputs = (w + k,) if k == 0 else (w + k, a + k - 1)
        kernels.append(Kernel(f"forward {k}", inputs, (a + k,)))
    for k in reversed(range(layers)):
        inputs = (w + k, a + k) if k == layers - 1 else (w + k, a + k, d + k + 1)
        kernels.append(Kernel(f"backward {k}", inputs, (d + k,)))
    for k in range(layers):
        kernels.append(Kernel(f"weight {k}", (a + k, d + k), (g + k,)))
        readers = (k, 2 * layers - 1 - k)
        update = Kernel(f"update {k}", (w + k, g + k), (n + k,), ((w + k, n + k),), readers)
        kernels.append(update)
    outputs = tuple(range(n, n + layers))
    return TensorGraph(dims, tuple(sizes), tuple(range(layers)), outputs, tuple(kernels))


def test_updates_move_behind_their_gradients():
    graph = chain(4, 100, 10)
    order = hoist_sinks(graph, range(len(graph.kernels)), [])
    names = [graph.kernels[k].name for k in order]
    assert names[4:7] == ["backward 3", "weight 3", "update 3"]
    assert names[7:10] == ["backward 2", "weight 2", "update 2"]
    before, after = live_trace(graph, range(len(order))), live_trace(graph, order)
    assert after.sum() < before.sum()


def test_a_peak_that_would_rise_keeps_a_sink_where_it_was():
    # The gradient of a weight is larger than all activations together: made while they are all
    # there, it would raise the peak.
    graph = chain(3, 1, 100)
    order = hoist_sinks(graph, range(len(graph.kernels)), [])
    assert live_trace(graph, order).max() <= live_trace(graph, range(len(order))).max()


@given(
    layers=st.integers(1, 6),
    activation=st.integers(1, 50),
    weight=st.integers(1, 2000),
    seed=st.randoms(use_true_random=False),
)
def test_is_never_worse_at_any_shape(layers, activation, weight, seed):
    dim = SymbolicDim("batch", 1, 64)
    graph = chain(layers, activation * SymbolicExpr.dim(dim), weight, (dim,))
    # A random valid order.
    order, waiting = [], set(range(len(graph.kernels)))
    made = graph.producers()
    while waiting:
        ready = [
            k
            for k in sorted(waiting)
            if all(made[t] not in waiting for t in graph.kernels[k].inputs if made[t] is not None)
            and waiting.isdisjoint(graph.kernels[k].after)
        ]
        order.append(seed.choice(ready))
        waiting.discard(order[-1])
    shapes = [{"batch": 1}, {"batch": 7}, {"batch": 64}]
    result = hoist_sinks(graph, order, shapes)
    check_order(graph, result)
    for shape in shapes:
        at = graph.at(shape)
        assert live_trace(at, result).max() <= live_trace(at, order).max()


def test_a_limit_above_the_peak_lets_sinks_move():
    """The gradient of a table is kept through the backward pass: most of what is live."""
    layers = 3
    graph = chain(layers, 1, 100)
    held, last = len(graph.sizes), 2 * layers - 1
    kernels = list(graph.kernels)
    kernels[layers] = replace(kernels[layers], outputs=(*kernels[layers].outputs, held))
    kernels[last] = replace(kernels[last], inputs=(*kernels[last].inputs, held))
    graph = replace(graph, sizes=(*graph.sizes, 1000), kernels=tuple(kernels))
    order = tuple(range(len(kernels)))  # updates at the end, where only gradients are live
    peak = int(live_trace(graph, order).max())
    assert hoist_sinks(graph, order, [])[layers + 1] == layers + 1
    hoisted = hoist_sinks(graph, order, [], [peak + 100])
    names = [graph.kernels[k].name for k in hoisted]
    assert names[layers + 1 : layers + 3] == ["weight 2", "update 2"]
    assert peak < live_trace(graph, hoisted).max() <= peak + 100


def test_a_graph_without_kernels_stays_empty():
    graph = TensorGraph((), (), (), (), ())
    assert hoist_sinks(graph, (), []) == ()


@pytest.mark.parametrize("layers", [1, 2])
def test_hoisting_twice_changes_nothing(layers):
    graph = chain(layers, 10, 10)
    once = hoist_sinks(graph, range(len(graph.kernels)), [])
    assert hoist_sinks(graph, once, []) == once
