"""The benchmark of the vocabulary head, at a small size."""

import json

import torch

from benchmarks import record, vocabulary_head
from tests.thread_count import threads


def test_runs_and_records(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    settings = {"threads": 1, "rounds": 2, "vocabulary": 400, "widths": "16", "rows": "20,100"}
    with threads(torch.get_num_threads()):
        vocabulary_head.main(**settings, name="x")
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["settings"]["vocabulary"] == 400
    assert [row["rows"] for row in found["results"]] == [20, 100]
    for row in found["results"]:
        assert 0 < row["chunk"] <= 128 and row["chunk"] % 16 == 0
        assert row["ratio"] > 0
        assert row["chunked_error"] < 1e-5 and row["plain_error"] < 1e-5
