"""What a program needs of memory, before anything runs: how much, where, and because of which line.

`report_memory` looks at a `TensorGraph` or at what the run time plans from (a `Session`, with or
without a machine).  With a session the peak is the run time's own plan without a budget, so that it
equals the measured peak to the byte.  With a bare graph it is the peak of live bytes.

The symbolic peak is the maximum of some polynomials in the dims: one for each step whose live bytes
are not proved to be at most those of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from relax_disc.analysis.memory.peak import live_ranges, live_trace
from relax_disc.analysis.memory.symbolic_peak import symbolic_peak
from relax_disc.analysis.program.tensor_graph import Kernel, TensorGraph
from relax_disc.analysis.symbolic.expr import SymbolicDim, SymbolicExpr
from relax_disc.errors import GraphError
from relax_disc.vm_builtins.plan_metadata import PlanMetadata, Program, Storage
from relax_disc.vm_builtins.session import Session

Shape = Mapping[str, int]

STATE_KINDS = ("parameter", "buffer", "state")


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A tensor that is alive at the peak.

    Attributes
    ----------
    name : str
        Its name in the program.
    kind : str
        "parameter", "buffer", "state", "batch", "constant", ... for what the caller passes
        ("input" where nobody said); "output" for what outlives the call; "workspace" for what
        nobody reads; else "activation".
    bytes : int
        Its size.
    made_by, source : str
        The kernel that makes it, and the line of the user's model; empty for what is passed.
    first, last_use : int
        Steps, inclusive.
    """

    name: str
    kind: str
    bytes: int
    made_by: str
    source: str
    first: int
    last_use: int


@dataclass(frozen=True, slots=True)
class ShapeMemory:
    """The memory of a program at one shape, all in bytes.

    Attributes
    ----------
    shape : mapping of str to int
        The shape.
    peak_bytes : int
        All memory of a call: resident + arena + escaping where the plan is known, else
        `live_peak_bytes`.
    live_peak_bytes : int
        Most live bytes of tensors of every kind, and workspaces, without rounding.
    resident_bytes, escaping_bytes : int
        What the caller passes; outputs that outlive the call.
    workspace_bytes : int
        Most that a library kernel needs beside its arguments, in the arena while it runs.
    arena_bytes : int or None
        Height of the planned arena; None for a bare graph.
    bytes_by_kind : mapping of str to int
        What is live at the peak, by `LiveTensor.kind` and "workspace".
    peak_step : int
        Index of the kernel that runs at the peak of live bytes; -1 if there are no kernels.
    peak_kernel, peak_source : str
        Its name, and the line of the user's model that made it.
    live_tensors : tuple of LiveTensor
        What is alive there, largest first.
    trace : tuple of int
        Live bytes during each kernel.
    """

    shape: Shape
    peak_bytes: int
    live_peak_bytes: int
    resident_bytes: int
    escaping_bytes: int
    workspace_bytes: int
    arena_bytes: int | None
    bytes_by_kind: Mapping[str, int]
    peak_step: int
    peak_kernel: str
    peak_source: str
    live_tensors: tuple[LiveTensor, ...]
    trace: tuple[int, ...]

    @property
    def activation_peak_bytes(self) -> int:
        """The peak without parameters, buffers and optimizer state."""
        return self.peak_bytes - sum(self.bytes_by_kind.get(kind, 0) for kind in STATE_KINDS)

    def describe(self, most: int = 8) -> list[str]:
        """Say it in lines: the peak, what it holds by kind, and what was made, by who made it.

        Parameters
        ----------
        most : int
            Lines of the model to name, largest sum first.
        """
        dims = ", ".join(f"{name}={value}" for name, value in self.shape.items()) or "program"
        at = f"{self.peak_kernel} {self.peak_source}".strip()
        kinds = ", ".join(f"{kind} {size:,}" for kind, size in self.bytes_by_kind.items())
        lines = [f"{dims}: peak {self.peak_bytes:,} bytes at {at}", f"  by kind: {kinds}"]
        made: dict[str, list[int]] = {}
        for tensor in self.live_tensors:
            if tensor.made_by:
                made.setdefault(tensor.source or tensor.made_by, []).append(tensor.bytes)
        places = sorted(made.items(), key=lambda item: -sum(item[1]))
        for place, sizes in places[:most]:
            count = "1 tensor" if len(sizes) == 1 else f"{len(sizes)} tensors"
            lines.append(f"  {sum(sizes):>15,} in {count} made by {place}")
        if rest := places[most:]:
            lines.append(f"  {sum(sum(sizes) for _, sizes in rest):>15,} made elsewhere")
        return lines


@dataclass(frozen=True, slots=True)
class MemoryAnalysis:
    """The memory of a program at some shapes.

    Attributes
    ----------
    points : tuple of ShapeMemory
        One for each shape, in the order given.
    symbolic_peak : tuple of SymbolicExpr
        The peak of live bytes is the maximum of these, at every shape in the dims' ranges.
    """

    points: tuple[ShapeMemory, ...]
    symbolic_peak: tuple[SymbolicExpr, ...]

    @property
    def worst(self) -> ShapeMemory:
        """The shape with the largest peak."""
        return max(self.points, key=lambda point: point.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """The largest peak over the shapes."""
        return self.worst.peak_bytes

    @property
    def activation_peak_bytes(self) -> int:
        """The largest peak without parameters, buffers and optimizer state."""
        return max(point.activation_peak_bytes for point in self.points)

    def __str__(self) -> str:
        lines = [line for point in self.points for line in point.describe()]
        peak = ", ".join(str(expr) for expr in self.symbolic_peak)
        lines.append(f"live bytes: max({peak})")
        return "\n".join(lines)


def report_memory(
    program: TensorGraph | Session,
    shapes: Shape | Sequence[Shape],
    *,
    kinds: Sequence[str] = (),
    dims: Sequence[SymbolicDim] = (),
) -> MemoryAnalysis:
    """Analyse a program's memory without running it.

    Parameters
    ----------
    program : TensorGraph or Session
        What will run, in its order.
    shapes : mapping, or sequence of mappings
        Values of the dims; ``{}`` for a program without dims.
    kinds : sequence of str
        The kind of each tensor that the caller passes, in order; missing ones are "constant" in a
        session and "input" in a graph.
    dims : sequence of SymbolicDim
        Ranges of the dims of a session, which has only their names.

    Raises
    ------
    GraphError
        If no shape is given.
    ShapeRangeError
        If a shape does not fit the dims.
    """
    points = (shapes,) if isinstance(shapes, Mapping) else tuple(shapes)
    if not points:
        raise GraphError("a memory report needs at least one shape")
    if isinstance(program, Session):
        graph, session, missing = graph_of_table(program.metadata, dims), program, "constant"
    else:
        graph, session, missing = program, None, "input"
    padded = [*kinds, *[missing] * len(graph.inputs)]
    kind_of = dict(zip(graph.inputs, padded, strict=False))
    reports = tuple(_at_shape(graph, session, kind_of, shape) for shape in points)
    return MemoryAnalysis(reports, symbolic_peak(graph))


def _at_shape(
    graph: TensorGraph, session: Session | None, kind_of: Mapping[int, str], shape: Shape
) -> ShapeMemory:
    numeric = graph.at(shape)
    dims = () if session is None else [shape[name] for name in session.metadata.dims]
    if session is not None:  # whose library kernels' workspaces follow from the threads too
        ops = session.planner_graph(dims).ops
        kernels = (
            replace(kernel, workspace_bytes=op.workspace)
            for kernel, op in zip(numeric.kernels, ops, strict=True)
        )
        numeric = replace(numeric, kernels=tuple(kernels))
    sizes = numeric.numbers()
    trace = live_trace(numeric)
    step = int(trace.argmax()) if len(trace) else -1
    outputs = frozenset(graph.outputs) - graph.written_in_place() - frozenset(graph.inputs)
    made = graph.producers()
    read = {tensor for kernel in graph.kernels for tensor in kernel.inputs}
    live = []
    for interval in live_ranges(numeric):
        if step >= 0 and not interval.first <= step <= interval.last_use:
            continue
        maker = made[interval.tensor]
        kernel = graph.kernels[maker] if maker is not None else None
        default = "activation" if interval.tensor in read else "workspace"
        if interval.tensor in outputs:
            default = "output"
        live.append(
            LiveTensor(
                name=graph.tensor_name(interval.tensor),
                kind=kind_of.get(interval.tensor, default),
                bytes=sizes[interval.tensor],
                made_by=kernel.name if kernel else "",
                source=kernel.source if kernel else "",
                first=interval.first,
                last_use=interval.last_use,
            )
        )
    by_kind: dict[str, int] = {}
    for tensor in live:
        by_kind[tensor.kind] = by_kind.get(tensor.kind, 0) + tensor.bytes
    resident = sum(sizes[tensor] for tensor in graph.inputs)
    live_peak = max(resident, int(trace[step])) if step >= 0 else resident
    if step >= 0:
        beside = int(numeric.kernels[step].workspace_bytes)  # type: ignore[arg-type]
        by_kind["workspace"] = by_kind.get("workspace", 0) + beside
    escaping = sum(sizes[tensor] for tensor in outputs)
    arena, workspace, peak = None, 0, live_peak
    if session is not None:
        plan = session.plan(dims)
        resident, escaping, workspace = (
            plan.resident_bytes,
            plan.escaping_bytes,
            plan.workspace_bytes,
        )
        arena, peak = plan.arena_bytes, plan.peak_bytes
    live.sort(key=lambda tensor: -tensor.bytes)
    at_peak = graph.kernels[step] if step >= 0 else None
    return ShapeMemory(
        shape=dict(shape),
        peak_bytes=peak,
        live_peak_bytes=live_peak,
        resident_bytes=resident,
        escaping_bytes=escaping,
        workspace_bytes=workspace,
        arena_bytes=arena,
        bytes_by_kind={kind: size for kind, size in by_kind.items() if size},
        peak_step=step,
        peak_kernel=at_peak.name if at_peak else "",
        peak_source=at_peak.source if at_peak else "",
        live_tensors=tuple(live),
        trace=tuple(trace.tolist()),
    )


def graph_of_table(metadata: PlanMetadata, dims: Sequence[SymbolicDim] = ()) -> TensorGraph:
    """Return the tensor graph of the run time's table of kernels.

    ``dims``: what is known of the dims' ranges; others are 0 or more.
    """
    known = {dim.name: dim for dim in dims}
    table_dims = tuple(known.get(name, SymbolicDim(name, 0)) for name in metadata.dims)
    tensors = metadata.tensors
    held = [(k, entry) for k, entry in enumerate(tensors) if entry.storage is Storage.GIVEN]
    given = {(entry.given, entry.begin): k for k, entry in held}
    cache: dict[int, SymbolicExpr] = {}

    def size(program: int) -> int | SymbolicExpr:
        if program not in cache:
            cache[program] = _expression(metadata.programs[program], table_dims)
        expr = cache[program]
        return expr.as_int() if expr.is_constant else expr

    kernels: list[Kernel] = []
    readers: dict[int, list[int]] = {}
    for index, kernel in enumerate(metadata.kernels):
        pairs, after = list(kernel.inplace), set()
        for output in kernel.outputs:
            if tensors[output].storage is Storage.OVERWRITE:
                entry = tensors[output]
                old = given[entry.given, entry.begin]
                for read in {old, given[entry.given, -1]}:
                    after |= set(readers.get(read, ()))
                pairs += [(old, output)] if old in kernel.inputs else []
        for tensor in kernel.inputs:
            readers.setdefault(tensor, []).append(index)
        kernels.append(
            Kernel(
                name=kernel.name,
                inputs=kernel.inputs,
                outputs=kernel.outputs,
                inplace=tuple(pairs),
                after=tuple(sorted(after)),
                flops=size(kernel.flops),
                moved_bytes=size(kernel.moved_bytes),
                recomputable=kernel.recomputable,
                source=kernel.source,
            )
        )
    stays = (Storage.ESCAPING, Storage.OVERWRITE)
    return TensorGraph(
        dims=table_dims,
        # Parts lie in wholes, which are counted.
        sizes=tuple(
            0 if entry.storage is Storage.GIVEN and entry.begin >= 0 else size(entry.bytes)
            for entry in tensors
        ),
        inputs=tuple(given[k] for k in sorted(given, key=lambda k: (k[1] >= 0, k))),
        outputs=tuple(k for k, entry in enumerate(tensors) if entry.storage in stays),
        kernels=tuple(kernels),
        tensor_names=tuple(entry.name for entry in tensors),
        origin=metadata.function,
    )


def _expression(program: Program, dims: Sequence[SymbolicDim]) -> SymbolicExpr:
    """Turn a postfix program back into an expression."""
    stack: list[SymbolicExpr] = []
    codes = iter(program)
    for code in codes:
        if code == 0:
            stack.append(SymbolicExpr.constant(next(codes)))
        elif code == 1:
            stack.append(SymbolicExpr.dim(dims[next(codes)]))
        else:
            right, left = stack.pop(), stack.pop()
            if code in (7, 8):
                stack.append(left.minimum(right) if code == 7 else left.maximum(right))
            else:
                stack.append(
                    {
                        2: left.__add__,
                        3: left.__sub__,
                        4: left.__mul__,
                        5: left.__floordiv__,
                        6: left.__mod__,
                    }[code](right)
                )
    return stack[-1]
