"""The Llamas of the suite, and the ways of training them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor
from torch.export import Dim
from torch.utils.checkpoint import checkpoint

import relax_disc
from benchmarks.gpu.device import Device
from benchmarks.training.batches import LONGEST, VOCABULARY, make_batch
from tutorials._llama import Llama, LlamaSizes

# Four layers of Llama-2-7B's dimensions, the paper's model; and small ones for checks.
PAPER = LlamaSizes(
    vocabulary=VOCABULARY, layers=4, hidden=4096, heads=32, feed_forward=11008, longest=LONGEST
)
MIDDLE = LlamaSizes(
    vocabulary=VOCABULARY, layers=4, hidden=512, heads=8, feed_forward=1376, longest=LONGEST
)
TINY = LlamaSizes(vocabulary=97, layers=2, hidden=32, heads=2, feed_forward=64, longest=LONGEST)

WAYS = (
    "relax_disc",
    "relax_disc:graphs",
    "eager",
    "checkpoint",
    "compile",
    "compile:0.5",
    "compile:0.3",
)
Step = Callable[[Tensor, Tensor], Tensor]


def make_model(sizes: LlamaSizes, device: Device, *, seed: int = 0) -> Llama:
    """Make a model on the device, with the same weights for the same seed."""
    torch.manual_seed(seed)
    with torch.device(device.kind):  # a billion numbers take long to draw on a host
        return Llama(sizes)


def batch_of(lengths: list[int], device: Device, sizes: LlamaSizes) -> tuple[Tensor, Tensor]:
    """Make ids and labels of these lengths, within the vocabulary."""
    ids, labels = make_batch([min(length, LONGEST) for length in lengths], seed=sum(lengths))
    small = labels.remainder(sizes.vocabulary)
    return device.place((ids % sizes.vocabulary, torch.where(labels < 0, labels, small)))


def compiled(
    model: Llama,
    optimizer: torch.optim.Optimizer,
    device: Device,
    *,
    autocast: bool = False,
    graphs: bool = False,
) -> relax_disc.TrainingStep:
    """Compile the step for all batches up to 64 and lengths up to the longest.

    ``graphs``: in CUDA graphs, where the device has them.
    """
    shape = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=1, max=LONGEST)}

    def loss(model: Llama, ids: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(device.kind, torch.bfloat16, enabled=autocast):
            return model(ids, labels)

    return relax_disc.compile(
        model,
        optimizer,
        batch_of([24, 16, 5], device, model.sizes),
        dynamic_shapes=(shape, shape),
        loss_fn=loss,
        target=device.target,
        cuda_graphs=graphs and device.target != "llvm",
    )


def way_of_training(
    name: str, model: Llama, optimizer: torch.optim.Optimizer, device: Device, *, autocast: bool
) -> Any:
    """Return a function of a batch that takes one step and returns the loss."""
    kind, _, budget = name.partition(":")
    if kind == "relax_disc":
        graphs = budget == "graphs"
        return compiled(model, optimizer, device, autocast=autocast, graphs=graphs)
    if kind == "checkpoint":
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    # Else a model of the same class runs what was compiled before, under another budget.
    torch.compiler.reset()
    functorch_config.activation_memory_budget = float(budget or 1.0)
    run: Any = torch.compile(model, dynamic=True) if kind == "compile" else model

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(device.kind, torch.bfloat16, enabled=autocast):
            loss = run(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
