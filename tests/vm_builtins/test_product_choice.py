"""Products of float32 by our kernels or PyTorch's: both right, chosen once, memory counted."""

import ctypes
import itertools
import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import tvm_ffi
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_disc.errors import InputMismatchError
from relax_disc.vm_builtins import product_choice
from relax_disc.vm_builtins.libraries.install import install
from relax_disc.vm_builtins.product_choice import Choice
from tests.thread_count import threads

install("cpu")
library = tvm_ffi.get_global_func
OWN, OTHERS = 0, 1
needs_mkl = pytest.mark.skipif(
    not library("relax_disc.cpu.has_other_products")(), reason="this build of torch has no MKL"
)
extents = st.one_of(st.integers(1, 40), st.sampled_from([64, 97, 385, 700, 2100]))


@contextmanager
def forced(which):
    before = library("relax_disc.cpu.force_products")(which)
    try:
        yield
    finally:
        library("relax_disc.cpu.force_products")(before)


def run(name, formula, sizes, tensors, numbers):
    """Call a kernel with the workspace that a plan would lend it; it must be enough."""
    size = library("relax_disc.cpu.workspace_bytes")(formula, tvm_ffi.Shape([4, *sizes]))
    *operands, result = (tvm_ffi.from_dlpack(t) for t in tensors)
    library("relax_disc.cpu.take_overflow")()
    library("relax_disc.cpu.call_with_workspace")(
        size, library(f"relax_disc.cpu.{name}"), *operands, *numbers, result
    )
    assert library("relax_disc.cpu.take_overflow")() == 0
    return result


def held_by_mkl():
    mkl = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    mkl.mkl_serv_mem_stat.restype = ctypes.c_int64
    return mkl.mkl_serv_mem_stat(ctypes.byref(ctypes.c_int()))


def assert_close(found, exact, magnitude):
    assert ((found.double() - exact).abs() <= 2**-18 * magnitude).all()


@needs_mkl
@given(
    m=extents,
    n=extents,
    k=extents,
    transpose_a=st.booleans(),
    transpose_b=st.booleans(),
    addend=st.sampled_from(["none", "row", "full", "in place"]),
    count=st.sampled_from([1, 2]),
)
@settings(max_examples=60)
def test_pytorch_multiplies_matrices(m, n, k, transpose_a, transpose_b, addend, count):
    torch.manual_seed(0)
    a = torch.randn((k, m) if transpose_a else (m, k))
    b = torch.randn((n, k) if transpose_b else (k, n))
    left, right = (a.T if transpose_a else a).double(), (b.T if transpose_b else b).double()
    exact, magnitude = left @ right, left.abs() @ right.abs()
    flags = (1, 1, int(transpose_a), int(transpose_b))
    extra = torch.randn(n) if addend == "row" else torch.randn(m, n)
    if addend != "none":
        exact, magnitude = exact + extra, magnitude + extra.abs()
    results = []
    with threads(count), forced(OTHERS):
        for _ in range(2):
            out = extra.clone() if addend == "in place" else torch.full((m, n), torch.nan)
            more = [] if addend == "none" else [out if addend == "in place" else extra]
            name = "matmul" if addend == "none" else "matmul_add"
            run(name, "matmul", (m, n, k), [a, b, *more, out], flags)
            assert held_by_mkl() == 0
            results.append(out)
    assert_close(results[0], exact, magnitude)
    assert torch.equal(*results)


@needs_mkl
@given(count=st.integers(1, 9), m=extents, n=extents, k=extents, axes=st.sampled_from([0, 1, 2]))
@settings(max_examples=40)
def test_pytorch_multiplies_batches(count, m, n, k, axes):
    m, n, k = (min(x, 300) for x in (m, n, k))
    torch.manual_seed(0)
    left, right = torch.randn(count, m, k), torch.randn(count, k, n)
    a = left.transpose(1, 2).contiguous() if axes == 2 else left
    b = right.transpose(1, 2).contiguous() if axes == 1 else right
    codes = [0x021 if axes == which else 0x012 for which in (2, 1)]
    out = torch.full((count, m, n), torch.nan)
    with forced(OTHERS):
        run("batch_matmul", "batch_matmul", (count, m, n, k), [a, b, out], [*codes, 0x012])
    assert held_by_mkl() == 0
    left, right = left.double(), right.double()
    assert_close(out, left @ right, left.abs() @ right.abs())


@needs_mkl
@given(m=extents, n=extents, k=extents, layout=st.sampled_from([0, 1, 2]))
@settings(max_examples=40)
def test_what_mkl_takes_is_bounded(m, n, k, layout):
    n = min(n, 2048)
    a = torch.ones(k, m).T if layout == 2 else torch.ones(m, k)
    b = torch.ones(n, k).T if layout == 1 else torch.ones(k, n)
    for count in (1, 2):
        with threads(count), forced(OTHERS):
            size = library("relax_disc.cpu.library_bytes")(
                "matmul", tvm_ffi.Shape([4, m, n, k]), False
            )
            library("relax_disc.cpu.matmul")(
                *(tvm_ffi.from_dlpack(x) for x in (torch.ones(3, 3), torch.ones(3, 3))),
                *(1, 1, 0, 0),
                tvm_ffi.from_dlpack(torch.ones(3, 3)),
            )  # MKL holds nothing after it
            torch.mm(a, b)
            assert held_by_mkl() <= size


def both(m=96, n=80, k=1000, offset=0):
    """The same product by the entry that chooses, by ours and by PyTorch's."""
    torch.manual_seed(0)
    a = torch.randn(m * k + offset)[offset:].view(m, k)
    b, results = torch.randn(k, n), []
    for name in ("matmul", "own_matmul", "aten_matmul"):
        c = torch.empty(m, n)
        tensors = [tvm_ffi.from_dlpack(x) for x in (a, b, c)]
        library(f"relax_disc.cpu.{name}")(*tensors[:2], 1, 1, 0, 0, tensors[2])
        results.append(c)
    library("relax_disc.cpu.take_overflow")()  # of a product that rounds its operands
    return results


@needs_mkl
def test_kernels_are_told_apart_and_pinned():
    for which in (OWN, OTHERS):
        with forced(which):
            chosen, own, other = both()
        assert not torch.equal(own, other)  # else this test proves nothing
        assert torch.equal(chosen, (own, other)[which])


@needs_mkl
def test_what_pytorch_computes_otherwise_stays_ours():
    with forced(OTHERS):
        chosen, own, _ = both(offset=1)  # not at a multiple of 64 bytes
        assert torch.equal(chosen, own)
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium")
        try:
            chosen, own, _ = both()
        finally:
            torch.set_float32_matmul_precision(before)
        assert torch.equal(chosen, own)


def child(code):
    environment = {**os.environ, "RELAX_DISC_PRODUCTS": "measured"}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.split()


TABLES = """
import torch, tvm_ffi
from relax_disc.vm_builtins import native, product_choice
native.load()
product_choice.choose = lambda: None  # nothing is measured here
library = tvm_ffi.get_global_func
choose, size = (library(f"relax_disc.cpu.{x}") for x in ("choose_products", "library_bytes"))
index = library("relax_disc.cpu.product_class")(1, 96, 80, 1000, 0)
own, other = tvm_ffi.Shape([]), tvm_ffi.Shape([index])
torch.set_num_threads(2)
print(choose(2, other), choose(2, other), choose(2, own))
print(size("matmul", tvm_ffi.Shape([4, 96, 80, 1000]), False) > 0)
print(size("matmul", tvm_ffi.Shape([4, 20, 20, 20]), False) == 0)
print(size("matmul", tvm_ffi.Shape([4, 2000, 80, 1000]), False) == 0)
print(size("matmul", tvm_ffi.Shape([4, 2000, 80, 1000]), True) > 0)  # 96 rows may be counted
from tests.vm_builtins.test_product_choice import both
print(*(torch.equal(both()[0], x) for x in both()[1:]))
torch.set_num_threads(1)
print(*(torch.equal(both()[0], x) for x in both()[1:]))
print(choose(1, other))
print(*(torch.equal(both()[0], x) for x in both()[1:]))
"""


@needs_mkl
def test_a_table_holds_for_its_threads_and_its_class_and_never_changes():
    found = child(TABLES)
    assert found == [
        *("True", "True", "False"),  # set, set again, another one
        *("True", "True", "True"),  # memory of the class, and of no other...
        "True",  # ...unless its sizes are bounds
        *("False", "True"),  # PyTorch's kernel
        *("True", "False"),  # ours on other threads...
        "False",  # ...for good, once they ran
        *("True", "False"),
    ]


COUNTED = """
import torch, tvm_ffi
from torch.export import Dim
import relax_disc
from relax_disc.vm_builtins import native, product_choice
native.load()
product_choice.choose = lambda: None  # nothing is measured here
library = tvm_ffi.get_global_func
torch.set_num_threads(2)
index = library("relax_disc.cpu.product_class")(1, 30, 40, 40, 0)
library("relax_disc.cpu.choose_products")(2, tvm_ffi.Shape([index]))
torch.manual_seed(0)
model = torch.nn.Linear(40, 40, bias=False)
step = relax_disc.compile(
    model, torch.optim.SGD(model.parameters(), lr=0.1), (torch.randn(64, 40),),
    dynamic_shapes=({0: Dim("rows", min=2, max=4096)},),
    loss_fn=lambda model, x: model(x[torch.tanh(x[:, 0]) > 0.9]).square().sum(),
)
x = torch.randn(2000, 40)
x[:, 0] = 0.0
x[:30, 0] = 3.0
step(x)
print(step.plan(rows=2000).library_bytes > 0, library("relax_disc.cpu.take_overflow")() == 0)
"""


@needs_mkl
def test_rows_that_a_step_counts_may_be_few_enough_for_mkl():
    assert child(COUNTED) == ["True", "True"]


def fake(monkeypatch, cache, gains):
    """Let measurements be these; counts them."""
    calls = []

    def measure(count):
        calls.append(count)
        return Choice("p", torch.__version__, count, gains)

    monkeypatch.setenv("RELAX_DISC_CACHE", str(cache))
    monkeypatch.setattr(product_choice, "measure", measure)
    return calls


def test_the_first_measurement_of_a_machine_stays(tmp_path, monkeypatch):
    calls = fake(monkeypatch, tmp_path, {3: 1.5, 4: 1.0, 5: 0.2})
    path = product_choice.choice_path(2)
    assert path.parent == tmp_path / "products"
    assert path != product_choice.choice_path(1)
    first = product_choice.keep(path, product_choice.measure(2))
    assert first is not None and first.classes() == [3]
    later = product_choice.keep(path, Choice("p", "t", 2, {4: 9.0}))
    assert later == first == product_choice.read(path)
    assert calls == [2] and [x.name for x in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"gains": {"a": 1}}'])
def test_a_damaged_file_is_measured_again(tmp_path, content):
    path = tmp_path / "choice.json"
    path.write_text(content)
    assert product_choice.read(path) is None
    choice = Choice("p", "t", 1, {1: 2.0})
    assert product_choice.keep(path, choice) == choice
    assert json.loads(path.read_text())["gains"] == {"1": 2.0}


def test_nothing_is_chosen_where_nothing_can_be_kept(tmp_path):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "choice.json"
    assert product_choice.keep(path, Choice("p", "t", 1, {1: 2.0})) is None


def test_probes_have_classes_of_their_own():
    probes = list(product_choice.probes())
    assert len({probe.index for probe in probes}) == len(probes) > 100


def test_many_small_products_of_a_batch_are_a_class_and_large_ones_are_as_of_few():
    def index(count, side):
        return library("relax_disc.cpu.product_class")(count, side, side, side, 0)

    assert len({index(1, 32), index(8, 32), index(64, 32)}) == 3
    assert index(1, 128) != index(8, 128) == index(64, 128)
    assert index(1, 512) != index(8, 512) == index(64, 512)
    probed = {probe.index for probe in product_choice.probes()}
    assert {index(count, side) for count in (8, 64) for side in (32, 96, 128, 512)} <= probed


def test_a_measurement_covers_its_probes_and_names_the_processor(monkeypatch):
    probes = list(product_choice.probes())[:2]
    monkeypatch.setattr(product_choice, "probes", lambda: iter(probes))
    choice = product_choice.measure(torch.get_num_threads())
    assert set(choice.gains) == {probe.index for probe in probes}
    assert all(gain > 0 for gain in choice.gains.values())
    assert choice.processor in product_choice.native.processor_identity()


class Clock:
    """Timings of our kernel and PyTorch's, by threads; some are disturbed, by up to 20 times."""

    def __init__(self, monkeypatch, times, disturbed):
        self.times = times  # threads -> (ours, PyTorch's)
        self.disturbed = disturbed  # threads -> share of the timings
        self.generator = torch.Generator().manual_seed(0)
        self.rounds = 0
        probes = list(product_choice.probes())[:20]
        monkeypatch.setattr(product_choice, "probes", lambda: iter(probes))
        monkeypatch.setattr(product_choice, "_timed", self.timed)
        monkeypatch.setattr(product_choice, "_call", lambda probe, prefix: lambda: prefix)

    def timed(self, function, repeats, clock):
        count = torch.get_num_threads()
        assert (clock is time.thread_time_ns) == (count == 1)
        self.rounds += 1
        chance, factor = torch.rand(2, generator=self.generator).tolist()
        wait = 1 + (20 * factor if chance < self.disturbed[count] else factor / 50)
        return int(repeats * 1e6 * self.times[count][function() == "aten_"] * wait)


@pytest.mark.parametrize(("ours", "other"), [(100, 80), (100, 95), (100, 300), (900, 300)])
@pytest.mark.parametrize("disturbed", [0.0, 0.6])
def test_the_least_time_is_waited_for(ours, other, disturbed, monkeypatch):
    clock = Clock(monkeypatch, {2: (ours, other), 1: (ours, other)}, {2: disturbed, 1: 0.0})
    with threads(2):
        choice = product_choice.measure(2)
    assert len(choice.gains) == 20
    assert list(choice.gains.values()) == pytest.approx([ours / other] * 20, rel=0.05)
    assert clock.rounds < 20 * 40 or disturbed > 0


@pytest.mark.parametrize(("alone", "chosen"), [((100, 100), 0), ((100, 50), 20)])
def test_what_wins_by_the_wall_clock_alone_is_not_chosen(alone, chosen, monkeypatch):
    Clock(monkeypatch, {2: (900, 100), 1: alone}, {2: 1.0, 1: 0.0})
    with threads(2):
        choice = product_choice.measure(2)
        assert torch.get_num_threads() == 2
    assert len(choice.classes()) == chosen


def test_an_unknown_pin_is_refused(monkeypatch):
    monkeypatch.setenv(product_choice.VARIABLE, "mkl")
    with pytest.raises(InputMismatchError, match="own, pytorch, measured"):
        product_choice.choose()


@needs_mkl
def test_the_present_threads_decide_what_is_near_on_one(monkeypatch):
    probes = list(itertools.islice(product_choice.probes(), 5))
    wins, loses, slow, near, disturbed = probes
    answers = {
        **dict.fromkeys([(wins, 1), (loses, 1)], (2.0, True)),
        **{(wins, 2): (1.5, True), (loses, 2): (0.5, True), (slow, 1): (0.9, True)},
        **dict.fromkeys([(near, 1), (disturbed, 1)], (1.0, True)),
        **{(near, 2): (1.2, True), (disturbed, 2): (1.2, False)},
    }
    asked = []

    def gain(probe, count):
        asked.append((probe, count, torch.get_num_threads()))
        return answers[probe, count]

    monkeypatch.setattr(product_choice, "probes", lambda: iter(probes))
    monkeypatch.setattr(product_choice, "_gain", gain)
    with threads(2):
        choice = product_choice.measure(2)
    assert choice.classes() == sorted([wins.index, near.index])
    assert all(count == present for _, count, present in asked)
    assert (slow, 2) not in [each[:2] for each in asked]
