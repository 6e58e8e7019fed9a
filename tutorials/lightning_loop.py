"""A LightningModule
=================

The step is compiled without an optimizer, and leaves gradients in ``p.grad``.  All the rest stays
Lightning's own: clipping, optimizer, schedules, counting, checkpoints.  The update is then eager,
and outside the budget.

    python tutorials/lightning_loop.py
"""  # noqa: D205, D400

from __future__ import annotations

import logging
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils.data import DataLoader, TensorDataset

import relax_disc


class Eager(lightning.LightningModule):
    """A small net, as anyone writes it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
        self.losses: list[float] = []

    def configure_optimizers(self) -> Any:
        """AdamW, and a schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=3)
        return [optimizer], [schedule]

    def training_step(self, batch: Any, number: int) -> Tensor:
        """Return the loss."""
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.losses.append(loss.item())
        return loss


class Compiled(Eager):
    """The same by a compiled step: four methods of Lightning's."""

    step: relax_disc.TrainingStep | None = None

    def training_step(self, batch: Any, number: int) -> Tensor:
        """Return the loss; the gradients are in ``p.grad``."""
        # Of so many batches the gradients are a mean; a tensor, since a callback may change it.
        summed = torch.tensor(float(self.trainer.accumulate_grad_batches))
        if self.step is None:
            rows = {0: Dim("rows", min=1, max=64)}
            self.step = relax_disc.compile(
                self.net,
                None,
                (*batch, summed),
                dynamic_shapes=(rows, rows, None),
                loss_fn=lambda net, x, y, summed: nn.functional.mse_loss(net(x), y) / summed,
            )
        loss = summed * self.step(*batch, summed, update=False)
        self.losses.append(loss.item())
        return loss

    def backward(self, loss: Tensor) -> None:
        """Nothing: the step has made the gradients."""

    def optimizer_zero_grad(self, *_: Any) -> None:
        """Nothing here: Lightning calls it between loss and gradients."""

    def optimizer_step(self, *args: Any, **settings: Any) -> None:
        """Update, and drop the gradients that the update has used."""
        super().optimizer_step(*args, **settings)
        self.zero_grad()


def train(kind: type[Eager], summed: int = 1) -> Eager:
    """Fit for three epochs, ``summed`` batches an update; the last batch of each is shorter."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(1)
    x = torch.randn(70, 8)
    module = kind()
    trainer = lightning.Trainer(
        max_epochs=3,
        accumulate_grad_batches=summed,
        gradient_clip_val=1.0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(x, x.sum(1, keepdim=True))
    trainer.fit(module, DataLoader(data, batch_size=16))
    assert trainer.global_step == 3 * -(-5 // summed)
    return module


for summed in (1, 2):
    theirs, ours = train(Eager, summed), train(Compiled, summed)
    print("batches of an update:", summed)
    print("eager   ", *(f"{loss:.4f}" for loss in theirs.losses[::5]))
    print("compiled", *(f"{loss:.4f}" for loss in ours.losses[::5]))
    torch.testing.assert_close(torch.tensor(ours.losses), torch.tensor(theirs.losses))
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
print("losses and weights are the same within rounding")
