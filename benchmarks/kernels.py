"""Library kernels of the CPU next to PyTorch's own, interleaved call by call.

    python -m benchmarks.kernels [--threads 2] [--rounds 30]

The shapes are those of a Llama step (shared/peers, sizes S and M: hidden 256 and 512) at batch 4.
Each round calls both; figures are medians over the rounds, the ratio that of paired calls with its
quartiles. Below 1 is faster than PyTorch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np
import torch
import tvm_ffi
import typer

from benchmarks.record import write_result
from relax_disc.vm_builtins.libraries.install import install

TOKENS = (328, 564, 1312)  # batch 4 of lengths 82, 141 and 328
VOCABULARY = 32_000
WIDTHS = {"S": (256, 688), "M": (512, 1376)}
LENGTHS = (82, 141, 328, 512)


@dataclass(frozen=True)
class Pair:
    """One kernel and PyTorch's counterpart on the same operands."""

    name: str
    flops: float
    ours: Callable[[], object]
    theirs: Callable[[], object]


@dataclass(frozen=True)
class Row:
    """Medians of one pair."""

    name: str
    ours_us: float
    theirs_us: float
    ratio: float
    ratio_low: float
    ratio_high: float
    gflops: float


def matrix_products(size: str, tokens: int) -> Iterator[Pair]:
    """All products of a layer and of the head: forward, by weight, by input."""
    hidden, inner = WIDTHS[size]
    for name, rows, columns in (
        ("qkv", hidden, hidden),
        ("up", hidden, inner),
        ("down", inner, hidden),
        ("head", hidden, VOCABULARY),
    ):
        label = f"{size} {name} {tokens}"
        yield _product(f"{label} forward", tokens, columns, rows, False, True)
        yield _product(f"{label} by weight", columns, rows, tokens, True, False)
        yield _product(f"{label} by input", tokens, rows, columns, False, False)


def _product(name: str, m: int, n: int, k: int, transpose_a: bool, transpose_b: bool) -> Pair:
    a = torch.randn(k, m) if transpose_a else torch.randn(m, k)
    b = torch.randn(n, k) if transpose_b else torch.randn(k, n)
    ours, theirs = torch.empty(m, n), torch.empty(m, n)
    left, right = (a.T if transpose_a else a), (b.T if transpose_b else b)
    function = tvm_ffi.get_global_func("relax_disc.cpu.matmul")
    arguments = [tvm_ffi.from_dlpack(x) for x in (a, b, ours)]
    flags = (1, 1, int(transpose_a), int(transpose_b))
    return Pair(
        name,
        2.0 * m * n * k,
        lambda: function(*arguments[:2], *flags, arguments[2]),
        lambda: torch.mm(left, right, out=theirs),
    )


def attention(length: int, dim: int) -> Iterator[Pair]:
    """Causal attention of 4 x 8 heads and its gradient, stored [batch, length, heads, dim]."""
    q, k, v, grad = (torch.randn(4, length, 8, dim) for _ in range(4))
    out, lse = torch.empty_like(q), torch.empty(4, 8, length)
    grads = [torch.empty_like(q) for _ in range(3)]
    scale = dim**-0.5
    forward = tvm_ffi.get_global_func("relax_disc.cpu.attention")
    backward = tvm_ffi.get_global_func("relax_disc.cpu.attention_backward")
    operands = [tvm_ffi.from_dlpack(x) for x in (q, k, v)]
    results = [tvm_ffi.from_dlpack(x) for x in (out, lse)]
    gradient, *targets = (tvm_ffi.from_dlpack(x) for x in (grad, *grads))
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    aten = torch.ops.aten
    flops = 2.0 * 4 * 8 * length * length * dim  # half of the square, two products
    forward(*operands, scale, 1, 0b1111, *results)
    saved = aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, True, scale=scale)
    yield Pair(
        f"attention {length} x {dim}",
        flops,
        lambda: forward(*operands, scale, 1, 0b1111, *results),
        lambda: aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, True, scale=scale),
    )
    yield Pair(
        f"attention gradient {length} x {dim}",
        2.5 * flops,
        lambda: backward(gradient, *operands, *results, scale, 1, 0xFF, *targets),
        lambda: aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad.transpose(1, 2), *heads, *saved, 0.0, True, scale=scale
        ),
    )


def embedding(tokens: int, hidden: int) -> Pair:
    """Gradient of the vocabulary's table."""
    grad, ids = torch.randn(tokens, hidden), torch.randint(0, VOCABULARY, (tokens,))
    out = torch.empty(VOCABULARY, hidden)
    function = tvm_ffi.get_global_func("relax_disc.cpu.embedding_backward")
    arguments = [tvm_ffi.from_dlpack(x) for x in (grad, ids, out)]
    return Pair(
        f"embedding gradient {tokens} x {hidden}",
        0.0,
        lambda: function(*arguments[:2], -1, arguments[2]),
        lambda: torch.ops.aten.embedding_dense_backward(grad, ids, VOCABULARY, -1, False),
    )


def measure(pair: Pair, rounds: int) -> Row:
    """Call both in turn; the first two rounds warm up.

    Each is called twice and the second call timed: the first wakes its own threads and lets the
    other library's, which wait for work in a loop for a while, fall asleep.
    """
    times = np.empty((rounds + 2, 2))
    for i in range(rounds + 2):
        order = (0, 1) if i % 2 == 0 else (1, 0)
        for which in order:
            function = (pair.ours, pair.theirs)[which]
            function()
            start = time.perf_counter()
            function()
            times[i, which] = time.perf_counter() - start
    ours, theirs = times[2:].T
    low, ratio, high = np.quantile(ours / theirs, [0.25, 0.5, 0.75])
    return Row(
        pair.name,
        *(float(np.median(x)) * 1e6 for x in (ours, theirs)),
        *(float(x) for x in (ratio, low, high)),
        gflops=pair.flops / float(np.median(ours)) / 1e9,
    )


def pairs() -> Iterator[Pair]:
    """Everything that is measured."""
    for size in WIDTHS:
        for tokens in TOKENS:
            yield from matrix_products(size, tokens)
    for dim in (32, 64):
        for length in LENGTHS:
            yield from attention(length, dim)
    for size in WIDTHS:
        yield embedding(TOKENS[1], WIDTHS[size][0])


def main(threads: int = 2, rounds: int = 30) -> None:
    """Print the table and write it to `benchmarks/results/kernels.json`."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    install("llvm")
    print(f"{'kernel':34}{'ours us':>10}{'torch us':>10}{'GFLOP/s':>9}   ratio [quartiles]")
    rows = []
    for pair in pairs():
        row = measure(pair, rounds)
        rows.append(row)
        print(
            f"{row.name:34}{row.ours_us:10.0f}{row.theirs_us:10.0f}{row.gflops:9.0f}"
            f"   {row.ratio:.2f} [{row.ratio_low:.2f}, {row.ratio_high:.2f}]",
            flush=True,
        )
    path = write_result(
        "kernels", {"threads": threads, "rounds": rounds}, [asdict(row) for row in rows]
    )
    print(f"written to {path}")


if __name__ == "__main__":
    typer.run(main)
