"""The optimizer's update of one parameter, or of a sum of gradients, as one kernel, a PrimFunc.

One block reads the parameter, its gradient, its states and the hyper-parameters, binds the new
values, and only then stores them: so the results may be written over the inputs they replace.
Parameters of equal shape and type share the function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder

from relax_disc.frontend.optimizer.states import Rule, hyper_names

T: Any = builder

_STATES: dict[Rule, tuple[str, ...]] = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd_momentum": ("momentum_buffer",),
    "sgd": (),
    "sum": (),
}


def hyper_dtype(dtype: str) -> str:
    """Name the type of the hyper-parameters, and of the arithmetic, for parameters of ``dtype``."""
    return "float64" if dtype == "float64" else "float32"


@functools.cache
def update_kernel(rule: Rule, shape: tuple[int, ...], dtype: str, clipped: bool) -> tirx.PrimFunc:
    """Build the update of a parameter.

    Parameters
    ----------
    rule : str
        Which formula, see :func:`relax_disc.frontend.optimizer.states.update_rule`; ``"sum"`` adds
        the gradient to that of earlier batches, which stands in the parameter's place.
    shape : tuple of int
        Of the parameter.
    dtype : str
        Of the parameter, its gradient and its states.
    clipped : bool
        Whether the gradient is scaled by a clip coefficient.

    Returns
    -------
    tirx.PrimFunc
        Arguments ``(parameter, gradient, *states, hyper[, coefficient], *results)``: the results
        are the new parameter and the new states.
    """
    states = _STATES[rule]
    width = len(hyper_names(rule))
    wide = hyper_dtype(dtype)
    extents = [tirx.IntImm("int64", n) for n in shape]
    with IRBuilder() as made:
        with T.prim_func(s_tir=True, private=True):
            T.func_name(f"update_{rule}")
            T.func_attr({"tirx.noalias": True})
            names = ("parameter", "gradient", *states)
            sources = [T.arg(name, T.buffer(extents, dtype)) for name in names]
            hyper = T.arg("hyper", T.buffer((width,), wide))
            clip = T.arg("coefficient", T.buffer((), wide)) if clipped else None
            results = [T.arg(f"new_{n}", T.buffer(extents, dtype)) for n in ("parameter", *states)]
            _body(rule, extents, sources, hyper, clip, results, wide)
    return made.get()  # pyright: ignore[reportReturnType]


def _body(
    rule: Rule,
    extents: Sequence[Any],
    sources: Sequence[Any],
    hyper: Any,
    clip: Any,
    results: Sequence[Any],
    wide: str,
) -> None:
    if not extents:
        with T.sblock("update"):
            _store(rule, (), sources, hyper, clip, results, wide)
        return
    with T.grid(*extents) as loops:
        loops = list(loops) if len(extents) > 1 else [_only(loops)]
        with T.sblock("update"):
            axes = T.axis.remap("S" * len(extents), loops, dtype="int64")
            index = tuple(axes) if len(extents) > 1 else (axes,)
            _store(rule, index, sources, hyper, clip, results, wide)


def _only(loops: Any) -> Any:
    return loops[0] if isinstance(loops, list | tuple) else loops


def _store(
    rule: Rule,
    index: tuple[Any, ...],
    sources: Sequence[Any],
    hyper: Any,
    clip: Any,
    results: Sequence[Any],
    wide: str,
) -> None:
    width = len(hyper_names(rule))
    extra = [clip[()]] if clip is not None else []
    T.reads(*(source[index] for source in sources), hyper[0:width], *extra)
    T.writes(*(result[index] for result in results))
    named = {name: hyper[k] for k, name in enumerate(hyper_names(rule))}
    values = [source[index].astype(wide) for source in sources]
    values[1] = values[1] * (clip[()] * named["sign"] if clip is not None else named["sign"])
    new = [T.Bind(value) for value in _FORMULAS[rule](named, *values)]
    for result, value in zip(results, new, strict=True):
        T.buffer_store(result, value.astype(result.dtype), list(index))


def _adam(h: dict[str, Any], p: Any, g: Any, mean: Any, square: Any) -> tuple[Any, ...]:
    """``torch.optim.adam._single_tensor_adam``."""
    g = T.Bind(g + h["coupled"] * p)
    mean = T.Bind(mean + (g - mean) * h["one_minus_beta1"])
    square = T.Bind(square * h["beta2"] + g * g * h["one_minus_beta2"])
    root = tirx.sqrt(square) / h["root_correction"] + h["eps"]
    return p * h["decay"] - h["step_size"] * (mean / root), mean, square


def _sgd(h: dict[str, Any], p: Any, g: Any) -> tuple[Any, ...]:
    """``torch.optim.sgd._single_tensor_sgd`` without momentum."""
    return (p - h["lr"] * (g + h["weight_decay"] * p),)


def _sgd_momentum(h: dict[str, Any], p: Any, g: Any, buffer: Any) -> tuple[Any, ...]:
    """``torch.optim.sgd._single_tensor_sgd``; the first step takes the gradient as the buffer."""
    g = T.Bind(g + h["weight_decay"] * p)
    kept = buffer * h["momentum"] + g * h["one_minus_dampening"]
    buffer = T.Bind(tirx.Select(h["first"] > 0, g, kept))
    step = tirx.Select(h["nesterov"] > 0, g + h["momentum"] * buffer, buffer)
    return p - h["lr"] * step, buffer


def _sum(h: dict[str, Any], total: Any, g: Any) -> tuple[Any, ...]:
    """``loss.backward()`` where there is a gradient already."""
    del h
    return (total + g,)


_FORMULAS: dict[Rule, Callable[..., tuple[Any, ...]]] = {
    "adam": _adam,
    "sgd": _sgd,
    "sgd_momentum": _sgd_momentum,
    "sum": _sum,
}
