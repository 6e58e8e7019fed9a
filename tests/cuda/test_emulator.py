"""The emulator reports each defect of a hand-written kernel, with its line; of right ones none."""

from __future__ import annotations

import shutil

import pytest
import torch

from tests.cuda.emulator import Emulator

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

# Two rows of 64 numbers are reversed through shared memory.
REVERSE = """
extern "C" __global__ void reverse(float* out, float* x, int64_t n) {
  __shared__ float row[64];
  int64_t first = ((int64_t)blockIdx.x) * 64;
  row[threadIdx.x] = x[first + threadIdx.x];
  __syncthreads();
  out[first + threadIdx.x] = row[63 - threadIdx.x];
}
"""

# A warp adds 32 numbers, four for each of eight lanes by a vector load.
SUM = """
extern "C" __global__ void sum(float* out, float* x, int64_t n) {
  float total[1];
  float4 v = *(float4*)(x + (threadIdx.x * 4));
  total[0] = ((v.x + v.y) + (v.z + v.w));
  for (int offset = 4; offset > 0; offset /= 2) {
    total[0] = total[0] + __shfl_down_sync(__activemask(), total[0], offset, 32);
  }
  if (threadIdx.x == 0) {
    out[0] = total[0];
  }
}
"""


@pytest.fixture
def emulator():
    emulator = Emulator.load()
    emulator.take_findings()
    yield emulator
    emulator.take_findings()


def run(emulator, source, *, grid=2, block=64, size=128):
    x = torch.arange(size, dtype=torch.float32)
    out = torch.full_like(x, -1.0)
    (kernel,) = emulator.add_source(source).values()
    kernel(grid, block, out, x, size)
    return out, emulator.take_findings()


@pytest.mark.parametrize("seed", range(5))
def test_a_right_kernel_computes_and_nothing_is_found(emulator, seed):
    emulator.seed = seed
    out, found = run(emulator, REVERSE)
    assert not found
    assert torch.equal(out, torch.arange(128.0).view(2, 64).flip(1).flatten())
    out, found = run(emulator, SUM, grid=1, block=8)
    assert not found
    assert out[0] == sum(range(32))


DEFECTS = {
    "race": (REVERSE.replace("  __syncthreads();\n", ""), "out[first + threadIdx.x]", {}),
    "uninitialised shared memory": (
        REVERSE.replace("  row[threadIdx.x] =", "  if (threadIdx.x != 7) row[threadIdx.x] ="),
        "out[first + threadIdx.x]",
        {},
    ),
    "out of bounds": (REVERSE.replace("out[first", "out[first + 1"), "out[first", {}),
    "race between blocks": (REVERSE.replace("out[first +", "out["), "out[", {}),
    "divergent barrier": (
        REVERSE.replace("  __syncthreads();", "  if (threadIdx.x < 40) __syncthreads();"),
        "if (threadIdx.x < 40)",
        {},
    ),
    "barriers on two lines": (
        REVERSE.replace(
            "  __syncthreads();",
            "  if (threadIdx.x < 40) {\n__syncthreads();\n} else {\n__syncthreads();\n}",
        ),
        "__syncthreads();",
        {},
    ),
    "shuffle among lanes that are no power of two": (SUM, "total[0] = total[0]", {"block": 6}),
    "divergent shuffle": (SUM.replace("__activemask()", "15"), "total[0] = total[0]", {"block": 8}),
    "misaligned": (SUM.replace("threadIdx.x * 4", "threadIdx.x * 4 + 1"), "float4 v", {"block": 8}),
    "out of bounds of a vector": (SUM, "float4 v", {"block": 8, "size": 30}),
    "race of vectors": (
        SUM.replace("if (threadIdx.x == 0) {", "*(float4*)(out + (threadIdx.x / 2 * 4)) = v; {"),
        "*(float4*)(out",
        {"block": 8},
    ),
    "out of bounds of shared memory": (
        REVERSE.replace("row[63 -", "row[64 -"),
        "out[first + threadIdx.x]",
        {},
    ),
    "hang": (
        SUM.replace(
            "total[0] = total[0] +", "if (threadIdx.x < 4) __syncthreads(); else total[0] ="
        ).replace("__activemask()", "255"),
        "",
        {"block": 8},
    ),
    "a mask of lanes that have ended": (
        SUM.replace("total[0] = total[0] +", "if (threadIdx.x == 0) total[0] = total[0] +").replace(
            "__activemask()", "255"
        ),
        "if (threadIdx.x == 0)",
        {"block": 8},
    ),
    "launch that no device takes": (REVERSE, "", {"block": 1025}),
}
_SAME_WHAT = {
    "race between blocks": "race",
    "barriers on two lines": "divergent barrier",
    "a mask of lanes that have ended": "divergent shuffle",
    "out of bounds of shared memory": "out of bounds",
    "out of bounds of a vector": "out of bounds",
    "race of vectors": "race",
}


@pytest.mark.parametrize("what", DEFECTS)
def test_a_defect_is_named_with_its_line(emulator, what):
    source, text, options = DEFECTS[what]
    options = {"grid": 1 if "block" in options else 2, **options}
    _, found = run(emulator, source, **options)
    reported = [f for f in found if f.what == _SAME_WHAT.get(what, what)]
    assert reported, [str(f) for f in found]
    assert any(f.text.startswith(text) for f in reported), [str(f) for f in reported]


def test_atomics_do_not_race_but_a_plain_write_beside_them_does(emulator):
    count = """
extern "C" __global__ void count(float* out, float* x, int64_t n) {
  atomicAdd(&(out[0]), x[threadIdx.x]);
}
"""
    out, found = run(emulator, count)
    assert not found
    assert out[0] == 2 * sum(range(64)) - 1
    _, found = run(
        emulator,
        count.replace("atomicAdd(&(out[0]), x", "out[0] = (out[0] + x").replace("]);", "]);"),
    )
    assert {f.what for f in found} == {"race"}


def test_shared_memory_of_a_type_of_two_words(emulator):
    source = REVERSE.replace("float row[64]", "signed char row[64]").replace(
        "= x[first", "= (signed char)x[first"
    )
    out, found = run(emulator, source)
    assert not found
    assert out[:64].tolist() == list(range(63, -1, -1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats_round_as_torch_does(emulator, dtype):
    name = {torch.bfloat16: "nv_bfloat16", torch.float16: "half"}[dtype]
    source = f"""
extern "C" __global__ void scale({name}* out, {name}* x, int64_t n) {{
  out[threadIdx.x] = ((x[threadIdx.x] * x[threadIdx.x]) + {name}(0.1f));
}}
"""
    torch.manual_seed(0)
    x = (torch.randn(64) * 30).to(dtype)
    out = torch.zeros_like(x)
    emulator.add_source(source)["scale"](1, 64, out, x, 64)
    assert not emulator.take_findings()
    assert torch.equal(out, x * x + torch.tensor(0.1, dtype=dtype))


def test_sectors_are_counted_once_a_block(emulator):
    """Rows of 64 floats are 8 sectors; each thread of a column walk touches a sector of its own."""
    columns = """
extern "C" __global__ void columns(float* out, float* x, int64_t n) {
  out[((int64_t)threadIdx.x) * 16 + ((int64_t)blockIdx.x)] = x[threadIdx.x];
}
"""
    out, x = torch.zeros(1024), torch.zeros(64)
    emulator.add_source(columns)["columns"](16, 64, out, x, 64)
    assert not emulator.take_findings()
    traffic = emulator.calls[-1].traffic
    assert (traffic["argument 0"].written, traffic["argument 0"].least_written) == (16 * 64, 128)
    assert (traffic["argument 1"].read, traffic["argument 1"].least_read) == (16 * 8, 8)
