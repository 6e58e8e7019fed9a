"""Scatters on the CPU: what they compute is what their loops do in order, to the last bit."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from tvm import te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder

from tests.tir_kernels.kernel_runs import Library, scheduled

T = builder
N, M = (tirx.Var(name, "int64") for name in "nm")
SIZES = [(1, 1), (3, 7), (2, 0), (9, 20)]


class Scatter:
    """``out[.., where[events, ..], ..] = values[events, ..]``, or +=, for all events in order."""

    def __init__(self, seed):
        choose = random.Random(seed)
        rank = choose.randint(1, 4)
        self.shape = [choose.choice([N, 1, 3, 5, 16]) for _ in range(rank)]
        long = [64, 100, 256, 300] if rank < 3 else []  # strips, and parts of them
        self.shape[-1] = choose.choice([N, 1, 4, 33, *long])
        last = rank if choose.random() < 0.3 else max(rank - 1, 1)
        self.looked_up = sorted(choose.sample(range(last), choose.randint(1, min(2, last))))
        self.kept = [d for d in range(rank) if d not in self.looked_up]
        self.events = [M, 3][: choose.randint(1, 2)]
        # the first position may differ along an axis that is kept
        self.along = choose.choice(self.kept) if self.kept and choose.random() < 0.3 else None
        self.dtype = choose.choice(["float32", "float32", "float64", "int32", "bool"])
        self.kind = "set" if self.dtype == "bool" else choose.choice(["add", "add", "set", "max"])
        self.has_start, self.is_guarded = choose.random() < 0.4, choose.random() < 0.3
        # by the first event, or by where it is along the last axis that is kept
        self.guarded_along = choose.choice([0, len(self.events) + len(self.kept) - 1])
        self.order = [*range(len(self.events) + len(self.kept))]  # of the values' axes
        if choose.random() < 0.4:
            choose.shuffle(self.order)
        self.func = self._func()

    @property
    def extents(self):
        """Of all loops but those that begin the result."""
        return [*self.events, *(self.shape[d] for d in self.kept)]

    def shapes(self):
        """Shapes of the parameters: values, positions, what is guarded, what it starts from."""
        first = [*self.events, *([] if self.along is None else [self.shape[self.along]])]
        return [
            [self.extents[k] for k in self.order],
            *[first, self.events][: len(self.looked_up)],
            *([[self.extents[self.guarded_along]]] if self.is_guarded else []),
            *([self.shape] if self.has_start else []),
        ]

    def step(self, read, at):
        """Where an iteration writes, what, and whether; ``read(k, indices)`` of parameter k."""
        event, columns = at[: len(self.events)], at[len(self.events) :]
        named = dict(zip(self.kept, columns, strict=True))
        along = [] if self.along is None else [named[self.along]]
        for k, d in enumerate(self.looked_up):
            named[d] = read(1 + k, [*event, *([] if k else along)])
        guard = None
        if self.is_guarded:
            guard = read(1 + len(self.looked_up), [at[self.guarded_along]]) % 2 == 0
        value = read(0, [at[k] for k in self.order])
        return [named[d] for d in range(len(self.shape))], value, guard

    def _func(self):
        shapes = self.shapes()
        of_dtype = {0, len(shapes) - 1 if self.has_start else 0}
        used = [
            te.placeholder(shape, self.dtype if k in of_dtype else "int64", f"x{k}")
            for k, shape in enumerate(shapes)
        ]
        out = tirx.decl_buffer(self.shape, self.dtype, "out")

        def body(inputs, outputs):
            def read(k, indices):
                return inputs[k][tuple(indices)]

            def store(at):
                place, value, guard = self.step(read, at)
                before = outputs[0][tuple(place)]
                if self.kind != "set":
                    value = before + value if self.kind == "add" else tirx.max(before, value)
                if guard is None:
                    T.buffer_store(outputs[0], value, place)
                    return
                with T.If(guard), T.Then():
                    T.buffer_store(outputs[0], value, place)

            with IRBuilder() as made:
                with T.seq_scope():
                    with T.grid(*self.shape) as loops:
                        place = [loops] if isinstance(loops, tirx.Var) else list(loops)
                        zero = tirx.const(0, self.dtype)
                        first = read(len(used) - 1, place) if self.has_start else zero
                        T.buffer_store(outputs[0], first, place)
                    with T.grid(*self.extents) as loops:
                        store([loops] if isinstance(loops, tirx.Var) else list(loops))
            return made.get()

        result = te.extern([self.shape], used, body, dtype=self.dtype, out_buffers=[out])
        return te.create_prim_func([*used, result])

    def arguments(self, n, m, seed=0):
        """Make parameters at sizes, those that are positions in range, and room for the result."""
        make, sizes = np.random.default_rng(seed), {N: n, M: m}

        def of(shape):
            return [sizes.get(extent, extent) for extent in shape]

        values, *others = map(of, self.shapes())
        start = [others.pop()] if self.has_start else []
        extents = [*(of(self.shape)[d] for d in self.looked_up), 4]
        numbers = [make.standard_normal(shape) * 9 for shape in [values, *start]]
        typed = [x.astype(self.dtype) if self.dtype != "bool" else x > 0 for x in numbers]
        positions = [make.integers(0, e, s) for e, s in zip(extents, others, strict=False)]
        return [typed[0], *positions, *typed[1:], np.ones(of(self.shape), self.dtype)]

    def expected(self, arguments):
        """Run the loops in Python."""
        *given, out = arguments
        out = given[-1].copy() if self.has_start else np.zeros_like(out)
        events, kept = len(self.events), iter(self.kept)
        extents = [given[0].shape[self.order.index(k)] for k in range(events)]
        extents += [out.shape[d] for d in kept]
        for at in itertools.product(*map(range, extents)):
            place, value, guard = self.step(lambda k, i: given[k][tuple(i)], list(at))
            place = tuple(place)
            if guard is False or (guard is not None and not guard):
                continue
            if self.kind == "set":
                out[place] = value
            else:
                out[place] = out[place] + value if self.kind == "add" else max(out[place], value)
        return out


@pytest.fixture(scope="module")
def made():
    found = {f"scatter{seed}": Scatter(seed) for seed in range(60)}
    return found, Library({name: scheduled(each.func) for name, each in found.items()})


def test_every_scatter_is_what_its_loops_do_in_order(made):
    scatters, library = made
    for (name, scatter), (n, m) in itertools.product(scatters.items(), SIZES):
        arguments = scatter.arguments(n, m)
        wanted = scatter.expected(arguments)
        library(name, *arguments)
        np.testing.assert_array_equal(arguments[-1], wanted, err_msg=f"{name} at {n}, {m}")


def test_most_are_spread_and_rows_are_vectors(made):
    scatters, _ = made
    functions = [scheduled(each.func) for each in scatters.values() if each.kept]
    assert all("tirx.is_scheduled" in function.attrs for function in functions)
    texts = [function.script() for function in functions]
    assert sum("T.parallel" in text for text in texts) > len(texts) / 2
    assert sum("T.vectorized" in text for text in texts) > len(texts) / 3
