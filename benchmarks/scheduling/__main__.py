"""Peaks of live memory under orders by different rules, against a bound that no order can beat.

For each graph and shape: the given order, the rule of BladeDISC++, torch inductor's three rules
(written anew from their description), list scheduling, and `schedule_ops`.  Graphs with dims get
one order for all shapes from the paper's rule and from ours, as both are symbolic; the other rules
see the sizes of the last shape.  Graphs of numbers are also scheduled from three shuffled orders.

Run ``python -m benchmarks.scheduling [--quick] [--capture]``; writes
benchmarks/results/scheduling.json.  Graphs in ../shared/graphs/recorded take part where that folder
is there.
"""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks.record import write_result
from benchmarks.scheduling.compare import (
    HEADS,
    SHUFFLES,
    capture_llama,
    graphs,
    grid_check,
    measure,
    print_row,
)
from benchmarks.scheduling.graphs import LLAMA_STEP, OWN_GRAPHS


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the largest graphs.")] = False,
    capture: Annotated[
        bool, typer.Option("--capture", help="Record the Llama step's graph again before.")
    ] = False,
) -> None:
    """Measure, print the table, write the figures."""
    if capture:
        capture_llama().save(LLAMA_STEP)
    print(
        f"{'graph':15s}{'kernels':>6s} {'shape':22s}{'given MiB':>9s}"
        + "".join(f"{head:>9s}" for head in (*HEADS, "ours", "bound"))
        + f"{'s':>8s} ours from shuffled orders"
    )
    rows = []
    for name, graph in graphs(quick):
        for row in measure(name, graph):
            print_row(row)
            rows.append(row)
    grid = grid_check(OWN_GRAPHS["llama step"]())
    print(
        f"llama step, one order over {grid['shapes']} shapes: worst {grid['worst_to_alone']:.4f} "
        f"of the best for each shape alone, which is {grid['worst_alone_to_bound']:.4f} of its "
        f"bound; at most {grid['worst_to_given']:.4f} of the given order"
    )
    settings = {"quick": quick, "shuffles": SHUFFLES}
    path = write_result("scheduling", settings, {"rows": rows, "llama_grid": grid})
    print(f"peaks as multiples of the given order's; written to {path}")


if __name__ == "__main__":
    typer.run(main)
