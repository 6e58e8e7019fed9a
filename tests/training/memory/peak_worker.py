"""Steps under a counter of malloc and mmap: planned and measured peaks, as JSON on stdout.

Run by `test_measured_peak.py` in a process of its own, with the counter preloaded.
"""

import gc
import json
import sys

import torch
from torch import nn

import relax_disc
from benchmarks.malloc_counter import MallocCounter
from tests.frontend.models import Llama, dims, token_batch

SHAPES = [(1, 8), (3, 40), (8, 30), (8, 48)]
FRACTIONS = [0.8, 0.5, 0.3, 0.0]


class WithHidden(nn.Module):
    """A Llama that returns something large beside its loss."""

    def __init__(self, **sizes):
        super().__init__()
        self.inner = Llama(**sizes)

    def forward(self, ids, labels):
        return self.inner(ids, labels), self.inner.table(ids) * 2.0


class Convolutions(nn.Module):
    """Convolutions, dense, grouped and deep, over pictures that embeddings make."""

    def __init__(self, channels=48):
        super().__init__()
        self.table = nn.Embedding(211, 64)
        kinds = [(1, channels, 1), (channels, channels, 1), (channels, channels, 4)]
        layers = []
        for inner, outer, groups in (*kinds, (channels, channels, channels)):
            layers += [nn.Conv2d(inner, outer, 3, padding=1, groups=groups, bias=False)]
            layers += [nn.BatchNorm2d(outer), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(channels, 211, (1, 64)))

    def forward(self, ids, labels):
        logits = self.layers(self.table(ids)[:, None])[..., 0]
        return nn.functional.cross_entropy(logits.transpose(1, 2).flatten(0, 1), labels.flatten())


MODELS = {
    "convolutions": Convolutions,
    "whole attention": lambda: Llama(layers=3, width=256),
    "written out": lambda: Llama(layers=3, width=256, whole=False, tied=False),
    "large output": lambda: WithHidden(layers=2, width=256),
    "accumulated": lambda: Llama(layers=3, width=256),
}


def main(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    b, s = dims()
    step = relax_disc.compile(
        model, optimizer, token_batch(3, 12), dynamic_shapes=({0: b, 1: s}, {0: b, 1: s})
    )
    batches = {shape: token_batch(*shape) for shape in SHAPES}
    counter, rows = MallocCounter(), []
    # The analysis computes with numpy, whose BLAS keeps a buffer from its first product on.
    relax_disc.analyze_memory(step, {"b": 1, "s": 1})
    gc.collect()
    base = counter.live_bytes()

    # Sums of gradients are made and dropped while the counter counts.
    sums = sum(p.numel() * p.element_size() for p in model.parameters())
    kinds = [False, True] if name == "accumulated" else [True]
    if name == "accumulated":  # compiles, and so leaves caches of the compiler behind
        step(*batches[SHAPES[0]], update=False)
        step(*batches[SHAPES[0]])
    if name == "convolutions":  # oneDNN makes code for every shape and keeps it
        for batch in batches.values():
            step(*batch)
        step.session.release()
        gc.collect()
        base = counter.live_bytes()
    if name == "accumulated":
        gc.collect()
        base = counter.live_bytes() - step.memory_report().held_bytes

    # The optimizer's state is made by the first step, as PyTorch does: while the counter counts.
    has_state = bool(optimizer.state)

    def late_bytes():
        states = () if has_state else optimizer.state.values()
        return sum(value.nbytes for state in states for value in state.values())

    sizes = {shape: step.shape_of(*batch) for shape, batch in batches.items()}

    def measure(shape, fraction=None):
        for update in kinds:
            step.memory_budget = None
            if fraction is not None:
                plan = step.plan(update=update, **sizes[shape])
                step.memory_budget = plan.peak_bytes - int((1 - fraction) * plan.arena_bytes)
                held = step.plan(update=update, **sizes[shape])
                if not held.fits:
                    step.memory_budget = held.least_bytes
            measure_call(shape, update)

    def measure_call(shape, update):
        plan = step.plan(update=update, **sizes[shape])
        plain = name != "accumulated"
        analysed = relax_disc.analyze_memory(step, sizes[shape])
        counter.reset_peak()
        step(*batches[shape], update=update)
        report = step.memory_report()
        rows.append(
            {
                "shape": shape,
                "budget": step.memory_budget,
                "planned": plan.peak_bytes,
                "reported": report.peak_bytes,
                "analysed": analysed.peak_bytes if plain else plan.peak_bytes,
                "measured": counter.peak_bytes()
                - base
                + plan.resident_bytes
                - late_bytes()
                - (0 if plain else sums),
                "workspace": plan.workspace_bytes,
                "library": plan.library_bytes,
                "escaping": plan.escaping_bytes,
                "recomputations": report.recomputations,
            }
        )

    for shape in SHAPES:  # each needs more than those before it
        measure(shape)
    for shape in reversed(SHAPES):
        for fraction in FRACTIONS:
            measure(shape, fraction)
    print(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1])
