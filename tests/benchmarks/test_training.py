"""The benchmark's own parts: counting memory, drawing lengths, statistics."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from benchmarks import record
from benchmarks.malloc_counter import MallocCounter, preload_environment
from benchmarks.training.batches import IGNORED, make_batch, real_batches, unseen_lengths
from benchmarks.training.packed_llama import PackedLlama, places
from benchmarks.training.report import markdown, median_with_interval, summarize, summary_table
from tutorials._llama import Llama, LlamaSizes

_COUNTING = """
import ctypes, json, mmap
from benchmarks.malloc_counter import MallocCounter
import numpy as np

counter = MallocCounter()
seen = []
base = counter.live_bytes()
def note():
    seen.append([counter.live_bytes() - base, counter.peak_bytes() - base])
counter.reset_peak()
block = np.ones(1 << 20, np.uint8); note()
block = None; note()
counter.reset_peak(); note()
region = mmap.mmap(-1, 1 << 21); note()
region.resize(3 << 20); note()
region.close(); note()
print(json.dumps(seen))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="preloading needs Linux with glibc")
def test_counter_sees_blocks_and_mappings(repository):
    done = subprocess.run(
        [sys.executable, "-c", _COUNTING],
        cwd=repository,
        env={**os.environ, **preload_environment(), "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    mega, slack = 2**20, 64 * 2**10
    expected = [[1, 1], [0, 1], [0, 0], [2, 2], [3, 3], [0, 3]]
    for (live, peak), (live_mega, peak_mega) in zip(json.loads(done.stdout), expected, strict=True):
        assert abs(live - live_mega * mega) < slack
        assert abs(peak - peak_mega * mega) < slack


def test_counter_refuses_a_process_without_it():
    with pytest.raises(RuntimeError, match="started without"):
        MallocCounter()


def test_batches_repeat_and_stay_in_range():
    batches = real_batches(4, 10)
    assert batches == real_batches(4, 10)
    assert all(1 <= length <= 512 for batch in batches for length in batch)
    ids, labels = make_batch(batches[0], seed=3)
    assert ids.shape == labels.shape == (4, max(batches[0]))
    assert int((labels != IGNORED).sum()) == sum(batches[0])
    # Where both are real, a label is the next id.
    row = max(range(4), key=lambda i: batches[0][i])
    assert labels[row, :-1].tolist() == ids[row, 1:].tolist()


@pytest.mark.parametrize("kind", ["split", "padded"])
def test_a_model_packed_by_hand_has_the_gradients_of_the_padded_batch(kind):
    torch.manual_seed(0)
    sizes = LlamaSizes(vocabulary=50, hidden=16, layers=2, heads=2, feed_forward=24, longest=32)
    model = Llama(sizes).double()
    packed = PackedLlama(model, kind)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(50, (3, 12), generator=generator)
    labels = ids.masked_fill(torch.arange(12) >= torch.tensor([[5], [12], [1]]), IGNORED)
    found = []
    for loss in (model(ids, labels), packed(ids, labels, *places(labels))):
        model.zero_grad()
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_unseen_lengths_are_unseen():
    seen = {10, 20, 30, 90}
    fresh = unseen_lengths(seen, 32)
    assert len(set(fresh)) == 32
    assert not seen & set(fresh)


def test_interval_holds_the_median():
    values = np.random.default_rng(1).normal(0.8, 0.05, 40).tolist()
    median, low, high = median_with_interval(values)
    assert low <= median <= high
    assert high - low < 0.06


def _results(seconds):
    steps = [
        {
            "seconds": s,
            "cpu_seconds": s,
            "records": 2,
            "length": 50,
            "tokens": 100,
            "loss": 1.0,
            "activation_peak_bytes": int(s * 1000),
        }
        for s in seconds
    ]
    return {
        "prepare_seconds": 3.0,
        "warm_up": [{"seconds": 9.0}, {"seconds": seconds[0]}],
        "steps": steps,
        "unseen": [steps[:2]],
    }


def test_summary_pairs_batches():
    summary = summarize({"eager": _results([1.0, 2.0, 4.0]), "relax_disc": _results([0.5, 1, 2])})
    ours = summary["relax_disc"]
    assert ours["time_ratio"]["eager"] == [0.5, 0.5, 0.5]
    assert ours["peak_ratio"]["eager"][0] == 0.5
    assert ours["tokens_per_second"] == pytest.approx(300 / 3.5)
    assert ours["compile_seconds"] == pytest.approx(3 + 9.5 - 2)
    assert ours["first_over_second"][0] == 0.5
    assert summary_table("title", summary).row_count == 2
    lines = markdown([{"size": "S", "batch": 4, "summary": summary}]).splitlines()
    assert len(lines) == 4
    assert lines[3].startswith("| S, 4 | relax_disc | 1.000 | 86 | 0.500 (0.50-0.50) |")


def test_batches_without_padding_are_compared():
    ours, padded = _results([1.0, 3.0]), _results([1.0, 2.0])
    padded["unseen"].append([{**step, "tokens": 60} for step in padded["steps"]])
    ours["unseen"].append([{**step, "tokens": 60, "seconds": 9.0} for step in ours["steps"]])
    summary = summarize({"relax_disc": ours, "relax_disc:padded": padded})
    assert summary["relax_disc"]["full_ratio"] == [1.5, 1.5, 1.5]
    assert summary["relax_disc"]["time_ratio"]["relax_disc:padded"][0] == 1.25
    assert "without padding" in markdown([{"size": "S", "batch": 2, "summary": summary}])


def test_result_file_says_commit_and_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    content = json.loads(record.write_result("x", {"count": 1}, [1, 2]).read_text())
    assert content["results"] == [1, 2]
    assert content["machine"]["packages"]["apache-tvm"] == "0.27.0.post1"
    assert content["commit"]


def test_results_are_no_changes_of_the_checkout(tmp_path, monkeypatch):
    def git(*arguments):
        options = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        subprocess.run(["git", *options, *arguments], cwd=tmp_path, check=True)

    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    monkeypatch.setattr(record, "RESULTS", results)
    assert record.commit() == "unknown"
    (results / "a.json").write_text("{}")
    (tmp_path / "code.py").write_text("")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "x")
    clean = record.commit()
    (results / "a.json").write_text("[]")
    assert record.commit() == clean
    (tmp_path / "code.py").write_text("1")
    assert record.commit() == f"{clean}+changes"
