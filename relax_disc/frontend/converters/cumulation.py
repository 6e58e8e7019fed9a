"""Cumulative sums, products and extrema: one pass along an axis."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from tvm import relax, te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder

from relax_disc.frontend.converters.registry import axis_of, converts
from relax_disc.frontend.emitter import Emitter

op: Any = relax.op
T: Any = builder


def _scan(
    emitter: Emitter, name: str, axis: int, inputs: tuple[Any, ...], step: Any, backward: bool
) -> Any:
    """Emit a kernel that runs along an axis of tensors of one shape, or back from its end.

    ``step(before, there, at)`` makes an element of the element before it, of whether there is one,
    and of ``at(tensor, shift)``, which reads an input at the element or one step before it.
    Loops go through memory in its order; the first, where it is not along the axis, in parallel.
    """

    def compute(*tensors: Any) -> Any:
        shape = tensors[0].shape

        def body(sources: Any, outputs: Any) -> Any:
            with IRBuilder() as made:
                with contextlib.ExitStack() as stack:
                    loops = [stack.enter_context(T.parallel(shape[0]))] if axis else []
                    inner = stack.enter_context(T.grid(*shape[len(loops) :]))
                    loops += [inner] if isinstance(inner, tirx.Var) else list(inner)
                    k = loops[axis]

                    def place(k: Any) -> tuple[Any, ...]:
                        k = shape[axis] - 1 - k if backward else k
                        return (*loops[:axis], k, *loops[axis + 1 :])

                    def at(index: int, shift: int = 0) -> Any:
                        return sources[index][place(k if shift == 0 else tirx.max(k - shift, 0))]

                    before = outputs[0][place(tirx.max(k - 1, 0))]
                    T.buffer_store(outputs[0], step(before, k > 0, at), list(place(k)))
            return made.get()

        out = tirx.decl_buffer(shape, tensors[0].dtype, "out")
        return te.extern(
            [shape], list(tensors), body, dtype=out.dtype, out_buffers=[out], name=name
        )

    return emitter.te(name, compute, *inputs, alone=True)


def _along(emitter: Emitter, x: Any, axis: int, combine: Callable[..., Any], name: str) -> Any:
    """Combine numbers with all before them, those of 16 bits in float32, as PyTorch does."""
    wanted = emitter.wanted_dtype
    if not emitter.shape(x):
        return emitter.cast(x, wanted)
    x = emitter.cast(x, "float32" if wanted in ("float16", "bfloat16") else wanted)

    def step(before: Any, there: Any, at: Any) -> Any:
        return tirx.if_then_else(there, combine(before, at(0)), at(0))

    found = _scan(emitter, name, axis_of(emitter, x, axis), (x,), step, backward=False)
    return emitter.cast(found, wanted)


@converts("aten.cumsum.default")
def cumsum(emitter: Emitter, x: Any, axis: int, dtype: Any = None) -> Any:
    """Cumulative sum along one axis."""
    return _along(emitter, x, axis, lambda before, a: before + a, "cumsum")


@converts("relax_disc.cumprod.default")
def cumprod(emitter: Emitter, x: Any, axis: int) -> Any:
    """Cumulative product along one axis."""
    return _along(emitter, x, axis, lambda before, a: before * a, "cumprod")


@converts("relax_disc.cumprod_backward.default")
def cumprod_backward(emitter: Emitter, grad: Any, x: Any, out: Any, axis: int) -> Any:
    """Gradient of the cumulative product, from the end: see :mod:`relax_disc.ops.cumprod`."""
    if not emitter.shape(x):
        return grad

    def later(before: Any, there: Any, at: Any) -> Any:
        return at(0) + tirx.if_then_else(there, at(1, 1) * before, tirx.const(0, x.ty.dtype.dtype))

    sums = _scan(emitter, "cumprod_later", axis, (grad, x), later, backward=True)

    def product(sums: Any, out: Any) -> Any:
        def element(*i: Any) -> Any:
            place = [tirx.max(j - 1, 0) if d == axis else j for d, j in enumerate(i)]
            return sums(*i) * tirx.if_then_else(i[axis] > 0, out(*place), tirx.const(1, out.dtype))

        return te.compute(sums.shape, element, name="cumprod_backward")

    return emitter.te("cumprod_backward", product, sums, out)
