"""Small moves lower the peak at single shapes, raise none, and keep the order legal."""

from __future__ import annotations

import random

from relax_disc.analysis.schedule.problem import ScheduleProblem, peaks_at_points
from relax_disc.analysis.schedule.settle import settle_peaks


def _backward_of_a_layer(points: int) -> ScheduleProblem:
    """A gradient that two products read: that of the wide input is made first and waits."""
    # ops: 0 saves the input, 1 makes the gradient, 2 the input's, 3 the weight's, 4 its update,
    # 5 reads the input's gradient; the update comes after the product that reads the weight.
    return ScheduleProblem(
        touch=[[0], [1], [1, 2], [0, 1, 3], [3], [2]],
        need=[[], [0], [1], [0, 1], [2, 3], [2]],
        pair=[[] for _ in range(6)],
        ready=[False] * 4,
        stays=[False] * 4,
        size=[[30, 10, 30, 5 + point] for point in range(points)],
        extra=[[0, 0, 10, 25, 0, 0] for _ in range(points)],
        base=[7] * points,
    )


def test_the_weights_gradient_goes_before_what_waits_for_nothing() -> None:
    problem = _backward_of_a_layer(3)
    assert peaks_at_points(problem, range(6)) == [107, 108, 109]
    order = settle_peaks(problem, range(6))
    assert order.index(3) < order.index(2)
    assert peaks_at_points(problem, order) == [77, 78, 79]


def test_no_shapes_peak_rises_and_the_order_stays_legal() -> None:
    lowered = 0
    for seed in range(60):
        problem = _random_problem(random.Random(seed))
        before = peaks_at_points(problem, range(problem.ops))
        order = settle_peaks(problem, range(problem.ops))
        assert sorted(order) == list(range(problem.ops))
        position = {op: step for step, op in enumerate(order)}
        for op, needs in enumerate(problem.need):
            assert all(position[other] < position[op] for other in needs)
        after = peaks_at_points(problem, order)
        assert all(new <= old for new, old in zip(after, before, strict=True))
        assert settle_peaks(problem, range(problem.ops)) == order
        lowered += after != before
    assert lowered > 30


def test_an_empty_program_has_an_empty_order() -> None:
    empty = ScheduleProblem([], [], [], [], [], [[]], [[]], [3])
    assert settle_peaks(empty, []) == ()


def _random_problem(rng: random.Random) -> ScheduleProblem:
    """A program in which every op makes one buffer and reads up to two that were made before."""
    ops, points = rng.randint(1, 40), rng.randint(1, 4)
    need = [sorted(rng.sample(range(op), min(op, rng.randint(0, 2)))) for op in range(ops)]
    return ScheduleProblem(
        touch=[[*needs, op] for op, needs in enumerate(need)],
        need=need,
        pair=[[] for _ in range(ops)],
        ready=[False] * ops,
        stays=[False] * ops,
        size=[[rng.randint(0, 50) for _ in range(ops)] for _ in range(points)],
        extra=[[rng.randint(0, 20) for _ in range(ops)] for _ in range(points)],
        base=[rng.randint(0, 9) for _ in range(points)],
    )
