"""Races of a kernel's threads are found from its loops, and nothing of right kernels."""

import pytest
from tvm import te, tirx

from relax_disc.analysis.kernels.races import racing
from relax_disc.tir_kernels import cuda_target, rules_for
from relax_disc.tir_kernels.cuda import Guarded
from relax_disc.tir_kernels.cuda.guarded import lowered_to_loops
from relax_disc.tir_kernels.cuda.threads import barrier, launch, only_where
from relax_disc.tir_kernels.flat import index_const
from relax_disc.tir_kernels.loops import loop, with_body
from relax_disc.transform.schedule_kernels import schedule_kernel

N = tirx.Var("n", "int64")
THREADS = 64


def found(body, blocks=None):
    """Tell what races when threads run ``body(x, index, out, block, thread)``."""
    x, index = te.placeholder((N,), name="x"), te.placeholder((N,), "int64", name="index")
    out = te.compute((N,), lambda i: x[i] + index[i].astype("float32"), name="out")
    func = te.create_prim_func([x, index, out])
    blocks = (N + (THREADS - 1)) // THREADS if blocks is None else index_const(blocks)
    grid = launch(blocks, THREADS, lambda block, thread: body(*func.params, block, thread))
    made = with_body(func, [grid]).mod["main"]
    return racing(lowered_to_loops(made, cuda_target("sm_90")), [(0, 2)])


def load(buffer, at):
    return tirx.BufferLoad(buffer, [at])


def store(buffer, value, at):
    return tirx.BufferStore(buffer, value, [at])


def own(x, index, out, block, thread):
    at = block * THREADS + thread
    return [only_where(at < N, [store(out, load(x, at), at)])]


def spare_threads_read_the_last(x, index, out, block, thread):
    at = block * THREADS + thread
    value = tirx.Var("value", "float32")
    kept = tirx.Bind(value, load(x, tirx.min(at, N - 1)))
    return [kept, only_where(at < N, [store(out, value, at)])]


def spare_threads_write_the_last(x, index, out, block, thread):
    at = tirx.min(block * THREADS + thread, N - 1)
    return [store(out, load(x, at), at)]


def neighbour(x, index, out, block, thread):
    at = block * THREADS + thread
    return [only_where(at + 1 < N, [store(out, load(x, at + 1), at)])]


def looked_up(x, index, out, block, thread):
    at = block * THREADS + thread
    return [only_where(at < N, [store(out, load(x, load(index, at)), at)])]


def scattered(x, index, out, block, thread):
    at = block * THREADS + thread
    return [only_where(at < N, [store(out, load(x, at), load(index, at))])]


def scattered_by_one(x, index, out, block, thread):
    walk = loop("at", N, lambda at: store(out, load(x, at), load(index, at)))
    return [only_where(tirx.EQ(thread, index_const(0)), [walk])]


@pytest.mark.parametrize(
    "body, apart, overlaid",
    [
        (own, False, False),
        (spare_threads_read_the_last, False, True),
        (spare_threads_write_the_last, True, True),
        (neighbour, False, True),
        (looked_up, False, True),
        (scattered, True, True),
    ],
)
def test_elements(body, apart, overlaid):
    races, pairs = found(body)
    assert races == apart
    assert bool(pairs) == overlaid


def test_one_thread_races_with_nobody():
    assert found(scattered_by_one, 1) == (False, [])


def stages(meet):
    """Two stages of one block: all threads read ``x``, the first writes; all read what it wrote."""

    def body(x, index, out, block, thread):
        value = tirx.Var("value", "float32")
        is_first = tirx.EQ(thread, index_const(0))
        own = thread + 1
        return [
            tirx.Bind(value, load(x, index_const(0))),
            *meet,
            only_where(is_first, [store(out, value, index_const(0))]),
            *meet,
            only_where(own < N, [store(out, load(out, index_const(0)), own)]),
        ]

    return body


def test_barriers_part_what_is_before_and_behind():
    assert found(stages([barrier()]), 1) == (False, [])
    assert found(stages([]), 1) == (True, [(0, 2)])
    # Threads of two blocks have none.
    assert found(stages([barrier()]), 2)[0]


def test_a_rule_whose_threads_race_is_passed_over():
    x = te.placeholder((N,), name="x")
    func = te.create_prim_func([x, te.compute((N,), lambda i: x[i] * 2.0, name="out")])
    target = cuda_target("sm_90")

    class Racing:
        def __init__(self, racing):
            self.racing = racing

        def apply(self, func, target, tunable):
            def body(block, thread):
                if self.racing == "apart":
                    return [store(func.params[1], load(func.params[0], N - 1), index_const(0))]
                return neighbour(func.params[0], None, func.params[1], block, thread)

            return with_body(func, [launch((N + 63) // THREADS, THREADS, body)])

    with target:
        right, by_rules = rules_for(target), schedule_kernel(func, target, rules_for(target))
        passed_over = schedule_kernel(func, target, [Guarded(Racing("apart")), *right])
        kept = schedule_kernel(func, target, [Guarded(Racing("overlaid")), *right])
    assert passed_over.script() == by_rules.script()
    assert [list(pair) for pair in by_rules.attrs["relax_disc.inplace"]] == [[0, 1]]
    assert not kept.attrs["relax_disc.inplace"]
