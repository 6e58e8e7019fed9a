"""The table of models: the page says what was recorded, and verdicts mean what they say."""

import dataclasses
import json
import re
import sys

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("transformers")

from benchmarks.models import (
    compile_time,
    language,
    networks,
    perception,
    sequences,
    speed_document,
    worker,
)
from benchmarks.models.__main__ import judged
from benchmarks.models.catalogue import ENTRIES, entry_named
from benchmarks.models.document import PAGE, page, read_results
from benchmarks.models.numerics import reference, relative_error
from benchmarks.models.speed import measured
from benchmarks.models.wide import WIDE
from benchmarks.record import without_folders

PRINCIPAL = (language, networks, perception, sequences)
"""Families of which nearly all must train; other files hold models that look for what does not."""


def test_the_page_says_what_was_recorded():
    results = read_results()
    assert PAGE.read_text() == page(results), "run `make docs`"
    assert results == json.loads(without_folders(json.dumps(results)))
    recorded = [r["model"] for r in results["results"]]
    assert recorded == [entry.name for entry in ENTRIES if entry.name in recorded]
    verdicts = {r["model"]: r["verdict"] for r in results["results"]}
    assert set(verdicts.values()) <= {"trains", "refused"}
    first = [verdicts[entry.name] for file in PRINCIPAL for entry in file.ENTRIES]
    assert first.count("trains") >= 0.95 * len(first)


def test_the_page_of_step_times_says_what_was_recorded():
    files = {name: read_results(name) for name in speed_document.RECORDED}
    compiling = read_results("compile_time_models")
    assert speed_document.PAGE.read_text() == speed_document.page(files, compiling)
    assert {entry.name for file in PRINCIPAL for entry in file.ENTRIES} < {e.name for e in WIDE}


@pytest.mark.skipif(sys.platform != "linux", reason="counting memory needs Linux with glibc")
def test_a_step_is_timed_next_to_eager():
    entry = next(entry for entry in WIDE if entry.name == "Variational autoencoder")
    found = measured(entry, ("eager", "relax_disc"), rounds=2, threads=1, limit_seconds=600)
    assert found["verdict"] == "measured", found
    assert [account["threads"] for account in found["processes"].values()] == [1, 1]
    for shape in found["shapes"]:
        eager, ours = shape["losses"]
        assert abs(eager - ours) < 1e-4
        assert shape["ratio"] == sorted(shape["ratio"])
        assert 0 < shape["planned_bytes"]


def test_every_model_of_the_table_has_a_wide_one():
    wide = {entry.name: entry for entry in WIDE}
    assert len(wide) == len(WIDE)
    for entry in ENTRIES:
        found = wide.get(entry.name) or wide[entry.name.removeprefix(f"{entry.source} ")]
        assert len(found.sizes) == 2
        for sizes in found.sizes:
            limits = found.ranges.values()
            assert all(low <= n <= high for n, (low, high) in zip(sizes, limits, strict=True))


def test_a_model_that_fails_is_a_row_that_says_why():
    broken = dataclasses.replace(entry_named("MLP"), name="none of that name")
    for limit, reason in (
        (600, "ended with 1: StopIteration"),
        (0.01, "not done within its"),
    ):
        found = measured(broken, ("eager",), rounds=2, threads=1, limit_seconds=limit)
        assert found["verdict"] == "failed"
        assert reason in found["message"]
        assert speed_document.speed_table([found]).row_count == 1


def test_shapes_are_enough_and_inside_their_ranges():
    assert len(ENTRIES) >= 40
    for entry in ENTRIES:
        assert len(set(entry.sizes)) >= 3
        limits = list(entry.ranges.values())
        for sizes in entry.sizes:
            assert all(low <= n <= high for n, (low, high) in zip(sizes, limits, strict=True))
        for extreme in (0, 1):
            assert tuple(limit[extreme] for limit in limits) in entry.sizes
        assert set(entry.axes) == set(entry.batch(*entry.sizes[0]))


def test_a_difference_is_found(monkeypatch):
    entry = dataclasses.replace(entry_named("MLP"), sizes=[(5,), (1,)])
    assert worker.judge(entry)["verdict"] == "trains"

    def shifted(model, batch, dtype):
        found = reference(model, batch, dtype)
        for gradient in found.gradients.values():
            gradient *= 1 + 1e-5
        return found

    monkeypatch.setattr(worker, "reference", shifted)
    assert worker.judge(entry)["verdict"] == "WRONG"


def test_a_mean_that_is_zero_is_measured_beside_its_variance():
    exact = {
        "norm.mean": torch.full((4,), 1e-17),
        "norm.var": torch.ones(4),
        "other": torch.ones(1),
    }
    mine = {**exact, "norm.mean": torch.full((4,), 1e-9)}
    assert worker.error_of_buffers(mine, exact) == pytest.approx(1e-9, rel=1e-3)
    assert worker.error_of_buffers({**exact, "other": torch.full((1,), 1.1)}, exact) > 0.09


@pytest.mark.slow
def test_a_process_that_ends_badly_is_no_verdict_of_its_own():
    entry = dataclasses.replace(entry_named("MLP"), name="none of that name")
    result = judged(entry, 120)
    assert result["verdict"] == "failed"
    assert "KeyError" in result["message"]
    assert judged(entry, 0.01)["verdict"] == "failed"


def test_places_are_named_without_the_folders_of_a_machine(repository):
    for venv in ("/home/me/venv", repository / ".venv"):
        text = f'["(at {venv}/lib/python3.11/site-packages/a/b.py:3, {repository}/c.py:4)"]'
        assert json.loads(without_folders(text)) == ["(at a/b.py:3, c.py:4)"]
    assert without_folders("in /usr/lib/d.py") == "in /usr/lib/d.py"


def test_float64_references_are_wide_all_through():
    class Narrow(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).to(torch.float32).float().softmax(-1).square().sum()

    torch.manual_seed(0)
    model, batch = Narrow(4, 4), {"x": torch.randn(3, 4)}
    exact = reference(model, batch, torch.float64)
    assert exact.gradients["weight"].dtype == torch.float64
    error = relative_error(reference(model, batch, torch.float32).gradients, exact.gradients)
    assert 0 < error < 1e-5


def test_compiling_that_takes_too_long_tells_the_processors_time():
    row = compile_time._told("relax_disc", WIDE[0], 0.5)
    assert re.fullmatch(r"not done in 0 s, \d+ s of the processor", row["failed"])
