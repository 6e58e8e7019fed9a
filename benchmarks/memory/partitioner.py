"""PyTorch's partitioner's plans against ours, on the same kernels and costs.

The min-cut partitioner decides, for a budget between 0 and 1, which tensors of the forward pass are
kept for the backward pass; the others are computed again.  Its choices for four layers of
Llama-2-7B are carried over to the tensors of our step (see `benchmarks.memory.partitioner_values`)
and replayed: forward as it is; in the backward pass whatever is read and was not kept runs again,
once, as late as possible, and stays to its last reader.  Peak and time of that sequence are counted
by the same rules and costs as those of our own plan within that peak.

Part ``partitioner`` of `python -m benchmarks.memory`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from benchmarks.memory.full_size import MACHINE, full_size_model
from benchmarks.memory.partitioner_values import (
    Digest,
    alike,
    carried_over,
    our_digests,
    torch_digests,
)
from benchmarks.memory.planner_peak import planner_peak
from relax_disc.analysis import Kernel
from relax_disc.training_step import TrainingStep
from relax_disc.vm_builtins.planner import PlannerGraph, plan_rematerialization

BUDGETS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
HEAD = "relax_disc.cpu.vocabulary_head"
_FAST = 0


@dataclass(frozen=True, slots=True)
class Partition:
    """What one budget of the partitioner keeps for the backward pass.

    Attributes
    ----------
    budget : float
        The partitioner's own kind: 1 keeps what it thinks best, 0 nothing.
    saved : tuple of (tuple of str, int)
        For each tensor its node's name and those of nodes that may stand for it, and its bytes.
    """

    budget: float
    saved: tuple[tuple[tuple[str, ...], int], ...]


class _Done(Exception):
    """Ends a trace once the partitioner has been asked: nothing is to run at full size."""


def partitions(batch: int, length: int, budgets: Iterable[float]) -> list[Partition]:
    """Ask PyTorch's partitioner about the full-size model at one shape."""
    found: list[Partition] = []

    def ask(joint: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        for budget in budgets:
            with functorch_config.patch(activation_memory_budget=budget):
                copy = torch.fx.GraphModule(joint, _copied(joint.graph))
                forward, _ = min_cut_rematerialization_partition(
                    copy, inputs, num_fwd_outputs=num_fwd_outputs, **options
                )
            returned: Any = forward.graph.output_node().args[0]
            outputs = returned[num_fwd_outputs:]
            kept = [n for n in outputs if n.op != "placeholder" and _is_tensor(n)]
            known = {n.name: n for n in joint.graph.nodes}
            saved = [(_stand_ins(known[n.name]), n.meta["val"].nbytes) for n in kept]
            found.append(Partition(budget, tuple(saved)))
        raise _Done

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: graph,
        bw_compiler=lambda graph, inputs: graph,
        partition_fn=ask,
        decompositions=select_decomp_table(),
    )
    tokens = torch.zeros((batch, length), dtype=torch.long)
    try:
        torch.compile(full_size_model(), backend=backend, dynamic=False)(tokens, tokens)
    except Exception as error:
        if not found:
            raise error
    return found


def _copied(graph: torch.fx.Graph) -> torch.fx.Graph:
    copy = torch.fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


_MOVES = ("alias", "detach", "view", "_unsafe_view", "permute", "transpose")


def _stand_ins(node: torch.fx.Node) -> tuple[str, ...]:
    """Names of nodes that hold the same values, then of the sum that a product goes into.

    Our matrix products add the residual at once, so that the product alone is no tensor of ours;
    keeping the sum instead costs the same memory and helps as much or more.
    """
    names = [node.name]
    source: Any = node
    while _operator(source) in _MOVES:
        source = source.args[0]
        names.append(source.name)
    result = node
    while len(result.users) == 1 and _operator(next(iter(result.users))) in _MOVES:
        result = next(iter(result.users))
    if _operator(node) == "mm":
        names += [user.name for user in result.users if _operator(user) == "add"]
    return tuple(names)


def _operator(node: torch.fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return "" if packet is None else packet.__name__


def _is_tensor(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def replayed(graph: PlannerGraph, kept: set[int], head: int) -> tuple[int, ...]:
    """Sequence of kernels when only some tensors of the forward pass stay for the backward pass.

    Parameters
    ----------
    graph : PlannerGraph
        The step, in order.
    kept : set of int
        Tensors that the backward pass finds as the forward pass left them.
    head : int
        Last kernel of the forward pass.
    """
    makers = {t: k for k in range(head + 1) for t in graph.ops[k].outputs}
    there = {t for t in makers if t in kept or not graph.ops[makers[t]].recomputable}
    sequence = list(range(head + 1))

    def bring(tensor: int) -> None:
        if tensor not in makers or tensor in there:
            return
        for source in graph.ops[makers[tensor]].inputs:
            bring(source)
        sequence.append(makers[tensor])
        there.update(graph.ops[makers[tensor]].outputs)

    there.update(graph.ops[head].outputs)
    for k in range(head + 1, len(graph.ops)):
        for tensor in graph.ops[k].inputs:
            bring(tensor)
        sequence.append(k)
    return tuple(sequence)


def compare_plans(step: TrainingStep, batch: int, length: int) -> list[dict[str, Any]]:
    """Compare every plan of the partitioner with ours at its peak; one row each."""
    metadata = step.session.metadata
    small, digests = our_digests()
    full = [Kernel(kernel.name, kernel.inputs, kernel.outputs) for kernel in metadata.kernels]
    ours = carried_over(small, full, digests)
    theirs = torch_digests()
    step.session.set_machine(MACHINE.flops_per_ns, MACHINE.bytes_per_ns, MACHINE.launch_ns)
    graph = step.session.planner_graph((batch, length))
    head = step.session.kernel_names.index(HEAD)
    rows = []
    for partition in partitions(batch, length, BUDGETS):
        kept, missing = _kept(partition.saved, ours, theirs)
        sequence = replayed(graph, kept, head)
        peak = planner_peak(graph, sequence)
        base = sum(op.time_ns for op in graph.ops)
        time = sum(graph.ops[k].time_ns for k in sequence)
        plan = plan_rematerialization(graph, peak, _FAST)
        rows.append(
            {
                "batch": batch,
                "length": length,
                "torch_budget": partition.budget,
                "saved_bytes": sum(size for _, size in partition.saved),
                "not_found_bytes": missing,
                "peak_bytes": peak,
                "torch_time_ratio": time / base,
                "our_time_ratio": plan.time_ns / base if plan.feasible else None,
                "our_peak_bytes": plan.peak_bytes if plan.feasible else plan.least_bytes,
            }
        )
    return rows


def _kept(
    saved: Sequence[tuple[tuple[str, ...], int]],
    ours: Mapping[int, Digest],
    theirs: Mapping[str, Digest],
) -> tuple[set[int], int]:
    """Our tensors that hold what nodes hold, and the bytes of nodes without such a tensor."""
    kept: set[int] = set()
    missing = 0
    for names, size in saved:
        for name in names:
            digest = theirs.get(name)
            found = [t for t, other in ours.items() if digest is not None and alike(digest, other)]
            if found:
                kept.update(found)
                break
        else:
            missing += size
    return kept, missing
