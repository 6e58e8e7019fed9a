"""Sizes that only the data tell, for CUDA: one build, many counts, as PyTorch on the CPU."""

import shutil

import pytest
import torch

from relax_disc.tir_kernels.target import cuda_target
from tests.cuda.stand_in import Recorder, WaitsRecorded, emulator_without_findings
from tests.tiers import every
from tests.training.counted_losses import (
    LOSSES,
    SHAPES,
    batch_of,
    check_step,
    compiled,
    distinct,
    rows_before_a_regression,
)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")  # of eager, about variances of one
@pytest.mark.parametrize("loss_fn", every(8, LOSSES), ids=lambda f: f.__name__)
def test_a_step_is_pytorchs_at_every_count(loss_fn, monkeypatch):
    monkeypatch.setenv("RELAX_DISC_COMPILE_CACHE", "0")
    with emulator_without_findings() as emulator:
        step = compiled(loss_fn, target=cuda_target("sm_90"))
        for seed, shape in enumerate(SHAPES):
            for selected in ("some", "all", "one", "none"):
                emulator.seed += 1
                check_step(step, loss_fn, batch_of(*shape, selected, seed))


@pytest.mark.parametrize("loss_fn", [rows_before_a_regression, distinct])
def test_the_host_waits_for_what_is_counted_and_the_peak_is_the_plans(loss_fn, monkeypatch):
    """Once where the call is planned, once where the program counts the same again."""
    monkeypatch.setenv("RELAX_DISC_COMPILE_CACHE", "0")
    with emulator_without_findings() as emulator:
        step = compiled(loss_fn, target=cuda_target("sm_90"))
        step(*batch_of(6, 33))
        emulator.forget()
        with WaitsRecorded(emulator):
            step(*batch_of(6, 33, seed=1))
        counted = [event for event in emulator.events if event.startswith("library cuda.")]
        assert sum(event.endswith((".nonzero", ".unique")) for event in counted) == 2
        assert "synchronise" not in emulator.events
        report = step.memory_report()
        assert report.peak_bytes <= report.planned_peak_bytes
        full = batch_of(6, 33, "all") if loss_fn is rows_before_a_regression else None
        if full is not None:
            step(*full)
            plan = step.plan(batch=6, length=33)
            assert step.memory_report().peak_bytes == plan.peak_bytes


def test_nothing_is_launched_for_no_rows(monkeypatch):
    """TVM would launch one block for none; kernels by rows do not look whether theirs exists."""
    monkeypatch.setenv("RELAX_DISC_COMPILE_CACHE", "0")
    with emulator_without_findings() as emulator:
        step = compiled(rows_before_a_regression, target=cuda_target("sm_90"))
        launches = {}
        for selected in ("some", "none"):
            emulator.forget()
            check_step(step, rows_before_a_regression, batch_of(3, 5, selected))
            launches[selected] = sum(event.startswith("launch ") for event in emulator.events)
        assert launches["none"] < launches["some"]
        assert torch.isnan(step(*batch_of(3, 5, "none")))  # a mean of nothing


def test_calls_that_count_run_without_a_graph_and_say_why(monkeypatch):
    monkeypatch.setenv("RELAX_DISC_COMPILE_CACHE", "0")
    with emulator_without_findings() as emulator, Recorder(emulator).running():
        step = compiled(rows_before_a_regression, target=cuda_target("sm_90"), cuda_graphs=True)
        for seed in range(3):
            check_step(step, rows_before_a_regression, batch_of(3, 5, "some", seed))
        report = step.graph_report()
        assert report.replays == 0
        assert any("a mask selects" in reason for reason in report.plain_calls)
