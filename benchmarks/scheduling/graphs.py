"""Tensor graphs for the scheduling benchmark: made here, so that they need nothing else.

`Step` writes a training step as a recording of plain operators would: forward, then for each
operator backwards the gradients of its inputs, sums where a value is used twice, and all parameter
updates at the end.  `llama_step` is the real thing: 4 layers with AdamW as this package compiles
it, fused (benchmarks/data/llama_step.json.gz, made by ``python -m benchmarks.scheduling
--capture``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from relax_disc.analysis import Kernel, SymbolicDim, SymbolicExpr, TensorGraph

LLAMA_STEP = Path(__file__).parents[1] / "data" / "llama_step.json.gz"
_FLOAT = 4


@dataclass(frozen=True)
class Recorded:
    """A forward operator: what its gradient needs."""

    inputs: tuple[int, ...]
    output: int
    saves: tuple[int, ...]


class Step:
    """Collects a forward pass and turns it into a training step."""

    def __init__(self, *dims: SymbolicDim) -> None:
        self._dims = dims
        self._sizes: list[SymbolicExpr | int] = []
        self._inputs: list[int] = []
        self._parameters: list[int] = []
        self._kernels: list[Kernel] = []
        self._tape: list[Recorded] = []

    def given(self, size: SymbolicExpr | int) -> int:
        """Add an input that is no parameter."""
        self._inputs.append(self._tensor(size))
        return self._inputs[-1]

    def parameter(self, elements: int) -> int:
        """Add a float32 parameter."""
        self._parameters.append(self.given(_FLOAT * elements))
        return self._parameters[-1]

    def op(self, name: str, *inputs: int, size: SymbolicExpr | int, saves: str = "inputs") -> int:
        """Add an operator; its gradient needs its "inputs", its "output", or "nothing"."""
        (made,) = self._run(name, inputs, size)
        saved = {"inputs": inputs, "output": (made,), "nothing": ()}[saves]
        self._tape.append(Recorded(inputs, made, saved))
        return made

    def graph(self, loss: int, name: str) -> TensorGraph:
        """Return the step: gradients of `loss` and an update of every parameter, all at the end."""
        gradients = {loss: self._run("seed", (loss,), self._sizes[loss])[0]}
        fixed = set(self._inputs) - set(self._parameters)
        for op in reversed(self._tape):
            arriving = gradients.pop(op.output, None)
            if arriving is None:
                continue
            for tensor in dict.fromkeys(op.inputs):
                if tensor in fixed:
                    continue
                read = dict.fromkeys((arriving, *op.saves))
                (part,) = self._run("gradient", tuple(read), self._sizes[tensor])
                if tensor in gradients:
                    both = (gradients[tensor], part)
                    (part,) = self._run("sum", both, self._sizes[tensor])
                gradients[tensor] = part
        outputs = [self._update(p, gradients[p]) for p in self._parameters if p in gradients]
        return TensorGraph(
            dims=self._dims,
            sizes=tuple(self._sizes),
            inputs=tuple(self._inputs),
            outputs=tuple(tensor for made in outputs for tensor in made),
            kernels=tuple(self._kernels),
            origin=name,
        )

    def _update(self, parameter: int, gradient: int) -> tuple[int, ...]:
        size = self._sizes[parameter]
        old = (parameter, self.given(size), self.given(size))
        new = tuple(self._tensor(size) for _ in old)
        readers = tuple(k for k, kernel in enumerate(self._kernels) if parameter in kernel.inputs)
        pairs = tuple(zip(old, new, strict=True))
        self._kernels.append(
            Kernel("update", (*old, gradient), new, pairs, readers, recomputable=False)
        )
        return new

    def _tensor(self, size: SymbolicExpr | int) -> int:
        self._sizes.append(size)
        return len(self._sizes) - 1

    def _run(
        self, name: str, inputs: tuple[int, ...], *sizes: SymbolicExpr | int
    ) -> tuple[int, ...]:
        made = tuple(self._tensor(size) for size in sizes)
        self._kernels.append(Kernel(name, inputs, made))
        return made


def transformer_step(layers: int = 12, width: int = 256) -> TensorGraph:
    """Plain operators, nothing fused: about 2,400 of them with 24 layers."""
    batch, seq = SymbolicDim("batch", 1, 18), SymbolicDim("seq", 16, 1896)
    tokens = SymbolicExpr.dim(batch) * SymbolicExpr.dim(seq)
    row = _FLOAT * width * tokens
    scores = _FLOAT * 4 * tokens * SymbolicExpr.dim(seq)
    step = Step(batch, seq)
    x = step.given(row)

    def norm(value: int) -> int:
        square = step.op("square", value, size=row)
        mean = step.op("mean", square, size=_FLOAT * tokens, saves="nothing")
        root = step.op("rsqrt", mean, size=_FLOAT * tokens, saves="output")
        scaled = step.op("scale", value, root, size=row)
        return step.op("gain", scaled, step.parameter(width), size=row)

    def linear(value: int, factor: int, size: SymbolicExpr) -> int:
        return step.op("matmul", value, step.parameter(width * width * factor), size=size)

    for _ in range(layers):
        y = norm(x)
        query, key, content = (linear(y, 1, row) for _ in range(3))
        product = step.op("matmul", query, key, size=scores)
        masked = step.op("mask", product, size=scores, saves="nothing")
        weights = step.op("softmax", masked, size=scores, saves="output")
        mixed = step.op("matmul", weights, content, size=row)
        x = step.op("add", x, linear(mixed, 1, row), size=row, saves="nothing")
        y = norm(x)
        gate, up = linear(y, 4, 4 * row), linear(y, 4, 4 * row)
        sigmoid = step.op("sigmoid", gate, size=4 * row, saves="output")
        silu = step.op("multiply", gate, sigmoid, size=4 * row)
        inner = step.op("multiply", silu, up, size=4 * row)
        x = step.op("add", x, linear(inner, 4, row), size=row, saves="nothing")
    return step.graph(step.op("loss", x, size=_FLOAT), f"transformer, {layers} layers, unfused")


def unet_step(depth: int = 5) -> TensorGraph:
    """Skips from every level; halving sides, doubling channels."""
    batch, side = SymbolicDim("batch", 1, 32), SymbolicDim("side", 32, 512, 32)
    area = SymbolicExpr.dim(batch) * SymbolicExpr.dim(side) * SymbolicExpr.dim(side)
    step = Step(batch, side)
    x, channels = step.given(_FLOAT * 3 * area), 32

    def block(value: int, size: SymbolicExpr, weights: int) -> int:
        for _ in range(2):
            y = step.op("conv", value, step.parameter(weights), size=size)
            y = step.op("norm", y, size=size)
            value = step.op("relu", y, size=size, saves="output")
        return value

    skips = []
    for level in range(depth):
        size = _FLOAT * channels * area // (2 ** (2 * level)) * 2**level
        x = block(x, size, 9 * channels * channels * 4**level)
        skips.append((x, size, level))
        x = step.op("pool", x, size=size // 4)
    for skip, size, level in reversed(skips):
        x = step.op("upsample", x, size=size, saves="nothing")
        x = step.op("concat", x, skip, size=2 * size, saves="nothing")
        x = block(x, size, 18 * channels * channels * 4**level)
    return step.graph(step.op("loss", x, size=_FLOAT), f"U-Net, {depth} levels")


def lstm_step(steps: int = 60) -> TensorGraph:
    """An unrolled cell: gates apart, weights shared by all steps, so that gradients add up."""
    batch, width = SymbolicDim("batch", 1, 256), 512
    row = _FLOAT * width * SymbolicExpr.dim(batch)
    step = Step(batch)
    weights = [step.parameter(2 * width * width) for _ in range(4)]
    hidden, cell = step.given(row), step.given(row)
    losses = []
    for _ in range(steps):
        joined = step.op("concat", step.given(row), hidden, size=2 * row, saves="nothing")
        gates = []
        for weight in weights:
            linear = step.op("matmul", joined, weight, size=row)
            gates.append(step.op("sigmoid", linear, size=row, saves="output"))
        kept = step.op("multiply", gates[0], cell, size=row)
        new = step.op("multiply", gates[1], gates[2], size=row)
        cell = step.op("add", kept, new, size=row, saves="nothing")
        squashed = step.op("tanh", cell, size=row, saves="output")
        hidden = step.op("multiply", gates[3], squashed, size=row)
        losses.append(step.op("loss", hidden, size=_FLOAT))
    total = losses[0]
    for loss in losses[1:]:
        total = step.op("add", total, loss, size=_FLOAT, saves="nothing")
    return step.graph(total, f"LSTM, {steps} steps")


def irregular(count: int, locality: float, seed: int) -> TensorGraph:
    """Kernels that read one to three tensors from an exponentially distributed way back."""
    rng = random.Random(seed)
    sizes, made, kernels = [1000] * 3, [], []
    for index in range(count):
        read = set()
        for _ in range(rng.choice((1, 1, 2, 2, 3))):
            back = int(rng.expovariate(1 / locality))
            read.add(made[max(0, len(made) - 1 - back)] if made else rng.randrange(3))
        written = tuple(range(len(sizes), len(sizes) + rng.choice((1, 1, 1, 1, 2))))
        sizes += [int(rng.lognormvariate(5, 1.5)) for _ in written]
        made += written
        kernels.append(Kernel(f"k{index}", tuple(sorted(read)), written))
    return TensorGraph(
        (), tuple(sizes), (0, 1, 2), (), tuple(kernels), origin=f"irregular, locality {locality:g}"
    )


OWN_GRAPHS: Mapping[str, Callable[[], TensorGraph]] = {
    "llama step": lambda: TensorGraph.load(LLAMA_STEP),
    "transformer 6": lambda: transformer_step(6),
    "transformer 24": lambda: transformer_step(24),
    "u-net": unet_step,
    "lstm 60": lstm_step,
    "irregular 30": lambda: irregular(3000, 30.0, 1),
    "irregular 300": lambda: irregular(3000, 300.0, 2),
    "irregular 3000": lambda: irregular(3000, 3000.0, 3),
}


def dependencies(graph: TensorGraph) -> tuple[list[int], list[list[int]]]:
    """Return how many kernels each waits for, and which wait for it, in ascending order."""
    made = graph.producers()
    waits: list[int] = []
    following: list[list[int]] = [[] for _ in graph.kernels]
    for index, kernel in enumerate(graph.kernels):
        need = {p for t in kernel.inputs if (p := made[t]) is not None} | set(kernel.after)
        waits.append(len(need))
        for other in sorted(need):
            following[other].append(index)
    return waits, following
