"""Export the model, or the loss function over it, with the user's dims.

The callable is wrapped so that it returns ``(loss, extras)`` whatever the model returns.  Failures
of torch.export become this package's errors and name the line of the model.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch._dynamo.exc import UserError, UserErrorType
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.export import ExportedProgram
from torch.export.dynamic_shapes import _combine_args
from torch.fx.experimental import _config as symbolic_config
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn import functional
from torch.utils import _pytree as pytree

from relax_disc.errors import (
    InputMismatchError,
    RelaxDiscError,
    ShapeRangeError,
    UnsupportedOperatorError,
)
from relax_disc.frontend.capture.batch_spec import BatchSpec, register_containers, shapes_as_lists
from relax_disc.frontend.capture.custom_functions import CustomCalls, custom_functions
from relax_disc.frontend.capture.example_values import example_values
from relax_disc.frontend.capture.export_mode import ExportMode
from relax_disc.frontend.capture.loops.cut import LoopBody, cut_loops
from relax_disc.frontend.capture.loops.source import loops_as_steps
from relax_disc.frontend.capture.loops.steps import LoopRefusal, RecordedLoops, recorded_loops
from relax_disc.frontend.capture.model_checks import EagerBranches, tensor_checks
from relax_disc.frontend.capture.model_patches import (
    cumulative_averages,
    hooks_as_before,
    inlined_checkpoints,
    masks_unread,
    own_attributes,
    symbolic_len,
)
from relax_disc.frontend.capture.sizes.branches import (
    SizeBranches,
    lines_that_fix_sizes,
    overlaps_by_stride,
    size_branches,
)
from relax_disc.frontend.capture.sizes.counted import merge_equal_masks, refuse_other_sizes
from relax_disc.frontend.capture.sizes.dims import (
    DimTable,
    declared_dims,
    dim_table,
    dims_by_source,
    enlarge,
    least_size,
    roots_stay,
)
from relax_disc.frontend.capture.sizes.guards import (
    ProvedConditions,
    SizeBranch,
    check_asked,
    check_assertions,
    check_derived_dims,
    check_numbers,
    varying_branches,
)
from relax_disc.frontend.capture.sizes.stand_ins import stand_ins
from relax_disc.frontend.capture.source_lines import SourceLine, parse_stack
from relax_disc.frontend.capture.state.live_number import LiveNumber
from relax_disc.frontend.capture.state.outer_state import OuterState
from relax_disc.frontend.capture.state.randomness import no_foreign_randomness
from relax_disc.frontend.capture.torch_errors import (
    contradiction,
    data_dependent,
    first_part,
    is_of_torch,
    traceback_text,
    translated,
    untraceable,
)

_MOST_EXAMPLES = 3
"""A program of one size may rely on what fails at others, and be right for all when made there."""

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
        self.contract = "model(*batch)" if loss_fn is None else "loss_fn(model, *batch)"
        self.outer = outer = OuterState(model, loss_fn)
        self.eager = lambda *args, **kwargs: function(*args, **kwargs)
        self.training = model.training
        self.add_module(MODEL, model)

        def forward(*args: Any, **kwargs: Any) -> Any:
            with (
                symbolic_len(model, loss_fn),
                loops_as_steps(model, loss_fn),
                outer.tracing((args, kwargs)) as call,
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

    Raises `InputMismatchError`: no scalar loss can be found.
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
    dynamic_shapes = _shapes_like(_gathered(dynamic_shapes, _signature(wrapped), args), combined)
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
    by_source = dims_by_source(wrapped, args, kwargs, declared)
    sizes: dict[str, int] = {}
    first: ShapeRangeError | None = None
    equals = False  # whether the example's sizes were equal where others are not
    is_longer = False  # whether the example was too short to tell what stands in the way
    for left in reversed(range(_MOST_EXAMPLES)):
        example = _enlarged((args, kwargs), declared, sizes)
        proved = ProvedConditions(by_source)
        try:
            with roots_stay(by_source):
                run = _recorded(wrapped, example, dynamic_shapes, leaves, equals, proved)
            _erase_unread(run.program.graph_module)
            refuse_other_sizes(run.program)
            merge_equal_masks(run.program.graph_module)
            table = dim_table(run.program, leaves, declared)
            varying = varying_branches(run.program, table, run.branches)
            check_assertions(run.program, table, run.branches, varying)
            check_derived_dims(run.program, table, run.branches, run.lines, varying)
            if equals:
                check_asked(run.program, table, run.branches)
            check_numbers(run.program, table, run.branches)
            break
        except Exception as error:
            fixed = isinstance(error.__cause__, UserError)  # torch.export took sizes for numbers
            fails_at = getattr(error, "fails_at", {}) or (proved.fails_at if fixed else {})
            last = not left or (fixed and (first is not None or not fails_at))
            if not isinstance(error, ShapeRangeError) or not error.dims or last:
                if first is None or (is_longer and not fixed):
                    raise
                raise first from None
            is_longer = is_longer or (fixed and not error.fails_at)
            equals = equals or not fixed
            first = first or error
            sizes |= _in_range(fails_at, declared)
    fixed = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
    batch = BatchSpec(structure, fixed, _positional(wrapped.forward))
    wrapped.outer.warn(run.example.deciding)
    return Exported(
        run.program,
        table,
        batch,
        tuple(leaves),
        run.calls,
        wrapped.outer,
        tuple(run.bodies),
        run.branches.ones_are_general,
        varying,
    )


@dataclass(frozen=True, slots=True)
class _Recording:
    """What one export has recorded, with its loops cut out."""

    program: ExportedProgram
    bodies: list[LoopBody]
    branches: SizeBranches
    lines: list[SourceLine]
    calls: CustomCalls
    example: Any  # what data decided


def _recorded(
    wrapped: _Wrapped,
    enlarged: Any,
    dynamic_shapes: Any,
    leaves: Sequence[Any],
    ones_are_general: bool,
    proved: ProvedConditions,
) -> _Recording:
    """Export; where a loop cannot be one step, once more as it is written."""
    args, kwargs = enlarged
    loops, eager_branches = RecordedLoops(), EagerBranches()
    loops.least = {name: least_size(dim) for name, dim in proved.by_source.items()}
    while True:
        with (
            eager_branches.answered(),
            tensor_checks(),
            size_branches() as branches,
            proved.kept_back(branches),
            lines_that_fix_sizes() as lines,
            custom_functions() as calls,
            recorded_loops(loops),
            example_values(wrapped, leaves) as example,
        ):
            branches.ones_are_general = ones_are_general
            try:
                program = _export(wrapped, args, kwargs, dynamic_shapes, lines, branches)
                bodies = cut_loops(program.graph_module, loops.lines)
                return _Recording(program, bodies, branches, lines, calls, example)
            except Exception as error:
                if eager_branches.give_up() or loops.give_up(error):
                    continue
                if not wrapped.outer.give_up_live_numbers(error):
                    raise loops.explained(error) from error.__cause__


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
    if len(shapes) != len(args) or is_gathered:
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


def _enlarged(
    example: Any, declared: Mapping[int, Mapping[int, Any]], sizes: Mapping[str, int]
) -> Any:
    """Make every dynamic axis of the example at least 2 long, and some of the sizes of dims."""
    return pytree.tree_map_only(
        torch.Tensor, lambda tensor: enlarge(tensor, declared.get(id(tensor), {}), sizes), example
    )


def _in_range(
    sizes: Mapping[str, int], declared: Mapping[int, Mapping[int, Any]]
) -> dict[str, int]:
    """Cut sizes of dims, by name, to the greatest that is declared for each."""
    dims = (dim for by_axis in declared.values() for dim in by_axis.values())
    roots = (getattr(dim, "root", dim) for dim in dims)
    most = {root.__name__: root.max for root in roots if isinstance(root, torch.export.Dim)}
    return {name: int(min(size, most.get(name, size))) for name, size in sizes.items()}


def _export(
    wrapped: _Wrapped,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    lines: Sequence[SourceLine],
    branches: SizeBranches,
) -> ExportedProgram:
    """Export; where torch cannot prove what it relies on, once more with assertions to check."""

    def attempt(deferred: bool) -> ExportedProgram:
        # nn.LSTM and its like keep their weights in a list beside the parameters.
        warnings.filterwarnings("ignore", message="The tensor attributes .* were assigned")
        with (
            ExportMode(),
            stand_ins(),
            no_foreign_randomness(wrapped.outer.moving),
            hooks_as_before(wrapped),
        ):
            return torch.export.export(
                wrapped,
                args,
                kwargs,
                dynamic_shapes=dynamic_shapes,
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=deferred,
            )

    try:
        with (
            own_attributes(wrapped),
            warnings.catch_warnings(),
            inlined_checkpoints(),
            masks_unread(),
            cumulative_averages(),
            overlaps_by_stride(),
        ):
            for deferred in () if branches.ones_are_general else (False, True):
                try:
                    return attempt(deferred)
                except UserError as error:
                    if error.error_type is not UserErrorType.CONSTRAINT_VIOLATION:
                        raise
                except AssertionError as error:  # while torch words what it asks of the dims
                    if not is_of_torch(error):
                        raise
            # Sizes such as ``length - 1`` may be 1 without being treated apart, as dims may.
            branches.ones_are_general = True
            with symbolic_config.patch(backed_size_oblivious=True):
                return attempt(deferred=True)
    except (
        GuardOnDataDependentSymNode,
        DataDependentOutputException,
        DynamicOutputShapeException,
    ) as error:
        raise data_dependent(error) from error
    except UnsupportedOperatorException as error:
        raise untraceable(error) from error
    except UserError as error:
        raise translated(error, lines) from error
    except (RelaxDiscError, LoopRefusal):
        raise
    except (RuntimeError, AttributeError) as error:
        if isinstance(error, AttributeError) and not is_of_torch(error):
            raise  # the model's own
        line = parse_stack(traceback_text(error))
        reason = first_part(error)
        if "Batching rule not implemented for relax_disc::inner_gradient" in reason:
            reason = (
                "gradients of each sample (torch.func.grad inside vmap) are not compiled; take the "
                "gradient of a sum by torch.autograd.grad, or compute them beside the step, on the "
                "model itself"
            )
        raise UnsupportedOperatorError(
            f"{line}: PyTorch cannot trace the model: {reason}",
            (("what torch.export cannot trace", str(line)),),
        ) from error
    except TypeError as error:
        if "unhashable type: non-nested SymInt" not in str(error):
            raise  # the model's own
        line = parse_stack(traceback_text(error))
        raise UnsupportedOperatorError(
            f"{line}: a size that differs between batches is the key of a dict or a member of a "
            "set; compute what is kept there each time, or keep it for the greatest size and "
            "slice that.",
            (("a size as a key", str(line)),),
        ) from error
    except ValueError as error:
        trace = traceback_text(error)
        if re.search(r"\bs\d+\b", str(error)):  # PyTorch asks for a number, and got a symbol
            line = parse_stack(trace)
            raise UnsupportedOperatorError(
                f"{line}: PyTorch cannot trace the model with symbolic sizes: {first_part(error)}",
                (("what torch.export cannot trace", str(line)),),
            ) from error
        if isinstance(error, fx.proxy.TraceError) and branches.numbers:
            line = next(iter(branches.numbers.values()))
            raise UnsupportedOperatorError(
                f"{line}: a Python number is made of sizes that differ between batches; compute it "
                "with tensors or with torch.sym_int, torch.sym_float and torch.sym_sqrt.",
                (("a number made of sizes", str(line)),),
            ) from error
        if ", in make_fake_inputs" not in trace:  # the model's own
            raise
        raise InputMismatchError(f"example_inputs cannot be exported: {error}") from error
    except AssertionError as error:
        # torch's own, made while it words what the model asks of the dims; the model's stay.
        if not is_of_torch(error):
            raise
        reason = (
            f"it branches on a size in a way that torch.export cannot put into words ({error}), "
            "such as `if length % 5`; pad or cut outside the model"
        )
        raise contradiction(reason, lines) from error


def _erase_unread(module: fx.GraphModule) -> None:
    """Erase sizes that depend on data where only checks of them are left."""
    graph = module.graph
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    if not any(node.meta.get("unbacked_bindings") for node in nodes):
        return
    checks = ("aten._assert_scalar.", "aten.sym_constrain_range")
    of_data = {node for node in nodes if node.meta.get("unbacked_bindings")}
    for node in nodes:
        if of_data.intersection(node.all_input_nodes):
            of_data.add(node)
    for node in reversed(nodes):
        unread = not node.users and (not node.is_impure() or str(node.target).startswith(checks))
        if node in of_data and unread:
            graph.erase_node(node)
    module.recompile()
