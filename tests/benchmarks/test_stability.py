"""Runs of the same measurement: how far their ratios lie apart."""

import json

import pytest
from typer import Typer
from typer.testing import CliRunner

from benchmarks import record, stability
from benchmarks.models import document


def run(row, step, peak):
    return {"row": row, "ratios": {"step / eager": step, "peak / eager": peak}, "other_work": 0.0}


def test_a_spread_is_the_highest_over_the_lowest():
    runs = [run("S, 4", 0.5, 0.2), run("M, 8", 0.6, 0.3), run("S, 4", 0.55, 0.2)]
    assert stability.spreads(runs) == {
        "S, 4": {"step / eager": pytest.approx(0.1), "peak / eager": 0.0},
        "M, 8": {"step / eager": 0.0, "peak / eager": 0.0},
    }


@pytest.mark.parametrize(("apart", "code"), [(0.01, 0), (0.1, 1)])
def test_runs_are_written_as_they_come_and_resumed(monkeypatch, tmp_path, apart, code):
    for module in (record, document):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(stability, "commit", lambda: "abc")
    monkeypatch.setattr(record, "commit", lambda: "abc")
    measured = []

    def measure(size, batch, *_):
        measured.append((size, batch))
        if len(measured) == 4:
            raise KeyboardInterrupt
        return run(f"{size}, {batch}", 0.5 * (1 + apart * len(measured)), 0.2)

    monkeypatch.setattr(stability, "_run", measure)
    app = Typer()
    app.command()(stability.main)
    assert CliRunner().invoke(app, []).exit_code != 0
    assert len(json.loads((tmp_path / "stability.json").read_text())["results"]["runs"]) == 3
    done = CliRunner().invoke(app, ["--resume"])
    assert done.exit_code == code, done.output
    assert measured == [("S", 4), ("M", 8)] * 2 + [("M", 8), ("S", 4), ("M", 8)]
    content = json.loads((tmp_path / "stability.json").read_text())
    assert len(content["results"]["runs"]) == 6
    refused = CliRunner().invoke(app, ["--resume", "--count", "7"])
    assert refused.exit_code == 2
