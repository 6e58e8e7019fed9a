"""Files come back as they were; what is unknown or missing is an error."""

import gzip
import json

import pytest

from relax_disc.analysis import TensorGraph, peak_bytes
from relax_disc.errors import GraphError
from tests.analysis.tensor_graphs import small_graph, training_graph

OLD = {
    "format": "tensor-graph/1",
    "source": "by hand",
    "bytes": [1, 2, 4],
    "inputs": [0],
    "outputs": [2],
    "recorded_peak_bytes": 9,
    "ops": [
        {"name": "a", "time_ns": 5, "inputs": [0], "outputs": [1]},
        {"name": "v", "time_ns": 1, "inputs": [1], "outputs": [], "views": [1]},
        {"name": "b", "time_ns": 7, "inputs": [1], "outputs": [2]},
    ],
}


def write(path, data):
    path.write_text(json.dumps(data))
    return path


def test_reads_the_first_format(tmp_path):
    graph = TensorGraph.load(write(tmp_path / "g.json", OLD))
    assert graph.sizes == (1, 2, 4) and graph.recorded_peak_bytes == 9 and graph.origin == "by hand"
    assert graph.kernels[1].views == (1,) and graph.kernels[0].time_ns == 5
    assert peak_bytes(graph) == 7
    packed = tmp_path / "g.json.gz"
    packed.write_bytes(gzip.compress(json.dumps(OLD).encode()))
    assert TensorGraph.load(packed) == graph
    graph.save(tmp_path / "again.json")
    assert TensorGraph.load(tmp_path / "again.json") == graph


@pytest.mark.parametrize("name", ["g.json", "g.json.gz"])
def test_round_trip(tmp_path, name):
    for graph in (training_graph(2), *(small_graph(seed) for seed in range(20))):
        graph.save(tmp_path / name)
        assert TensorGraph.load(tmp_path / name) == graph
    first = (tmp_path / name).read_bytes()
    graph.save(tmp_path / name)
    assert (tmp_path / name).read_bytes() == first


def without(data, *path):
    copy = json.loads(json.dumps(data))
    part = copy
    for key in path[:-1]:
        part = part[key]
    del part[path[-1]]
    return copy


def having(data, value, *path):
    copy = json.loads(json.dumps(data))
    part = copy
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return copy


NEW = having(having(OLD, "tensor-graph/2", "format"), [{"name": "n", "range": [1, None]}], "dims")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "a JSON object"),
        (having(OLD, "tensor-graph/3", "format"), "unknown format 'tensor-graph/3'"),
        (having(OLD, 1, "extra"), "unknown field 'extra'"),
        (having(OLD, [], "dims"), "unknown field 'dims'"),
        (having(OLD, 1, "ops", 0, "after"), "op 0 has unknown field 'after'"),
        (without(OLD, "bytes"), "no field 'bytes'"),
        (without(OLD, "ops", 0, "time_ns"), "op 0 has no field 'time_ns'"),
        (having(OLD, "x", "ops"), "ops must be a list"),
        (having(OLD, ["x"], "ops"), "op 0 is no JSON object"),
        (having(OLD, [1, 2.5, 3], "bytes"), "2.5; it must be a whole number"),
        (having(OLD, [1, -2, 3], "bytes"), "negative"),
        (having(OLD, ["0"], "inputs"), "no tensor number"),
        (having(NEW, [1, "2*m", 3], "bytes"), "names the unknown dim 'm'"),
        (having(NEW, [1, "2*(", 3], "bytes"), "size of tensor 1"),
        (having(NEW, [{"name": "n"}], "dims"), "a dim needs 'name' and 'range'"),
        (having(NEW, [{"name": "n", "range": 3}], "dims"), "a range is"),
        (having(NEW, [{"name": "n", "range": [9, 3]}], "dims"), "lies in|range|9"),
        (having(NEW, [[1]], "ops", 0, "inplace"), "two tensors"),
        (having(NEW, 1, "ops", 0, "recomputable"), "not true or false"),
        (
            having(
                NEW,
                [0],
                "ops",
                0,
                "inputs",
            ),
            None,
        ),
    ],
)
def test_refuses(tmp_path, data, message):
    path = write(tmp_path / "g.json", data)
    if message is None:
        TensorGraph.load(path)
        return
    with pytest.raises(GraphError, match=message):
        TensorGraph.load(path)


def test_refuses_what_is_no_json(tmp_path):
    for content in (b"{", b"\x1f\x8bxx", b"\xff\xfe"):
        (tmp_path / "g.json").write_bytes(content)
        with pytest.raises(GraphError, match="not a JSON file"):
            TensorGraph.load(tmp_path / "g.json")
