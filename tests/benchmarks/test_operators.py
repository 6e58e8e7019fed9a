"""PyTorch's own lists of operators and modules, each trained for a step beside eager PyTorch."""

import json

import pytest

pytest.importorskip("expecttest", reason="PyTorch's own lists of operators need expecttest")

from benchmarks.operators.__main__ import judge_all
from benchmarks.operators.document import RESULT
from benchmarks.operators.judge import CRASH, NO_SAMPLE, RANDOM, STATIC, WRONG
from benchmarks.operators.worker import entries, judged
from tests.tiers import every

SAMPLE = [
    ("operator", name)
    for name in (
        "as_strided",
        "cdist",
        "digamma",
        "fft_hfft",
        "gather",
        "index_put",
        "linalg_eigh",
        "linalg_inv",
        "logcumsumexp",
        "native_batch_norm",
        "nn_functional_unfold",
        "polar",
        "special_i1e",
        "take_along_dim",
        "var_mean",
    )
] + [("module", "nn_GroupNorm"), ("module", "nn_CosineEmbeddingLoss")]


@pytest.mark.parametrize("kind, name", every(3, [pytest.param(*entry) for entry in SAMPLE]))
def test_entry(kind, name):
    result = judged(kind, name)
    assert result["outcome"].startswith("right"), f"{result['sample']}: {result['reason']}"


@pytest.mark.slow
def test_every_entry():
    """None wrong, none crashing, none worse than recorded."""
    known = {
        (r["kind"], r["name"]): r["outcome"] for r in json.loads(RESULT.read_text())["results"]
    }
    worse = [
        result
        for result in judge_all(entries(), jobs=2, limit_seconds=600)
        if result["outcome"] in (WRONG, CRASH)
        or (known.get((result["kind"], result["name"]), "").startswith("right"))
        > result["outcome"].startswith("right")
    ]
    assert not worse


def test_recorded_outcomes():
    results = json.loads(RESULT.read_text())["results"]
    assert {(r["kind"], r["name"]) for r in results} == set(entries())
    for kind in ("operator", "module"):
        outcomes = [r["outcome"] for r in results if r["kind"] == kind]
        # What is random, or has no dense sample, cannot be compared.
        outcomes = [outcome for outcome in outcomes if outcome not in (RANDOM, NO_SAMPLE)]
        assert not {WRONG, CRASH} & set(outcomes)
        assert sum(o.startswith("right") for o in outcomes) >= 0.97 * len(outcomes)
        assert outcomes.count(STATIC) <= 0.05 * len(outcomes)
