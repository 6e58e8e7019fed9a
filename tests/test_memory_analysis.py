"""Memory known without building: equal to what a run uses, to the byte; kinds and lines named."""

import pytest
import torch
from torch.export import Dim

import relax_disc
from relax_disc.analysis import SymbolicDim, TensorGraph
from relax_disc.errors import GraphError, ShapeRangeError
from relax_disc.frontend import capture_step
from relax_disc.memory_analysis import largest
from relax_disc.pipeline import PipelineOptions
from tests.analysis.tensor_graphs import training_graph
from tests.frontend.models import VOCABULARY, Llama


def batch(count, length):
    generator = torch.Generator().manual_seed(count * length)
    ids = torch.randint(0, VOCABULARY, (count, length), generator=generator)
    return ids, ids.roll(-1, 1)


SHAPES = {
    name: {0: Dim("b", min=1, max=8), 1: Dim("s", min=2, max=64)} for name in ("ids", "labels")
}


@pytest.fixture(scope="module")
def model_and_optimizer():
    torch.manual_seed(0)
    model = Llama()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.fixture(scope="module")
def captured(model_and_optimizer):
    return capture_step(*model_and_optimizer, batch(3, 12), dynamic_shapes=SHAPES)


@pytest.fixture(scope="module")
def step(model_and_optimizer):
    # As captured, with all positions of the batch.
    options = PipelineOptions(remove_padding=False)
    return relax_disc.compile(
        *model_and_optimizer, batch(3, 12), dynamic_shapes=SHAPES, options=options
    )


def test_equals_a_run_to_the_byte(captured, step):
    points = [{"b": 2, "s": 9}, {"b": 8, "s": 64}, {"b": 1, "s": 2}]
    report = relax_disc.analyze_memory(captured.module, points)
    built = relax_disc.analyze_memory(step, points)
    assert [point.peak_bytes for point in built.points] == [p.peak_bytes for p in report.points]
    for point, shape in zip(report.points, points, strict=True):
        step(*batch(shape["b"], shape["s"]))
        measured = step.memory_report()
        assert point.peak_bytes == measured.peak_bytes
        assert point.arena_bytes == measured.arena_bytes
        assert point.resident_bytes == measured.resident_bytes
        assert point.escaping_bytes == measured.escaping_bytes
        assert point.activation_peak_bytes == measured.activation_peak_bytes
        assert point.peak_bytes == step.plan(**shape).peak_bytes
    assert report.peak_bytes == report.points[1].peak_bytes and report.worst is report.points[1]


def test_says_what_is_alive_and_why(step):
    report = relax_disc.analyze_memory(step, {"b": 8, "s": 64})
    point = report.worst
    weights = sum(4 * p.numel() for p in Llama().parameters())
    assert point.bytes_by_kind["parameter"] == weights
    assert point.bytes_by_kind["state"] >= 2 * weights
    assert point.bytes_by_kind["batch"] == 2 * 8 * 8 * 64
    assert sum(point.bytes_by_kind.values()) >= point.live_peak_bytes == max(point.trace)
    assert max(point.trace) == point.trace[point.peak_step]
    made = [tensor for tensor in point.live_tensors if tensor.kind == "activation"]
    assert made and any("models.py:" in tensor.source for tensor in made)
    assert [t.bytes for t in point.live_tensors] == sorted(
        (t.bytes for t in point.live_tensors), reverse=True
    )
    lines = str(report).splitlines()
    assert f"peak {report.peak_bytes:,} bytes at" in lines[0] and "live bytes: max(" in lines[-1]
    named = [line for line in lines if " made by " in line or " made elsewhere" in line]
    total = sum(int(line.split()[0].replace(",", "")) for line in named)
    assert total == sum(tensor.bytes for tensor in point.live_tensors if tensor.made_by)
    assert any("models.py:" in line for line in named)


def test_symbolic_peak_is_the_peak_at_every_shape():
    step = training_graph(3)
    report = relax_disc.analyze_memory(step, {"batch": 1, "seq": 16})
    for shape in ({"batch": b, "seq": s} for b in (1, 3, 18) for s in (16, 99, 500, 1896)):
        point = relax_disc.analyze_memory(step, shape).worst
        assert max(expr.evaluate(shape) for expr in report.symbolic_peak) == point.peak_bytes
    assert len(report.symbolic_peak) < len(step.kernels) / 2


def test_largest(step):
    enough = relax_disc.analyze_memory(step, {"b": 4, "s": 32}).peak_bytes
    assert largest(step, "b", memory_budget=enough, s=32) >= 4
    assert largest(step, "s", memory_budget=10_000, b=8) == 0
    with pytest.raises(ShapeRangeError, match="one bounded dim of b, s; got 'x'"):
        largest(step, "x", memory_budget="1GiB")
    with pytest.raises(ShapeRangeError, match="no value for dim 'b'"):
        largest(step, "s", memory_budget="1GiB")


def test_graphs_and_bad_input():
    graph = TensorGraph((), (4, 8), (0,), (), ())
    assert relax_disc.analyze_memory(graph, {}).peak_bytes == 4
    with pytest.raises(GraphError, match="at least one shape"):
        relax_disc.analyze_memory(graph, [])
    with pytest.raises(GraphError, match="the module or the step"):
        largest(graph, "n", memory_budget=1)
    n = SymbolicDim("n", 1, 4)
    with pytest.raises(ShapeRangeError, match="'n' is 9"):
        relax_disc.analyze_memory(TensorGraph((n,), (), (), (), ()), {"n": 9})
