"""Calls of PyTorch that are replaced while a model is exported.

PyTorch's own tracing writes them in a form that fixes a size: a recurrent layer step by step, an
evenly spaced range as a list, bags of equal length by offsets; or they look at data to check it.
Where the model itself does, `model_checks` answers.
What is put in their place gives the same values for every size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from relax_disc import ops  # noqa: F401  registers torch.ops.relax_disc
from relax_disc.frontend.capture import example_values, model_checks
from relax_disc.frontend.capture.refusals import refusal, refuse_sparse
from relax_disc.frontend.capture.replaced import (
    arguments,
    attention,
    contractions,
    data_places,
    inner_gradients,
    items,
    joins,
    matrices,
    packed_sequences,
    parts,
    pooling,
    ranges,
    spectra,
)
from relax_disc.frontend.capture.replaced.chances import Chances
from relax_disc.frontend.capture.replaced.equal_masks import EqualMasks
from relax_disc.frontend.capture.replaced.frozen import FrozenParameters
from relax_disc.frontend.capture.replaced.keywords import by_position
from relax_disc.frontend.capture.replaced.recurrent_layers import layers
from relax_disc.frontend.capture.sizes import numbers as size_numbers
from relax_disc.frontend.capture.sizes import operands, stand_ins
from relax_disc.frontend.capture.sizes.squeezes import Squeezes
from relax_disc.frontend.capture.source_lines import calling_line

_OF_SPARSE = frozenset(
    "mm spmm matmul __matmul__ _sparse_mm addmm sparse_addmm _sparse_addmm bmm mv mul __mul__ add "
    "__add__ sum _sparse_sum softmax _sparse_softmax index_select t transpose coalesce indices "
    "values to_dense to".split()
)
"""What models do with sparse tensors; PyTorch itself asks gradients that are for more."""


class ExportMode(TorchFunctionMode):
    """While active, the calls of `REPLACED` are replaced where a replacement is not None.

    ``squeezes``: takes note of axes that are squeezed, and of questions for what is left.
    ``chances``: takes note of random numbers.
    """

    def __init__(self, squeezes: Squeezes, chances: Chances) -> None:
        super().__init__()
        self._squeezes, self._chances, self._masks = squeezes, chances, EqualMasks()
        self._frozen = FrozenParameters()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Check what the user's code leaves, if it has run to its end."""
        super().__exit__(kind, error, trace)
        self._frozen.put_back()
        if error is None:
            self._frozen.check_end()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Replace a call, or make it."""
        replacement = REPLACED.get(func)
        if kwargs:
            args, kwargs = by_position(func, replacement, args, kwargs)
        kwargs = kwargs or {}
        inner_gradients.refuse_transforms()
        if kwargs.get("generator") is not None:
            why = (
                "a torch.Generator cannot be drawn from; leave it out, step.rng_state is the state"
            )
            raise refusal(getattr(func, "__name__", str(func)), why)
        data_places.check_use((*args, *kwargs.values()))
        self._frozen.note(func, args, kwargs)
        args, kwargs = self._frozen.detached(func, args, kwargs)
        if (name := getattr(func, "__name__", "")) in _OF_SPARSE:
            for x in args:
                if isinstance(x, Tensor):
                    refuse_sparse(x, f"{calling_line()}, {name}")
        args, kwargs = stand_ins.sizes_again(args, kwargs)
        args, kwargs = size_numbers.sizes_for_tensors(func, args, kwargs)
        args, kwargs = operands.tensors_for_sizes(func, args, kwargs)
        args = self._masks.with_firsts(func, args)
        truth = self._chances.truth(args[0]) if func is Tensor.__bool__ else None
        if truth is not None:
            return truth
        result = None if replacement is None else replacement(*args, **kwargs)
        if result is None:
            result = size_numbers.remember_size(func, args, kwargs, func(*args, **kwargs))
            example = example_values.active()
            if func is Tensor.item and example is not None:
                example.take(args[0], result)
            self._squeezes.note(func, args, result)
            self._chances.note(func, args, result)
            self._masks.note(func, args, kwargs, result)
        return result


def _data(x: Tensor) -> Tensor:
    """``detach()``: the same memory, but recorded, so that what is written there is not lost."""
    return x.detach()


def _set_data(*_: Any) -> Any:
    """Refused by name: the program would go on with the tensor that it knows."""
    raise refusal("Tensor.data", "another tensor in its place would be lost; write `copy_()`")


def _deepcopy(x: Tensor, memo: dict[int, Any]) -> Tensor | None:
    """A copy of memory of its own; None where eager PyTorch refuses it or makes a leaf."""
    if x.requires_grad:
        return None
    memory: Any = ("memory", id(x if x._base is None else x._base))
    if memo.setdefault(memory, x) is not x:
        raise refusal(
            "copy.deepcopy",
            "two tensors share memory, as their copies would; copy one of them, and take the other "
            "from that",
        )
    return memo.setdefault(id(x), x.clone())


def _layer(kind: str) -> Callable[..., Any]:
    def layer(*args: Any) -> Any:
        """Recurrent layers over any length, one operator for each layer and direction."""
        return layers(kind, *args)

    return layer


def _to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    """The tensor itself where it is as asked for: PyTorch's trace keeps a view of it there.

    A loop may write into ``torch.zeros(...).to(device)`` as into what was made for it.
    """
    if {"copy", "other"} & kwargs.keys() or len(args) > 2:
        return None
    try:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    except (RuntimeError, TypeError):
        return None  # PyTorch's own raises better
    is_there = device is None or (device.type, device.index or 0) == (
        x.device.type,
        x.device.index or 0,
    )
    return x if is_there and dtype in (None, x.dtype) and memory_format is None else None


def _get_item(x: Tensor, index: Any) -> Any:
    """Read what `x[place]` reads, or the size of a packed batch; None: PyTorch's own does."""
    number = packed_sequences.first_item(x, index)
    return items.REPLACED[Tensor.__getitem__](x, index) if number is None else number


def _hook(*_: Any) -> Any:
    """Refused by name: torch.export would leave the hook out, and the gradient as it is."""
    why = "a hook on a gradient is not called by a compiled step; change the gradient with a "
    raise refusal("Tensor.register_hook", why + "torch.autograd.Function")


def _backward(*_: Any, **__: Any) -> Any:
    """Refused by name: it would write gradients into tensors in the middle of the step."""
    why = (
        "a backward pass inside the loss cannot be compiled; torch.autograd.grad returns gradients "
        "instead, and with create_graph=True ones that the loss may contain"
    )
    raise refusal("backward", why)


def _embedding(
    ids: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> None:
    """Refused by name where its gradient would be sparse; else PyTorch's own."""
    if sparse and weight.requires_grad:
        raise refusal("embedding", "its gradient is sparse; say sparse=False, which is as exact")


def _embedding_bag(
    ids: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor | None:
    """Bags of one length, rank 2: rows of a table, summed, averaged, or their greatest."""
    if sparse and weight.requires_grad:
        raise refusal("embedding_bag", "its gradient is sparse; say sparse=False")
    if ids.dim() != 2 or max_norm is not None or scale_grad_by_freq:
        return None
    rows = functional.embedding(ids, weight, padding_idx)
    if padding_idx is None:
        there = torch.ones_like(ids, dtype=torch.bool)[..., None]
    else:
        there = (ids != padding_idx % weight.shape[0])[..., None]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[..., None]
    if mode == "max":
        top = torch.where(there, rows, float("-inf")).amax(1)
        return torch.where(there.any(1), top, 0.0)
    total = torch.where(there, rows, 0.0).sum(1)
    return total / there.sum(1).clamp_min(1) if mode == "mean" else total


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Connectionist temporal classification of padded targets, kept whole.

    Targets that a mask has picked from padded ones are padded again.

    Raises `UnsupportedOperatorError`: the targets of a batch are concatenated otherwise.
    """
    alone = log_probs.dim() == 2
    if (picked := getattr(targets, _PICKED, None)) is not None and not alone:
        targets, mask = picked
        torch.ops.aten._assert_async.msg(
            (torch.as_tensor(target_lengths) == mask.sum(-1)).all(),
            "ctc_loss: target_lengths are not the numbers of targets that the mask picks.",
        )
        targets = targets.gather(1, (~mask).to(torch.int8).argsort(dim=1, stable=True))
    if alone:
        log_probs, targets = log_probs.unsqueeze(1), targets.reshape(1, -1)
    if targets.dim() != 2:
        raise refusal(
            "ctc_loss",
            "concatenated targets have a layout that depends on data; give them padded, [N, S]",
        )
    lengths = [
        torch.as_tensor(x, dtype=torch.int64, device=log_probs.device).reshape(-1)
        for x in (input_lengths, target_lengths)
    ]
    wide = torch.promote_types(log_probs.dtype, torch.float32)
    loss = torch.ops.relax_disc.ctc_loss(
        log_probs.to(wide), targets.to(torch.int64), *lengths, blank
    )[0]
    if zero_infinity:
        loss = torch.where(torch.isinf(loss), 0.0, loss)
    if reduction == "mean":
        loss = (loss / lengths[1].clamp_min(1).to(wide)).mean()
    elif reduction == "sum":
        loss = loss.sum()
    elif alone:
        loss = loss.squeeze(0)
    return loss.to(log_probs.dtype)


_PICKED = "_relax_disc_picked"


def _masked_select(x: Tensor, mask: Tensor) -> Tensor:
    """``x[mask]``, whose size PyTorch knows to be that of other picks by the mask.

    The result remembers where it was picked from, for ``ctc_loss``.
    """

    def are_alike(one: Any, other: Any) -> bool:
        # Without a question that PyTorch would keep: inputs have a symbol for each size.
        return type(one) is type(other) and (isinstance(one, torch.SymInt) or one == other)

    alike = x.dim() == mask.dim() and all(map(are_alike, x.shape, mask.shape))
    result = x[mask] if alike else torch.masked_select(x, mask)
    if x.dim() == 2 and mask.dtype == torch.bool and mask.shape == x.shape:
        setattr(result, _PICKED, (x, mask))
    return result


def _gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Any,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor | None:
    """PyTorch's formula without its look at the data for negative variances."""
    if not isinstance(var, Tensor) or reduction not in ("none", "mean", "sum"):
        return None
    if var.dim() == input.dim() - 1:
        var = var.unsqueeze(-1)
    var = var + (var.clamp_min(eps) - var).detach()  # the bound passes gradients on
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return {"none": lambda x: x, "mean": torch.mean, "sum": torch.sum}[reduction](loss)


def _take_along_dim(x: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """Broadcast and gather; PyTorch's own form fixes the sizes."""
    if dim is None:
        return x.flatten().gather(0, indices.flatten())
    at = dim % x.dim()
    shapes = [list(tensor.shape) for tensor in (x, indices)]
    along = [shape.pop(at) for shape in shapes]
    shape = torch.broadcast_shapes(*shapes)
    x, indices = (
        tensor.expand(*shape[:at], size, *shape[at:])
        for tensor, size in zip((x, indices), along, strict=True)
    )
    return x.gather(at, indices)


def _bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """As many counts as ``minlength`` says; a larger value is an index out of range."""
    if not minlength:
        why = "how many counts there are depends on the data; give minlength, the number of classes"
        raise refusal("bincount", why)
    if weights is None:
        each = torch.ones_like(x, dtype=torch.int64)
    elif weights.requires_grad:
        raise refusal("bincount", "its weights get no gradient; detach() them")
    else:
        each = weights
        each = each if each.dtype == torch.float32 else each.to(torch.float64)
    counts = torch.zeros(minlength, dtype=each.dtype, device=x.device)
    return counts.scatter_add(0, x.to(torch.int64), each)


def _narrow(x: Tensor, dim: int, start: Any, length: Any) -> Tensor | None:
    """Rows from a start that is data, read at positions."""
    if not isinstance(start, Tensor):
        return None
    first = torch.where(start < 0, start + x.shape[dim], start).reshape(())
    return x.index_select(dim, first + torch.arange(length, device=x.device))


def _uniform(x: Tensor, low: Any = 0.0, high: Any = 1.0, **options: Any) -> Tensor | None:
    """Draw between bounds that tensors tell, whose values PyTorch would take out of them."""
    bounds = options.get("from", low), options.get("to", high)
    if not any(isinstance(bound, Tensor) for bound in bounds):
        return None
    low, high = (b.detach() if isinstance(b, Tensor) else b for b in bounds)
    return x.copy_(torch.rand_like(x) * (high - low) + low)


REPLACED: dict[Any, Callable[..., Any]] = {
    torch.Tensor.uniform_: _uniform,
    torch.lstm: _layer("lstm"),
    torch.gru: _layer("gru"),
    torch.rnn_tanh: _layer("rnn_tanh"),
    torch.rnn_relu: _layer("rnn_relu"),
    torch.Tensor.__deepcopy__: _deepcopy,
    torch.Tensor.register_hook: _hook,
    torch.Tensor.data.__get__: _data,  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.data.__set__: _set_data,  # pyright: ignore[reportAttributeAccessIssue]
    torch.autograd.grad: inner_gradients.record,
    torch.autograd.backward: _backward,
    torch.Tensor.backward: _backward,
    functional.embedding: _embedding,
    functional.embedding_bag: _embedding_bag,
    **arguments.REPLACED,
    **attention.REPLACED,
    **contractions.REPLACED,
    **data_places.REPLACED,
    **joins.REPLACED,
    **parts.REPLACED,
    **pooling.REPLACED,
    **items.REPLACED,
    Tensor.to: _to,
    Tensor.__getitem__: _get_item,
    **matrices.REPLACED,
    **packed_sequences.REPLACED,
    **ranges.REPLACED,
    **spectra.REPLACED,
    functional.ctc_loss: _ctc_loss,
    torch.masked_select: _masked_select,
    Tensor.masked_select: _masked_select,
    functional.gaussian_nll_loss: _gaussian_nll_loss,
    torch.bincount: _bincount,
    Tensor.bincount: _bincount,
    torch.narrow: _narrow,
    torch.Tensor.narrow: _narrow,
    torch.take_along_dim: _take_along_dim,
    torch.Tensor.take_along_dim: _take_along_dim,
    **operands.REPLACED,
    **size_numbers.REPLACED,
    Tensor.__bool__: model_checks.assumed,
    torch._assert: model_checks.asserted,
}
