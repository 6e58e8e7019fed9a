"""Trace forward and gradients of an exported program into one flat graph of ATen operators.

The exported graph is interpreted under ``make_fx`` on its own fake tensors, so that sizes stay
symbols.  Attention and cross-entropy are kept whole (:mod:`.decompositions`); everything else is
decomposed into the operators that the importer knows.  The optimizer is not traced.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import re
import traceback
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch._subclasses.functional_tensor import (
    FunctionalTensor,
    FunctionalTensorMode,
    dispatch_functionalize,
)
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx.experimental import _config as symbolic_config
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing

from relax_disc.errors import InputMismatchError, UnsupportedOperatorError
from relax_disc.frontend.capture.arguments import Argument, is_foreign_parameter, list_arguments
from relax_disc.frontend.capture.exported.export import Exported
from relax_disc.frontend.capture.exported.torch_errors import traceback_text
from relax_disc.frontend.capture.loops.programs import Loops
from relax_disc.frontend.capture.replaced import inner_gradients
from relax_disc.frontend.capture.replaced.custom_functions import answered_questions
from relax_disc.frontend.capture.sizes.branches import layouts_by_stride
from relax_disc.frontend.capture.sizes.counted import (
    CountedSize,
    CountedSizes,
    find_counted,
    general_ways,
)
from relax_disc.frontend.capture.sizes.dims import DimTable
from relax_disc.frontend.capture.sizes.guards import GuardWatch, unequal_sizes
from relax_disc.frontend.capture.source_lines import parse_stack, source_line
from relax_disc.frontend.capture.state.outer_state import OuterState
from relax_disc.frontend.capture.traced.decompositions import (
    check_where_computed,
    checks_are_traced,
    decomposition_table,
    kept_whole,
)
from relax_disc.frontend.capture.traced.interpreter import StepInterpreter
from relax_disc.frontend.capture.traced.picked_losses import with_ignored_labels
from relax_disc.frontend.capture.traced.writes import without_writes, writes
from relax_disc.frontend.capture.traced.written_attention import attention_as_one
from relax_disc.frontend.random_ops import Randomness

_WITHOUT_GRADIENT = re.compile(r"derivative for (\S+) is not implemented")


@dataclass(frozen=True, slots=True)
class Traced:
    """A flat graph; its placeholders follow ``arguments``, its output is one flat list.

    The list holds the loss, the extra outputs, the new values of ``buffers`` (and of other tensors
    that are written) and the gradients of ``gradients``, in this order; the last two are indices
    into ``arguments``.  ``extras`` is ``nested`` in a tuple if outputs of a forward pass stand
    beside new values.  The last ``late`` arguments are gradients of outputs.  The graph finds the
    sizes ``counted`` in its own tensors.
    """

    graph: fx.GraphModule
    arguments: tuple[Argument, ...]
    extras: pytree.TreeSpec | None
    extra_count: int
    buffers: tuple[int, ...]
    gradients: tuple[int, ...]
    nested: bool = False
    late: int = 0
    counted: tuple[CountedSize, ...] = ()


@dataclass(frozen=True, slots=True)
class Halves:
    """What a function in two halves gives: gradients of ``leaves`` by those of ``outputs``."""

    leaves: frozenset[int]  # of the flattened batch
    outputs: tuple[int, ...]


class _Functional(FunctionalTensorMode):
    """Functionalization in which a detached tensor is another handle of the same value.

    Autograd detaches whatever it saves: half of all operators of a step, each otherwise a view
    that is traced, and made again after a write.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default and type(args[0]) is FunctionalTensor:
            same = FunctionalTensor(args[0].elem, self)
            return return_and_correct_aliasing(func, args, kwargs or {}, same)
        return super().__torch_dispatch__(func, types, args, kwargs)


def trace_step(
    exported: Exported, model: nn.Module, scaled: bool = False, held: Container[int] = ()
) -> Traced:
    """Trace the loss, its gradients by every parameter that requires them, and mutated buffers.

    ``scaled``: the gradients are those of the loss times a number, an argument of kind "scale".
    ``held``: the ``id`` of each parameter that the optimizer would update.

    Raises `InputMismatchError`: it would update one that is not the model's.
    """
    return _trace(exported, model, with_gradients=True, scaled=scaled, held=held)


def trace_forward(exported: Exported, model: nn.Module) -> Traced:
    """Trace the outputs alone; the first is in the place of the loss."""
    return _trace(exported, model, with_gradients=False)


def trace_halves(exported: Exported, model: nn.Module, halves: Halves) -> Traced:
    """Trace the outputs, and the gradients of leaves of the batch by those of the outputs."""
    return _trace(exported, model, with_gradients=bool(halves.outputs), halves=halves)


def _trace(
    exported: Exported,
    model: nn.Module,
    with_gradients: bool,
    halves: Halves | None = None,
    scaled: bool = False,
    held: Container[int] = (),
) -> Traced:
    program = exported.program
    arguments, position = list_arguments(program, model, exported.outer)
    trained = tuple(
        index
        for index, argument in enumerate(arguments)
        if with_gradients and _is_trained(argument, halves)
    )
    foreign = [
        i for i, a in enumerate(arguments) if is_foreign_parameter(a) and id(a.tensor) in held
    ]
    mutates = _mutates(program.graph_module)
    twice = inner_gradients.has_inner_gradients(program.graph_module)
    place = {id(argument.tensor): index for index, argument in enumerate(arguments)}
    reassigned = [place[id(outer.tensor)] for outer in exported.outer.reassigned]
    writable = tuple(
        i
        for i, a in enumerate(arguments)
        if a.kind in ("buffer", "parameter")
        or (a.kind == "constant" and a.outer is not None)
        or (a.kind == "batch" and halves is not None)
    )
    module, written = program.graph_module, []
    if mutates and not exported.custom_calls and not twice:
        indices = list(position.values())
        fit = {i for i in writable if indices.count(i) == 1} - {*trained, *reassigned}
        names = {name for name, index in position.items() if index in fit}
        plain = without_writes(module, names)
        if plain is not None:
            (module, written), mutates = plain, False
    if not twice:
        tables = {name for name, k in position.items() if arguments[k].kind == "parameter"}
        module = with_ignored_labels(attention_as_one(module, tables))
    news = [position[name] for name in written]
    buffers = writable if mutates else tuple(sorted([*reassigned, *news]))
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    users = [
        index
        for index, spec in enumerate(program.graph_signature.output_specs)
        if spec.kind is OutputKind.USER_OUTPUT
    ]
    outputs: dict[str, Any] = {"missed": []}

    def step(*flat: Any) -> list[Any]:
        values = [v.detach() if isinstance(v, Tensor) else v for v in flat]
        for index in (*trained, *foreign):
            values[index] = values[index].requires_grad_(True)
        if not exported.custom_calls:
            return results(values)
        with (
            _tensors_replaced(model, arguments, values),  # they may call its modules
            exported.outer.tracing_gradients(),
            answered_questions(),
        ):
            return results(values)

    def results(values: list[Any]) -> list[Any]:
        feed = [values[position[node.name]] for node in placeholders]
        late = values[first_late:]
        with torch.set_grad_enabled(with_gradients or twice):
            randomness = Randomness(values[count])
            outputs["counted"] = counted = CountedSizes()
            parts = randomness, counted, exported.custom_calls
            # What makes the loss of two halves scales it, too.
            allows_half = scaled or halves is not None
            loops = Loops(exported.loops)
            interpreter = StepInterpreter(module, *parts, allows_half, loops, twice)
            produced = interpreter.run(*feed)
        found = [produced[index] for index in users]
        found, assigned = (
            found[: len(users) - len(reassigned)],
            found[len(users) - len(reassigned) :],
        )
        extras = [x.detach() if isinstance(x, Tensor) else x for x in found[1:]]
        assigned = [*assigned, *produced[len(produced) - len(news) :]]
        new = dict(zip([*reassigned, *news], assigned, strict=True))
        grads: Sequence[Tensor | None] = ()
        if with_gradients:
            made = [found[0]] if halves is None else [found[k] for k in halves.outputs]
            if scaled and made[0].requires_grad:
                made = [made[0] * values[count + 1]]
            if late:
                early = [x.detach() for x in found if isinstance(x, Tensor)]
                late = [torch.ops.relax_disc.await_gradient(x, early) for x in late]
            if made[0].requires_grad and trained:
                _keep_lines(made)
                wanted = [values[index] for index in (*trained, *foreign)]
                found_grads = _gradients(made, wanted, late or None)
                grads = found_grads[: len(trained)]
                outputs["missed"] = [g is not None for g in found_grads[len(trained) :]]
            else:
                grads = [None] * len(trained)
        outputs["grads"] = [g is not None for g in grads]
        kept = [g.detach() for g in grads if g is not None]
        changed = [new.get(index, values[index]).detach() for index in buffers]
        first = found[0].detach() if isinstance(found[0], Tensor) else found[0]
        return [first, *extras, *changed, *kept]

    fakes = _fakes(placeholders, position, arguments)
    count = len(arguments)
    arguments = (*arguments, Argument("rng", "rng", "rng", None))
    with next(f.fake_mode for f in fakes if hasattr(f, "fake_mode")):
        fakes.append(torch.empty(2, dtype=torch.int64))
        if scaled:
            fakes.append(torch.empty((), dtype=torch.float32))
            arguments = (*arguments, Argument("scale", "scale", "scale", None))
        first_late = len(arguments)
        for k in halves.outputs if halves is not None else ():
            made = program.graph.output_node().args[0][users[k]]  # pyright: ignore
            fakes.append(torch.empty_like(made.meta["val"], memory_format=torch.contiguous_format))
            arguments = (*arguments, Argument(f"gradient_{k}", "output_gradient", k, None))
    watch = GuardWatch(fakes)
    # Functions of the user's own would be told what they ask, too.
    answers = contextlib.nullcontext if exported.custom_calls else general_ways
    ones = symbolic_config.patch(backed_size_oblivious=exported.ones_are_general)
    with ones, answers(), inner_gradients.differentiated_again(module):
        graph = _make_graph(step, fakes, exported.dims, mutates)
    if not mutates and _mutates(graph):  # a decomposition wrote in place
        buffers = writable
        with ones, answers(), inner_gradients.differentiated_again(module):
            graph = _make_graph(step, fakes, exported.dims, functionalize=True)
    watch.check(exported.dims)
    _refuse_foreign_parameters(list(itertools.compress(foreign, outputs["missed"])), arguments)
    graph.graph.eliminate_dead_code()
    counted = find_counted(graph, tuple(exported.dims.specs), outputs["counted"])
    _refuse_foreign_tensors(graph, exported.outer)
    check_where_computed(graph)
    kept = [i for i, there in zip(trained, outputs["grads"], strict=True) if there]
    extra_count = len(users) - 1 - len(reassigned)
    traced = _drop_unchanged(graph, arguments, extra_count, buffers, tuple(kept), program)
    late = len(arguments) - first_late
    return replace(traced, nested=bool(reassigned), late=late, counted=counted)


def _is_trained(argument: Argument, halves: Halves | None) -> bool:
    if halves is not None:
        return argument.kind == "batch" and argument.target in halves.leaves
    return (
        argument.kind == "parameter"
        and argument.tensor is not None
        and argument.tensor.requires_grad
    )


def _refuse_foreign_parameters(missed: Sequence[int], arguments: Sequence[Argument]) -> None:
    """Refuse an optimizer over parameters that get a gradient and are not the model's."""
    if missed:
        names = ", ".join(str(arguments[index].target) for index in missed[:4])
        more = f" and {len(missed) - 4} more" if len(missed) > 4 else ""
        raise InputMismatchError(
            f"The optimizer holds {names}{more}, which the loss reads and which the model does not "
            "have: a step trains the parameters of its model alone. Compile a module that holds "
            "both in the model's place, torch.nn.ModuleList([model, other]), with a loss_fn that "
            "calls them as before."
        )


def _refuse_foreign_tensors(graph: fx.GraphModule, outer: OuterState) -> None:
    """Refuse tensors of the user that are no inputs: the program would keep their values of today.

    Where the model or ``loss_fn`` reads one it is an input; that leaves functions with a gradient
    of their own.
    """
    for node in graph.graph.nodes:
        held = node.op == "get_attr" and operator.attrgetter(str(node.target))(graph)
        if not isinstance(held, Tensor) or not node.users:
            continue
        name = outer.name_of(held)
        if name is not None or isinstance(held, nn.Parameter):
            line = source_line(node)
            raise UnsupportedOperatorError(
                f"{line}: a torch.autograd.Function reads {name or 'a parameter'} of shape "
                f"{tuple(held.shape)}, which is none of the model's and none of its arguments: "
                "give it as an argument, or make its module a part of the model.",
                (("torch.autograd.Function", str(line)),),
            )


def _make_graph(
    step: Callable[..., Any], fakes: list[Any], dims: DimTable, functionalize: bool
) -> fx.GraphModule:
    if functionalize:
        mode = _Functional(pre_dispatch=False, _allow_token_discovery=False)
        step = dispatch_functionalize(step, mode)
    fake_mode = next(f.fake_mode for f in fakes if hasattr(f, "fake_mode"))
    contexts = (
        fake_mode,
        _lines_of_the_model(),
        enable_python_dispatcher(),  # decompositions that keep sizes symbolic
        _without_libraries(),
        kept_whole(),
        checks_are_traced(),
        layouts_by_stride(),
        unequal_sizes(dims),
    )
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        return make_fx(
            step,
            decomposition_table=decomposition_table(),
            tracing_mode="real",
            _allow_non_fake_inputs=True,
        )(*fakes)


@contextlib.contextmanager
def _without_libraries() -> Iterator[None]:
    """Keep operators of mkldnn out of decompositions, and nnpack's limits out of the guards.

    PyTorch would give a convolution over fewer than 16 pictures to nnpack, and guard on that.
    ``torch.backends.mkldnn.flags`` would also set precisions, and not restore them all.
    """
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        with torch.backends.nnpack.flags(enabled=False):
            yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextlib.contextmanager
def _lines_of_the_model() -> Iterator[None]:
    """Copy the exported nodes' source lines to the traced nodes, the gradients' included."""
    before, check_nan = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    try:
        with fx_traceback.preserve_node_meta():
            yield
    finally:
        torch.autograd.set_detect_anomaly(before, check_nan)


@contextlib.contextmanager
def _tensors_replaced(
    model: nn.Module, arguments: Sequence[Argument], values: list[Any]
) -> Iterator[None]:
    """Give the model's own modules the traced values of its parameters and buffers.

    Unlike ``torch.func.functional_call``, this restores modules that have several names, too.
    """
    traced = {
        id(argument.tensor): value
        for argument, value in zip(arguments, values, strict=False)
        if argument.kind in ("parameter", "buffer")
    }
    held: list[tuple[dict[str, Any], str, Any]] = []
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            held += [(table, name, x) for name, x in table.items() if id(x) in traced]
    for table, name, tensor in held:
        table[name] = traced[id(tensor)]
    try:
        yield
    finally:
        for table, name, tensor in held:
            table[name] = tensor


def _gradients(
    made: list[Tensor], wanted: list[Tensor], late: Sequence[Tensor] | None
) -> Sequence[Tensor | None]:
    """Return the gradients, with what the backward of a `torch.autograd.Function` adds to them."""
    try:
        found = torch.autograd.grad(made, wanted, late, allow_unused=True)
        return [_sum_of(g, leaf.grad) for g, leaf in zip(found, wanted, strict=True)]
    except UnsupportedOperatorException as error:
        raise UnsupportedOperatorError(
            f"The gradient of the model needs {error.func}, whose results PyTorch cannot describe "
            "without running it; detach what goes into it.",
            ((str(error.func), "the gradient"),),
        ) from error
    except GuardOnDataDependentSymNode as error:
        raise UnsupportedOperatorError(
            f"PyTorch cannot trace the gradient of the model: it asks whether {error.cond} of a "
            "size that depends on data. Weigh by a mask instead of picking by it.",
            (("a size that depends on data", "the gradient"),),
        ) from error
    except TypeError as error:
        if "Multiple dispatch failed" not in str(error):
            raise
        raise UnsupportedOperatorError(
            "PyTorch cannot trace the gradient of a complex tensor that is written in place: write "
            "what was changed with torch.where or torch.cat, or with real and imaginary parts.",
            (("a complex tensor that is written", "the gradient"),),
        ) from error
    except RuntimeError as error:
        found = _WITHOUT_GRADIENT.search(str(error))
        if found is None:
            name = _running(error)
            if name is None:
                line = parse_stack(traceback_text(error))  # of a backward of the user's, if any
                said = str(error).partition(". ")[0].partition("\n")[0]
                raise UnsupportedOperatorError(
                    f"{line}: PyTorch cannot trace the gradient of the model: {said}. Where that "
                    "is of a tensor that is written in place, write a clone() of it.",
                    (("the gradient", str(line)),),
                ) from error
            raise UnsupportedOperatorError(
                f"The gradient of the model needs {name}, which PyTorch cannot trace with symbolic "
                f"sizes ({str(error).splitlines()[0]}); write what it belongs to in another way.",
                ((name, "the gradient"),),
            ) from error
        raise UnsupportedOperatorError(
            f"PyTorch has no gradient for {found[1]}; detach what goes into it.",
            ((found[1], "the model"),),
        ) from error


def _running(error: BaseException) -> str | None:
    """Name the operator in which PyTorch raised an error; None if it was raised elsewhere."""
    last = list(traceback.walk_tb(error.__traceback__))[-1][0]
    called = last.f_locals.get("self")
    return str(called) if isinstance(called, OpOverload) else None


def _sum_of(gradient: Tensor | None, added: Tensor | None) -> Tensor | None:
    return gradient if added is None else added if gradient is None else gradient + added


def _keep_lines(made: Sequence[Tensor]) -> None:
    roots = [tensor.grad_fn for tensor in made if tensor.grad_fn is not None]
    setup_stacktrace_preservation_hooks(roots)


def _fakes(
    placeholders: list[fx.Node], position: dict[str, int], arguments: Sequence[Argument]
) -> list[Any]:
    fakes: list[Any] = [None] * len(arguments)
    for node in placeholders:
        value = node.meta.get("val")
        fakes[position[node.name]] = value.detach() if isinstance(value, Tensor) else value
    mode = next(f.fake_mode for f in fakes if hasattr(f, "fake_mode"))
    for index, argument in enumerate(arguments):
        if fakes[index] is None and argument.outer is not None and argument.tensor is not None:
            fakes[index] = mode.from_tensor(argument.tensor.detach(), static_shapes=True)
    return fakes


def _mutates(graph: fx.GraphModule) -> bool:
    modules = [module for module in graph.modules() if isinstance(module, fx.GraphModule)]
    return any(writes(node) for module in modules for node in module.graph.nodes)


def _origin(node: Any) -> Any:
    """Follow a value to where it was computed, through other names of the same tensor."""
    while node.target in (torch.ops.aten.alias.default, torch.ops.aten.detach.default):
        node = node.args[0]
    return node


def _drop_unchanged(
    graph: fx.GraphModule,
    arguments: tuple[Argument, ...],
    extra_count: int,
    buffers: tuple[int, ...],
    gradients: tuple[int, ...],
    program: ExportedProgram,
) -> Traced:
    """Drop the buffers whose new value is the old one from the outputs."""
    output = graph.graph.output_node()
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    flat = list(output.args[0])  # pyright: ignore[reportArgumentType]
    first = 1 + extra_count
    changed = [
        (index, flat[first + k])
        for k, index in enumerate(buffers)
        if _origin(flat[first + k]) is not placeholders[index]
    ]
    rest = flat[first + len(buffers) :]
    output.args = ([*flat[:first], *(node for _, node in changed), *rest],)
    graph.recompile()
    extras = program.call_spec.out_spec
    return Traced(
        graph, arguments, extras, extra_count, tuple(index for index, _ in changed), gradients
    )
