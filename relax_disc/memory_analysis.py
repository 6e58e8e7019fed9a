"""Memory of a training step before it is built: `analyze_memory` and `largest`.

>>> report = relax_disc.analyze_memory(module, {"batch": 8, "seq": 512})
>>> report.peak_bytes, report.worst.peak_source, report.symbolic_peak

A module of operators is lowered to the kernels that would run, in their order, but no machine code
is made.  The figures are those of a call without a memory budget: nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tvm
from tvm import relax

from relax_disc import pipeline
from relax_disc.analysis.memory.report import MemoryAnalysis, Shape, graph_of_table, report_memory
from relax_disc.analysis.program.extraction import extract, machine_of
from relax_disc.analysis.program.table import NotPlannableError
from relax_disc.analysis.program.tensor_graph import TensorGraph, check_shape
from relax_disc.analysis.symbolic.dim import SymbolicDim
from relax_disc.bytes_text import parse_bytes
from relax_disc.errors import GraphError
from relax_disc.tir_kernels.target import resolve_target
from relax_disc.training.memory_plan import bounded_dim, largest_that_fits
from relax_disc.vm_builtins.session import Session

if TYPE_CHECKING:
    from relax_disc.frontend.spec import CapturedStep
    from relax_disc.training.compiled_function import CompiledFunction

    Source = tvm.IRModule | CapturedStep | CompiledFunction | TensorGraph


def analyze_memory(
    source: Source, shapes: Shape | Sequence[Shape], *, target: str | tvm.target.Target = "llvm"
) -> MemoryAnalysis:
    """Tell what a program needs of memory at some shapes, and where, without running it.

    Parameters
    ----------
    source : tvm.IRModule, CapturedStep, TrainingStep, ForwardFunction or TensorGraph
        The program.  Of a module the function ``main`` is taken, or the only one.
    shapes : mapping, or sequence of mappings
        Values of the dims, by name.
    target : str or tvm.target.Target
        What a module is lowered for; ``"llvm"`` is this machine's processor.

    Returns
    -------
    MemoryAnalysis
        Peak, what is alive there and which line of the model made it, parameters, state, inputs and
        activations apart, and the peak as a maximum of polynomials.

    Raises
    ------
    NotPlannableError
        If the program has control flow, or shapes that are known only while it runs.
    ShapeRangeError
        If a shape does not fit the dims.
    """
    if isinstance(source, TensorGraph):
        return report_memory(source, shapes)
    session, kinds, dims = _planner(source, target)
    complete = _completion(source)
    given = [shapes] if isinstance(shapes, Mapping) else shapes
    return report_memory(session, [complete(shape) for shape in given], kinds=kinds, dims=dims)


def largest(
    source: Source,
    dim: str,
    *,
    memory_budget: int | str,
    target: str | tvm.target.Target = "llvm",
    **other_dims: int,
) -> int:
    """Return the largest size of one dim at which a step runs inside a budget.

    Parameters
    ----------
    source : tvm.IRModule, CapturedStep, TrainingStep or ForwardFunction
        The program.
    dim : str
        The dim to maximise; it must have an upper bound.
    memory_budget : int or str
        Bytes, or text such as ``"8GiB"``; tensors are recomputed where that is needed to fit.
    target : str or tvm.target.Target
        As in `analyze_memory`.
    **other_dims : int
        Sizes of the other dims.

    Returns
    -------
    int
        The size; 0 where none fits.

    Raises
    ------
    ShapeRangeError
        If the dim is unknown or has no upper bound, or the others are not given in their ranges.
    """
    if isinstance(source, TensorGraph):
        raise GraphError("largest() plans a program that can run: give the module or the step")
    session, _, dims = _planner(source, target)
    names = session.metadata.dims
    budget = parse_bytes(memory_budget)
    found = bounded_dim(getattr(source, "dims", dims), dim)
    complete = _completion(source)
    check_shape(dims, complete({**other_dims, dim: found.last or 0}))

    def fits(size: int) -> bool:
        sizes = complete({**other_dims, dim: size})
        return session.fits([sizes[name] for name in names], budget)

    return largest_that_fits(fits, found)


def step_graph(
    source: Source, *, scheduled: bool = True, target: str | tvm.target.Target = "llvm"
) -> TensorGraph:
    """Return the tensor graph of the kernels that a program comes down to.

    A built one is scheduled already. ``scheduled``: in the order in which they would run; else as
    the model was written. ``target``: as in `analyze_memory`.
    """
    if getattr(source, "session", None) is not None:
        session, _, dims = _planner(source, target)
        return graph_of_table(session.metadata, dims)
    module = source if isinstance(source, tvm.IRModule) else source.module
    lowered = _lowered(module, target, scheduled=scheduled)
    return extract(lowered, _main_of(lowered)).graph()


def _planner(
    source: Any, target: str | tvm.target.Target
) -> tuple[Session, tuple[str, ...], tuple[SymbolicDim, ...]]:
    """Return what plans the program, the kinds of what the caller passes, and the dims."""
    session = getattr(source, "session", None)
    if session is not None:
        return session, source.input_kinds, tuple(source.program_dims)
    module = source if isinstance(source, tvm.IRModule) else source.module
    name = _main_of(module)
    function = module[name]
    with resolve_target(target):
        try:
            extraction = extract(module, name)
        except NotPlannableError:
            extraction = extract(_lowered(module, target), name)
    attrs: Mapping[str, Any] = function.attrs or {}
    kinds = tuple(str(kind) for kind in attrs.get("relax_disc.param_kinds") or ())
    if not kinds:  # a module from elsewhere
        kinds = tuple("input" for p in function.params if isinstance(p.ty, relax.TensorType))
    return (
        Session.to_plan(extraction.metadata(machine_of(resolve_target(target)))),
        tuple(kind for kind in kinds if kind != "shape"),
        tuple(extraction.table.dims.values()),
    )


def _completion(source: Any) -> Callable[[Mapping[str, int]], Mapping[str, int]]:
    """Return what adds to a shape the sizes that a compiled step finds out itself."""
    leaves_out = hasattr(source, "padding_report") and source.padding_report().is_left_out
    return source.complete_sizes if leaves_out else dict


def _main_of(module: tvm.IRModule) -> str:
    """Return the name of ``main``, or of the only Relax function."""
    names = [
        variable.name_hint
        for variable, function in module.functions_items()
        if isinstance(function, relax.Function)
    ]
    if "main" in names or len(names) != 1:
        return "main"
    return names[0]


def _lowered(
    module: tvm.IRModule, target: str | tvm.target.Target, *, scheduled: bool = True
) -> tvm.IRModule:
    """Return the module's kernels, in the order in which they would run if `scheduled`."""
    chosen = resolve_target(target)
    options = pipeline.PipelineOptions()
    passes = [
        *pipeline.simplify_passes(),
        *pipeline.library_passes(chosen, options),
        *pipeline.legalize_passes(chosen, options),
        *pipeline.alias_passes(),
        *pipeline.kernel_passes(chosen),
        *pipeline.workspace_passes(),
        *(pipeline.order_passes() if scheduled else []),
        *(pipeline.rematerialization_passes() if scheduled else []),
    ]
    with chosen:
        return tvm.transform.Sequential(passes)(relax.transform.Normalize()(module))
