"""The paper's experiment: padding, sums over an epoch, planned against counted peaks."""

import pytest
import torch

from benchmarks.dry_pytorch import Counted
from benchmarks.memory.full_size import compile_llama
from benchmarks.paper import (
    count_pytorch,
    count_unlimited,
    plan_epoch,
    power_of_two,
    pytorch_steps,
)
from tutorials._llama import Llama, LlamaSizes


def test_powers_of_two():
    assert [power_of_two(n) for n in (1, 2, 3, 4, 5, 64, 65)] == [1, 2, 4, 4, 8, 64, 128]


def test_an_epoch_is_planned_batch_by_batch():
    torch.manual_seed(0)
    sizes = LlamaSizes(vocabulary=61, layers=2, hidden=32, heads=2, feed_forward=64, longest=64)
    step = compile_llama(Llama(sizes), batch=8, longest=64)
    epoch = [[5, 9], [3, 9], [33, 2]]
    free = plan_epoch(step, epoch, None, padded=False)
    peaks = [step.plan(batch=2, length=n, tokens=t).peak_bytes for n, t in ((9, 16), (33, 48))]
    assert free["peak_bytes"] == max(peaks) < count_unlimited(step, 2, 33)
    assert free["batches"] == 3 and free["batches_over_budget"] == 0 and free["longest"] == 33
    padded = plan_epoch(step, epoch, None, padded=True)
    assert padded["longest"] == 64
    assert padded["modelled_tokens_per_second"] <= free["modelled_tokens_per_second"]
    # What fits nowhere is left out, and said.
    least = step.plan(batch=2, length=9, tokens=16).least_bytes
    tight = plan_epoch(step, epoch, least, padded=False)
    assert tight["batches_over_budget"] == 1 and tight["peak_bytes"] <= least


def test_pytorchs_epoch_is_counted_by_its_peaks():
    class Products:
        def count(self, rows, length):
            return Counted(rows * length, 100.0 * length)

    epoch = [[5, 9], [3, 7], [20, 2], [30, 4], [19]]
    found = count_pytorch(Products(), epoch, 19)
    rate = found.pop("modelled_tokens_per_second")
    assert rate == pytest.approx((5 + 9 + 3 + 7 + 19) / (9 + 7 + 19) * 1e7)
    assert found == {
        "unlimited_bytes": 60,
        "peak_bytes": 19,
        "longest": 30,
        "batches": 5,
        "batches_over_budget": 2,
    }
    assert count_pytorch(Products(), epoch, 60)["batches_over_budget"] == 0
    none = count_pytorch(Products(), epoch, 1)
    assert none["batches_over_budget"] == 5 and none["modelled_tokens_per_second"] is None


@pytest.mark.slow
def test_pytorchs_ways_at_full_size_hold_what_they_promise():
    counted = {name: step.count(14, 400) for name, step in pytorch_steps([50, 400])}
    peaks = {name: found.peak_bytes for name, found in counted.items()}
    times = {name: found.nanoseconds for name, found in counted.items()}
    assert times["torch.compile"] < times["PyTorch, eager"] < times["PyTorch, checkpointing"]
    assert times["torch.compile"] < times["torch.compile, budget 0.3"]
    assert next(iter(peaks)) == "PyTorch, eager"
    assert max(peaks.values()) == peaks["PyTorch, eager"]
    assert peaks["torch.compile, budget 0.3"] < peaks["torch.compile"]
