"""Sizes compared without being known
==================================

A training step is compiled once for all shapes, so its sizes are expressions: `4*batch*seq**2`.
The shape graph finds out which of them are equal, writes all of them in the fewest dims, and
compares them: proved over every shape in the declared ranges, or refuted with two shapes.

    python tutorials/shape_graph.py
"""  # noqa: D205, D400

# TVMScript writes calls where Python has types.
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from relax_disc.analysis import Order, SymbolicShapeGraph
from relax_disc.errors import GraphError
from relax_disc.frontend import capture_step

# %%
# What operators say about sizes
# ------------------------------
# Two dims come in, and nobody says how they are related.  A reshape does: it keeps the number of
# elements, so `S0` is `12*S1`, and every size that mentions `S0` is rewritten.


@I.ir_module
class Rows:
    """A vector seen as 12 rows, and spread over 1024 columns."""

    @R.function
    def main(x: R.Tensor(("S0",), "float32"), y: R.Tensor(("S1", 11008), "float32")) -> R.Tensor(
        ("S0", 1024), "float32"
    ):
        S0, S1 = T.int64(), T.int64()
        with R.dataflow():
            rows = R.reshape(x, (12, S1))
            column = R.reshape(x, (S0, 1))
            wide = R.broadcast_to(column, (S0, 1024))
            R.output(rows, wide)
        return wide


graph = SymbolicShapeGraph.from_module(Rows)
print(graph)
answer = graph.compare("11008*S1", "1024*S0")
print(f"11008*S1 {answer.order.value} 1024*S0, which is {graph.canonical('1024*S0')}")
assert answer.order is Order.LESS

# %%
# A training step
# ---------------
# A small attention model with two dims.  The step below holds its forward pass, its gradients and
# the optimizer's update; all sizes come down to the two dims that were declared.


class Reader(nn.Module):
    """One attention block over token embeddings, with the loss inside."""

    def __init__(self, vocabulary: int = 512, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.table = nn.Embedding(vocabulary, width)
        self.mix = nn.Linear(width, 3 * width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of the next tokens."""
        x = self.table(ids)
        batch, seq, width = x.shape
        q, k, v = (
            part.view(batch, seq, self.heads, width // self.heads).transpose(1, 2)
            for part in self.mix(x).chunk(3, dim=-1)
        )
        scores = torch.softmax(q @ k.transpose(-1, -2) / 4, dim=-1)
        x = x + (scores @ v).transpose(1, 2).reshape(batch, seq, width)
        logits = self.head(x)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


torch.manual_seed(0)
model = Reader()
ids = torch.randint(0, 512, (3, 17))
batch, seq = Dim("batch", min=1, max=64), Dim("seq", min=2, max=4096)
shapes = ({0: batch, 1: seq}, {0: batch, 1: seq})
captured = capture_step(
    model, torch.optim.AdamW(model.parameters()), (ids, ids), dynamic_shapes=shapes
)
graph = SymbolicShapeGraph.from_module(captured.module)
print(f"\n{graph}\n")

# %%
# The sizes that occur, and how many values have each of them.

sizes: dict[str, list[str]] = {}
for block in captured.module["main"].body.blocks:
    for binding in block.bindings:
        size = str(graph.bytes(binding.var))
        sizes.setdefault(size, []).append(binding.var.name)
print(f"{'bytes':>28}  values  first of them")
for size, names in sorted(sizes.items(), key=lambda item: -len(item[1]))[:12]:
    print(f"{size:>28}  {len(names):6}  {names[0]}")

# %%
# Which is larger?
# ----------------
# Attention scores grow with the square of the length, logits with the vocabulary.  Neither is
# always larger, and the answer says at which shapes: that is why what to give up has to be decided
# when the shape is known.  Other pairs have one order at every shape, and that needs no decision.

scores, logits, hidden = "4*4*batch*seq**2", "4*512*batch*seq", "4*64*batch*seq"
for name, left, right in (
    ("hidden and logits", hidden, logits),
    ("scores and logits", scores, logits),
    ("a padded and an exact length", "(seq + 63) // 64 * 64", "seq"),
    ("scores and a cubic bound", scores, "8*batch*seq**3"),
):
    answer = graph.compare(left, right)
    print(f"{name}: {left} {answer.order.value} {right}")
    if answer.order is Order.INCOMPARABLE:
        for word, shape in (("less", answer.witness_less), ("more", answer.witness_greater)):
            print(f"    {word} at {shape}")

# %%
# Sizes that contradict
# ---------------------
# A shape that can never be is found here, with the binding that asks for it, not in a kernel.


@I.ir_module
class Torn:
    """Rows of 12 and rows of 8 out of a length that is neither."""

    @R.function
    def main(x: R.Tensor(("n",), "float32")) -> R.Tensor((12, "n // 12"), "float32"):
        R.func_attr({"relax_disc.dims": {"n": [25, 35, 1]}})
        return R.reshape(x, (12, -1))


try:
    SymbolicShapeGraph.from_module(Torn)
except GraphError as error:
    print(f"\nrefused: {error}")
