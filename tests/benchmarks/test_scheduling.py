"""The scheduling benchmark's graphs are what they say, and ours is never above any rule's peak."""

import pytest

from benchmarks.scheduling import compare
from benchmarks.scheduling.graphs import LLAMA_STEP, lstm_step, transformer_step, unet_step
from benchmarks.scheduling.rules import RULES, order_by_rule
from relax_disc.analysis import TensorGraph, peak_bytes, schedule_ops
from tests.analysis.tensor_graphs import (
    irregular_graph,
    replayed_peak,
    shuffled,
    small_graph,
    training_graph,
)


def test_steps_are_complete():
    for graph in (transformer_step(2), unet_step(3), lstm_step(4), TensorGraph.load(LLAMA_STEP)):
        assert graph.dims and graph.written_in_place()
        assert compare.shuffled(graph, 1).sizes == graph.sizes


def test_measure(capsys):
    for name, graph in (
        ("unet", unet_step(3)),
        ("numeric", transformer_step(1).at({"batch": 2, "seq": 64})),
    ):
        for row in compare.measure(name, graph):
            compare.print_row(row)
            assert row["bound"] <= row["ours"] <= row["given_bytes"]
    assert row["ours"] <= min(row[rule] for rule in compare.RULES)
    assert max(row["from_shuffled"]) == row["ours"]
    assert len(capsys.readouterr().out.splitlines()) > 4


def test_one_order_for_the_llama_step():
    grid = compare.grid_check(TensorGraph.load(LLAMA_STEP))
    assert grid["worst_to_alone"] <= 1.01 and grid["worst_alone_to_bound"] <= 1.005
    assert grid["worst_to_given"] <= 1.0


@pytest.mark.parametrize("rule", ["given", "paper", *RULES])
def test_rules_give_legal_orders(rule):
    for seed in range(40):
        graph = small_graph(seed)
        assert replayed_peak(graph, order_by_rule(graph, [{}], rule)) > 0
    step = training_graph(2)
    order = order_by_rule(step, [{"batch": 1, "seq": 16}], rule)
    assert sorted(order) == list(range(len(step.kernels)))


@pytest.mark.parametrize("locality", [5.0, 50.0, 500.0])
def test_irregular_graphs_beat_every_rule(locality):
    graph = irregular_graph(3, 400, locality)
    found = schedule_ops(shuffled(graph, 1), work_limit=2 * 10**7)
    for rule in ("given", "paper", *RULES):
        order = order_by_rule(graph, [{}], rule)
        assert found.peak_bytes <= peak_bytes(graph, order)
