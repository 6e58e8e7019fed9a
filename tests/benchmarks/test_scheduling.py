"""The scheduling benchmark's graphs are what they say, and ours is never above any rule's peak."""

from benchmarks import scheduling
from benchmarks.scheduling_graphs import LLAMA_STEP, lstm_step, transformer_step, unet_step
from relax_disc.analysis import TensorGraph


def test_steps_are_complete():
    for graph in (transformer_step(2), unet_step(3), lstm_step(4), TensorGraph.load(LLAMA_STEP)):
        assert graph.dims and graph.written_in_place()
        assert scheduling.shuffled(graph, 1).sizes == graph.sizes


def test_measure(capsys):
    for name, graph in (
        ("unet", unet_step(3)),
        ("numeric", transformer_step(1).at({"batch": 2, "seq": 64})),
    ):
        for row in scheduling.measure(name, graph):
            scheduling.print_row(row)
            assert row["bound"] <= row["ours"] <= row["given_bytes"]
    assert row["ours"] <= min(row[rule] for rule in scheduling.RULES)
    assert max(row["from_shuffled"]) == row["ours"]
    assert len(capsys.readouterr().out.splitlines()) > 4


def test_one_order_for_the_llama_step():
    grid = scheduling.grid_check(TensorGraph.load(LLAMA_STEP))
    assert grid["worst_to_alone"] <= 1.01 and grid["worst_alone_to_bound"] <= 1.005
    assert grid["worst_to_given"] <= 1.0
