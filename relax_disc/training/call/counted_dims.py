"""The dims that a program counts: their bounds, and the sizes that the batch alone tells.

Those are found before a call, in the program's own arena, by a function beside it
(`relax_disc.transform.memory.count_at_entry`), so that the call is planned for what there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import tvm
from tvm import relax

from relax_disc.analysis.symbolic.expr import SymbolicExpr
from relax_disc.errors import ShapeRangeError
from relax_disc.frontend.spec import CapturedStep
from relax_disc.training.call.batch import batch_argument
from relax_disc.training.variants import Variants
from relax_disc.transform.memory.count_at_entry import counts_name
from relax_disc.vm_builtins.planner import PlannerGraph
from relax_disc.vm_builtins.session import Session

_MOST_SHAPES = 1024


def _rounded(count: int, most: int) -> int:
    """Round a count up to 16 or by less than a sixteenth, so that plans are used again."""
    unit = 1 << max(4, count.bit_length() - 5)
    return min(-(-max(count, 1) // unit) * unit, most)


class CountedDims:
    """The dims that one function counts.

    Attributes
    ----------
    at_entry : frozenset of str
        Those that the batch tells.
    """

    def __init__(
        self, captured: CapturedStep, machine: relax.VirtualMachine, variants: Variants
    ) -> None:
        self._bounds = [(dim.name, SymbolicExpr.parse(str(dim.bound))) for dim in captured.counted]
        self._variants = variants
        self._sizes_of_largest: dict[tuple[int, ...], int] = {}
        self.at_entry: frozenset[str] = frozenset()
        self._session: Session | None = None
        name = counts_name(captured.function)
        if not self._bounds or not machine.module.implements_function(name):
            return
        self._run, self._forget_result = machine[name], machine[f"{name}__session"]
        self._session = Session.of(machine, name)
        metadata = self._session.metadata
        counted = {kernel.counts for kernel in metadata.kernels if kernel.counts >= 0}
        self.at_entry = frozenset(metadata.dims[dim] for dim in counted)
        (self._shape,) = (spec.shape for spec in captured.inputs if spec.kind == "shape")

    def share_arena(self, session: Session) -> None:
        """Count in the arena of a session."""
        if self._session is not None:
            self._session.share_arena(session)

    def complete(
        self, sizes: Mapping[str, int], counts: Mapping[str, int] | None = None
    ) -> dict[str, int]:
        """Add the dims that are counted: rounded counts where there are, else their bounds.

        Raises `ShapeRangeError`: a count is beyond its bound.
        """
        result = dict(sizes)
        for name, bound in self._bounds:
            most = int(bound.evaluate(result))
            count = (counts or {}).get(name, most)
            if not 0 <= count <= most:
                raise ShapeRangeError(f"{name}={count}; allowed is 0 .. {most} = {bound}.")
            result[name] = _rounded(count, most)
        return result

    def told_by(self, tensors: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the sizes that a batch tells; none where to count takes more than the program.

        Raises `ShapeRangeError`: the model cannot run with what was counted.
        """
        if self._session is None:
            return {}
        bounds = self.complete(sizes)
        shape = tvm.runtime.ShapeTuple([bounds[str(name)] for name in self._shape])
        self._run(shape, *map(batch_argument, tensors))
        report = self._session.report()
        self._forget_result()
        found = dict(zip(self._session.metadata.dims, report.dims, strict=True))
        counts = {name: found[name] for name in self.at_entry}
        entered = self.complete(sizes, counts)
        taken = report.arena_bytes + report.escaping_bytes
        return counts if taken <= self._size_of_largest(entered) else {}

    def _size_of_largest(self, sizes: Mapping[str, int]) -> int:
        """Return the bytes of the kernel that needs most: no plan, and no budget, has less."""
        dims = tuple(sizes[name] for name in self._variants.plain.session.metadata.dims)
        if dims not in self._sizes_of_largest:
            if len(self._sizes_of_largest) >= _MOST_SHAPES:
                self._sizes_of_largest.clear()
            graphs = (session.planner_graph(dims) for session in self._variants.sessions())
            self._sizes_of_largest[dims] = min(map(_largest_kernel, graphs))
        return self._sizes_of_largest[dims]


def _largest_kernel(graph: PlannerGraph) -> int:
    """Return the bytes of the kernel that needs most inside the arena."""
    needed = [0]
    for op in graph.ops:
        tensors = {*op.inputs, *op.outputs} - {output for _, output in op.inplace}
        needed.append(op.workspace + sum(graph.sizes[k] for k in tensors if not graph.resident[k]))
    return max(needed)
