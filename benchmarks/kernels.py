"""Library kernels of the CPU next to PyTorch's own, interleaved call by call.

    python -m benchmarks.kernels [--threads 2] [--rounds 30] [--only lstm,gru]

The shapes are those of a Llama step (shared/peers, sizes S and M: hidden 256 and 512) at batch 4,
of GPT-2, BERT, ViT and MLP-Mixer, and of tagging and speech for recurrent layers and CTC.  Products
are our kernel against PyTorch's on the same memory, whichever `product_choice.py` takes.
Each round calls both; figures are medians over the rounds, the ratio that of paired calls with its
quartiles. Below 1 is faster than PyTorch.  Times are of the processor with one thread, which other
processes disturb less, else of the clock.  Memory is what a call holds at most beside its operands,
results included: ours by what plans count, PyTorch's by what malloc gave.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import tvm_ffi
import typer

from benchmarks.malloc_counter import MallocCounter, preload_environment
from benchmarks.record import write_result
from relax_disc.ops.recurrence_steps import KINDS
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
    ours_bytes: int | None = None
    """Results and workspace, where memory is compared."""


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
    ours_bytes: int | None
    theirs_bytes: int | None


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


def _product(
    name: str, m: int, n: int, k: int, transpose_a: bool, transpose_b: bool, bias: bool = False
) -> Pair:
    a = torch.randn(k, m) if transpose_a else torch.randn(m, k)
    b = torch.randn(n, k) if transpose_b else torch.randn(k, n)
    operands = _tensors(a, b, *((torch.randn(n),) if bias else ()))
    flags = (1, 1, int(transpose_a), int(transpose_b))
    kind = "matmul_add" if bias else "matmul"
    ours, theirs = _library(f"own_{kind}"), _library(f"aten_{kind}")
    (result,) = _tensors(torch.empty(m, n))
    return Pair(
        name,
        2.0 * m * n * k,
        lambda: ours(*operands, *flags, result),
        lambda: theirs(*operands, *flags, result),
    )


def _linear(label: str, tokens: int, depth: int, width: int, stored: bool) -> Iterator[Pair]:
    """A linear layer with bias and its gradients; `stored`: as [depth, width], else transposed."""
    yield _product(f"{label} forward", tokens, width, depth, False, not stored, bias=True)
    of_weight = (depth, width) if stored else (width, depth)
    yield _product(f"{label} by weight", *of_weight, tokens, True, False)
    yield _product(f"{label} by input", tokens, depth, width, False, stored)


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


def other_products() -> Iterator[Pair]:
    """Layers of GPT-2 and BERT (base, batch 4 of 128), ViT (tiny, batch 4), MLP-Mixer (S/16)."""
    for name, depth, width in (("qkv", 768, 2304), ("out", 768, 768), ("up", 768, 3072)):
        yield from _linear(f"GPT-2 {name} 512", 512, depth, width, stored=True)
    for name, depth, width in (("out", 768, 768), ("up", 768, 3072), ("down", 3072, 768)):
        yield from _linear(f"BERT {name} 512", 512, depth, width, stored=False)
    for name, depth, width in (("qkv", 192, 576), ("up", 192, 768), ("down", 768, 192)):
        yield from _linear(f"ViT {name} 788", 788, depth, width, stored=False)
    for name, rows, depth, width in (("tokens", 2048, 196, 256), ("channels", 784, 512, 2048)):
        yield from _linear(f"Mixer {name} {rows}", rows, depth, width, stored=False)
    for rows in (1, 8):
        yield from _linear(f"classes {rows}", rows, 512, 1000, stored=False)


def head_products() -> Iterator[Pair]:
    """Attention's products as they are without a kernel for it, of heads of 64."""
    for count, length in ((48, 128), (12, 512)):
        shapes = {
            "scores": ((length, length, 64), 1),
            "values": ((length, 64, length), 0),
            "by values": ((length, 64, length), 2),
        }
        for name, ((m, n, k), operands) in shapes.items():
            a = torch.randn(count, *((k, m) if operands == 2 else (m, k)))
            b = torch.randn(count, *((n, k) if operands == 1 else (k, n)))
            tensors = _tensors(a, b, torch.empty(count, m, n))
            axes = tuple(0x021 if operands == which else 0x012 for which in (2, 1))
            ours, theirs = _library("own_batch_matmul"), _library("aten_batch_matmul")
            yield Pair(
                f"heads {name} {count} x {length}",
                2.0 * count * m * n * k,
                lambda f=ours, x=tensors, axes=axes: f(x[0], x[1], *axes, 0x012, x[2]),
                lambda f=theirs, x=tensors, axes=axes: f(x[0], x[1], *axes, 0x012, x[2]),
            )


def ctc(steps: int, count: int, classes: int, labels: int) -> Iterator[Pair]:
    """CTC of a batch of utterances and its gradient."""
    probs = torch.randn(steps, count, classes).log_softmax(-1)
    targets = torch.randint(1, classes, (count, labels))
    inputs, goals = torch.full((count,), steps), torch.full((count,), labels)
    loss, alpha = torch.empty(count), torch.empty(count, steps, 2 * labels + 1)
    grad, out = torch.ones(count), torch.empty_like(probs)
    operands = _tensors(probs, targets, inputs, goals)
    results = _tensors(loss, alpha)
    forward, backward = _library("ctc_loss"), _library("ctc_loss_backward")
    forward(*operands, 0, *results)
    label = f"{steps} x {count} x {classes}, {labels} labels"
    lengths = inputs.tolist(), goals.tolist()
    aten = torch.ops.aten
    yield Pair(
        f"CTC {label}",
        0.0,
        lambda: forward(*operands, 0, *results),
        lambda: aten._ctc_loss(probs, targets, *lengths, 0),
        _bytes(loss, alpha),
    )
    known = aten._ctc_loss(probs, targets, *lengths, 0)
    gradient, target = _tensors(grad, out)
    yield Pair(
        f"CTC gradient {label}",
        0.0,
        lambda: backward(gradient, *operands, *results, 0, target),
        lambda: aten._ctc_loss_backward(grad, probs, targets, *lengths, *known, 0),
        _bytes(out) + _workspace("ctc_loss_backward", 4, labels),
    )


def layer(kind: str, length: int, batch: int, width: int) -> Iterator[Pair]:
    """A recurrent layer and its gradient, products of all steps included."""
    counts = KINDS[kind]
    module: Any = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[kind](width, width)
    weight_x, weight_h, bias_x, bias_h = (p.detach() for p in module.parameters())
    x = torch.randn(length, batch, width)
    state = torch.zeros(counts.states, batch, width)

    def empty(parts: int) -> torch.Tensor:
        return torch.empty(length, batch, parts * width)

    projected, out, reserve = (empty(n) for n in (counts.gates, 1, counts.reserve))
    last, gradients, dx = torch.empty_like(state), empty(counts.gradients), empty(1)
    grad_out, grad_last = torch.ones_like(out), torch.zeros_like(state)
    before = torch.cat([state[:1], out[:-1]])
    dw = torch.empty_like(weight_x)
    flags = (tuple(KINDS).index(kind), 0, 0)
    recur, recur_back = _library("recurrence"), _library("recurrence_backward")
    product, sum_ = _library("matmul"), _library("matmul_add")
    gates = slice(0, counts.gates * width)
    of_x = gradients[..., gates].contiguous()  # as wide as what a GRU's projection gets
    (tx, twx, tbx, tproj, tstate, twh, tbh, tout, tlast, treserve, tgo, tgl, tgrad, tgx, tdx) = (
        _tensors(
            *(x, weight_x, bias_x, projected, state, weight_h, bias_h, out, last, reserve),
            *(grad_out, grad_last, gradients, of_x, dx),
        )
    )
    tbefore, tdw = _tensors(before, dw)
    dstate = torch.empty_like(state)
    tdstate = tvm_ffi.from_dlpack(dstate)

    def ours() -> None:
        sum_(tx, twx, tbx, 2, 1, 0, 1, tproj)
        recur(tproj, tstate, twh, tbh, *flags, tout, tlast, treserve)

    def ours_back() -> None:
        recur_back(tgo, tgl, tstate, twh, tout, treserve, *flags, tgrad, tdstate)
        for operand in (tx, tbefore):
            product(tgx, operand, 2, 2, 1, 0, tdw)
        product(tgx, twx, 2, 1, 0, 0, tdx)
        of_x.sum((0, 1))

    ours()
    leaf = x.clone().requires_grad_()
    result = module(leaf)[0]
    wanted = [leaf, *module.parameters()]
    flops = 4.0 * length * batch * counts.gates * width * width
    rows = counts.gates * width
    label = f"{kind.upper()} {length} x {batch} x {width}"
    yield Pair(
        label,
        flops,
        ours,
        lambda: module(leaf),
        _bytes(projected, out, reserve, last) + _workspace("recurrence", 4, batch, width, rows),
    )
    yield Pair(
        f"{label} gradient",
        2 * flops,
        ours_back,
        lambda: torch.autograd.grad(result, wanted, grad_out, retain_graph=True),
        _bytes(gradients, dx, dstate, dw, dw)
        + _workspace("recurrence_backward", 4, batch, width, rows),
    )


def _library(name: str) -> Any:
    return tvm_ffi.get_global_func(f"relax_disc.cpu.{name}")


def _tensors(*tensors: torch.Tensor) -> list[Any]:
    return [tvm_ffi.from_dlpack(x) for x in tensors]


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _workspace(formula: str, *numbers: int) -> int:
    return _library("workspace_bytes")(formula, tvm_ffi.Shape(numbers))


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
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    for i in range(rounds + 2):
        order = (0, 1) if i % 2 == 0 else (1, 0)
        for which in order:
            function = (pair.ours, pair.theirs)[which]
            function()
            start = clock()
            function()
            times[i, which] = clock() - start
    ours, theirs = times[2:].T
    low, ratio, high = np.quantile(ours / theirs, [0.25, 0.5, 0.75])
    return Row(
        pair.name,
        *(float(np.median(x)) * 1e6 for x in (ours, theirs)),
        *(float(x) for x in (ratio, low, high)),
        gflops=pair.flops / float(np.median(ours)) / 1e9,
        ours_bytes=pair.ours_bytes,
        theirs_bytes=None if pair.ours_bytes is None else _held(pair.theirs),
    )


def _held(function: Callable[[], object]) -> int:
    counter = MallocCounter()
    before = counter.live_bytes()
    counter.reset_peak()
    function()
    return counter.peak_bytes() - before


def pairs() -> Iterator[tuple[str, Callable[[], Iterator[Pair]]]]:
    """Everything that is measured, by what it is; operands are made when they are needed."""
    for size in WIDTHS:
        for tokens in TOKENS:
            yield "product", lambda size=size, tokens=tokens: matrix_products(size, tokens)
    yield "product", other_products
    yield "product", head_products
    for dim in (32, 64):
        for length in LENGTHS:
            yield "attention", lambda length=length, dim=dim: attention(length, dim)
    for size in WIDTHS:
        yield "embedding", lambda size=size: iter([embedding(TOKENS[1], WIDTHS[size][0])])
    for sizes in ((150, 8, 32, 30), (400, 4, 1000, 60)):
        yield "ctc", lambda sizes=sizes: ctc(*sizes)
    for kind in ("lstm", "gru"):
        for shape in ((64, 16, 256), (200, 8, 512), (30, 64, 128)):
            yield kind, lambda kind=kind, shape=shape: layer(kind, *shape)


def main(threads: int = 2, rounds: int = 30, only: str = "", name: str = "kernels") -> None:
    """Print the table and write it to `benchmarks/results/<name>.json`."""
    try:
        MallocCounter()
    except RuntimeError:  # once more, with the counter
        environment = {**os.environ, **preload_environment()}
        arguments = [sys.executable, "-m", "benchmarks.kernels", *sys.argv[1:]]
        os.execve(sys.executable, arguments, environment)
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    install("llvm")
    print(f"{'kernel':40}{'ours us':>10}{'torch us':>10}{'GFLOP/s':>9}   ratio [quartiles]")
    rows = []
    words: Sequence[str] = only.split(",") if only else ()
    for kind, make in pairs():
        for pair in make() if not words or kind in words else ():
            row = measure(pair, rounds)
            rows.append(row)
            held = (
                f"  {row.ours_bytes / 2**20:.2f} : {row.theirs_bytes / 2**20:.2f} MiB"
                if row.ours_bytes is not None and row.theirs_bytes is not None
                else ""
            )
            print(
                f"{row.name:40}{row.ours_us:10.0f}{row.theirs_us:10.0f}{row.gflops:9.0f}"
                f"   {row.ratio:.2f} [{row.ratio_low:.2f}, {row.ratio_high:.2f}]{held}",
                flush=True,
            )
    settings = {"threads": threads, "rounds": rounds, "only": only}
    path = write_result(name, settings, [asdict(row) for row in rows])
    print(f"written to {path}")


if __name__ == "__main__":
    typer.run(main)
