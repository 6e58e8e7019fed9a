"""What a training step and a forward function have in common: run, budget, plans, reports."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import tvm
from torch.utils import _pytree as pytree
from tvm import relax

from relax_disc.analysis.memory.timeline import timeline_of
from relax_disc.analysis.symbolic.dim import SymbolicDim
from relax_disc.analysis.symbolic.expr import SymbolicExpr
from relax_disc.bytes_text import parse_bytes
from relax_disc.errors import InputMismatchError, ShapeRangeError
from relax_disc.frontend.optimizer.several import optimizers_of
from relax_disc.frontend.spec import CapturedStep, SizeOutput
from relax_disc.training.call.asked_sizes import AskedSizes
from relax_disc.training.call.batch import batch_argument, describe_batch
from relax_disc.training.call.binding import Binding, as_runtime
from relax_disc.training.call.counted_dims import CountedDims
from relax_disc.training.call.hooks import HookWatch
from relax_disc.training.call.interrupt import OneAtATime, deferred_interrupt
from relax_disc.training.call.loss_scale import LossScale
from relax_disc.training.call.random_state import RandomState
from relax_disc.training.call.streams import on_current_stream
from relax_disc.training.call.value_guards import ValueGuards
from relax_disc.training.memory_plan import (
    MemoryPlan,
    MemoryReport,
    WholeGradient,
    bounded_dim,
    largest_that_fits,
)
from relax_disc.training.padding_report import PaddingReport
from relax_disc.training.variants import Variants
from relax_disc.vm_builtins.session import ArenaFacts, Session
from relax_disc.vm_builtins.state_file import StateFile
from relax_disc.vm_builtins.tier import FileTier, Tier, TierName, tier_for

_STATE_KINDS = ("parameter", "buffer", "state")


class CompiledFunction:
    """A compiled program bound to a model; see `TrainingStep` and `ForwardFunction`.

    A ``sibling`` is a function of the same model that takes turns with this one: they share one
    arena, one budget at the start, the scale of the loss and the state of the random operators.
    """

    _offer: ClassVar[str] = "name where to offload tensors to (offload_to)"

    def __init__(
        self,
        captured: CapturedStep,
        executable: relax.VMExecutable | tvm.runtime.Module,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        sibling: CompiledFunction | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        self._captured, self._executable = captured, executable
        self._schema = schema = describe_batch(captured, model)
        self._model = model
        used = {guard.what: guard.value for guard in captured.outer.guards}
        held = {name: value for name, value in used.items() if isinstance(value, torch.nn.Module)}
        self._hooks = HookWatch(model, optimizers_of(optimizer), held)
        self._modules = list(model.modules())
        self._modes = [module.training for module in self._modules]
        device = tvm.runtime.device(schema.device.type, schema.device.index or 0)
        if sibling is not None and sibling._executable is executable:
            self._machine = sibling._machine
        else:
            self._machine = relax.VirtualMachine(executable, device)
        self._variants = Variants(self._machine, captured.function)
        self._session = self._variants.plain.session
        self._guards = ValueGuards(captured.outer.guards)
        self._binding = Binding(captured.inputs, model, optimizer, captured.outer)
        # What the user replaces is let go of.
        self._captured = captured = replace(captured, outer=captured.outer.released())
        self._arguments = self._binding.arguments
        places = {spec.target: k for k, spec in enumerate(captured.inputs) if spec.kind == "batch"}
        self._batch_places = [places[leaf.position] for leaf in schema.leaves]
        self._batch_places += [k for k, x in enumerate(captured.inputs) if x.kind == "packing"]
        shapes = [spec for spec in captured.inputs if spec.kind == "shape"]
        self._shape_names = tuple(str(name) for name in shapes[0].shape) if shapes else ()
        self._counted = CountedDims(captured, self._machine, self._variants)
        self._asked = AskedSizes(captured, schema.dims, self._counted)
        self._written = sorted(
            {out.replaces for out in captured.outputs if out.replaces is not None}
        )
        self._binding.refuse_shared_writes(self._written)
        self._returned = [out for out in captured.outputs if out.replaces is None]
        self._lock = threading.RLock() if sibling is None else sibling._lock
        self._sizes: Mapping[str, int] = {}
        self._alone = OneAtATime()
        self._rng = self._bind_rng(None if sibling is None else sibling._rng)
        self._loss_scale = loss_scale if sibling is None else sibling._loss_scale
        for index, spec in enumerate(captured.inputs):
            if spec.kind == "scale":
                assert self._loss_scale is not None
                self._arguments[index] = as_runtime(self._loss_scale.tensor, "the loss's scale")
        for session in self._variants.sessions():
            session.set_offer(self._offer)
        self._tier: Tier | None = None
        self._offload: tuple[str, ...] = ("activations",)
        self._state_file: StateFile | None = None
        shared = self if sibling is None else sibling
        for session in self._variants.sessions():
            if session is not shared._session:
                session.share_arena(shared._session)
                session.memory_budget = shared.memory_budget
        self._counted.share_arena(shared._session)
        if sibling is not None:
            self._use_offload(sibling._tier, sibling._offload, sibling._state_file)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse ``copy.deepcopy`` and ``pickle``.

        Raises `InputMismatchError`: always: says how a step is stored, and how a copy of a model is
        compiled.
        """
        raise InputMismatchError(
            f"A {type(self).__name__} holds native code bound to its model and cannot be copied or "
            "pickled. Store a step with step.save(path) and TrainingStep.load(path, model, "
            "optimizer); for a copy of the model compile again, which takes the program from the "
            "cache."
        )

    @property
    def rng_state(self) -> torch.Tensor | None:
        """``[seed, calls so far]`` of the random operators, None where there are none; settable.

        Each call draws a seed from PyTorch's default generator.  Once this has been read or set,
        calls count on from it instead, until that generator gets another seed.
        """
        return None if self._rng is None else self._rng.state

    @rng_state.setter
    def rng_state(self, state: torch.Tensor) -> None:
        if self._rng is None or state.shape != (2,) or state.dtype != torch.int64:
            raise InputMismatchError(
                "rng_state takes what rng_state returned: two int64 numbers, and only where the "
                "model draws random numbers."
            )
        with self._lock:
            self._rng.state = state

    @property
    def name(self) -> str:
        """The function's name in its program."""
        return self._captured.function

    @property
    def dims(self) -> tuple[SymbolicDim, ...]:
        """The symbolic dims, with their ranges."""
        return self._schema.dims

    @property
    def input_kinds(self) -> tuple[str, ...]:
        """What each tensor is that the program takes: "batch", "parameter", "state", ..."""
        return tuple(spec.kind for spec in self._captured.inputs if spec.kind != "shape")

    @property
    def session(self) -> Session:
        """Run-time state of the compiled function: plans, arena, profile."""
        return self._session

    @property
    def memory_budget(self) -> int | None:
        """Budget in bytes for all device memory of a call; None is no limit."""
        return self._session.memory_budget

    @memory_budget.setter
    def memory_budget(self, value: int | str | None) -> None:
        budget = None if value is None else parse_bytes(value)
        with self._lock:
            for function in self._functions():
                for session in function._variants.sessions():
                    session.memory_budget = budget

    @property
    def offload_to(self) -> Tier | None:
        """Where tensors are kept under a budget while others need their memory; settable.

        Set a folder's path, a `FileTier`, or None; on a GPU ``"host"``, a `HostTier`, or None.
        Raises `OffloadError`: the folder is not there, or it is the other kind of tier.
        """
        return self._tier

    @offload_to.setter
    def offload_to(self, value: TierName) -> None:
        tier = tier_for(value, on_host=self._session.metadata.machine.is_host)
        self._set_offload(tier, self._offload)

    def _set_offload(self, tier: Tier | None, what: tuple[str, ...]) -> None:
        """Offload to another tier, or other things."""
        with self._lock:
            in_file = tier is not None and "optimizer" in what  # on the CPU: see `check_offload`
            file = self._state_file if tier is self._tier else None
            if in_file and file is None:
                assert isinstance(tier, FileTier)
                file = StateFile(tier.folder)
            for function in self._functions():
                function._use_offload(tier, what, file if in_file else None)

    def _use_offload(
        self, tier: Tier | None, what: tuple[str, ...], file: StateFile | None
    ) -> None:
        for session in self._variants.sessions():
            session.set_tier(tier if "activations" in what else None, self._schema.device)
        if file is not self._state_file:
            inputs = self._binding.keep_state_in(file)
            shapes = [k for k, spec in enumerate(self._captured.inputs) if spec.kind == "shape"]
            given = [index - sum(shape < index for shape in shapes) for index in inputs]
            folder = tier if isinstance(tier, FileTier) else None
            for session in self._variants.sessions():
                session.set_state_file(file, folder, given)
        self._tier, self._offload, self._state_file = tier, what, file

    def plan(self, **dims: int) -> MemoryPlan:
        """Tell the memory and modelled time of a shape under the present budget; runs nothing.

        Parameters
        ----------
        **dims : int
            A size for every dim, by its name; where padding is left out ``tokens`` may say how many
            positions are computed, else all are planned for. So it is with sizes that the batch
            tells (`shape_of` names them).

        Raises
        ------
        ShapeRangeError
            A dim is missing, unknown or out of its range.
        """
        return self._plan(dims, self.memory_budget)

    def shape_of(self, *batch: Any, **named: Any) -> dict[str, int]:
        """Return the sizes of a batch, as `plan` takes them; of the program it runs nothing.

        Raises `InputMismatchError` or `ShapeRangeError`: the batch is not like the example's.
        """
        with self._lock:
            tensors, sizes = self._schema.bind(batch, named)
            return {**sizes, **self._counts(tensors, sizes)}

    def largest(
        self, dim: str, *, memory_budget: int | str | None = None, **other_dims: int
    ) -> int:
        """Return the largest size of one dim that fits the budget, the others given.

        Parameters
        ----------
        dim : str
            Name of the dim to maximise; it must have an upper bound.
        memory_budget : int, str or None
            Budget to use instead of the present one.
        **other_dims : int
            Sizes of all other dims; ``tokens`` as for `plan`. What a batch tells is bounded.

        Returns
        -------
        int
            The size, or 0 where none fits.

        Raises
        ------
        ShapeRangeError
            The dim is unknown or has no upper bound, or the others are not all given, or one that
            the batch tells is.
        """
        if told := sorted(self._counted.at_entry & other_dims.keys()):
            raise ShapeRangeError(
                f"largest() answers for whatever a batch may hold; leave out {', '.join(told)}."
            )
        budget = self.memory_budget if memory_budget is None else parse_bytes(memory_budget)
        found = bounded_dim(self.dims, dim)

        def sizes(size: int) -> dict[str, int]:
            return self._asked.as_many_as_there_are({**other_dims, dim: size})

        self.complete_sizes(sizes(found.last or 0))
        if budget is None:
            return found.last or 0
        return largest_that_fits(lambda size: self._fits(sizes(size), budget), found)

    def memory_report(self) -> MemoryReport:
        """Tell what the last call used, counted while it ran."""
        facts = self._variants.report()
        sizes = dict(zip(self._session.metadata.dims, facts.dims, strict=False))
        return MemoryReport(
            shape={dim.name: sizes[dim.name] for dim in self.program_dims if dim.name in sizes},
            budget_bytes=facts.budget_bytes,
            planned_peak_bytes=facts.planned_peak_bytes,
            peak_bytes=facts.peak_bytes,
            resident_bytes=facts.resident_bytes,
            state_bytes=self._state_bytes() + facts.state_window_bytes,
            arena_bytes=facts.arena_bytes,
            escaping_bytes=facts.escaping_bytes,
            workspace_bytes=facts.workspace_bytes,
            held_bytes=facts.held_bytes,
            recomputations=facts.recomputations,
            offloaded_bytes=facts.offloaded_bytes,
            reloaded_bytes=facts.reloaded_bytes,
            waited_ns=facts.waited_ns,
            offloaded_state_bytes=facts.offloaded_state_bytes,
            state_window_bytes=facts.state_window_bytes,
            finished=facts.finished,
        )

    def padding_report(self) -> PaddingReport:
        """Tell whether the padding of batches is left out, and what needs it, by line."""
        tokens = tuple(packing.tokens for packing in self._captured.packings)
        return PaddingReport(tokens, self._captured.padding)

    def first_use(self, target: str) -> str:
        """Return the model's line, ``"file:line"``, of the first kernel that reads a tensor.

        ``target``: full name of a parameter or buffer; ``""`` is returned where nothing is known.
        """
        given = [spec for spec in self._captured.inputs if spec.kind != "shape"]
        places = {
            index
            for index, spec in enumerate(given)
            if spec.target == target and spec.kind in ("parameter", "buffer")
        }
        metadata = self._session.metadata
        for kernel in metadata.kernels:
            if kernel.source and any(metadata.tensors[k].given in places for k in kernel.inputs):
                return kernel.source
        return ""

    def run(
        self, args: Sequence[Any], named: Mapping[str, Any] | None = None
    ) -> list[torch.Tensor]:
        """Check and bind the arguments, run, return every output that replaces nothing, in order.

        Raises `InputMismatchError` or `ShapeRangeError`: the arguments or the model do not fit what
        was compiled. Raises `MemoryBudgetError` or `OutOfMemoryError`: the shape cannot run inside
        the budget, or the system has not even that much memory; nothing has run. Raises
        `ReentrantCallError`: the function is running in this thread: a signal handler or a
        finalizer called it.
        """
        with self._lock, self._alone, deferred_interrupt():
            self._check_mode()
            return self._execute(*self._bind(args, named or {}))

    def _bind(
        self, args: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[list[torch.Tensor], dict[str, int]]:
        """Return a batch's tensors and the sizes to enter with; raises as `run`."""
        tensors, sizes = self._schema.bind(args, named)
        return tensors, self._counted.complete(sizes, self._counts(tensors, sizes))

    def _counts(self, tensors: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the sizes that a batch tells; none where the budget has room for bounds alone.

        Planning is no monotone function of sizes: a budget that `plan` promises for whatever a
        batch may hold may be a few bytes short of what is found for less.
        """
        counts = self._counted.told_by(tensors, sizes)
        if not counts or self.memory_budget is None or self._has_room(sizes, counts):
            return counts
        return {} if self._has_room(sizes, {}) else counts

    def _has_room(self, sizes: Mapping[str, int], counts: Mapping[str, int]) -> bool:
        """Say whether the budget has room for what is counted, or for bounds where nothing is."""
        values = self._values(self._counted.complete(sizes, counts))
        budget = self.memory_budget
        return budget is None or self._variants.fits(values, budget)

    def check_unchanged(self) -> None:
        """Refuse a model or an optimizer that no longer fits what was compiled.

        Raises `InputMismatchError`: names what changed.
        """
        self._check_mode()
        self._binding.refresh(early=True)

    def bind_hyper_parameters(self, vectors: Sequence[torch.Tensor]) -> None:
        """Let the program read the vectors of hyper-parameters, one for each update group."""
        for group, vector in zip(self._captured.update_groups, vectors, strict=True):
            self._arguments[group.hyper_input] = as_runtime(vector, "hyper-parameters")

    def _execute(self, tensors: Sequence[torch.Tensor], values: Mapping[str, int]) -> list[Any]:
        """Bind what PyTorch has replaced, run, tell autograd; return as `_call`."""
        if self._binding.states.renew():
            self._guards.check()  # which compares with the containers of this call from now on
        self._binding.refresh()
        flat = self._call(tensors, values)
        self._mark_written()
        self._binding.states.note()
        return flat

    def _functions(self) -> tuple[CompiledFunction, ...]:
        """The functions that share this one's budget."""
        return (self,)

    def _bind_rng(self, shared: RandomState | None) -> RandomState | None:
        """Bind the state of the random operators, a sibling's or a new one."""
        for index, spec in enumerate(self._captured.inputs):
            if spec.kind == "rng":
                shared = shared or RandomState(self._schema.device)
                self._arguments[index] = as_runtime(shared.tensor, "rng_state")
                return shared
        return None

    def _state_bytes(self) -> int:
        by_kind = self._binding.bytes_by_kind
        return sum(by_kind.get(kind, 0) for kind in _STATE_KINDS)

    def _plan(self, dims: Mapping[str, int], budget: int | None) -> MemoryPlan:
        session, facts = self._planned(dims, budget)
        sizes = self.complete_sizes(dims)
        kernels, base_time_ns = session.kernel_names, facts.base_time_ns
        if session is not self._session:
            base_time_ns = self._session.plan(self._values(sizes)).base_time_ns
        return MemoryPlan(
            shape=sizes,
            budget_bytes=budget,
            fits=facts.feasible,
            peak_bytes=facts.peak_bytes,
            resident_bytes=facts.resident_bytes,
            state_bytes=self._state_bytes() + facts.state_window_bytes,
            arena_bytes=facts.arena_bytes,
            live_peak_bytes=facts.live_peak_bytes,
            escaping_bytes=facts.escaping_bytes,
            workspace_bytes=facts.workspace_bytes,
            library_bytes=facts.library_bytes,
            unbounded_calls=session.metadata.unbounded_calls(),
            time_ratio=facts.time_ns / base_time_ns if base_time_ns else 1.0,
            evicted=tuple(kernels[kernel] for kernel in facts.recomputed),
            offloaded=facts.offloaded(session.metadata),
            offloaded_bytes=facts.offloaded_bytes,
            reloaded_bytes=facts.reloaded_bytes,
            offload_space_bytes=facts.tier_bytes,
            offload_buffer_bytes=facts.buffer_bytes,
            offloaded_state_bytes=facts.offloaded_state_bytes,
            state_window_bytes=facts.state_window_bytes,
            stall_ratio=facts.stall_ns / base_time_ns if base_time_ns else 0.0,
            by_rows=session is not self._session,
            whole_gradients=tuple(self._whole_gradients()),
            _least_bytes=functools.cache(lambda: self._least_bytes(dims, facts)),
            _timeline=functools.partial(
                *(timeline_of, session, facts, sizes, budget),
                *(self.input_kinds, self.program_dims),
            ),
        )

    def _least_bytes(self, dims: Mapping[str, int], facts: ArenaFacts) -> int:
        # Whatever budget is refused, this is the least that the refusal names.
        least = self._plan_facts(dims, 0) if facts.feasible else facts
        return least.least_bytes

    def _whole_gradients(self) -> Iterator[WholeGradient]:
        for _, place, reason in self._session.metadata.whole_gradients:
            spec = self._captured.inputs[place]
            size = math.prod(map(int, spec.shape)) * getattr(torch, spec.dtype).itemsize
            yield WholeGradient(str(spec.target), size, reason)

    def _plan_facts(self, dims: Mapping[str, int], budget: int | None) -> ArenaFacts:
        return self._planned(dims, budget)[1]

    def _planned(self, dims: Mapping[str, int], budget: int | None) -> tuple[Session, ArenaFacts]:
        return self._variants.plan(self._values(self.complete_sizes(dims)), budget)

    def _values(self, sizes: Mapping[str, int]) -> list[int]:
        """Sizes in the order of the program's dims."""
        return [int(sizes[name]) for name in self._session.metadata.dims]

    @property
    def program_dims(self) -> tuple[SymbolicDim, ...]:
        """The dims that plans are made for: `dims`, then those of sizes that follow from data."""
        return self._asked.program_dims

    def complete_sizes(self, dims: Mapping[str, int]) -> dict[str, int]:
        """Check sizes; add those that follow from data, by what they can be at most.

        The numbers of rows that are computed may be told.

        Raises `ShapeRangeError`: a size is missing, unknown or outside its range.
        """
        return self._asked.complete(dims)

    def _fits(self, dims: Mapping[str, int], budget: int) -> bool:
        return self._call_fits(dims, budget)

    def _call_fits(self, dims: Mapping[str, int], budget: int) -> bool:
        return self._variants.fits(self._values(self.complete_sizes(dims)), budget)

    def _call(self, tensors: Sequence[torch.Tensor], values: Mapping[str, int]) -> list[Any]:
        """Run the program; return the outputs that replace nothing, as torch tensors."""
        arguments = self._arguments
        self._sizes = values
        if self._shape_names:
            arguments[0] = tvm.runtime.ShapeTuple([values[name] for name in self._shape_names])
        if self._rng is not None:
            self._rng.begin()
        if self._loss_scale is not None:
            self._loss_scale.read()
        try:
            outputs = self._launch(tensors)
        finally:
            for place in self._batch_places:
                arguments[place] = None
        if self._rng is not None:
            self._rng.end()
        if self._captured.counted:
            facts = self._variants.ran.session.report()
            self._sizes = dict(zip(self._session.metadata.dims, facts.dims, strict=True))
        self._variants.ran.forget_result()
        return self._received(outputs)

    def _launch(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Run the program on a batch, on PyTorch's current stream."""
        for place, tensor in zip(self._batch_places, tensors, strict=True):
            self._arguments[place] = batch_argument(tensor)
        with on_current_stream(self._schema.device):
            return self._variants.call(self._arguments)

    def _received(self, outputs: Any) -> list[torch.Tensor]:
        """Share what the program returned with PyTorch."""
        flat = [outputs] if isinstance(outputs, tvm.runtime.Tensor) else list(outputs)
        return [torch.from_dlpack(tensor) for tensor in flat]

    def _extras(self, flat: Sequence[torch.Tensor]) -> Any:
        """Put the extra outputs into the structure in which the model returned them."""
        found = [t for t, out in zip(flat, self._returned, strict=True) if out.kind == "extra"]
        structure = self._captured.extras
        if structure is None:
            return tuple(found)
        tensors = iter(found)
        leaves = [
            self._plain_extra(place) if place in self._captured.plain_extras else next(tensors)
            for place in range(structure.num_leaves)
        ]
        return pytree.tree_unflatten(leaves, structure)

    def _plain_extra(self, place: int) -> Any:
        """Return an extra output that is no tensor, for the sizes of the last call."""
        value = self._captured.plain_extras[place]
        if isinstance(value, SizeOutput):
            return int(SymbolicExpr.parse(value.expression).evaluate(self._sizes))
        return value

    @property
    def _has_extras(self) -> bool:
        structure = self._captured.extras
        return structure is not None and structure.num_leaves > 0

    def _mark_written(self) -> None:
        """Tell autograd that the tensors written in place changed."""
        self._binding.mark_written(self._written)

    def _check_mode(self) -> None:
        if (now := [module.training for module in self._modules]) != self._modes:
            changed = next(k for k, mode in enumerate(now) if mode != self._modes[k])
            mode = "train" if self._modes[changed] else "eval"
            raise InputMismatchError(
                f"{type(self._modules[changed]).__name__} was compiled in {mode}() mode and is in "
                f"the other one now; call `.{mode}()` or compile again."
            )
        self._guards.check()
        self._hooks.check()


def bind_vector(binding: Binding, index: int, length: int, dtype: str) -> torch.Tensor:
    """Allocate a small vector that the caller fills before each call, and bind it."""
    vector = torch.zeros(length, dtype=getattr(torch, dtype))
    binding.arguments[index] = as_runtime(vector, "hyper-parameters")
    return vector
