"""Products of float32 on matrix tiles, in a process of their own."""

import os
import subprocess
import sys

import pytest

from relax_disc.vm_builtins import native

pytestmark = pytest.mark.skipif(
    not {"amx_tile", "amx_bf16"} <= native.processor_flags(),
    reason="the processor has no matrix tiles of bfloat16",
)

SETUP = """
import itertools, math
import torch, tvm_ffi
from relax_disc.vm_builtins import native
native.load()
library = lambda name: tvm_ffi.get_global_func(f"relax_disc.cpu.{name}")
assert library("has_matrix_tiles")()
torch.manual_seed(0)

def product(a, b, transpose_a, transpose_b, *addend):
    if transpose_a:
        a = a.t().contiguous()
    if transpose_b:
        b = b.t().contiguous()
    shape = a.shape[1 if transpose_a else 0], b.shape[0 if transpose_b else 1]
    c = torch.full(shape, math.nan)
    a, b, *addend = (tvm_ffi.from_dlpack(x) for x in (a, b, *addend))
    name = "own_matmul_add" if addend else "own_matmul"
    library(name)(a, b, *addend, 1, 1, transpose_a, transpose_b, tvm_ffi.from_dlpack(c))
    return c

layouts = list(itertools.product((0, 1), (0, 1)))
"""

# Whole and partial tiles; one, two and three depth blocks; columns of B at once and in blocks.
ERRORS = """
sizes = [(64, 256, 64), (65, 257, 67), (100, 100, 129), (128, 128, 1537), (200, 97, 2051),
         (99, 70, 2000), (64, 64, 32000), (513, 1023, 700), (70, 2500, 2100)]
for m, n, k in sizes:
    a, b = torch.randn(m, k), torch.randn(k, n)
    for addend in ([], [torch.randn(m, n)], [torch.randn(n)]):
        exact = a.double() @ b.double() + sum(x.double() for x in addend)
        theirs = ((a @ b + sum(addend)).double() - exact).norm()
        for layout in layouts:
            error = (product(a, b, *layout, *addend).double() - exact).norm()
            assert error < theirs, (m, n, k, layout, error / theirs)
"""

THREADS = """
a, b = torch.randn(333, 1111), torch.randn(1111, 222)
results = []
for threads in (1, 2, 5):
    torch.set_num_threads(threads)
    results.append([product(a, b, *layout) for layout in layouts])
assert all(torch.equal(x, results[0][0]) for row in results for x in row)
"""

# The largest numbers round to infinity in bfloat16 and are none.
NO_PARTS = """
for m, n, k in [(100, 100, 129), (300, 600, 1100)]:
    a, b = torch.randn(m, k), torch.randn(k, n)
    a[3, 7], a[40, 5], a[50, 1], a[60, 4] = math.inf, -math.inf, math.nan, math.inf
    a[70, 3], b[3, 5], b[4, :], b[9, 33] = 3.4028e38, 0.5, 0, math.inf
    b[3, :].clamp_(-0.9, 0.9)
    expected = a @ b
    assert expected.isnan().any() and expected.isinf().any()
    for layout in layouts:
        c = product(a, b, *layout)
        torch.testing.assert_close(c, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
"""


@pytest.mark.parametrize(
    "code", [ERRORS, THREADS, NO_PARTS], ids=["errors", "threads", "infinities"]
)
def test_products(code):
    found = subprocess.run(
        [sys.executable, "-c", SETUP + code],
        env={**os.environ, "RELAX_DISC_AMX": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr


def test_they_can_be_forbidden():
    environment = {**os.environ, "RELAX_DISC_AMX": "0"}
    code = SETUP.replace("assert library", "assert not library")
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
