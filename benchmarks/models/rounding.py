"""How far gradients move where sums only have another order: PyTorch beside PyTorch.

`python -m benchmarks.models.rounding` takes a step of a model with each of many weights and
batches, its batch norms as PyTorch has them and written with sums in float32 by so many threads of
a block, each in turns, then in pairs; and its convolutions by PyTorch's own kernels where oneDNN
makes them.  The errors against float64 say what a difference between two right programs can be, at
shapes where batch norms amplify the last digits.  ``--after 3`` trains at the model's first three
shapes before, as a model is judged at its fourth, with weights that differ by their last digit.
"""

from __future__ import annotations

import copy
import math
import statistics
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models.catalogue import entry_named
from benchmarks.models.entry import Entry
from benchmarks.models.numerics import reference, relative_error
from benchmarks.models.worker import LEARNING_RATE
from benchmarks.record import write_result

THREADS = (64, 256)
"""Along the rows of sums down columns, where a thread has one column, and four."""

_LAST_DIGIT = 2.0**-24  # of a float32, about


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


def trained(entry: Entry, steps: int, seed: int) -> nn.Module:
    """Train as `benchmarks.models.worker` does; return a model whose last digits are a draw."""
    torch.manual_seed(seed if steps == 0 else 0)
    model = entry.make().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    for sizes in entry.sizes[:steps]:
        found = reference(model, dict(entry.batch(*sizes)), torch.float32)
        for name, parameter in model.named_parameters():
            parameter.grad = found.gradients.get(name)
        optimizer.step()
    if steps:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 1 + _LAST_DIGIT * torch.randn_like(parameter)
    return model


def errors(name: str, sizes: tuple[int, ...], steps: int, seed: int) -> dict[str, float]:
    """Return the gradients' relative errors, PyTorch's own and by the way of the sums."""
    entry = entry_named(name)
    model = trained(entry, steps, seed)
    batch = dict(entry.batch(*sizes))
    exact = reference(model, batch, torch.float64).gradients
    own = reference(model, batch, torch.float32).gradients
    found = {"torch": relative_error(own, exact)}
    with torch.backends.mkldnn.flags(enabled=False):
        other = reference(model, batch, torch.float32).gradients
    found["other convolutions"] = relative_error(other, exact)
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
    after: Annotated[int, typer.Option(help="Steps before, at the model's first shapes.")] = 0,
    record: Annotated[str, typer.Option(help="Name of the file.")] = "batch_norm_rounding",
) -> None:
    """Measure, print and record."""
    torch.set_num_threads(1)
    shape = tuple(map(int, sizes.split(",")))
    rows = [errors(model, shape, after, seed) for seed in range(seeds)]
    results: list[dict[str, Any]] = []
    for way in rows[0]:
        ratios = [row[way] / row["torch"] for row in rows]
        results.append(
            {
                "sums": way,
                "error": math.exp(statistics.fmean(math.log(row[way]) for row in rows)),
                "least_error": min(row[way] for row in rows),
                "most_error": max(row[way] for row in rows),
                "ratio": math.exp(statistics.fmean(map(math.log, ratios))),
                "least": min(ratios),
                "most": max(ratios),
                "beyond_2": sum(ratio > 2 for ratio in ratios),
            }
        )
        print(results[-1], flush=True)
    settings = {"model": model, "sizes": sizes, "seeds": seeds, "after": after}
    write_result(record, settings, results)


if __name__ == "__main__":
    typer.run(main)
