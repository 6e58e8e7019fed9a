"""Gradients that the loss itself is made of: gradient penalties, physics-informed losses.

torch.export records composite operators whole, so that the gradient of what they are made of would
stand in its graph without its operands.  Here ``torch.autograd.grad`` becomes one operator of the
exported graph; the trace of gradients then takes the gradient itself, from what it has traced, and
differentiates it again.  In such a graph nothing is kept whole that PyTorch differentiates once
only.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    set_proxy_slot,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from relax_disc.errors import UnsupportedOperatorError
from relax_disc.frontend.capture.refusals import refusal
from relax_disc.frontend.capture.source_lines import source_line

_ATEN = torch.ops.aten
_NAME = "relax_disc::inner_gradient"
_WARNED = "an autograd kernel was not registered"

torch.library.define(
    _NAME,
    "(Tensor[] outputs, Tensor[] inputs, Tensor[] grad_outputs, bool create_graph) -> Tensor[]",
)


@torch.library.register_fake(_NAME)
def _(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    grad_outputs: Sequence[Tensor],
    create_graph: bool,
) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in inputs]


def refuse_transforms() -> None:
    """Refuse gradients by ``torch.func``, whose tensors torch.export cannot follow.

    Raises `UnsupportedOperatorError`: such a transform runs.
    """
    transform = torch._C._functorch.peek_interpreter_stack()
    if transform is not None and transform.key() in _TRANSFORMS:
        raise refusal(
            "a gradient by torch.func (grad, vjp, jvp, jacrev, jacfwd, hessian)",
            "it is not compiled; take the gradient of a sum by torch.autograd.grad, with "
            "create_graph=True and torch.func.functional_call where the loss is made of it, or "
            "compute it beside the step, on the model itself",
        )


_KINDS = torch._C._functorch.TransformType
_TRANSFORMS = (_KINDS.Grad, _KINDS.Jvp)


def record(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:
    """Put one operator into the exported graph for a call of ``torch.autograd.grad``.

    What is returned has the history of PyTorch's own result, so that it may be differentiated
    again.  Raises what PyTorch raises, and `UnsupportedOperatorError` for batched gradients.
    """
    if is_grads_batched:
        raise refusal("torch.autograd.grad", "is_grads_batched=True cannot be compiled; use a loop")
    made = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    wanted = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    given = [grad_outputs] if isinstance(grad_outputs, Tensor) else grad_outputs
    given = list(given) if given is not None else [None] * len(made)
    with disable_proxy_modes_tracing(), warnings.catch_warnings():
        # The trace refuses it, with the line.
        warnings.filterwarnings("ignore", message=f".*{_WARNED}")
        found = torch.autograd.grad(
            made,
            wanted,
            given,
            create_graph=True,
            allow_unused=allow_unused,
            materialize_grads=materialize_grads,
        )
    used = [place for place, gradient in enumerate(found) if gradient is not None]
    seeds = [torch.ones_like(y) if g is None else g for y, g in zip(made, given, strict=True)]
    chosen = [wanted[place] for place in used]
    recorded = _operator()(made, chosen, seeds, create_graph)
    results: list[Tensor | None] = [None] * len(found)
    for place, tensor in zip(used, recorded, strict=True):
        results[place] = _standing_for(found[place], tensor) if create_graph else tensor
    return tuple(results)


def _standing_for(found: Tensor, recorded: Tensor) -> Tensor:
    """Let PyTorch's own result stand for the operator's in the graph."""
    mode = get_proxy_mode()
    if mode is not None:
        set_proxy_slot(found, mode.tracer, get_proxy_slot(recorded, mode.tracer))
    return found


def _operator() -> Any:
    return torch.ops.relax_disc.inner_gradient.default


def is_inner(target: Any) -> bool:
    """Whether a node's target is the operator that `record` puts into a graph."""
    return target is _operator()


def take(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    grad_outputs: Sequence[Tensor],
    create_graph: bool,
) -> list[Tensor]:
    """Take the gradient, which may be differentiated again: what `record` put into the graph."""
    found = torch.autograd.grad(outputs, inputs, grad_outputs, create_graph=True)
    return [gradient if create_graph else gradient.detach() for gradient in found]


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    *_: Any,
) -> Tensor | None:
    """Normalise `[n, channels, ...]` by the batch's statistics, of operators that keep sizes."""
    if not training:
        return None
    axes = [axis for axis in range(x.dim()) if axis != 1]
    count = x.numel() // x.shape[1]
    mean = x.mean(axes, keepdim=True)
    centred = x - mean
    var = centred.square().mean(axes, keepdim=True)
    for running, new in ((running_mean, mean), (running_var, var * (count / (count - 1)))):
        if running is not None:
            running.mul_(1 - momentum).add_(new.detach().flatten(), alpha=momentum)
    return _scaled(centred * (var + eps).rsqrt(), weight, bias)


def _instance_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    *_: Any,
) -> Tensor | None:
    """Normalise each plane of `[n, channels, ...]` by its own statistics."""
    if not use_input_stats or running_mean is not None:
        return None
    axes = list(range(2, x.dim()))
    centred = x - x.mean(axes, keepdim=True)
    var = centred.square().mean(axes, keepdim=True)
    return _scaled(centred * (var + eps).rsqrt(), weight, bias)


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    shape = [1, -1, *[1] * (x.dim() - 2)]
    x = x if weight is None else x * weight.view(shape)
    return x if bias is None else x + bias.view(shape)


RULES = {
    torch.ops.relax_disc.inner_gradient.default: take,
    _ATEN.batch_norm.default: _batch_norm,
    _ATEN.instance_norm.default: _instance_norm,
}
"""Of operators in a graph that differentiates gradients, by overload."""


def has_inner_gradients(graph: fx.GraphModule) -> bool:
    """Whether a graph, or one nested in it, takes a gradient."""
    modules = [module for module in graph.modules() if isinstance(module, fx.GraphModule)]
    return any(is_inner(node.target) for module in modules for node in module.graph.nodes)


def differentiated(graph: fx.GraphModule) -> set[fx.Node]:
    """Find the nodes of a graph by which it, or a graph nested in it, takes a gradient."""
    found: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if is_inner(node.target):
            found |= {x for x in node.args[1] if isinstance(x, fx.Node)}
        for place, argument in enumerate(node.args):
            is_graph = isinstance(argument, fx.Node) and argument.op == "get_attr"
            inner = getattr(graph, str(argument.target), None) if is_graph else None
            if isinstance(inner, fx.GraphModule):
                own = [n for n in inner.graph.nodes if n.op == "placeholder"]
                given = dict(zip(own, node.args[place + 1 :], strict=False))
                outer = [given.get(n) for n in differentiated(inner)]
                found |= {n for n in outer if isinstance(n, fx.Node)}
    return found


@contextlib.contextmanager
def differentiated_again(graph: fx.GraphModule) -> Iterator[None]:
    """While gradients of a graph with inner ones are traced: refuse to take a gradient for zero.

    PyTorch only warns where it meets the gradient of a layer that is traced whole, whatever else
    the model does: recurrent ones, CTC.  Attention is computed of operators that it differentiates.
    """
    modules = [module for module in graph.modules() if isinstance(module, fx.GraphModule)]
    nodes = (node for module in modules for node in module.graph.nodes)
    line = next((source_line(node) for node in nodes if is_inner(node.target)), None)
    if line is None:
        yield
        return
    try:
        with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH), _convolutions():
            warnings.filterwarnings("error", message=f".*{_WARNED}")
            yield
    except UserWarning as warning:
        name, _, rest = str(warning).partition(": ")
        if not rest.startswith(_WARNED):
            raise
        layer = name.removeprefix("relax_disc::").removesuffix("_backward")
        raise UnsupportedOperatorError(
            f"{line}: torch.autograd.grad inside the loss: the gradient of {layer} has none of its "
            "own; take the gradient of a part of the model without it, or run these batches in "
            "eager PyTorch.",
            (("torch.autograd.grad", str(line)),),
        ) from warning


@contextlib.contextmanager
def _convolutions() -> Iterator[None]:
    """Write the gradient of a convolution's gradient with sizes that stay symbols."""
    operator = _ATEN._convolution_double_backward.default
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    operator.py_kernels[key] = _convolution_double_backward
    operator._dispatch_cache.clear()
    try:
        yield
    finally:
        del operator.py_kernels[key]
        operator._dispatch_cache.clear()


def _convolution_double_backward(
    of_input: Tensor | None,
    of_weight: Tensor | None,
    of_bias: Tensor | None,
    grad: Tensor,
    weight: Tensor,
    x: Tensor,
    *rest: Any,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Differentiate the gradients of ``y = convolution(x, weight) + bias``, which is bilinear.

    ``of_input``, ``of_weight``, ``of_bias``: gradients by those of ``x``, ``weight`` and ``bias``,
    each shaped as it; ``grad``: the gradient of ``y``. ``rest``: stride, padding, dilation,
    transposed, output padding, groups; which of the results are wanted. Returns the gradients by
    ``grad``, ``x`` and ``weight``.
    """
    *options, wanted = rest
    by_grad = by_x = by_weight = None
    if wanted[0]:
        if of_input is not None:
            by_grad = _ATEN.convolution(of_input, weight, None, *options)
        if of_weight is not None:
            part = _ATEN.convolution(x, of_weight, None, *options)
            by_grad = part if by_grad is None else by_grad + part
        if of_bias is not None:
            part = of_bias.reshape(1, -1, *[1] * (grad.dim() - 2)).expand_as(grad)
            by_grad = part if by_grad is None else by_grad + part
    if wanted[1] and of_weight is not None:
        mask = [True, False, False]
        by_x = _ATEN.convolution_backward(grad, x, of_weight, None, *options, mask)[0]
    if wanted[2] and of_input is not None:
        mask = [False, True, False]
        by_weight = _ATEN.convolution_backward(grad, of_input, weight, None, *options, mask)[1]
    return by_grad, by_x, by_weight
