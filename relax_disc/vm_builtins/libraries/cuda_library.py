"""Library functions for CUDA: PyTorch's kernels (cuBLAS, flash attention) on planned memory.

`register()` makes `relax_disc.cuda.*`, with the arguments that `install` lists. Operands and
results pass by DLPack without copies, and the work goes to the stream that the virtual machine
uses. Attention is in `cuda_attention.py`.

PyTorch allocates results and workspaces beside the arena; `LibraryFunction.device_bytes` of each in
`relax_disc.ops` bounds them, and plans count that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import tvm_ffi

from relax_disc.ops import recurrence_steps
from relax_disc.vm_builtins.capturing import refuse_capture
from relax_disc.vm_builtins.libraries import cuda_attention


def _as_matrix(values: torch.Tensor, split: int, transpose: int) -> torch.Tensor:
    """View a compact tensor as a matrix whose rows are its first `split` axes, or its transpose."""
    rows, columns = math.prod(values.shape[:split]), math.prod(values.shape[split:])
    matrix = values.reshape(rows, columns)
    return matrix.T if transpose else matrix


def _unpack_axes(code: int, rank: int) -> tuple[int, ...]:
    """Decode a permutation of axes, one hexadecimal digit per axis, first axis first."""
    return tuple(code >> 4 * (rank - 1 - i) & 15 for i in range(rank))


@functools.cache
def register() -> None:
    """Register every library function for CUDA, once per process."""
    for name, function in FUNCTIONS.items():
        tvm_ffi.register_global_func(f"relax_disc.cuda.{name}", _on_stream(function), override=True)


def matmul(
    a: Any, b: Any, a_split: int, b_split: int, transpose_a: int, transpose_b: int, c: Any
) -> None:
    """Compute c = a' @ b'."""
    left = _as_matrix(_tensor(a), a_split, transpose_a)
    right = _as_matrix(_tensor(b), b_split, transpose_b)
    torch.mm(left, right, out=_tensor(c).view(left.shape[0], right.shape[1]))


def matmul_add(
    a: Any,
    b: Any,
    addend: Any,
    a_split: int,
    b_split: int,
    transpose_a: int,
    transpose_b: int,
    c: Any,
) -> None:
    """Compute c = a' @ b' + addend."""
    left = _as_matrix(_tensor(a), a_split, transpose_a)
    right = _as_matrix(_tensor(b), b_split, transpose_b)
    target = _tensor(c).view(left.shape[0], right.shape[1])
    extra = _tensor(addend)
    rows = left.shape[0] if extra.numel() == target.numel() else 1
    torch.addmm(extra.view(rows, right.shape[1]), left, right, out=target)


def batch_matmul(a: Any, b: Any, a_axes: int, b_axes: int, c_axes: int, c: Any) -> None:
    """Compute c = a @ b with broadcast batch axes, all three with permuted axes."""
    left, right, target = (
        _tensor(tensor).permute(_unpack_axes(axes, len(tensor.shape)))
        for tensor, axes in ((a, a_axes), (b, b_axes), (c, c_axes))
    )
    torch.matmul(left, right, out=target)


def embedding_backward(grad: Any, ids: Any, padding_idx: int, out: Any) -> None:
    """Sum rows of `grad` by their id into `out`."""
    target = _tensor(out)
    target.copy_(
        torch.ops.aten.embedding_dense_backward(
            _tensor(grad), _tensor(ids), target.shape[0], padding_idx, False
        )
    )


def embedding_backward_add(grad: Any, ids: Any, addend: Any, padding_idx: int, out: Any) -> None:
    """Sum rows of `grad` by their id onto `addend`."""
    target = _tensor(out)
    rows = torch.ops.aten.embedding_dense_backward(
        _tensor(grad), _tensor(ids), target.shape[0], padding_idx, False
    )
    torch.add(_tensor(addend), rows, out=target)


# A few of PyTorch's kernels for each step.
recurrence = recurrence_steps.library_function(recurrence_steps.forward, 4)
recurrence_backward = recurrence_steps.library_function(recurrence_steps.backward, 6)


def _on_host(lengths: Any) -> list[int]:
    """Wait for the device to know lengths."""
    refuse_capture("PyTorch's CTC loss takes lengths from the host")
    return _tensor(lengths).tolist()


def ctc_loss(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int,
    loss: Any,
    alpha: Any,
) -> None:
    """Compute the loss of each sequence; the gradient runs it again, so that alpha is unused."""
    inputs = [_tensor(x) for x in (log_probs, targets)]
    lengths = [_on_host(x) for x in (input_lengths, target_lengths)]
    _tensor(loss).copy_(torch.ops.aten._ctc_loss(*inputs, *lengths, blank)[0])
    _tensor(alpha).zero_()


def ctc_loss_backward(
    grad: Any,
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    loss: Any,
    alpha: Any,
    blank: int,
    result: Any,
) -> None:
    """Compute the gradient of the logarithms of the probabilities."""
    inputs = [_tensor(x) for x in (log_probs, targets)]
    lengths = [_on_host(x) for x in (input_lengths, target_lengths)]
    losses, paths = torch.ops.aten._ctc_loss(*inputs, *lengths, blank)
    given = _tensor(grad)
    found = torch.ops.aten._ctc_loss_backward(given, *inputs, *lengths, losses, paths, blank, False)
    silent = torch.isinf(losses) & (given == 0)
    _tensor(result).copy_(found.masked_fill(silent[None, :, None], 0))


def nonzero(mask: Any, positions: Any) -> int:
    """List the true elements of a mask; return how many there are, for which the host waits."""
    refuse_capture("how many elements a mask selects is read on the host")
    found = torch.nonzero(_tensor(mask)).view(-1)
    _fill(positions, found)
    return len(found)


def unique(x: Any, values: Any, inverse: Any, counts: Any, scratch: Any) -> int:
    """List the distinct values of a tensor; return how many there are, for which the host waits."""
    del scratch
    refuse_capture("how many distinct values a tensor has is read on the host")
    found, where, times = torch.unique(_tensor(x), return_inverse=True, return_counts=True)
    for target, source in ((values, found), (inverse, where), (counts, times)):
        _fill(target, source)
    return len(found)


def _fill(target: Any, source: torch.Tensor) -> None:
    """Copy what there is room for: the caller refuses more than that."""
    room = _tensor(target)
    kept = min(len(room), len(source))
    room[:kept].copy_(source[:kept])


def convolution(x: Any, weight: Any, *rest: Any) -> None:
    """Compute a convolution; activations have their channels last."""
    *numbers, out = rest
    _convolve(x, weight, None, numbers, out)


def convolution_bias(x: Any, weight: Any, bias: Any, *rest: Any) -> None:
    """Compute a convolution with a bias."""
    *numbers, out = rest
    _convolve(x, weight, _tensor(bias), numbers, out)


def convolution_input(grad: Any, weight: Any, *rest: Any) -> None:
    """Compute the gradient of a convolution by its input."""
    *numbers, result = rest
    target = _channels_first(result)
    options = _geometry(numbers)
    found = torch.ops.aten.convolution_backward(
        _channels_first(grad), target, _tensor(weight), None, *options, (True, False, False)
    )
    target.copy_(found[0])


def convolution_weight(grad: Any, x: Any, *rest: Any) -> None:
    """Compute the gradient of a convolution by its weight."""
    *numbers, result = rest
    target = _tensor(result)
    options = _geometry(numbers)
    found = torch.ops.aten.convolution_backward(
        _channels_first(grad), _channels_first(x), target, None, *options, (False, True, False)
    )
    target.copy_(found[1])


def _convolve(
    x: Any, weight: Any, bias: torch.Tensor | None, numbers: Sequence[int], out: Any
) -> None:
    options = _geometry(numbers)
    found = torch.convolution(_channels_first(x), _tensor(weight), bias, *options)
    _channels_first(out).copy_(found)


def _geometry(numbers: Sequence[int]) -> tuple[Any, ...]:
    """Stride, padding and dilation of each axis, and groups, as `aten.convolution` takes them."""
    rank = len(numbers) // 3
    stride, padding, dilation = (list(numbers[k * rank : (k + 1) * rank]) for k in range(3))
    return stride, padding, dilation, False, [0] * rank, numbers[-1]


def _channels_first(value: Any) -> torch.Tensor:
    return _tensor(value).movedim(-1, 1)


def _tensor(value: Any) -> torch.Tensor:
    return torch.from_dlpack(value)


def _on_stream(function: Callable[..., int | None]) -> Callable[..., int | None]:
    """Run a function without gradients on the virtual machine's stream."""

    def run(*arguments: Any) -> int | None:
        with torch.no_grad(), _stream_of(arguments[0]):
            return function(*arguments)

    return run


@contextmanager
def _stream_of(tensor: Any) -> Iterator[None]:
    device = _tensor(tensor).device
    if device.type != "cuda":
        yield
        return
    raw = tvm_ffi.get_raw_stream(tvm_ffi.device("cuda", device.index))
    stream = torch.cuda.ExternalStream(raw, device) if raw else torch.cuda.default_stream(device)
    with torch.cuda.stream(stream):
        yield


FUNCTIONS: dict[str, Callable[..., int | None]] = {
    "matmul": matmul,
    "matmul_add": matmul_add,
    "batch_matmul": batch_matmul,
    **cuda_attention.FUNCTIONS,
    "embedding_backward": embedding_backward,
    "embedding_backward_add": embedding_backward_add,
    "recurrence": recurrence,
    "recurrence_backward": recurrence_backward,
    "convolution": convolution,
    "convolution_bias": convolution_bias,
    "convolution_input": convolution_input,
    "convolution_weight": convolution_weight,
    "ctc_loss": ctc_loss,
    "ctc_loss_backward": ctc_loss_backward,
    "nonzero": nonzero,
    "unique": unique,
}
