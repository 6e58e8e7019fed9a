"""Random programs with branches on two dims: eager PyTorch's at every size, or refused there."""

from __future__ import annotations

import importlib.util
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import relax_disc
from relax_disc.errors import RelaxDiscError
from tests.tiers import every

CONDITIONS = (
    *("a < b", "a <= b", "a > b", "a >= b", "a == b", "a != b", "a >= max(a, b)", "b < max(a, b)"),
    *("a > 1", "b == 1", "a + b > 6", "a < b and b > 2", "a == b or a > 3", "min(a, b) == a"),
    *("2 * a <= b", "a - b > 1", "a * b % 2 == 0"),
)
STATEMENTS = (
    "x = F.pad(x, (0, 0, 0, b - a))",
    "x = F.pad(x, (0, 0, 0, max(a, b) - a))",
    "y = F.pad(y, (0, 0, 0, max(a, b) - b))",
    "x = torch.cat([x, x.new_zeros(x.shape[0], max(a, b) - x.shape[1], 4)], 1)",
    "y = torch.cat([y, y.new_ones(y.shape[0], max(a, b) - y.shape[1], 4)], 1)",
    *("x = x[:, : min(a, b)]", "y = y[:, : min(a, b)]", "x = x[:, :b]", "y = y[:, :a]"),
    *("x = x * 2", "y = y + 1", "x, y = y, x", "x = x.clone()", "x = m.layer(x)", "pass"),
)
ENDS = (
    "return (x.sum(1) - 2 * y.sum(1)).square().mean()",
    "return x.square().mean() + y.tanh().mean()",
    "n = max(x.shape[1], y.shape[1])\n"
    "    x, y = (F.pad(t, (0, 0, 0, n - t.shape[1])) for t in (x, y))\n"
    "    return (x - y.roll(1, 1)).square().mean()",
    "n = min(x.shape[1], y.shape[1])\n"
    "    return (x[:, :n] * torch.arange(n)[:, None] - y[:, :n]).square().mean()",
)
MOST = 7


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


def program(draw: random.Random) -> str:
    """Write a loss of two sequences ``[rows, a, 4]`` and ``[rows, b, 4]``."""
    lines = ["x, y = m.layer(x), m.layer(y)", "a, b = x.shape[1], y.shape[1]"]
    for _ in range(draw.randint(1, 3)):
        lines += [f"if {draw.choice(CONDITIONS)}:", f"    {draw.choice(STATEMENTS)}"]
        if draw.random() < 0.4:
            lines += ["else:", f"    {draw.choice(STATEMENTS)}"]
        if draw.random() < 0.3:
            lines.append("a, b = x.shape[1], y.shape[1]")
    head = "import torch\nfrom torch.nn import functional as F\n\n\ndef loss(m, x, y):\n"
    return head + "".join(f"    {line}\n" for line in (*lines, draw.choice(ENDS)))


def batch(a: int, b: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(31 * a + b)
    rows = 1 + (a + b) % 2
    return tuple(torch.randn(rows, n, 4, generator=generator) for n in (a, b))  # pyright: ignore


def found(call: Any) -> Any:
    """Return what a call does, or None where its sizes do not fit."""
    try:
        return call()
    except (RuntimeError, RelaxDiscError):
        return None


@pytest.mark.parametrize("seed", every(16, range(80)))
def test_branches_on_two_dims(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    path = tmp_path / f"branches_{seed}.py"
    path.write_text(program(draw))
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    file = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(file)
    torch.manual_seed(0)
    model, example = Model(), batch(*draw.choice([(4, 7), (7, 4), (5, 5)]))
    if found(lambda: file.loss(model, *example)) is None:
        return
    rows, a, b = (Dim(name, min=1, max=MOST) for name in ("rows", "a", "b"))
    shapes = {0: rows, 1: a}, {0: rows, 1: b}
    step = found(
        lambda: relax_disc.compile(model, None, example, dynamic_shapes=shapes, loss_fn=file.loss)
    )
    for sizes in itertools.product(range(1, MOST + 1), repeat=2) if step is not None else ():
        given = batch(*sizes)
        model.zero_grad()
        loss = found(lambda given=given: step(*given, update=False))
        expected = found(lambda given=given: file.loss(model, *given))
        if loss is None or expected is None:
            continue
        gradients = torch.autograd.grad(expected, list(model.parameters()))
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-5, equal_nan=True)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(
                parameter.grad, gradient, rtol=1e-3, atol=1e-4, equal_nan=True
            )
