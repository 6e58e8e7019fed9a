"""Quick start: one compilation, every shape
=========================================

A small model trains at four shapes from one program; the memory of each is known before it runs.

    python tutorials/quick_start.py
"""  # noqa: D205, D400

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim

import relax_disc

# %%
# Any model whose output is the loss, or has ``.loss``; or give ``loss_fn=``.


class Tagger(nn.Module):
    """Tell the kind of each word from the words around it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, 64)
        self.around = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.kinds = nn.Linear(64, 10)

    def forward(self, words: Tensor, kinds: Tensor) -> Tensor:
        guesses = self.kinds(self.around(self.words(words)))
        return nn.functional.cross_entropy(guesses.flatten(0, 1), kinds.flatten())


def batch(rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Make words and their kinds, int64 [rows, length]."""
    words = torch.randint(1000, (rows, length))
    return words, words % 10


# %%
# Compile the step from one batch; the ranges say which other shapes there will be.

torch.manual_seed(0)
model = Tagger()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
shape = {0: Dim("rows", min=1, max=64), 1: Dim("length", min=2, max=512)}
step = relax_disc.compile(
    model, optimizer, batch(4, 20), dynamic_shapes={"words": shape, "kinds": shape}
)

# %%
# Train.  Forward, gradients and update are one call; learning-rate schedulers, ``state_dict()`` and
# evaluation go on as ever, because the parameters are PyTorch's own.

for rows, length in [(8, 50), (3, 7), (16, 128), (8, 51)] * 5:
    loss = step(*batch(rows, length))
print(f"loss {loss.item():.3f} after 20 steps of 4 shapes")
assert loss < 2.0  # it began at 2.3

# %%
# What would a larger shape need?  Nothing runs for the answer.

print(step.plan(rows=64, length=512))
step.memory_budget = "100MiB"
print(step.plan(rows=64, length=512))
print("largest batch of length 512 in 100 MiB:", step.largest("rows", length=512))
