"""What the tensors of a small step hold: our kernels' and those of PyTorch's joint graph.

The two programs know nothing of each other's names.  Run on the same numbers, a tensor of one is a
tensor of the other where both hold the same values, in whatever layout; a digest of the values
stands for them.  `python -m benchmarks.partitioner_values` prints ours; it needs
``RELAX_DISC_NATIVE=0``, since only the Python run time can be looked into.  Our step at full size
has the same kernels, but its schedule may put some that do not depend on each other in another
order: `carried_over` finds each tensor's twin.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition
from torch._inductor.decomposition import select_decomp_table
from torch.export import Dim

import relax_disc
from benchmarks.training_batches import make_batch
from relax_disc.analysis import Kernel
from relax_disc.vm_builtins import runtime_twin
from relax_disc.vm_builtins.plan_metadata import Storage
from tutorials._llama import Llama, LlamaSizes

# Llama-2-7B's proportions, so that the kernels come in the same order.
SMALL = LlamaSizes(
    vocabulary=500, layers=4, hidden=64, heads=4, feed_forward=172, longest=64, attention="fused"
)
LENGTHS = [24, 16]
Digest = tuple[int, float, float, float]


def small_model() -> Llama:
    """Make the model whose numbers both programs work on."""
    torch.manual_seed(0)
    model = Llama(SMALL)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # else scaled and unscaled tensors look alike
                parameter.uniform_(0.5, 1.5)
    return model


def small_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of the small vocabulary, padded."""
    ids, labels = make_batch(LENGTHS, 0)
    return ids % SMALL.vocabulary, torch.where(labels < 0, labels, labels % SMALL.vocabulary)


def digest(tensor: torch.Tensor) -> Digest:
    """Sum up the values of a tensor so that their order does not matter."""
    values = tensor.detach().double().abs().flatten()
    return (
        values.numel(),
        values.sum().item(),
        values.square().sum().item(),
        values.max().item() if values.numel() else 0.0,
    )


def alike(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether two digests are those of the same values, computed in different ways."""
    return a[0] == b[0] and all(
        abs(x - y) <= 1e-4 * max(abs(x), abs(y)) for x, y in zip(a[1:], b[1:], strict=True)
    )


@functools.cache
def our_digests() -> tuple[list[Kernel], dict[int, Digest]]:
    """Kernels of our small step in order, and a digest for each tensor that one of them makes."""
    root = Path(__file__).parents[1]
    environment = {
        **os.environ,
        "RELAX_DISC_NATIVE": "0",
        "RELAX_DISC_COMPILE_CACHE": "0",
        "PYTHONPATH": str(root),
    }
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.partitioner_values"],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"the small step failed:\n{done.stderr}")
    kernels, digests = json.loads(done.stdout.splitlines()[-1])
    return (
        [Kernel(name, tuple(inputs), tuple(outputs)) for name, inputs, outputs in kernels],
        {int(tensor): tuple(values) for tensor, values in digests.items()},
    )


def carried_over(
    small: Sequence[Kernel], full: Sequence[Kernel], digests: Mapping[int, Digest]
) -> dict[int, Digest]:
    """Digests of the small step's tensors, for those of the step at full size.

    A kernel's partner is the first of its name that reads the twins of what it reads.  It may make
    more: scratch memory, which kernels need at full size only, comes after the results.

    Raises
    ------
    ValueError
        If the two steps are not the same kernels between the same tensors.
    """
    waiting: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in full:
        waiting[kernel.name].append(kernel)
    twins: dict[int, int] = {}
    for kernel in small:
        partners = (other for other in waiting[kernel.name] if _are_twins(kernel, other, twins))
        partner = next(partners, None)
        if partner is None:
            raise ValueError(f"the step at full size lacks {kernel.name!r} of the small one")
        waiting[kernel.name].remove(partner)
        twins.update(zip(kernel.inputs, partner.inputs, strict=True))
        twins.update(zip(kernel.outputs, partner.outputs, strict=False))
    if left := [other.name for others in waiting.values() for other in others]:
        raise ValueError(f"the small step lacks {left[0]!r} of the one at full size")
    return {twins[tensor]: digest for tensor, digest in digests.items()}


def _are_twins(kernel: Kernel, other: Kernel, twins: Mapping[int, int]) -> bool:
    return (
        len(kernel.inputs) == len(other.inputs)
        and len(kernel.outputs) <= len(other.outputs)
        and all(twins.get(a, b) == b for a, b in zip(kernel.inputs, other.inputs, strict=True))
    )


@functools.cache
def torch_digests() -> dict[str, Digest]:
    """Digests of the nodes of the forward part of PyTorch's joint graph, by name."""
    found: dict[str, Digest] = {}

    def forward(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        del inputs
        return lambda *arguments: _Recorder(graph, found).run(*arguments)

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, inputs: graph,
        partition_fn=default_partition,
        decompositions=select_decomp_table(),
    )
    torch.compile(small_model(), backend=backend, dynamic=False)(*small_batch())
    return found


class _Recorder(torch.fx.Interpreter):
    def __init__(self, graph: torch.fx.GraphModule, found: dict[str, Digest]) -> None:
        super().__init__(graph)
        self._found = found

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            self._found[n.name] = digest(result)
        return result


def _print_ours() -> None:
    found: dict[int, Digest] = {}
    run = runtime_twin.TwinFrame.run

    def recorded(frame: runtime_twin.TwinFrame, function: Any) -> None:
        kernel = frame.plan.sequence[frame.position]
        run(frame, function)
        metadata = frame.session.metadata
        for tensor in metadata.kernels[kernel].outputs:
            views = [i for i, view in enumerate(metadata.views) if view.tensor == tensor]
            if metadata.tensors[tensor].storage is Storage.ARENA and views:
                value = torch.from_dlpack(frame.view(views[0]))
                if value.is_floating_point():
                    found[tensor] = digest(value)

    runtime_twin.TwinFrame.run = recorded  # type: ignore[method-assign]
    dims = {0: Dim("batch", min=1, max=8), 1: Dim("length", min=1, max=SMALL.longest)}
    model = small_model()
    step = relax_disc.compile(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.0),
        make_batch([12, 10], 0),
        dynamic_shapes={"ids": dims, "labels": dims},
    )
    step(*small_batch())
    kernels = [(k.name, k.inputs, k.outputs) for k in step.session.metadata.kernels]
    print(json.dumps([kernels, found]))


if __name__ == "__main__":
    _print_ours()
