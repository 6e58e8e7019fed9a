"""How far gradients move where batch norms only add up in another order: PyTorch beside PyTorch.

`python -m benchmarks.models.rounding` takes a step of a model with each of many weights and
batches, its batch norms as PyTorch has them and written with sums in float32 by so many threads of
a block, each in turns, then in pairs.  The errors against float64 say what a difference between two
right programs can be, at shapes where batch norms amplify the last digits.
"""

from __future__ import annotations

import copy
import math
import statistics
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn import functional

from benchmarks.models.catalogue import entry_named
from benchmarks.models.numerics import reference, relative_error
from benchmarks.record import write_result

THREADS = (64, 256)
"""Along the rows of sums down columns, where a thread has one column, and four."""


def total(x: Tensor, threads: int) -> Tensor:
    """Add up all but the second axis in float32: each thread in turns, then threads in pairs."""
    rows = x.movedim(1, 0).flatten(1)
    padded = functional.pad(rows, (0, -rows.shape[1] % threads)).unflatten(1, (-1, threads))
    own = torch.zeros_like(padded[:, 0])
    for turn in range(padded.shape[1]):
        own = own + padded[:, turn]
    while own.shape[1] > 1:
        own = own[:, : own.shape[1] // 2] + own[:, own.shape[1] // 2 :]
    return own[:, 0].view(1, -1, *[1] * (x.dim() - 2))


class Normalized(torch.autograd.Function):
    """The arithmetic of `relax_disc.frontend.converters.normalization`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, threads: int) -> Any:
        """Normalise by the batch's mean and deviation."""
        shape = 1, -1, *[1] * (x.dim() - 2)
        count = x.numel() // x.shape[1]
        centred = x - total(x, threads) / count
        rstd = torch.rsqrt(total(centred * centred, threads) / count + eps)
        ctx.save_for_backward(centred, rstd, weight.view(shape))
        ctx.count, ctx.threads = count, threads
        return centred * rstd * weight.view(shape) + bias.view(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gradients of the input, the weight and the bias."""
        (grad,), (centred, rstd, weight) = grads, ctx.saved_tensors
        of_bias, dot = total(grad, ctx.threads), total(grad * centred, ctx.threads)
        tilted = grad - centred * (dot / ctx.count * (rstd * rstd))
        moved = (tilted - of_bias / ctx.count) * (rstd * weight)
        return moved, (dot * rstd).flatten(), of_bias.flatten(), None, None


def errors(name: str, sizes: tuple[int, ...], seed: int) -> dict[str, float]:
    """Return the gradients' relative errors, PyTorch's own and by the number of threads."""
    entry = entry_named(name)
    torch.manual_seed(seed)
    model = entry.make().train()
    batch = dict(entry.batch(*sizes))
    exact = reference(model, batch, torch.float64).gradients
    own = reference(model, batch, torch.float32).gradients
    found = {"torch": relative_error(own, exact)}
    original = functional.batch_norm
    for threads in THREADS:

        def ours(x: Tensor, _m: Any, _v: Any, *rest: Any, threads: int = threads) -> Tensor:
            weight, bias, is_training, _momentum, eps = rest
            assert is_training
            return Normalized.apply(x, weight, bias, eps, threads)  # pyright: ignore

        functional.batch_norm = ours
        try:
            other = reference(copy.deepcopy(model), batch, torch.float32).gradients
        finally:
            functional.batch_norm = original
        found[f"{threads} threads"] = relative_error(other, exact)
    return found


def main(
    model: str = "timm mobilenetv3_small_050",
    sizes: Annotated[str, typer.Option(help="One shape, such as 2,2,2.")] = "2,2,2",
    seeds: int = 60,
) -> None:
    """Measure, print and record."""
    torch.set_num_threads(1)
    shape = tuple(map(int, sizes.split(",")))
    rows = [errors(model, shape, seed) for seed in range(seeds)]
    results: list[dict[str, Any]] = []
    for way in rows[0]:
        ratios = [row[way] / row["torch"] for row in rows]
        results.append(
            {
                "sums": way,
                "error": math.exp(statistics.fmean(math.log(row[way]) for row in rows)),
                "ratio": math.exp(statistics.fmean(map(math.log, ratios))),
                "most": max(ratios),
                "beyond_2": sum(ratio > 2 for ratio in ratios),
            }
        )
        print(results[-1], flush=True)
    write_result("batch_norm_rounding", {"model": model, "sizes": sizes, "seeds": seeds}, results)


if __name__ == "__main__":
    typer.run(main)
