"""Compile a PyTorch training step once, for every shape.

capture -> IRModule -> pipeline -> executable -> `TrainingStep`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import tvm
from tvm import relax

from relax_disc.bytes_text import parse_bytes
from relax_disc.devices import device_figures
from relax_disc.errors import InputMismatchError, UnsupportedOperatorError
from relax_disc.forward_function import ForwardFunction
from relax_disc.frontend import ExportedStep, capture_forward, export_step
from relax_disc.frontend.capture.tracing import tracing
from relax_disc.frontend.optimizer.several import optimizers_of
from relax_disc.frontend.padding import without_padding
from relax_disc.frontend.spec import CapturedStep, UpdateGroup
from relax_disc.pipeline import PipelineOptions, pipeline
from relax_disc.progress import phase
from relax_disc.tir_kernels.target import resolve_target
from relax_disc.training.cache.capture_cache import recall, remember
from relax_disc.training.cache.compile_cache import CachedProgram, build_cached, enabled
from relax_disc.training.cache.saved_step import Program
from relax_disc.training.calibration import machine_name, read
from relax_disc.training.call.batch import device_of
from relax_disc.training.call.graphs import check_graphs
from relax_disc.training.call.hooks import watch_clipping
from relax_disc.training.call.loss_scale import check_scaler
from relax_disc.training_step import GradientStep, TrainingStep
from relax_disc.transform.functions import pass_context
from relax_disc.transform.schedule_kernels import LOWERING_FAILURES
from relax_disc.vm_builtins.tier import TierName, check_offload, tier_for

_logger = logging.getLogger(__name__)


@tracing()
def compile(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    example_inputs: tuple[Any, ...],
    *,
    dynamic_shapes: Any,
    loss_fn: Callable[..., Any] | None = None,
    target: str | tvm.target.Target = "llvm",
    memory_budget: int | str | None = None,
    max_grad_norm: float | None = None,
    offload_to: TierName = None,
    offload: str | Sequence[str] = "activations",
    scaler: torch.amp.GradScaler | None = None,
    cuda_graphs: bool = False,
    options: PipelineOptions | None = None,
) -> TrainingStep:
    """Compile forward, gradients and optimizer update into one program for all shapes.

    Parameters
    ----------
    model : torch.nn.Module
        In ``train()`` or ``eval()`` mode, which is fixed from now on.
    optimizer : torch.optim.Optimizer, list of them or None
        Over the model's parameters, of any class whose ``step`` can be traced: its own update is
        compiled.  Several hold different parameters and all step.  Without one, calls of the step
        with ``update=False`` leave the gradients in ``p.grad`` for an optimizer that cannot be
        compiled.
    example_inputs : tuple
        One batch, of any size; a dynamic axis of size 1 is traced as if it were longer.
    dynamic_shapes : tuple or dict
        What `torch.export.export` takes: named `torch.export.Dim` with ranges, or names alone.
    loss_fn : callable, optional
        See `relax_disc.frontend.capture_step`; without it the model's output is the loss, or has
        an attribute ``loss``.
    target : str or tvm.target.Target
        ``"llvm"`` compiles for this machine's processor; a tag such as ``"relax_disc/h100"`` for
        that device (`relax_disc.devices.TAGS` lists them); or a target of TVM.
    memory_budget : int or str, optional
        Bytes (``8589934592`` or ``"8GiB"``) that all device memory of a step stays inside.  By
        default nine tenths of the memory of a device named by a tag, none elsewhere.
    max_grad_norm : float, optional
        Clip the gradients' global norm, which `TrainingStep.gradient_norm` then tells; infinity
        clips nothing, and then no gradient waits for the others.
    offload_to : path-like, FileTier or HostTier, optional
        A folder on a fast disk; on a GPU ``"host"``, pinned memory of the host.  Under a budget a
        tensor that is evicted may be written there and read back, where that is faster than to
        compute it again or the only way to fit.
    offload : str or sequence of str
        What goes there: "activations" (all that a step evicts), "optimizer" (the tensors of the
        optimizer's state, always), or both.
    scaler : torch.amp.GradScaler, optional
        For ``torch.autocast`` with float16: the step scales the loss, unscales the gradients before
        they are clipped, leaves out an update whose gradients are not all finite
        (`TrainingStep.skipped_updates`), and updates the scaler.  One that is not enabled counts as
        none.
    cuda_graphs : bool
        On CUDA: capture the second call of each shape in a CUDA graph and replay it from then on,
        so that launches leave no gaps.  `TrainingStep.graph_report` tells which calls ran without
        one, and why.
    options : PipelineOptions, optional
        What is done to the program; by default everything.

    Returns
    -------
    TrainingStep
        ``loss = step(*batch)`` at any shape in the ranges.

    Raises
    ------
    UnsupportedOperatorError
        The model uses operators that cannot be translated; lists all, with their lines.
    InputMismatchError
        An argument of this function does not fit.
    """
    if torch.is_inference_mode_enabled():
        raise InputMismatchError(
            "relax_disc.compile is called inside torch.inference_mode(), where there are no "
            "gradients: call it outside."
        )
    if options is not None and not isinstance(options, PipelineOptions):
        raise InputMismatchError(
            f"options={options!r} is of type {type(options).__name__}: give "
            "relax_disc.PipelineOptions(remove_padding=False), say."
        )
    watch_clipping()
    target = resolve_target(target)
    budget = _budget(memory_budget, target)
    optimizers_of(optimizer)  # or it is refused before the model is exported
    if optimizer is None and max_grad_norm is not None:
        raise InputMismatchError(
            "max_grad_norm needs the optimizer; without one call torch.nn.utils.clip_grad_norm_ "
            "between step(*batch, update=False) and your optimizer's step()."
        )
    offload_to = tier_for(offload_to, on_host=target.kind.name == "llvm")
    check_offload(offload, offload_to, optimizer)
    on_cuda = target.kind.name == "cuda"
    check_graphs(cuda_graphs, on_cuda, has_optimizer=optimizer is not None)
    scaler = check_scaler(scaler)
    export = functools.partial(
        export_step,
        model,
        optimizer,
        example_inputs,
        dynamic_shapes=dynamic_shapes,
        loss_fn=loss_fn,
        max_grad_norm=max_grad_norm,
        scaled=scaler is not None,
    )
    with phase("export the model"):
        exported = export()
    if optimizer is None:
        exported.tell_foreign_parameters()
    [captured], built = _capture_or_recall(exported, target, options)

    groups = captured.update_groups  # not the whole, which holds the user's tensors

    def accumulation_programs() -> tuple[Program, Program]:
        functions, both = _capture_or_recall(
            export(), target, options, accumulate=True, groups=groups
        )
        adding, updating = (Program(each, both.executable, both.library) for each in functions)
        return adding, updating

    machine = machine_name(device_of(model))
    path = built.calibration_path(machine)
    kind = GradientStep if optimizer is None else TrainingStep
    step = kind(
        *(captured, built.executable, model, optimizer, built.library),
        loss_fn=loss_fn,
        max_grad_norm=max_grad_norm,
        memory_budget=budget,
        cuda_graphs=cuda_graphs,
        calibration=None if path is None else read(path, machine),
        calibration_path=path,
        summing=accumulation_programs,
        scaler=scaler,
    )
    step.offload_to = offload_to
    step.offload = offload
    return step


def _budget(memory_budget: int | str | None, target: tvm.target.Target) -> int | None:
    if memory_budget is not None:
        return parse_bytes(memory_budget)
    figures = device_figures(target)
    return None if figures is None else figures.default_budget_bytes()


def _capture_or_recall(
    exported: ExportedStep,
    target: tvm.target.Target,
    options: PipelineOptions | None,
    *,
    accumulate: bool = False,
    groups: Sequence[UpdateGroup] | None = None,
) -> tuple[Sequence[CapturedStep], CachedProgram]:
    """Trace and compile an exported step, unless an earlier start has done so.

    Returns the step alone, or the two functions that sum gradients, in update groups as given.
    """
    fingerprint = None
    if enabled():
        fingerprint = exported.fingerprint(accumulate=accumulate, groups=groups)
    known = recall(fingerprint, target, exported.outer(), options)
    if known is not None:
        return known
    with phase("trace gradients and update"):
        if exported.optimizer is None:
            captured = (exported.capture_gradients(),)
        elif accumulate:
            captured = exported.capture_accumulation(groups)
        else:
            captured = (exported.capture(),)
        if options is None or options.remove_padding:
            captured = without_padding(captured, target)
    built = build_or_reuse(captured[0].module, target, options)
    remember(fingerprint, target, captured, built.path, options)
    return captured, built


@tracing()
def compile_forward(
    model: torch.nn.Module,
    example_inputs: tuple[Any, ...],
    *,
    dynamic_shapes: Any,
    target: str | tvm.target.Target = "llvm",
    memory_budget: int | str | None = None,
    offload_to: TierName = None,
) -> ForwardFunction:
    """Compile a forward pass alone into one program for all shapes.

    Parameters and errors are those of `compile`.

    Returns
    -------
    ForwardFunction
        ``outputs = function(*inputs)``, without gradients.
    """
    target = resolve_target(target)
    budget = _budget(memory_budget, target)
    captured = capture_forward(model, example_inputs, dynamic_shapes=dynamic_shapes)
    built = build_or_reuse(captured.module, target)
    function = ForwardFunction(captured, built.executable, model, None)
    function.memory_budget = budget
    function.offload_to = offload_to
    return function


def build(
    module: tvm.IRModule, target: str | tvm.target.Target, options: PipelineOptions | None = None
) -> relax.VMExecutable:
    """Lower a captured module and generate its code.

    ``"llvm"`` is this machine's processor.
    """
    chosen, resolved = options or PipelineOptions(), resolve_target(target)
    _refuse_counts(module, resolved, chosen)
    # Checks of arguments were 95 % of an element-wise kernel's code, and half of the time of making
    # it; the entry of a call has checked all that kernels are given views of.
    with pass_context({"tirx.disable_assert": True}):
        try:
            quick = replace(chosen, verify_schedules=False)
            return relax.build(module, resolved, relax_pipeline=pipeline(quick))
        except LOWERING_FAILURES as error:
            if not chosen.verify_schedules:
                raise
            _logger.info("code generation failed, kernels are verified one by one: %s", error)
            return relax.build(module, resolved, relax_pipeline=pipeline(chosen))


def _refuse_counts(
    module: tvm.IRModule, target: tvm.target.Target, options: PipelineOptions
) -> None:
    """Refuse sizes that kernels count where nothing takes them from the kernels."""
    for function in module.functions.values():
        if "relax_disc.counted" not in (function.attrs or {}):
            continue
        if target.kind.name not in ("llvm", "cuda") or not options.plan_arena:
            where = f"on {target.kind.name}" if options.plan_arena else "without plan_arena"
            raise UnsupportedOperatorError(
                f"The model has sizes that depend on data, by a mask, nonzero or unique; {where} "
                "they cannot be compiled yet. Weigh by the mask instead of picking by it."
            )


def build_or_reuse(
    module: tvm.IRModule, target: str | tvm.target.Target, options: PipelineOptions | None = None
) -> CachedProgram:
    """Like `build`, but look into the cache of compiled programs first."""
    resolved = resolve_target(target)
    with phase("compile the kernels"):
        return build_cached(module, resolved, options, lambda: build(module, resolved, options))
