"""Random programs that keep state in attributes, containers and globals, and loops around them.

`run` writes a program to a file, since code without a source is compiled otherwise, and trains two
of it side by side, one compiled: losses, state and what the loop has kept agree after each step, or
the compiled one is refused with nothing written.
"""

from __future__ import annotations

import importlib.util
import random
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim
from torch.utils import _pytree as pytree

import relax_disc
from relax_disc.errors import InputMismatchError, UnsupportedOperatorError

_HEAD = """\
import types
from typing import NamedTuple

import torch
from torch import nn


class Pair(NamedTuple):
    h: torch.Tensor
    c: torch.Tensor


def new(value):
    return torch.full((1, 4), float(value))


STORE = {"g": new(0.5), "pair": (new(0.1), new(0.2))}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("f", new(0.3))
        self.a, self.b = new(1), new(2)
        self.p, self.l, self.d = (new(3), new(4)), [new(5), new(6)], {"u": new(7), "v": new(8)}
        self.t, self.box = Pair(new(9), new(10)), types.SimpleNamespace(q=new(11), w=(new(12), 1))
        self.kept = []
"""
_PLACES = (
    *("self.a", "self.b", "self.f", "self.box.q", 'STORE["g"]'),
    *("self.l[0]", "self.l[1]", 'self.d["u"]', 'self.d["v"]'),
)
_READ_ONLY = (
    *("self.p[0]", "self.p[1]", "self.t.h", "self.t.c", "self.box.w[0]"),
    *('STORE["pair"][0]', 'STORE["pair"][1]'),
)
_WHOLE = {
    "self.p": "({}, {})",
    "self.l": "[{}, {}]",
    "self.d": '{{"u": {}, "v": {}}}',
    "self.t": "Pair({}, {})",
    'STORE["pair"]': "({}, {})",
}


class _Writer:
    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def place(self) -> str:
        return self._draw.choice((*_PLACES, *_READ_ONLY))

    def factor(self) -> float:
        return self._draw.choice((0.1, 0.25, 0.5, 0.9))

    def value(self) -> str:
        place, factor = self.place(), self.factor()
        return self._draw.choice(
            (
                *("n.clone()", f"n * {factor}", f"{place} * {factor} + n", f"{place} + {factor}"),
                *(f"{place}.clone()", f"new({factor})"),
            )
        )

    def start(self) -> str:
        """A statement that gives a second name to something, or none."""
        whole = self._draw.choice(tuple(_WHOLE))
        return self._draw.choice(
            (
                *("pass", "pass", "self.b = self.a", "self.l[1] = self.l[0]", "self.a = self.f"),
                *("self.p = (self.a, self.p[1])", "self.kept.append(self.a)"),
                *(
                    "self.kept.append(self.p)",
                    "self.kept.append(self.l)",
                    "self.l = self.l[:1] * 2",
                ),
                *("self.first = self.a", f"self.first = {whole}", "self.kept.append(self.d)"),
            )
        )

    def statement(self) -> str:
        """A statement of `forward`."""
        kind = self._draw.randrange(12)
        if kind < 4:
            return f"h = torch.tanh(h + {self.place()} * {self.factor()})"
        if kind < 6:
            return f"{self._draw.choice(_PLACES)} = {self.value()}"
        if kind < 8:
            target, form = self._draw.choice(tuple(_WHOLE.items()))
            return f"{target} = {form.format(self.value(), self.value())}"
        if kind == 8:
            return "n = h.mean(0, keepdim=True).detach()"
        if kind == 9:
            one, other = self._draw.sample(_PLACES, 2)
            return f"{one}, {other} = {other}, {one}"
        place = self.place()
        return self._draw.choice(
            (
                *(f"{place}.mul_({self.factor()})", f"{place}.copy_(n)", f"{place}.add_(n)"),
                *("self.l.append(self.l.pop(0))", "self.l = self.l[1:] + [n]"),
            )
        )

    def between(self) -> str:
        """A statement of the user's loop."""
        place, value = self._draw.choice(_PLACES), self._draw.randrange(9)
        target, form = self._draw.choice(tuple(_WHOLE.items()))
        return self._draw.choice(
            (
                *("pass", "pass", f"{place} = new({value})", f"{self.place()}.fill_({value})"),
                *(f"{target} = {form.format(f'new({value})', 'new(1)')}", f"{place} = {place} + 1"),
                *(f"self.kept.append({self.place()})", f"self.kept.append({target})"),
                *("self.restore()", "self.restore()", f"{place} = {self.place()}.clone()"),
            )
        )

    def program(self) -> str:
        lines = [_HEAD.rstrip(), f"        {self.start()}", ""]
        lines += ["    def forward(self, x, y):", "        h = self.linear(x)"]
        lines += ["        n = h.mean(0, keepdim=True).detach()"]
        statements = [self.statement() for _ in range(self._draw.randint(2, 6))]
        assigned = {root for line in statements for root in _assigned(line)}
        # What is written in place, too, or set in a list that is then replaced, eager PyTorch shows
        # to who keeps it; a compiled step does not where nobody can tell (`assigned_states`).
        lines += [
            f"        {line}"
            for index, line in enumerate(statements)
            if not (_written(line) & assigned or _is_set(line) & _replaced(statements[index:]))
        ]
        lines += ["        return ((h - y) ** 2).mean()", "", "    def restore(self):"]
        for kind, target in (("Pair", "t"), ("tuple", "p"), ("list", "l"), ("dict", "d")):
            lines += [f"        if self.kept and type(self.kept[0]) is {kind}:"]
            lines += [f"            self.{target} = self.kept[0]", "            return"]
        lines += ["        if self.kept:", "            self.a = self.kept[0]", ""]
        for index in range(4):
            between = self.between()
            while ".fill_(" in between and _written(between) & assigned:
                between = self.between()
            lines += [f"    def between_{index}(self):", f"        {between}", ""]
        return "\n".join(lines)


def _roots(text: str) -> set[str]:
    return set(re.findall(r"self\.\w+|STORE", text))


def _assigned(line: str) -> set[str]:
    """Name the attributes in whose places, or elements, a statement of `forward` puts others."""
    target, is_assignment, _ = line.partition(" = ")
    is_rotation = ".pop(" in line
    return _roots(target if is_assignment or is_rotation else "") - {"self.linear"}


def _written(line: str) -> set[str]:
    """Name what a statement writes in place."""
    return _roots(line.partition("_(")[0]) if "_(" in line and " = " not in line else set()


def _is_set(line: str) -> set[str]:
    """Name the containers of which a statement sets elements."""
    target, is_assignment, _ = line.partition(" = ")
    return _roots(target) if is_assignment and "[" in target else set()


def _replaced(lines: list[str]) -> set[str]:
    """Name the containers that statements replace by others."""
    targets = [line.partition(" = ")[0] for line in lines if " = " in line]
    return {root for target in targets if "[" not in target for root in _roots(target)}


def _module(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _state(module: ModuleType, net: Any) -> list[Tensor]:
    held = [net.a, net.b, net.f, net.p, net.l, net.d, net.t, net.box.q, net.box.w]
    held += [getattr(net, "first", None), module.STORE, net.kept, list(net.parameters())]
    leaves = pytree.tree_leaves(held)
    return [leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor)]


def _differ(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) != len(other) or not all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5)
        for a, b in zip(one, other, strict=True)
    )


def run(seed: int, folder: Path) -> str:
    """Train a program; return what became of it: "trained", "refused", "noticed" or "eager".

    Raises `AssertionError`: the compiled one differs; the message has the file's name.
    """
    path = folder / f"state_program_{seed}.py"
    path.write_text(_Writer(seed).program())
    ours, eager = _module(path, f"ours_{seed}"), _module(path, f"eager_{seed}")
    nets: list[Any] = []
    for module in (ours, eager):
        torch.manual_seed(seed)
        nets.append(module.Net())
    net, other = nets
    generator = torch.Generator().manual_seed(seed)
    example = torch.randn(3, 4, generator=generator), torch.randn(3, 4, generator=generator)
    before = _state(ours, net)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in nets]
    shapes = tuple({0: Dim("batch", min=1, max=16)} for _ in range(2))
    try:
        step = relax_disc.compile(net, optimizers[0], example, dynamic_shapes=shapes)
    except (UnsupportedOperatorError, InputMismatchError):
        assert not _differ(_state(ours, net), before), f"{path}: compile has changed the state"
        return "refused"
    assert not _differ(_state(ours, net), before), f"{path}: compile has changed the state"
    for index, size in enumerate((3, 1, 5, 2, 4)):
        batch = [torch.randn(size, 4, generator=generator) for _ in range(2)]
        optimizers[1].zero_grad()
        try:
            loss = other(*batch)
            loss.backward()
        except RuntimeError:  # what a gradient needs was written in place
            return "eager"
        optimizers[1].step()
        before = _state(ours, net)
        try:
            found = step(*batch)
        except InputMismatchError:
            assert not _differ(_state(ours, net), before), (
                f"{path}: refused call {index} has written"
            )
            return "noticed"
        assert torch.allclose(found, loss.detach(), rtol=1e-4, atol=1e-5), (
            f"{path}: call {index} gives {float(found)}, eager {float(loss)}"
        )
        assert not _differ(_state(ours, net), _state(eager, other)), f"{path}: state after {index}"
        if index < 4:
            for each in nets:
                getattr(each, f"between_{index}")()
    return "trained"
