"""The vocabulary head in chunks of rows next to the head in one piece, interleaved call by call.

    python -m benchmarks.vocabulary_head [--threads 1] [--rounds 9]

Both are the kernels of a compiled step on the same operands: loss, gradient of the input, gradient
of the weight. Ratios of processor time are taken round by round; below 1 is faster than in one
piece. Errors are those of the two gradients against float64, as a part of the largest element. The
workspace is what lives beside operands and results: all logits, or those of a chunk.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
import torch
import tvm_ffi
import typer
from tvm import relax, tirx

from benchmarks.record import write_result
from relax_disc import ops
from relax_disc.compiler import build
from relax_disc.ops.vocabulary_head import workspace_columns
from relax_disc.pipeline import PipelineOptions
from relax_disc.transform.libraries.chunk_vocabulary_head import chunk_rows
from relax_disc.vm_builtins.libraries.install import install

_IGNORED = -100
_LOSS_KERNELS = ("cross_entropy_rows", "cross_entropy_total", "fused_cross_entropy_gradient")
_OPTIONS = {"ignore_index": _IGNORED, "label_smoothing": 0.0, "reduction": "mean"}


@dataclass(frozen=True)
class Row:
    """One shape; medians over the rounds, the ratio with its quartiles."""

    width: int
    rows: int
    chunk: int
    plain_ms: float
    chunked_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float
    plain_error: float
    chunked_error: float
    plain_workspace_bytes: int
    chunked_workspace_bytes: int


class Heads:
    """Both ways of computing one head on the same operands."""

    def __init__(self, classes: int, width: int, rows: int, kernels: Any) -> None:
        generator = torch.Generator().manual_seed(rows)
        self.x = torch.randn(rows, width, generator=generator)
        self.weight = torch.randn(classes, width, generator=generator) * width**-0.5
        self.target = torch.randint(0, classes, (rows,), generator=generator)
        self.chunk = int(chunk_rows(tirx.const(rows, "int64")))
        self.workspace = torch.empty(self.chunk, workspace_columns(classes, width))
        self.logits = torch.empty(rows, classes)
        self.plain_grads = (torch.empty_like(self.x), torch.empty_like(self.weight))
        self.chunked_grads = (torch.empty_like(self.x), torch.empty_like(self.weight))
        self._rows, self._total, self._gradient = (
            kernels.get_function(name)
            for name in (
                "cross_entropy_rows",
                "cross_entropy_total",
                "fused_cross_entropy_gradient",
            )
        )
        self._matmul, self._head = (
            tvm_ffi.get_global_func(f"relax_disc.cpu.{name}")
            for name in ("matmul", "vocabulary_head")
        )
        self._operands = _passed(self.x, self.weight, self.target, torch.ones(()))
        scalars, statistics = torch.empty(2), torch.empty(2, rows)
        self._plain = _passed(self.logits, *statistics, scalars[0], scalars[1], *self.plain_grads)
        self._chunked = _passed(torch.empty(()), *self.chunked_grads, self.workspace)

    def plain(self) -> None:
        """Call the kernels of the head in one piece; the gradient is written over the logits."""
        x, weight, target, grad = self._operands
        logits, lse, losses, loss, count, grad_x, grad_weight = self._plain
        self._matmul(x, weight, 1, 1, 0, 1, logits)
        self._rows(logits, target, lse, losses)
        self._total(losses, logits, target, loss, count)
        self._gradient(lse, count, grad, logits, target, logits)
        self._matmul(logits, weight, 1, 1, 0, 0, grad_x)
        self._matmul(logits, x, 1, 1, 1, 0, grad_weight)

    def chunked(self) -> None:
        """Call the head in chunks."""
        self._head(*self._operands, _IGNORED, 0.0, 1, *self._chunked)

    def errors(self) -> tuple[float, float]:
        """Largest error of both ways' gradients, against float64."""
        x, weight = (t.double().requires_grad_() for t in (self.x, self.weight))
        torch.nn.functional.cross_entropy(x @ weight.T, self.target).backward()

        exact = [tensor.grad for tensor in (x, weight) if tensor.grad is not None]

        def largest(grads: Sequence[torch.Tensor]) -> float:
            pairs = zip(grads, exact, strict=True)
            return max(float((g - e).abs().max() / e.abs().max()) for g, e in pairs)

        return largest(self.plain_grads), largest(self.chunked_grads)


def _passed(*tensors: torch.Tensor) -> list[Any]:
    return [tvm_ffi.from_dlpack(tensor) for tensor in tensors]


def loss_kernels(classes: int, width: int) -> Any:
    """Build the head in one piece for any number of rows; the module of its kernels."""
    tensor, rows = relax.TensorType, tirx.Var("rows", "int64")
    x = relax.Var("x", tensor([rows, width], "float32"))
    weight = relax.Var("weight", tensor([classes, width], "float32"))
    target = relax.Var("target", tensor([rows], "int64"))
    grad_loss = relax.Var("grad_loss", tensor([], "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, weight, target, grad_loss]):
        with builder.dataflow():
            logits = builder.emit(relax.op.matmul(x, relax.op.permute_dims(weight)))
            whole = builder.emit(ops.cross_entropy(logits, target, **_OPTIONS))
            loss, lse, count = (builder.emit(relax.TupleGetItem(whole, i)) for i in range(3))
            gradient = builder.emit(
                ops.cross_entropy_backward(grad_loss, logits, target, lse, count, **_OPTIONS)
            )
            by_x = builder.emit(relax.op.matmul(gradient, weight))
            by_weight = builder.emit(relax.op.matmul(relax.op.permute_dims(gradient), x))
            result = builder.emit_output(relax.Tuple([loss, by_x, by_weight]))
        builder.emit_func_output(result)
    options = PipelineOptions(chunk_vocabulary_head=False, rematerialize=False, plan_arena=False)
    return build(builder.get(), "llvm", options).jit().imports[0]


def measure(classes: int, width: int, rows: int, kernels: Any, rounds: int) -> Row:
    """Call both in turn, first one then the other first; a round before warms up."""
    heads = Heads(classes, width, rows, kernels)
    times = np.empty((rounds + 1, 2))
    for i in range(rounds + 1):
        for which in (0, 1) if i % 2 == 0 else (1, 0):
            start = time.process_time()
            (heads.plain, heads.chunked)[which]()
            times[i, which] = time.process_time() - start
    plain, chunked = times[1:].T
    low, ratio, high = np.quantile(chunked / plain, [0.25, 0.5, 0.75])
    return Row(
        width,
        rows,
        heads.chunk,
        float(np.median(plain)) * 1e3,
        float(np.median(chunked)) * 1e3,
        float(ratio),
        float(low),
        float(high),
        *heads.errors(),
        plain_workspace_bytes=heads.logits.nbytes,
        chunked_workspace_bytes=heads.workspace.nbytes,
    )


def main(
    threads: Annotated[int, typer.Option(help="Of the kernels.")] = 1,
    rounds: int = 9,
    vocabulary: int = 32_000,
    widths: Annotated[str, typer.Option(help="Separated by commas.")] = "256,512",
    rows: Annotated[str, typer.Option(help="Separated by commas.")] = "128,256,512,1024,2048,4096",
    name: Annotated[str, typer.Option(help="Of the results; empty: none.")] = "vocabulary_head",
) -> None:
    """Print the table and write it to `benchmarks/results`."""
    torch.set_num_threads(threads)
    install("llvm")
    print("width  rows  chunk   plain ms  chunked ms   ratio [quartiles]     errors")
    measured = []
    for width in (int(number) for number in widths.split(",")):
        kernels = loss_kernels(vocabulary, width)
        for count in (int(number) for number in rows.split(",")):
            row = measure(vocabulary, width, count, kernels, rounds)
            measured.append(asdict(row))
            print(
                f"{row.width:5}{row.rows:6}{row.chunk:7}{row.plain_ms:11.1f}{row.chunked_ms:12.1f}"
                f"   {row.ratio:.3f} [{row.ratio_low:.3f}, {row.ratio_high:.3f}]"
                f"  {row.plain_error:.1e} {row.chunked_error:.1e}",
                flush=True,
            )
    if name:
        settings = {"threads": threads, "rounds": rounds, "vocabulary": vocabulary}
        load = {"load_average": os.getloadavg()[0]}
        print(f"written to {write_result(name, settings | load, measured)}")


if __name__ == "__main__":
    typer.run(main)
