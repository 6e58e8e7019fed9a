"""What the tensors of a small step hold: our kernels' and those of PyTorch's joint graph.

The two programs know nothing of each other's names.  Run on the same numbers, a tensor of one is a
tensor of the other where both hold the same values, in whatever layout; a digest of the values
stands for them.  Our step at full size has the same kernels, but its schedule may put some that do
not depend on each other in another order: `carried_over` finds each tensor's twin.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import tvm_ffi
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition
from torch._inductor.decomposition import select_decomp_table
from torch.export import Dim

import relax_disc
from benchmarks.training.batches import make_batch
from relax_disc.analysis import Kernel
from relax_disc.vm_builtins.plan_metadata import Storage
from relax_disc.vm_builtins.runtime import function
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
    run = function("relax_disc.kernel")

    def recorded(frame: Any, index: int, kernel: Any) -> None:
        arguments: list[Any] = []
        run(frame, index, lambda *given: (kernel(*given), arguments.extend(given)))
        metadata = step.session.metadata
        entry = metadata.kernels[index]
        for (kind, view), value in zip(entry.arguments, arguments, strict=True):
            tensor = metadata.views[view].tensor if kind == "view" else -1
            if tensor in entry.outputs and metadata.tensors[tensor].storage is Storage.ARENA:
                value = torch.from_dlpack(value)
                if value.is_floating_point():
                    found.setdefault(tensor, digest(value))

    found: dict[int, Digest] = {}
    dims = {0: Dim("batch", min=1, max=8), 1: Dim("length", min=1, max=SMALL.longest)}
    model = small_model()
    # The machine looks its functions up when it is made.
    tvm_ffi.register_global_func("relax_disc.kernel", recorded, override=True)
    try:
        step = relax_disc.compile(
            model,
            torch.optim.AdamW(model.parameters(), lr=0.0),
            make_batch([12, 10], 0),
            dynamic_shapes={"ids": dims, "labels": dims},
        )
        step(*small_batch())
    finally:
        tvm_ffi.register_global_func("relax_disc.kernel", run, override=True)
    kernels = step.session.metadata.kernels
    return [Kernel(kernel.name, kernel.inputs, kernel.outputs) for kernel in kernels], found


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
