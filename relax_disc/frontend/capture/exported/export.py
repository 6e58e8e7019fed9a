"""Export the model, or the loss function over it, with the user's dims.

The callable is wrapped so that it returns ``(loss, extras)`` whatever the model returns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._dynamo.exc import UserError
from torch.export import ExportedProgram
from torch.export.dynamic_shapes import _combine_args
from torch.nn import functional
from torch.utils import _pytree as pytree

from relax_disc.errors import InputMismatchError, RelaxDiscError, UnsupportedOperatorError
from relax_disc.frontend.capture.batch_spec import BatchSpec, register_containers, shapes_as_lists
from relax_disc.frontend.capture.exported.all_sizes import Task
from relax_disc.frontend.capture.exported.torch_errors import translated
from relax_disc.frontend.capture.functions import functions_of
from relax_disc.frontend.capture.loops.cut import LoopBody
from relax_disc.frontend.capture.loops.source import loops_as_steps
from relax_disc.frontend.capture.refusals import refuse_sparse
from relax_disc.frontend.capture.replaced.custom_functions import CustomCalls
from relax_disc.frontend.capture.replaced.model_patches import changes_of, symbolic_builtins
from relax_disc.frontend.capture.sizes.dims import (
    DimTable,
    declared_dims,
    dims_by_source,
    named_dims,
)
from relax_disc.frontend.capture.sizes.guards import SizeBranch
from relax_disc.frontend.capture.state.live_number import LiveNumber
from relax_disc.frontend.capture.state.outer_state import OuterState

MODEL = "model"
"""Name of the user's model inside the exported module; stripped from every full name."""


@dataclass(frozen=True, slots=True)
class Exported:
    """An exported program with what is needed to read it."""

    program: ExportedProgram
    dims: DimTable
    batch: BatchSpec
    leaves: tuple[Any, ...]
    custom_calls: CustomCalls
    outer: OuterState
    loops: tuple[LoopBody, ...] = ()
    ones_are_general: bool = False
    size_branches: tuple[SizeBranch, ...] = ()


class _Wrapped(nn.Module):
    """A module around the user's, with the signature that the user sees."""

    def __init__(
        self,
        model: nn.Module,
        function: Callable[..., Any],
        sign: Any,
        loss_fn: Callable[..., Any] | None = None,
        is_step: bool = True,
    ) -> None:
        super().__init__()
        if loss_fn is None:
            self.contract = "model(*batch)"
        elif _is_criterion(loss_fn):
            self.contract = (
                "loss_fn(model(*inputs), target) of a module or of a function of PyTorch"
            )
        else:
            self.contract = "loss_fn(model, *batch)"
        self.outer = outer = OuterState(model, loss_fn)
        self.eager = lambda *args, **kwargs: function(*args, **kwargs)
        self.training = model.training
        self.add_module(MODEL, model)

        functions = functions_of(model, loss_fn)
        changes = changes_of(functions)

        def forward(*args: Any, **kwargs: Any) -> Any:
            with (
                loops_as_steps(model, functions),
                outer.tracing((args, kwargs)) as call,
                # Last, since what it replaces is none of the user's variables.
                symbolic_builtins(changes),
            ):
                result = call.result = function(*args, **kwargs)
            if not call.reassigned:
                return result
            values = tuple(call.reassigned)
            return (*result, values) if is_step else (result, values)

        forward.__signature__ = sign  # pyright: ignore[reportFunctionMemberAccess]
        self.forward = forward


def wrap_step(model: nn.Module, loss_fn: Callable[..., Any] | None) -> _Wrapped:
    """Wrap a model so that calling it returns ``(loss, extras)``.

    With ``loss_fn`` the loss is ``loss_fn(model, *batch)``, or, if it is a module such as
    ``nn.CrossEntropyLoss()`` or a function of ``torch.nn.functional``,
    ``loss_fn(model(*inputs), target)`` for a batch ``(*inputs, target)``; without, the model's
    output is the loss, has ``.loss``, holds ``"loss"``, or is a tuple that begins with it.
    """
    if loss_fn is None:
        return _Wrapped(model, lambda *a, **k: split_loss(model(*a, **k)), _signature(model))
    if _is_criterion(loss_fn):
        return _wrap_criterion(model, loss_fn)
    sign = inspect.signature(loss_fn)
    rest = list(sign.parameters.values())
    if rest and rest[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        rest = rest[1:]
    sign = sign.replace(parameters=rest)
    return _Wrapped(model, lambda *a, **k: split_loss(loss_fn(model, *a, **k)), sign, loss_fn)


def _is_criterion(loss_fn: Callable[..., Any]) -> bool:
    """Whether a loss takes a model's output and a target, as PyTorch's own do."""
    homes = (functional.__name__, "torch._C._nn")
    return isinstance(loss_fn, nn.Module) or getattr(loss_fn, "__module__", "") in homes


def _wrap_criterion(model: nn.Module, criterion: Callable[..., Any]) -> _Wrapped:
    def loss(*batch: Any) -> Any:
        return split_loss(criterion(model(*batch[:-1]), batch[-1]))

    both = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    inputs = [
        p for p in _signature(model).parameters.values() if p.kind in both and p.default is p.empty
    ]
    target = inspect.Parameter("target", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return _Wrapped(model, loss, inspect.Signature([*inputs, target]), criterion)


def wrap_forward(model: nn.Module) -> _Wrapped:
    """Wrap a model so that its full names match those of :func:`wrap_step`."""
    return _Wrapped(model, model, _signature(model), is_step=False)


def _signature(model: nn.Module) -> inspect.Signature:
    return inspect.signature(model.forward)


def split_loss(output: Any) -> tuple[torch.Tensor, Any]:
    """Split what a model or loss function returns into the loss and the extra outputs.

    Raises `InputMismatchError`: no scalar loss can be found. Raises `UnsupportedOperatorError`: a
    complex tensor is returned.
    """
    extras: Any = ()
    if isinstance(output, torch.Tensor):
        loss = output
    elif isinstance(getattr(output, "loss", None), torch.Tensor):
        loss = output.loss
    elif isinstance(output, Mapping) and isinstance(output.get("loss"), torch.Tensor):
        loss = output["loss"]
        extras = {key: value for key, value in output.items() if key != "loss"}
    elif isinstance(output, tuple | list) and output and isinstance(output[0], torch.Tensor):
        loss, extras = output[0], tuple(output[1:])
    else:
        raise InputMismatchError(
            f"The model returns {type(output).__name__}, in which no loss can be found: return the "
            "loss, (loss, ...), or something with .loss, or pass loss_fn(model, *batch)."
        )
    extras = pytree.tree_map_only(LiveNumber, LiveNumber.fixed, extras)
    register_containers(extras)
    if any(isinstance(x, torch.Tensor) and x.is_complex() for x in pytree.tree_leaves(extras)):
        raise UnsupportedOperatorError(
            "The model or loss_fn returns a complex tensor beside the loss, which a compiled step "
            "has as two real ones: return torch.view_as_real(x).",
            (("a complex tensor that is returned", "the model"),),
        )
    if loss.numel() != 1 or not loss.dtype.is_floating_point:
        raise InputMismatchError(
            f"The loss must be one floating-point number, but it is of type {loss.dtype} with "
            f"{loss.dim()} axes; pass loss_fn(model, *batch)."
        )
    return loss.reshape(()), extras


def split_example(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split example inputs into positional and keyword arguments.

    A tuple or list holds positional arguments, a mapping keyword arguments, anything else is the
    only argument.
    """
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return (example_inputs,), {}


def _distinct(example: Any) -> Any:
    """Copy a tensor that is given twice: torch.export would read both arguments from the first."""
    seen: set[int] = set()

    def apart(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in seen:
            return tensor.detach().clone()
        seen.add(id(tensor))
        return tensor

    return pytree.tree_map_only(torch.Tensor, apart, example)


def export(wrapped: _Wrapped, example_inputs: Any, dynamic_shapes: Any) -> Exported:
    """Export a wrapped model.

    Raises `UnsupportedOperatorError`: control flow or a shape depends on data. Raises
    `ShapeRangeError`: the model contradicts ``dynamic_shapes``. Raises `InputMismatchError`: the
    arguments do not fit the model.
    """
    args, kwargs = split_example(example_inputs)
    register_containers((args, kwargs))
    _name_keywords(wrapped, kwargs)
    if any(isinstance(leaf, np.ndarray) for leaf in pytree.tree_leaves((args, kwargs))):
        raise InputMismatchError(
            "example_inputs hold a NumPy array; convert it with `torch.as_tensor`, in calls too."
        )
    args, kwargs = _distinct((args, kwargs))
    try:
        combined = _combine_args(wrapped, args, kwargs)
    except TypeError as error:
        raise InputMismatchError(
            f"example_inputs do not fit {wrapped.contract}, which is how they are passed: {error}."
        ) from error
    shapes = _shapes_like(_gathered(dynamic_shapes, _signature(wrapped), args), combined)
    dynamic_shapes = named_dims(shapes)
    try:
        declared = declared_dims(combined, dynamic_shapes)
    except UserError as error:
        raise translated(error) from error
    except RelaxDiscError:
        raise
    except ValueError as error:
        raise InputMismatchError(
            f"dynamic_shapes do not fit the example inputs: {error}"
        ) from error
    leaves, structure = pytree.tree_flatten((args, kwargs))
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            refuse_sparse(leaf, "example_inputs")
    by_source = dims_by_source(wrapped, args, kwargs, declared)
    run = Task(wrapped, (args, kwargs), dynamic_shapes, declared, leaves, by_source).export()
    fixed = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
    batch = BatchSpec(structure, fixed, _positional(wrapped.forward))
    wrapped.outer.warn(run.example.deciding)
    return Exported(
        run.program,
        replace(run.dims, sizes={}),
        batch,
        tuple(leaves),
        run.calls,
        wrapped.outer,
        tuple(run.bodies),
        run.branches.ones_are_general,
        run.varying,
    )


def _positional(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the parameters that can be given by place and by name."""
    by_both = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = inspect.signature(function).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind is by_both)


def _gathered(shapes: Any, sign: inspect.Signature, args: Sequence[Any]) -> Any:
    """Gather the shapes of ``*batch``, given one by one, into the tuple of torch.export."""
    kinds = [parameter.kind for parameter in sign.parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL not in kinds or not isinstance(shapes, tuple | list):
        return shapes
    first = kinds.index(inspect.Parameter.VAR_POSITIONAL)
    rest = list(shapes[first:])
    is_gathered = len(rest) == 1 and isinstance(rest[0], tuple | list)
    if len(shapes) != len(args) or is_gathered or not rest:
        return shapes
    return (*shapes[:first], tuple(rest))


def _shapes_like(dynamic_shapes: Any, combined: Mapping[str, Any]) -> Any:
    if isinstance(dynamic_shapes, tuple | list):
        arguments = [combined[key] for key in combined][: len(dynamic_shapes)]
        return shapes_as_lists(list(dynamic_shapes), arguments)
    return shapes_as_lists(dynamic_shapes, combined)


def _name_keywords(wrapped: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Write the keywords that go into ``**kwargs`` into the signature, one by one.

    torch.export's parts do not agree about how shapes of ``**kwargs`` are nested.
    """
    sign = _signature(wrapped)
    plain = [p for p in sign.parameters.values() if p.kind is not p.VAR_KEYWORD]
    if len(plain) == len(sign.parameters):
        return
    named = {p.name for p in plain}
    plain += [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY) for key in kwargs if key not in named
    ]
    wrapped.forward.__signature__ = sign.replace(  # pyright: ignore[reportFunctionMemberAccess]
        parameters=plain
    )
