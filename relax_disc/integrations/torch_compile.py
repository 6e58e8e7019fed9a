"""``torch.compile(model, backend="relax_disc")``: our programs inside a loop that PyTorch keeps.

PyTorch's own compiler front end (TorchDynamo) cuts the model into graphs and hands each over.  A
graph and its gradients become one program with symbolic sizes and one memory plan for both passes;
the loss that the caller makes of the outputs lies between its halves, which share an arena that
stays taken until the backward pass has run or the outputs are dropped.

The optimizer's update is the caller's: gradients of all parameters are alive at once, and neither
they nor the optimizer's state are in the plan.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import tvm
from torch import _guards as guards
from torch import fx, nn
from tvm import relax

from relax_disc.bytes_text import parse_bytes
from relax_disc.compiler import build_or_reuse
from relax_disc.errors import (
    GraphError,
    InputMismatchError,
    RelaxDiscWarning,
    ShapeRangeError,
    UnsupportedOperatorError,
)
from relax_disc.frontend import CapturedStep, capture_halves
from relax_disc.frontend.capture.traced.trace import Halves
from relax_disc.frontend.spec import InputSpec
from relax_disc.integrations.dynamo_graph import GraphLayout
from relax_disc.progress import phase
from relax_disc.training.call.batch import batch_argument, placed
from relax_disc.training.call.binding import as_runtime
from relax_disc.training.call.interrupt import deferred_interrupt
from relax_disc.training.call.streams import on_current_stream
from relax_disc.training.compiled_function import CompiledFunction
from relax_disc.transform.memory.plan_arena import backward_name
from relax_disc.vm_builtins.tier import Tier

_logger = logging.getLogger(__name__)

_OPTIONS = ("memory_budget",)

_MOST_NUMBERS = 8
"""A graph is compiled for so many sets of the plain numbers that it is called with."""

_ONCE = (
    "A gradient of a gradient through a program of torch.compile(backend='relax_disc'): it has "
    "none. Leave the call that is differentiated twice to eager PyTorch."
)

_made: list[weakref.ref[GraphFunction]] = []


def programs() -> tuple[GraphFunction, ...]:
    """Return the programs of this process that PyTorch still holds, in the order of compilation.

    Of each the budget can be set, and ``plan`` and ``memory_report`` tell its memory; the dims are
    named after the graph's argument and the axis that shows them, such as ``input_ids_1``.
    """
    return tuple(program for made in _made if (program := made()) is not None)


def backend(
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one graph of TorchDynamo; what ``torch.compile(backend="relax_disc")`` calls.

    Parameters
    ----------
    graph : torch.fx.GraphModule
        Its placeholders are tensors, sizes of those, and plain numbers.
    example_inputs : sequence
        What it is called with first.
    options : mapping, optional
        ``{"memory_budget": bytes or "4GiB"}``: what the memory of each graph's passes stays inside:
        its parameters and inputs, the arena, outputs and gradients.
    mode : str, optional
        Refused: modes are those of PyTorch's own backend.

    Returns
    -------
    callable
        From the graph's arguments to a tuple of its outputs.

    Raises
    ------
    UnsupportedOperatorError
        Something in the graph cannot be translated; names it and its line.
    InputMismatchError
        An option is unknown, or a mode is named.
    """
    if mode is not None:
        raise InputMismatchError(
            f"The backend relax_disc has no mode {mode!r}: leave out mode, or the backend."
        )
    chosen = dict(options or {})
    if unknown := sorted(set(chosen) - set(_OPTIONS)):
        raise InputMismatchError(
            f"The backend relax_disc does not know the option {unknown[0]!r}; it knows "
            f"{', '.join(_OPTIONS)}."
        )
    budget = chosen.get("memory_budget")
    compiled = _Graph(graph, None if budget is None else parse_bytes(budget))
    if not compiled.makes_something:
        return graph.forward
    compiled.program(example_inputs)
    return compiled


class _Graph:
    """A graph, and its programs: one for each set of the plain numbers that it is called with."""

    def __init__(self, graph: fx.GraphModule, budget: int | None) -> None:
        self._layout = GraphLayout(graph)
        self._budget = budget
        self._programs: dict[tuple[Any, ...], GraphFunction] = {}

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        made = self.program(args)([args[place] for place in self._layout.tensors])
        return self._layout.results(args, made)

    @property
    def makes_something(self) -> bool:
        """Whether there is anything to compile: tensors go in, and tensors come out."""
        return bool(self._layout.tensors and self._layout.made)

    def program(self, args: Sequence[Any]) -> GraphFunction:
        """Return the program for the numbers among the arguments, compiled at their first use."""
        numbers = tuple(_plain(args[place]) for place in self._layout.numbers)
        found = self._programs.get(numbers)
        if found is None:
            if len(self._programs) == _MOST_NUMBERS:
                raise InputMismatchError(
                    f"The numbers {numbers} are compiled into a graph that torch.compile took for "
                    f"general, and {_MOST_NUMBERS} other sets of them have been before: give what "
                    "changes from call to call as tensors."
                )
            found = self._compile(args, numbers)
            self._programs[numbers] = found
        return found

    def _compile(self, args: Sequence[Any], numbers: tuple[Any, ...]) -> GraphFunction:
        layout = self._layout
        examples = [args[place] for place in layout.tensors]
        for tensor in examples:
            if tensor.device.type != "cpu":
                raise UnsupportedOperatorError(
                    f"The backend relax_disc runs on the CPU; the graph takes a tensor on "
                    f"{tensor.device}. relax_disc.compile with a CUDA target compiles whole steps."
                )
        module = _GraphModule(layout, numbers)
        halves = layout.halves(examples)
        detached = [tensor.detach() for tensor in examples]
        captured = None
        while captured is None:
            # In a context of its own: symbols made here must not get into TorchDynamo's guards.
            try:
                with (
                    phase("trace the graph and its gradients"),
                    guards.tracing(None),
                    warnings.catch_warnings(),
                ):
                    # Of what a whole step leaves undone: here the caller's tensors are written.
                    warnings.simplefilter("ignore", RelaxDiscWarning)
                    shapes = (layout.dynamic_shapes(),)
                    captured = capture_halves(
                        module, (detached,), dynamic_shapes=shapes, halves=halves
                    )
            except (ShapeRangeError, GraphError) as error:
                if not layout.narrow(error):
                    raise
                _logger.info("%s", error)
        layout.check_gradients(halves, captured)
        built = build_or_reuse(captured.module, "llvm")
        parameters = {k: x.nbytes for k, x in enumerate(examples) if isinstance(x, nn.Parameter)}
        function = GraphFunction(captured, built.executable, module, halves, parameters)
        function.memory_budget = self._budget
        _made[:] = [made for made in _made if made() is not None]
        _made.append(weakref.ref(function))
        return function


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else int(value)


class _GraphModule(nn.Module):
    """A graph as a module over the list of its tensors, without any of its own."""

    def __init__(self, layout: GraphLayout, numbers: tuple[Any, ...]) -> None:
        super().__init__()
        self._layout = [layout]  # no submodule
        self._given = numbers

    def forward(self, tensors: list[torch.Tensor]) -> tuple[Any, ...]:
        """Return what the graph makes."""
        return self._layout[0].run(tensors, self._given)


class GraphFunction(CompiledFunction):
    """A program of ``torch.compile``; its ``plan`` and ``memory_report`` are of both passes.

    ``function(tensors)`` returns what the graph makes; PyTorch's autograd runs the second half.
    """

    _offer: ClassVar[str] = ""

    def __init__(
        self,
        captured: CapturedStep,
        executable: relax.VMExecutable | tvm.runtime.Module,
        module: nn.Module,
        halves: Halves,
        parameters: Mapping[int, int],
    ) -> None:
        super().__init__(captured, executable, module, None)
        self._parameters = dict(parameters)  # bytes of those among the tensors, by place
        self._differentiable = frozenset(halves.outputs)
        self._frame: Any = None
        early = [spec for spec in captured.inputs if spec.kind != "output_gradient"]
        self._has_halves = len(early) < len(captured.inputs)
        self._arguments = self._arguments[: len(early)]
        self._writes = [int(early[place].target) for place in self._written]
        self._rng_place = next((k for k, spec in enumerate(early) if spec.kind == "rng"), -1)
        self._returned = [out for out in self._returned if out.kind != "gradient"]
        self._gradients = [int(out.name) for out in captured.outputs if out.kind == "gradient"]
        self._second = self._machine[backward_name(self.name)] if self._has_halves else None
        self._read_late = self._find_read_late(early)

    def _set_offload(self, tier: Tier | None, what: tuple[str, ...]) -> None:
        if tier is not None:
            raise InputMismatchError(
                "Programs of torch.compile(backend='relax_disc') offload nothing; "
                "relax_disc.compile takes offload_to."
            )

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Sequence[Any]:
        """Run the forward pass.

        Raises `ShapeRangeError`, `IndexRangeError` or `MemoryBudgetError`: nothing has run.
        """
        if self._has_halves and torch.is_grad_enabled():
            return _Autograd.apply(self, *tensors)  # pyright: ignore[reportReturnType]
        return self.forward(tensors)[0]

    def forward(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], Any]:
        """Run the first half; return what the graph makes, and what `backward` goes on from."""
        given = [tensor.detach() for tensor in tensors]
        inputs = list(given)
        for place in self._writes:
            inputs[place] = placed(given[place])
        with self._lock:
            if self._rng is not None:  # the last call's may still be read by its second half
                self._rng.tensor = self._rng.tensor.clone()
                self._arguments[self._rng_place] = as_runtime(self._rng.tensor, "rng_state")
            made = self._extras(self.run((inputs,)))
            frame, self._frame = self._frame, None
        for place in self._writes:
            if inputs[place] is given[place]:
                torch.autograd.graph.increment_version([tensors[place]])
            else:
                given[place].copy_(inputs[place])
        return made, frame

    def backward(self, frame: Any, gradients: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Run the second half; return the gradients by the place of what they are of."""
        with self._lock, self._alone, deferred_interrupt():
            assert self._second is not None
            with on_current_stream(self._schema.device):
                outputs = self._second(frame, *map(batch_argument, gradients))
            self._variants.ran.forget_result()
            return dict(zip(self._gradients, super()._received(outputs), strict=True))

    @property
    def differentiable(self) -> frozenset[int]:
        """Places of the outputs whose gradients `backward` takes, in order."""
        return self._differentiable

    @property
    def read_late(self) -> Sequence[int]:
        """Places of the tensors that must be as they were when the second half runs."""
        return self._read_late

    def _received(self, outputs: Any) -> list[torch.Tensor]:
        if not self._has_halves:
            return super()._received(outputs)
        *made, self._frame = outputs
        return [torch.from_dlpack(tensor) for tensor in made]

    def _find_read_late(self, early: Sequence[InputSpec]) -> tuple[int, ...]:
        """Find the inputs that kernels of the second half read, or kernels that may run again."""
        metadata = self._session.metadata
        specs = [spec for spec in early if spec.kind != "shape"]
        given = {k: entry.given for k, entry in enumerate(metadata.tensors) if entry.given >= 0}
        starts_late = False
        read: set[int] = set()
        for kernel in metadata.kernels:
            places = {given[tensor] for tensor in kernel.inputs if tensor in given}
            starts_late = starts_late or any(place >= len(specs) for place in places)
            if starts_late or kernel.recomputable:
                read |= places
        batch = [place for place in sorted(read) if place < len(specs)]
        found = [int(specs[place].target) for place in batch if specs[place].kind == "batch"]
        return tuple(place for place in found if place not in self._writes)

    @property
    def input_kinds(self) -> tuple[str, ...]:
        """What each tensor is that the program takes."""
        return tuple(
            "parameter" if spec.target in self._parameters and spec.kind == "batch" else spec.kind
            for spec in self._captured.inputs
            if spec.kind != "shape"
        )

    def _state_bytes(self) -> int:
        return sum(self._parameters.values())

    def _mark_written(self) -> None:
        """Leave that to `forward`, which knows the caller's tensors."""


class _Autograd(torch.autograd.Function):
    """The two halves of a program as PyTorch's autograd calls them."""

    @staticmethod
    def forward(ctx: Any, function: GraphFunction, *tensors: torch.Tensor) -> Any:
        made, ctx.frame = function.forward(tensors)
        ctx.function, ctx.count = function, len(tensors)
        ctx.save_for_backward(*(tensors[place] for place in function.read_late))
        ctx.mark_non_differentiable(
            *(
                value
                for place, value in enumerate(made)
                if isinstance(value, torch.Tensor) and place not in function.differentiable
            )
        )
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradients; under ``create_graph=True`` ones that have none of their own."""
        _ = ctx.saved_tensors  # PyTorch raises where one was written in the meantime
        frame, ctx.frame = ctx.frame, None
        if frame is None:
            raise RuntimeError(
                "The backward pass of a program of relax_disc runs once: its memory serves other "
                "calls then. Call the model again instead of backward(retain_graph=True)."
            )
        wanted = [gradients[place] for place in sorted(ctx.function.differentiable)]
        with torch.no_grad():
            found = ctx.function.backward(frame, wanted)
        if torch.is_grad_enabled():
            found = _differentiated_once(found)
        return (None, *(found.get(place) for place in range(ctx.count)))


def _differentiated_once(found: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the gradients so that a gradient of them raises, whatever they are multiplied with.

    PyTorch's ``once_differentiable`` lets them pass for constants where what comes in is one, as
    in the backward pass of a sum.
    """
    refuse = torch._C._functions.DelayedError(_ONCE.encode(), len(found))
    made = refuse(*(tensor.requires_grad_() for tensor in found.values()))
    return dict(zip(found, made if len(found) > 1 else [made], strict=True))
