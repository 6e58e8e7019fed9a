"""The parts of the memory benchmark that compute rather than measure."""

import pytest

from benchmarks.memory.partitioner import replayed
from benchmarks.memory.partitioner_values import alike, carried_over
from benchmarks.memory.planner_peak import planner_peak
from benchmarks.memory.report import summarize_sweep, sweep_table
from benchmarks.memory.sweep import BUDGETS, UNLIMITED
from relax_disc.analysis import Kernel
from relax_disc.vm_builtins.planner import PlannerGraph, PlannerOp, plan_rematerialization


def way(seconds, peak, **more):
    return {"seconds": seconds, "activation_peak_bytes": peak, **more}


def test_sweep_summaries_pair_batches():
    rows = []
    for number, size in enumerate((10, 30)):
        ours = {"fits": number == 1, "recomputations": 4, "modelled_time_ratio": 1.1}
        ways = {"compile": way(2.0 * size, 100 * size)}
        for name in BUDGETS:
            slower = 1.0 if name == UNLIMITED else 1.25
            planned = 50 * size if name == UNLIMITED else 25 * size
            account = {"accounted_activation_bytes": planned, **ours}
            ways[name] = way(slower * size, planned + 1, **account)
        rows.append({"number": number, "length": size, "ways": ways})
    by_name = {summary["way"]: summary for summary in summarize_sweep(rows)}
    tight = by_name["1/2 of own"]
    assert tight["time_ratio"] == [1.25, 1.25, 1.25] and tight["run_time_ratio"] == 1.25
    assert tight["peak_ratio"][0] == tight["highest_ratio"] == 0.25
    assert tight["highest_counted_bytes"] == 751
    assert tight["within_budget"] == 1
    assert by_name[UNLIMITED]["time_over_compile"][0] == 0.5
    assert by_name["compile"]["within_budget"] is None
    assert sweep_table("title", rows).row_count == len(BUDGETS) + 1


def chain(length):
    """Tensor 0 is given; forward kernel k makes k + 1; backward kernels read them in reverse."""
    ops = [PlannerOp(10, -1, 0, (k,), (k + 1,), (), True) for k in range(length)]
    for k in range(length):
        source = (length - k, length + k) if k else (length,)
        ops.append(PlannerOp(20, -1, 0, source, (length + k + 1,), (), False))
    tensors = 2 * length + 1
    return PlannerGraph(
        sizes=(8,) * tensors,
        resident=tuple(t == 0 for t in range(tensors)),
        is_output=tuple(t == tensors - 1 for t in range(tensors)),
        ops=tuple(ops),
    )


@pytest.mark.parametrize("kept", [set(), {2}, {1, 2, 3, 4, 5, 6}])
def test_what_is_not_kept_runs_again_when_it_is_read(kept):
    graph = chain(6)
    sequence = replayed(graph, kept, 5)
    again = [k for k in range(6) if sequence.count(k) > 1]
    assert sorted(set(sequence)) == list(range(12))
    assert all(k + 1 not in kept for k in again)
    if len(kept) == 6:
        assert sequence == tuple(range(12))
    else:
        assert again == [k for k in range(5) if k + 1 not in kept]  # the head makes its own
    plan = plan_rematerialization(graph, planner_peak(graph, sequence), 0)
    assert plan.feasible
    assert plan.time_ns <= sum(graph.ops[k].time_ns for k in sequence)


def test_digests_tell_values_apart():
    assert alike((4, 1.0, 2.0, 3.0), (4, 1.00001, 2.0, 3.0))
    assert not alike((4, 1.0, 2.0, 3.0), (4, 1.001, 2.0, 3.0))
    assert not alike((4, 1.0, 2.0, 3.0), (5, 1.0, 2.0, 3.0))


SMALL = [Kernel("a", (0,), (1,)), Kernel("b", (1,), (2,)), Kernel("b", (0, 2), (3,))]


def test_digests_go_over_to_the_same_kernels_in_another_order():
    full = [Kernel("a", (5,), (8, 9)), Kernel("b", (8,), (6,)), Kernel("b", (5, 6), (7,))]
    digests = {1: (4, 1.0, 2.0, 3.0), 3: (4, 5.0, 6.0, 7.0)}
    assert carried_over(SMALL, full, digests) == {8: digests[1], 7: digests[3]}
    assert carried_over(SMALL, full[::-1], digests) == {8: digests[1], 7: digests[3]}


@pytest.mark.parametrize(
    ("full", "words"),
    [
        (SMALL[:2], "lacks 'b' of the small"),
        ([*SMALL, Kernel("c", (3,), (4,))], "small step lacks 'c'"),
        ([*SMALL[:2], Kernel("b", (0, 1), (3,))], "lacks 'b' of the small"),
    ],
)
def test_digests_do_not_go_over_to_other_kernels(full, words):
    with pytest.raises(ValueError, match=words):
        carried_over(SMALL, full, {})
