"""The paper's rule: least symbolic impact first, lifetime where sizes do not compare."""

from benchmarks.scheduling.paper import paper_order
from relax_disc.analysis import Kernel, SymbolicDim, SymbolicExpr, TensorGraph

N, M = SymbolicDim("n", 1, 100), SymbolicDim("m", 1, 100)
n, m = SymbolicExpr.dim(N), SymbolicExpr.dim(M)


def graph(sizes, kernels, outputs):
    return TensorGraph((N, M), sizes, (0,), outputs, tuple(kernels))


def test_least_impact_runs_first():
    kernels = [
        Kernel("large", (0,), (1,)),
        Kernel("small", (0,), (2,)),
        Kernel("reduce", (2,), (3,)),
        Kernel("join", (1, 3), (4,)),
    ]
    # 4n*m is larger than 2n at every shape; freeing it by `reduce` comes before anything grows.
    assert paper_order(graph((8, 4 * n * m, 2 * n, 1, 1), kernels, (4,))) == (1, 2, 0, 3)


def test_lifetime_decides_where_sizes_do_not_compare():
    kernels = [
        Kernel("long", (0,), (1,)),
        Kernel("short", (0,), (2,)),
        Kernel("use", (2,), (3,)),
        Kernel("later", (1, 3), (4,)),
    ]
    # n and m do not compare; what `short` makes is read soon, what `long` makes only at the end.
    assert paper_order(graph((8, 4 * n, 4 * m, 1, 1), kernels, (4,)))[0] == 1


def test_shared_inputs_are_freed_by_the_last_reader():
    kernels = [
        Kernel("make", (0,), (1,)),
        Kernel("a", (1,), (2,)),
        Kernel("b", (1,), (3,)),
        Kernel("end", (2, 3), (4,)),
    ]
    order = paper_order(graph((8, 100 * n, n, 2 * n, 1), kernels, (4,)))
    assert order == (0, 1, 2, 3)
