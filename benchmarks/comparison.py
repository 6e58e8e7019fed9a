"""How often, how fast and how rightly `relax_disc.analysis.compare` decides.

Random pairs of polynomials in three dims, of degree three.  Half of them over small ranges, where
every shape is evaluated; half over ranges of real training steps, attacked with the corners and
100,000 sampled shapes.  The judge evaluates the generated coefficients itself.

Run ``python -m benchmarks.comparison [pairs]``; writes benchmarks/results/comparison.json.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from benchmarks.record import write_result
from relax_disc.analysis.symbolic.comparison.compare import Comparison, Order, compare
from relax_disc.analysis.symbolic.dim import SymbolicDim
from relax_disc.analysis.symbolic.expr import SymbolicExpr

NAMES = ("batch", "seq", "width")
EXPONENTS = [powers for powers in product(range(4), repeat=3) if sum(powers) <= 3]
SAMPLES = 100_000
PAIRS_PER_BOX = 50
Polynomial = dict[tuple[int, ...], int]


@dataclass(frozen=True)
class Family:
    """How coefficients are drawn: a share of the 20 monomials, from `lowest` to `highest`."""

    share: float
    lowest: int
    highest: int


FAMILIES = (
    Family(0.15, 0, 20),
    Family(0.3, 0, 100),
    Family(0.3, -10, 10),
    Family(0.6, -100, 100),
    Family(1.0, -1000, 1000),
    Family(1.0, 0, 12_000),
)


def random_polynomial(rng: random.Random, family: Family) -> Polynomial:
    """Return coefficients by exponents."""
    return {
        powers: rng.randint(family.lowest, family.highest)
        for powers in EXPONENTS
        if rng.random() < family.share
    }


def to_expression(polynomial: Polynomial, dims: tuple[SymbolicDim, ...]) -> SymbolicExpr:
    """Build the expression by the public arithmetic."""
    result = SymbolicExpr.constant(0)
    for powers, coefficient in polynomial.items():
        term = SymbolicExpr.constant(coefficient)
        for dim, power in zip(dims, powers, strict=True):
            term = term * SymbolicExpr.dim(dim) ** power
        result = result + term
    return result


def small_box(rng: random.Random) -> tuple[SymbolicDim, ...]:
    """Return dims in ranges up to 48."""
    lowers = [rng.randint(0, 12) for _ in NAMES]
    return tuple(
        SymbolicDim(name, lower, rng.randint(lower, 48))
        for name, lower in zip(NAMES, lowers, strict=True)
    )


def realistic_box(rng: random.Random) -> tuple[SymbolicDim, ...]:
    """Return dims as training steps have them."""
    return (
        SymbolicDim(NAMES[0], rng.choice([1, 2]), rng.choice([16, 64, 256])),
        SymbolicDim(NAMES[1], rng.choice([1, 16]), rng.choice([512, 4096, 8192])),
        SymbolicDim(NAMES[2], rng.choice([1, 64]), rng.choice([128, 1024, 11_008])),
    )


def every_shape(dims: tuple[SymbolicDim, ...]) -> np.ndarray:
    """Return all shapes, int64 [shapes, dims]."""
    axes = [np.arange(dim.lower, (dim.upper or 0) + 1) for dim in dims]
    return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(dims))


def sampled_shapes(dims: tuple[SymbolicDim, ...], seed: int) -> np.ndarray:
    """Return the corners, and samples half uniform, half uniform in the logarithm."""
    rng = np.random.default_rng(seed)
    columns = []
    for dim in dims:
        upper = dim.upper or 0
        uniform = rng.integers(dim.lower, upper + 1, SAMPLES // 2)
        logs = rng.uniform(np.log(dim.lower), np.log(upper + 1), SAMPLES - SAMPLES // 2)
        columns.append(np.concatenate([uniform, np.exp(logs).astype(np.int64)]))
    corners = np.array(list(product(*((dim.lower, dim.upper) for dim in dims))), np.int64)
    shapes = np.concatenate([corners, np.stack(columns, axis=-1)])
    return np.clip(shapes, corners.min(axis=0), corners.max(axis=0))


def monomial_values(shapes: np.ndarray) -> np.ndarray:
    """Return the value of every monomial at every shape, int64 [shapes, monomials]."""
    return np.stack([np.prod(shapes ** np.array(powers), axis=1) for powers in EXPONENTS], axis=-1)


def value(polynomial: Polynomial, shape: Mapping[str, int]) -> int:
    """Evaluate exactly, without the package."""
    return sum(
        coefficient
        * shape[NAMES[0]] ** powers[0]
        * shape[NAMES[1]] ** powers[1]
        * shape[NAMES[2]] ** powers[2]
        for powers, coefficient in polynomial.items()
    )


def is_wrong(
    answer: Comparison,
    left: Polynomial,
    right: Polynomial,
    dims: tuple[SymbolicDim, ...],
    monomials: np.ndarray,
) -> bool:
    """Judge an answer by the values at given shapes."""
    coefficients = [left.get(powers, 0) - right.get(powers, 0) for powers in EXPONENTS]
    # |difference| < 24000 * 20 * 11008**3 < 2**63: nothing wraps.
    differences = monomials @ np.array(coefficients, np.int64)
    match answer.order:
        case Order.LESS:
            return bool((differences >= 0).any())
        case Order.GREATER:
            return bool((differences <= 0).any())
        case Order.EQUAL:
            return bool((differences != 0).any())
        case Order.LESS_EQUAL:
            return bool((differences > 0).any())
        case Order.GREATER_EQUAL:
            return bool((differences < 0).any())
        case Order.UNKNOWN:
            return answer.witness_less is not None or answer.witness_greater is not None
    less, greater = answer.witness_less, answer.witness_greater
    if less is None or greater is None:
        return True
    # A dim that neither size depends on may be missing from a witness.
    free = {dim.name: dim.lower for dim in dims}
    less, greater = {**free, **less}, {**free, **greater}
    inside = all(shape[dim.name] in dim for shape in (less, greater) for dim in dims)
    return not (
        inside
        and value(left, less) < value(right, less)
        and value(left, greater) > value(right, greater)
    )


def measure(kind: str, pairs: int, seed: int = 0) -> Iterator[tuple[Comparison, float, bool]]:
    """Yield answer, processor seconds and whether it is wrong, for pairs of one kind of ranges."""
    rng = random.Random(f"{kind}{seed}")
    done = 0
    while done < pairs:
        dims = small_box(rng) if kind == "small" else realistic_box(rng)
        shapes = every_shape(dims) if kind == "small" else sampled_shapes(dims, done)
        monomials = monomial_values(shapes)
        families = [FAMILIES[index % len(FAMILIES)] for index in range(PAIRS_PER_BOX)]
        drawn = [
            (random_polynomial(rng, family), random_polynomial(rng, family))
            for family in families[: pairs - done]
        ]
        answers = []
        for left, right in drawn:  # apart from the judging, which empties the caches
            first, second = to_expression(left, dims), to_expression(right, dims)
            start = time.thread_time()
            answer = compare(first, second)
            answers.append((answer, time.thread_time() - start))
        for (left, right), (answer, seconds) in zip(drawn, answers, strict=True):
            yield answer, seconds, is_wrong(answer, left, right, dims, monomials)
        done += PAIRS_PER_BOX


def summary(results: list[tuple[Comparison, float, bool]]) -> dict[str, Any]:
    """Return the figures of the acceptance table."""
    seconds = sorted(duration for _, duration, _ in results)
    orders = Counter(answer.order.name for answer, _, _ in results)
    return {
        "pairs": len(results),
        "wrong": sum(wrong for _, _, wrong in results),
        "undecided_percent": 100 * orders[Order.UNKNOWN.name] / len(results),
        "median_us": seconds[len(seconds) // 2] * 1e6,
        "p99_us": seconds[len(seconds) * 99 // 100] * 1e6,
        "worst_ms": seconds[-1] * 1e3,
        "orders": dict(sorted(orders.items())),
    }


def main(pairs: int = 10_000) -> None:
    """Measure, print the table, write the figures."""
    kinds = {
        "small": "ranges <= 48, every shape",
        "realistic": f"realistic ranges, corners and {SAMPLES:,} samples",
    }
    results = {kind: summary(list(measure(kind, pairs // 2))) for kind in kinds}
    print(
        f"{'pairs':>6} {'wrong':>6} {'undecided':>10} {'median us':>10} {'worst ms':>9}  judged by"
    )
    for kind, row in results.items():
        print(
            f"{row['pairs']:6d} {row['wrong']:6d} {row['undecided_percent']:9.2f}% "
            f"{row['median_us']:10.1f} {row['worst_ms']:9.2f}  {kinds[kind]}"
        )
    print(
        f"targets: wrong 0, undecided <= 1 %, median <= 50 us, worst <= 20 ms (processor time); "
        f"written to {write_result('comparison', {'pairs': pairs}, results)}"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
