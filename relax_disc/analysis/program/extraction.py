"""The two results of reading a Relax function: its `TensorGraph` and the run time's `PlanMetadata`.

`extract` is the entry: it reads, decides on storage and order, and writes both down.  Kernels have
the same indices in both, in execution order; so have the tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import tvm
from tvm import relax

from relax_disc.analysis.kernels.facts import KernelFacts
from relax_disc.analysis.program.counted import counting_kernels
from relax_disc.analysis.program.reader import halves, inplace_pairs, read_function, whole_gradients
from relax_disc.analysis.program.storage import execution_order, order_halves, place_results
from relax_disc.analysis.program.table import (
    FunctionTable,
    Joined,
    KernelCall,
    NotPlannableError,
    leaves,
)
from relax_disc.analysis.program.tensor_graph import Kernel, Size, TensorGraph
from relax_disc.analysis.symbolic.expr import SymbolicExpr
from relax_disc.devices import PCIE_4_BYTES_PER_NS, PRODUCT_WORKSPACE_BYTES, device_figures
from relax_disc.vm_builtins.plan_metadata import (
    CountCheckEntry,
    KernelEntry,
    Machine,
    PlanMetadata,
    ProgramTable,
    Storage,
    TensorEntry,
    ViewEntry,
)


@dataclass(frozen=True, slots=True)
class Extraction:
    """What one function is to the planners and to the run time."""

    table: FunctionTable  # the function as it was read, with the storage of every buffer
    order: tuple[int, ...]  # kernels of the table in execution order
    returned: Any  # the result without the values that are written over parameters
    whole_gradients: tuple[tuple[str, int, str], ...] = ()  # see `PlanMetadata`

    @property
    def kernels(self) -> list[KernelCall]:
        """The kernels in execution order."""
        return [self.table.kernels[k] for k in self.order]

    @property
    def variables(self) -> tuple[Any, ...]:
        """TVM variables of the dims, in the order of the run time's dims."""
        return tuple(self.table.dims)

    def result_views(self) -> list[int]:
        """Views that the function returns, each once, in order of first appearance."""
        return list(dict.fromkeys(x for x in leaves(self.returned) if isinstance(x, int)))

    def first_late_kernel(self) -> int:
        """The first kernel that reads what is given late, or how many kernels there are."""
        late = self.table.late
        positions = (k for k, kernel in enumerate(self.kernels) if late & set(kernel.inputs))
        return next(positions, len(self.kernels))

    def needs_regenerate(self) -> list[bool]:
        """Whether a plan may run other kernels again before each kernel."""
        fleeting = {
            output
            for kernel in self.kernels
            if kernel.may_rerun and kernel.recomputable
            for output in kernel.outputs
        }
        return [not fleeting.isdisjoint(kernel.inputs) for kernel in self.kernels]

    def graph(self) -> TensorGraph:
        """Return the tensor graph, symbolic in the function's dims."""
        table = self.table
        position = {k: i for i, k in enumerate(self.order)}
        given = table.given_buffers()
        parts = [
            i for i, b in enumerate(table.buffers) if b.storage is Storage.GIVEN and b.begin >= 0
        ]
        kernels = []
        for kernel in self.kernels:
            pairs = self._shared(kernel.inplace)
            for output in kernel.outputs:
                entry = table.buffers[output]
                if entry.storage is Storage.OVERWRITE:
                    is_part = entry.begin >= 0
                    old = table.part_of(entry.given, entry.begin) if is_part else given[entry.given]
                    pairs.append((old, output))
            kernels.append(
                Kernel(
                    name=kernel.name,
                    inputs=tuple(kernel.inputs),
                    outputs=tuple(kernel.outputs),
                    inplace=tuple(pairs),
                    after=tuple(sorted(position[k] for k in kernel.after)),
                    flops=_size(kernel.flops),
                    moved_bytes=_size(self._moved(kernel)),
                    recomputable=kernel.recomputable,
                    source=kernel.source,
                )
            )
        stored = {
            i
            for i, b in enumerate(table.buffers)
            if b.storage in (Storage.ESCAPING, Storage.OVERWRITE)
        }
        return TensorGraph(
            dims=tuple(table.dims.values()),
            # Parts lie in wholes, which are counted.
            sizes=tuple(
                0 if i in parts else _size(buffer.bytes) for i, buffer in enumerate(table.buffers)
            ),
            inputs=(*(given[i] for i in sorted(given)), *parts),
            outputs=tuple(sorted(stored)),
            kernels=tuple(kernels),
            tensor_names=tuple(buffer.name for buffer in table.buffers),
            origin=table.name,
        )

    def metadata(self, machine: Machine) -> PlanMetadata:
        """Return the table that the run time executes on a machine."""
        table = self.table
        calls_libraries = any(kernel.name.startswith("relax_disc.") for kernel in table.kernels)
        if calls_libraries and not machine.is_host:
            machine = replace(machine, library_bytes=PRODUCT_WORKSPACE_BYTES)
        names = [dim.name for dim in table.dims.values()]
        programs = ProgramTable()
        counts = {k: names.index(name) for k, name in counting_kernels(table).items()}

        def program(expr: SymbolicExpr) -> int:
            return programs.add(expr.program(names))

        tensors = tuple(
            TensorEntry(b.name, program(b.bytes), b.storage, b.given, b.begin)
            for b in table.buffers
        )
        views = tuple(
            ViewEntry(v.buffer, v.dtype, tuple(program(extent) for extent in v.shape))
            for v in table.views
        )
        kernels = tuple(
            KernelEntry(
                name=kernel.name,
                source=kernel.source,
                arguments=tuple(
                    _argument(kind, value, program) for kind, value in kernel.arguments
                ),
                inputs=tuple(kernel.inputs),
                outputs=tuple(kernel.outputs),
                inplace=tuple(self._shared(kernel.inplace)),
                copies=tuple(kernel.copies),
                flops=program(kernel.flops),
                moved_bytes=program(self._moved(kernel)),
                recomputable=kernel.may_rerun and kernel.recomputable,
                workspace=(
                    kernel.workspace[0],
                    tuple(program(number) for number in kernel.workspace[1]),
                ),
                counts=counts.get(k, -1),
            )
            for k, kernel in zip(self.order, self.kernels, strict=True)
        )
        count_checks = tuple(
            CountCheckEntry(
                size=program(check.size),
                relation=check.relation,
                limit=program(check.limit),
                dims=tuple(names.index(name) for name in check.dims),
                message=check.message,
            )
            for check in table.count_checks
        )
        return PlanMetadata(
            function=table.name,
            dims=tuple(names),
            programs=programs.all(),
            tensors=tensors,
            views=views,
            kernels=kernels,
            outputs=tuple(self.result_views()),
            machine=machine,
            count_checks=count_checks,
            whole_gradients=self.whole_gradients,
        )

    def _moved(self, kernel: KernelCall) -> SymbolicExpr:
        touched = {*kernel.inputs, *kernel.outputs}
        total = SymbolicExpr()
        for buffer in sorted(touched):
            total = total + self.table.buffers[buffer].bytes
        return total

    def _shared(self, pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Pairs of which both lie in the arena: the others have their places."""
        buffers = self.table.buffers
        return [
            (source, target)
            for source, target in pairs
            if buffers[source].storage is buffers[target].storage is Storage.ARENA
        ]


def _size(expr: SymbolicExpr) -> Size:
    return expr.as_int() if expr.is_constant else expr


def _argument(kind: str, value: Any, program: Any) -> tuple[str, Any]:
    if kind == "integer":
        return kind, program(value)
    if kind == "shape":
        return kind, [program(extent) for extent in value]
    return kind, value


def machine_of(target: tvm.target.Target | None) -> Machine:
    """What plans must know of a target: its memory's alignment, a tagged device's speed."""
    on_host = target is None or target.kind.name == "llvm"
    alignment = 64 if on_host else 256
    figures = None if target is None else device_figures(target)
    if figures is None:
        to_host = 0.0 if on_host else PCIE_4_BYTES_PER_NS
        return Machine(alignment=alignment, host_bytes_per_ns=to_host)
    return Machine(
        alignment=alignment,
        flops_per_ns=figures.flops_per_ns,
        bytes_per_ns=figures.copy_bytes_per_ns,
        overhead_ns=figures.launch_ns,
        host_bytes_per_ns=figures.host_bytes_per_ns,
    )


def extract(mod: tvm.IRModule, name: str) -> Extraction:
    """Read one function of a module in call_tir form.

    ``mod``: with the PrimFuncs that the function calls. ``name``: the Relax function.

    Raises `NotPlannableError`: the function has control flow, or shapes known only while it runs.
    """
    func = mod[name]
    if not isinstance(func, relax.Function):
        raise NotPlannableError(f"{name} is no Relax function")
    for only_copies in (False, True):
        table = read_function(mod, name)
        pairs = {o: table.parameter_given[p] for o, p in inplace_pairs(func).items()}
        facts = KernelFacts(mod, table)
        facts.annotate()
        place_results(table, pairs, facts.may_overwrite, only_copies=only_copies)
        if table.late:
            order_halves(table, halves(func)[1])
        order = execution_order(table)
        if order is not None:
            returned = _returned(table.result, pairs)
            return Extraction(table, tuple(order), returned, whole_gradients(func))
    raise NotPlannableError(f"{name}: its kernels need each other in a circle")


def _returned(result: Any, pairs: Mapping[int, int]) -> Any:
    """Leave out what a caller finds in its own tensors."""
    if not pairs or not isinstance(result, tuple):
        return result
    kept, position = [], 0
    for part in result:
        if not (isinstance(part, int | Joined) and position in pairs):
            kept.append(part)
        position += len(list(leaves(part)))
    return kept[0] if len(kept) == 1 else tuple(kept)
