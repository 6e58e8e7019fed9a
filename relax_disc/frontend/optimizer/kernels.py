"""The optimizer's update of one parameter, or of a sum of gradients, as one kernel, a PrimFunc.

An update in which every element follows from the same element of parameter, gradient and states
becomes one block: it reads them and the hyper-parameters, binds the new values, and only then
stores them, so that results may be written over the inputs that they replace.  Parameters of equal
shape and type share the function.  Updates with norms, sums or products go through the converters
like the model's own operators (:mod:`.updates`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder

from relax_disc.frontend.emitter import dtype_name
from relax_disc.frontend.optimizer.numbers import constant
from relax_disc.frontend.optimizer.program import UpdateProgram, Value, reachable

T: Any = builder

_PLACEMENT = ("dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking")
SUM_HYPER = ("check",)
"""What the addition of gradients reads: nothing but the flag of the check of the loss."""


def hyper_dtype(dtype: str) -> str:
    """Name the type of the hyper-parameters, and of the arithmetic, for parameters of ``dtype``."""
    return "float64" if dtype == "float64" else "float32"


def is_elementwise(program: UpdateProgram) -> bool:
    """Say whether an update is one kernel."""
    shape = program.traced_shape
    return all(state.shape == shape for state in program.tensors) and all(
        value.op in ("parameter", "gradient", "state", "entry", "filled")
        or (value.op in _RULES and value.shape in (shape, ()) and _computable(value))
        for way in program.ways
        for value in reachable(way.outputs.values())
    )


def _computable(value: Value) -> bool:
    if value.dtype is torch.bool:
        return "copy" not in value.op
    return value.dtype.is_floating_point


def update_kernel(
    program: UpdateProgram,
    shape: tuple[int, ...],
    dtype: str,
    clipped: bool,
    may_skip: bool = False,
) -> tirx.PrimFunc:
    """Build the update of a parameter.

    Arguments ``(parameter, gradient, *states read, hyper[, coefficient], *results)``: the results
    are the new parameter and the new states; the coefficient scales the gradient.  With
    ``may_skip`` one that is NaN leaves all as it was.
    """
    key = (shape, dtype, clipped, may_skip)
    if key not in program.kernels:
        results = {"parameter": dtype, **{s.key: dtype_name(s.dtype) for s in program.written}}
        sources = {"parameter": dtype, "gradient": dtype}
        sources |= {s.key: dtype_name(s.dtype) for s in states_read(program, may_skip)}

        def formula(read: Any, hyper: Any, coefficient: Any) -> list[Any]:
            names = list(results)
            new = _Lowering(program, hyper_dtype(dtype), read, hyper, coefficient).results(names)
            if not may_skip:
                return new
            skipped = tirx.isnan(coefficient)
            pairs = zip(names, new, strict=True)
            return [tirx.Select(skipped, read(name), value) for name, value in pairs]

        program.kernels[key] = _kernel(
            "update", formula, shape, sources, results, program.width, hyper_dtype(dtype), clipped
        )
    return program.kernels[key]


@functools.cache
def sum_kernel(shape: tuple[int, ...], dtype: str) -> tirx.PrimFunc:
    """Build the addition of a gradient to the sum so far, as ``loss.backward()`` does it."""

    def formula(read: Any, hyper: Any, coefficient: Any) -> list[Any]:
        del hyper, coefficient
        return [read("total") + read("gradient")]

    sources = {"total": dtype, "gradient": dtype}
    wide = hyper_dtype(dtype)
    width = len(SUM_HYPER)
    return _kernel("update_sum", formula, shape, sources, {"total": dtype}, width, wide, False)


def states_read(program: UpdateProgram, may_skip: bool = False) -> list[Any]:
    """List the states that the kernel reads, in the program's order."""
    used = {
        value.args[0]
        for way in program.ways
        for value in reachable(way.outputs.values())
        if value.op == "state"
    }
    written = {state.key for state in program.written}
    partly = {  # where a way leaves a state as it is
        key for key in written if may_skip or any(key not in way.outputs for way in program.ways)
    }
    return [state for state in program.tensors if state.key in used | partly]


def _kernel(
    name: str,
    formula: Callable[..., list[Any]],
    shape: tuple[int, ...],
    sources: dict[str, str],
    results: dict[str, str],
    width: int,
    wide: str,
    clipped: bool,
) -> tirx.PrimFunc:
    extents = [tirx.IntImm("int64", n) for n in shape]
    with IRBuilder() as made:
        with T.prim_func(s_tir=True, private=True):
            T.func_name(name)
            T.func_attr({"tirx.noalias": True})
            read = {key: T.arg(key, T.buffer(extents, dtype)) for key, dtype in sources.items()}
            hyper = T.arg("hyper", T.buffer((width,), wide))
            clip = T.arg("coefficient", T.buffer((), wide)) if clipped else None
            written = [
                T.arg(f"new_{key}", T.buffer(extents, dtype)) for key, dtype in results.items()
            ]

            def store(index: tuple[Any, ...]) -> None:
                extra = [clip[()]] if clip is not None else []
                T.reads(*(source[index] for source in read.values()), hyper[0:width], *extra)
                T.writes(*(result[index] for result in written))
                wide_of = {key: source[index].astype(wide) for key, source in read.items()}
                coefficient = None if clip is None else clip[()]
                new = [T.Bind(v) for v in formula(wide_of.__getitem__, hyper, coefficient)]
                for result, value in zip(written, new, strict=True):
                    T.buffer_store(result, value.astype(result.dtype), list(index))

            _over_elements(extents, store)
    return made.get()  # pyright: ignore[reportReturnType]


def _over_elements(extents: Sequence[Any], store: Callable[[tuple[Any, ...]], None]) -> None:
    extents_or_one = extents or [tirx.IntImm("int64", 1)]  # a block without axes is no nest
    with T.grid(*extents_or_one) as loops:
        loops = list(loops) if len(extents) > 1 else [_only(loops)]
        with T.sblock("update"):
            axes = T.axis.remap("S" * len(loops), loops, dtype="int64")
            axes = tuple(axes) if len(loops) > 1 else (axes,)
            store(axes if extents else ())


def _only(loops: Any) -> Any:
    return loops[0] if isinstance(loops, list | tuple) else loops


class _Lowering:
    """Turns the values of a program into expressions for one element."""

    def __init__(
        self, program: UpdateProgram, wide: str, read: Any, hyper: Any, coefficient: Any
    ) -> None:
        self._program, self._wide, self._read = program, wide, read
        self._hyper, self._coefficient = hyper, coefficient
        self._entries = {expr: k for k, expr in enumerate(program.entries)}
        self._made: dict[Any, Any] = {}
        self._uses: dict[int, int] = {}
        for value in reachable([v for way in program.ways for v in way.outputs.values()]):
            for operand in value.operands():
                self._uses[id(operand)] = self._uses.get(id(operand), 0) + 1

    def results(self, names: Sequence[str]) -> list[Any]:
        """Return the new values; where the step goes several ways, a flag of each chooses."""
        found = []
        for name in names:
            ways = [way.outputs.get(name) for way in self._program.ways]
            chosen = self._output(ways[0], name)
            for k, value in enumerate(ways[1:], len(self._entries)):
                if value is not ways[0]:
                    chosen = tirx.Select(self._hyper[k] > 0, self._output(value, name), chosen)
            found.append(chosen)
        return found

    def _output(self, value: Value | None, name: str) -> Any:
        return self._source(name) if value is None else self.lower(value)

    def _source(self, name: str) -> Any:
        if name not in self._made:
            value = self._read(name)
            if name == "gradient" and self._coefficient is not None:
                value = value * self._coefficient
            self._made[name] = T.Bind(value)
        return self._made[name]

    def lower(self, value: Value) -> Any:
        """Return the expression of a value, in the wide type or bool."""
        if value.op in ("parameter", "gradient"):
            return self._source(value.op)
        if value.op == "state":
            return self._source(value.args[0])
        if id(value) not in self._made:
            made = self._expression(value)
            bound = self._uses.get(id(value), 0) > 1 and value.op not in ("entry", "filled")
            self._made[id(value)] = T.Bind(made) if bound else made
        return self._made[id(value)]

    def _expression(self, value: Value) -> Any:
        if value.op == "entry":
            number = constant(value.args[0])
            index = self._entries.get(value.args[0], 0)
            return self._hyper[index] if number is None else self.const(number)
        if value.op == "filled":
            return self.const(value.args[0])
        count = len(value.node.args)
        named = {k: self._operand(x) for k, x in value.args[count:] if k not in _PLACEMENT}
        return _RULES[value.op](*map(self._operand, value.args[:count]), lowering=self, **named)

    def _operand(self, argument: Any) -> Any:
        if isinstance(argument, Value):
            made = self.lower(argument)
            truth = argument.dtype is torch.bool and argument.op != "entry"
            return _Truth(made) if truth else made
        if isinstance(argument, tuple):
            return [self._operand(x) for x in argument]
        if isinstance(argument, bool | int | float):
            return self.const(argument)
        return argument

    def const(self, value: Any) -> Any:
        """Make a number of the wide type."""
        return tirx.const(float(value), self._wide)


class _Truth:
    """An operand that is true or false."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _number(x: Any, lowering: _Lowering) -> Any:
    if isinstance(x, _Truth):
        return tirx.Select(x.value, lowering.const(1), lowering.const(0))
    return x


def _truth(x: Any) -> Any:
    return x.value if isinstance(x, _Truth) else x != 0


def _numeric(function: Callable[..., Any]) -> Callable[..., Any]:
    def rule(*operands: Any, lowering: _Lowering) -> Any:
        return function(*(_number(x, lowering) for x in operands))

    return rule


def _logical(function: Callable[..., Any]) -> Callable[..., Any]:
    def rule(*operands: Any, lowering: _Lowering) -> Any:
        del lowering
        return function(*(_truth(x) for x in operands))

    return rule


def _scaled(function: Callable[..., Any]) -> Callable[..., Any]:
    def rule(x: Any, y: Any, alpha: Any = None, *, lowering: _Lowering) -> Any:
        x, y = _number(x, lowering), _number(y, lowering)
        return function(x, y if alpha is None else y * alpha)

    return rule


def _pow(x: Any, exponent: Any, lowering: _Lowering) -> Any:
    x = _number(x, lowering)
    if isinstance(exponent, tirx.FloatImm):
        if exponent.value == 2:
            return x * x
        if exponent.value == 0.5:
            return tirx.sqrt(x)
        if exponent.value == -0.5:
            return lowering.const(1) / tirx.sqrt(x)
    return tirx.power(x, exponent)


def _sign(x: Any, lowering: _Lowering) -> Any:
    zero = lowering.const(0)
    below = tirx.Select(x < zero, lowering.const(-1), zero)
    return tirx.Select(x > zero, lowering.const(1), below)


def _equal(x: Any, y: Any) -> Any:
    return tirx.Not(tirx.isnan(x)) if x.same_as(y) else x == y  # TVM takes x == x as true


def _unequal(x: Any, y: Any) -> Any:
    return tirx.isnan(x) if x.same_as(y) else x != y


def _maximum(x: Any, y: Any) -> Any:
    return tirx.Select(tirx.any(x >= y, tirx.isnan(x)), x, y)  # NaN wins


def _minimum(x: Any, y: Any) -> Any:
    return tirx.Select(tirx.any(x <= y, tirx.isnan(x)), x, y)


def _clamp(x: Any, low: Any = None, high: Any = None, **named: Any) -> Any:
    low, high = named.get("min", low), named.get("max", high)
    x = x if low is None else tirx.Select(x < low, low, x)
    return x if high is None else tirx.Select(x > high, high, x)


def _where(condition: Any, x: Any, y: Any, lowering: _Lowering) -> Any:
    return tirx.Select(_truth(condition), _number(x, lowering), _number(y, lowering))


_RULES: dict[str, Callable[..., Any]] = {
    **{
        f"aten.{name}.{kind}": rule
        for kind in ("Tensor", "Scalar")
        for name, rule in (
            ("add", _scaled(operator.add)),
            ("sub", _scaled(operator.sub)),
            ("div", _numeric(operator.truediv)),
            ("lerp", _numeric(lambda x, y, weight: x + (y - x) * weight)),
            ("eq", _numeric(_equal)),
            ("ne", _numeric(_unequal)),
            *((n, _numeric(getattr(operator, n))) for n in ("gt", "ge", "lt", "le", "mul")),
        )
    },
    **{f"aten.pow.{kind}": _pow for kind in ("Tensor_Scalar", "Tensor_Tensor")},
    "aten.rsub.Scalar": _numeric(lambda x, y: y - x),
    "aten.neg.default": _numeric(lambda x: -x),
    "aten.abs.default": _numeric(tirx.abs),
    "aten.sqrt.default": _numeric(tirx.sqrt),
    "aten.exp.default": _numeric(tirx.exp),
    "aten.log.default": _numeric(tirx.log),
    "aten.tanh.default": _numeric(tirx.tanh),
    "aten.maximum.default": _numeric(_maximum),
    "aten.minimum.default": _numeric(_minimum),
    "aten.isnan.default": _numeric(tirx.isnan),
    "aten._to_copy.default": lambda x, lowering: _number(x, lowering),
    "aten.copy.default": lambda x, y, lowering: _number(y, lowering),
    "aten.sign.default": _sign,
    "aten.where.self": _where,
    "aten.rsqrt.default": lambda x, lowering: lowering.const(1) / tirx.sqrt(x),
    "aten.reciprocal.default": lambda x, lowering: lowering.const(1) / x,
    "aten.clamp.default": lambda *x, lowering, **named: _clamp(*x, **named),
    **dict.fromkeys(("aten.logical_and.default", "aten.bitwise_and.Tensor"), _logical(tirx.all)),
    **dict.fromkeys(("aten.logical_or.default", "aten.bitwise_or.Tensor"), _logical(tirx.any)),
    **dict.fromkeys(("aten.logical_not.default", "aten.bitwise_not.default"), _logical(tirx.Not)),
}
"""How one element is computed; what is not here is no elementwise update."""
