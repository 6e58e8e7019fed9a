"""A loop of accelerate
====================

accelerate prepares data, schedule and checkpoints; the compiled step stands in for forward,
``accelerator.backward`` and ``optimizer.step()``.  One process, one device.

    python tutorials/accelerate_loop.py
"""  # noqa: D205, D400

from __future__ import annotations

import tempfile
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.export import Dim
from torch.utils.data import DataLoader, TensorDataset

import relax_disc

SUMMED = 2
"""Batches of an update."""


def train(compiled: bool) -> tuple[list[float], Tensor]:
    """Train a small net; the losses, and its first weights in the end."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    x = torch.randn(70, 8)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=SUMMED)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model, optimizer, loader, schedule = accelerator.prepare(
        net,
        optimizer,
        DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16),  # the last has 6
        torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=10),
    )

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(model(x), y)

    step: Any = None
    if compiled:
        rows = {0: Dim("rows", min=1, max=64)}
        step = relax_disc.compile(
            model,
            optimizer,
            (x[:4], x[:4, :1]),
            dynamic_shapes=(rows, rows),
            # A compiled step sums: accelerate's backward() divides, here the loss does.
            loss_fn=lambda model, x, y: loss_of(model, x, y) / SUMMED,
        )
    losses = []
    for _ in range(3):
        for x, y in loader:
            with accelerator.accumulate(model):
                if compiled:
                    loss = SUMMED * step(x, y, update=accelerator.sync_gradients)
                else:
                    loss = loss_of(model, x, y)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                schedule.step()
            losses.append(loss.item())
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)  # model, optimizer and schedule, as ever
        accelerator.load_state(folder)
    return losses, net[0].weight.detach()


theirs, ours = train(compiled=False), train(compiled=True)
print("eager   ", *(f"{loss:.4f}" for loss in theirs[0][::5]))
print("compiled", *(f"{loss:.4f}" for loss in ours[0][::5]))
torch.testing.assert_close(torch.tensor(ours[0]), torch.tensor(theirs[0]), rtol=1e-4, atol=1e-6)
torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-5)
print("losses and weights are the same within rounding")
