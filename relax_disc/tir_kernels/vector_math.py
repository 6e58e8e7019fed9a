"""Replace exp, log, log1p, sigmoid, tanh, erf and rsqrt by formulas that become vectors.

LLVM turns a vector of `exp` into one call of the C library for each lane.  The replacement happens
inside the function at hand, so that other users of TVM in the process keep their own lowering.
Single precision; half-precision arguments are computed in float32.

Largest error over a dense sweep (see the tests): exp 1.1 ulp, log 0.9, log1p 2.4, sigmoid 2.5,
tanh 1.3, erf 5.5.
Infinities and NaN come out as in the C library; results too small for a normal number are kept.

References: Cephes (S. Moshier) expf, logf and tanhf; log1p as W. Kahan computes it; the rational
approximation of erf is Eigen's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import prim

from relax_disc.analysis.kernels.element import is_guard
from relax_disc.analysis.kernels.mutate import mutate
from relax_disc.tir_kernels.binding import keep

_FLOAT = "float32"
_HALF = ("float16", "bfloat16")

_LOG2_E = 1.44269504088896341
# ln 2 in two parts; the first has few bits, so that n * _LN2_HIGH is exact.
_LN2_HIGH = 0.693359375
_LN2_LOW = -2.12194440e-4
_EXP = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
# exp overflows at 88.72 and vanishes at -103.97.
_EXP_HIGH = 89.0
_EXP_LOW = -110.0

# log(1 + m) = m - m^2 / 2 + m^3 P(m) for sqrt(1/2) <= 1 + m < sqrt(2).
_LOG = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
_SQRT_HALF = 0.70710678118654752
_LEAST_NORMAL = 1.17549435e-38
_SUBNORMAL_STEPS = 25  # powers of two by which what is less than that is scaled

# tanh(x) = x + x^3 P(x^2) for small x.
_TANH_SMALL = 0.625
_TANH = (
    -5.70498872745e-3,
    2.06390887954e-2,
    -5.37397155531e-2,
    1.33314422036e-1,
    -3.33332819422e-1,
)

# erf(x) = x P(x^2) / Q(x^2) on [-4, 4]; beyond, it is 1 in float32.
_ERF_BOUND = 4.0
_ERF_P = (
    -2.72614225801306e-10,
    2.77068142495902e-08,
    -2.10102402082508e-06,
    -5.69250639462346e-05,
    -7.34990630326855e-04,
    -2.95459980854025e-03,
    -1.60960333262415e-02,
)
_ERF_Q = (
    -1.45660718464996e-05,
    -2.13374055278905e-04,
    -1.68282697438203e-03,
    -7.37332916720468e-03,
    -1.42647390514189e-02,
)


# Names a value that is used more than once: ``name(hint, value)`` returns what stands for it.
Name = Callable[[str, Any], Any]


def _const(value: float) -> Any:
    return tirx.const(value, _FLOAT)


def _polynomial(coefficients: Sequence[float], x: Any) -> Any:
    """Evaluate by Horner's rule, highest power first."""
    total: Any = _const(coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + _const(coefficient)
    return total


def _power_of_two(exponent: Any) -> Any:
    bits = (exponent + tirx.const(127, "int32")) << tirx.const(23, "int32")
    return tirx.reinterpret(_FLOAT, bits)


def exp(x: Any, name: Name) -> Any:
    """Build exp(x) for a float32 expression."""
    x = name("exp_x", x)
    # NaN fails the comparison: it takes the last branch and stays NaN, as inf stays inf.
    is_inside = x < _const(_EXP_HIGH)
    bounded = name(
        "exp_bounded", prim.Select(is_inside, tirx.max(x, _const(_EXP_LOW)), _const(0.0))
    )
    n = name("exp_n", tirx.floor(bounded * _const(_LOG2_E) + _const(0.5)))
    r = name("exp_r", (bounded - n * _const(_LN2_HIGH)) - n * _const(_LN2_LOW))
    whole = tirx.Cast("int32", n)
    half = whole >> tirx.const(1, "int32")
    near_one = _polynomial(_EXP, r) * (r * r) + r + _const(1.0)
    # In two steps: 2^n itself is out of range at both ends.
    value = near_one * _power_of_two(half) * _power_of_two(whole - half)
    return prim.Select(is_inside, value, x * _const(3.0e38))


def log(x: Any, name: Name) -> Any:
    """Build log(x) for a float32 expression."""
    x = name("log_x", x)
    is_small = x < _const(_LEAST_NORMAL)
    scaled = prim.Select(is_small, x * _const(2.0**_SUBNORMAL_STEPS), x)
    bits = name("log_bits", tirx.reinterpret("int32", scaled))
    # x = f * 2^exponent with 1/2 <= f < 1.
    mantissa = (bits & tirx.const(0x007FFFFF, "int32")) | tirx.const(0x3F000000, "int32")
    f = name("log_f", tirx.reinterpret(_FLOAT, mantissa))
    exponent = tirx.Cast(_FLOAT, (bits >> tirx.const(23, "int32")) - tirx.const(126, "int32"))
    is_low = f < _const(_SQRT_HALF)
    n = exponent - prim.Select(is_small, _const(float(_SUBNORMAL_STEPS)), _const(0.0))
    n = name("log_n", n - prim.Select(is_low, _const(1.0), _const(0.0)))
    m = name("log_m", prim.Select(is_low, f + f, f) - _const(1.0))
    z = name("log_z", m * m)
    low = _polynomial(_LOG, m) * m * z + n * _const(_LN2_LOW) - _const(0.5) * z
    value = (m + low) + n * _const(_LN2_HIGH)
    # NaN and infinity stay what they are; less than 0 gives NaN.
    beyond = prim.Select(x < _const(0.0), _const(float("nan")), x)
    found = prim.Select(tirx.all(x > _const(0.0), x < _const(float("inf"))), value, beyond)
    return prim.Select(x == _const(0.0), _const(float("-inf")), found)


def log1p(x: Any, name: Name) -> Any:
    """Build log(1 + x) for a float32 expression; small x keep their digits."""
    x = name("log1p_x", x)
    u = name("log1p_u", x + _const(1.0))
    value = log(u, name) * (x / (u - _const(1.0)))
    # Where 1 + x is 1, log(1 + x) is x; infinity would be divided by itself.
    is_plain = tirx.any(u == _const(1.0), u == _const(float("inf")))
    return prim.Select(is_plain, x, value)


def sigmoid(x: Any, name: Name) -> Any:
    """Build 1 / (1 + exp(-x)) for a float32 expression."""
    return _const(1.0) / (_const(1.0) + exp(_const(0.0) - x, name))


def tanh(x: Any, name: Name) -> Any:
    """Build tanh(x) for a float32 expression."""
    x = name("tanh_x", x)
    z = name("tanh_z", x * x)
    small = _polynomial(_TANH, z) * z * x + x
    magnitude = name("tanh_magnitude", tirx.max(x, _const(0.0) - x))
    exponential = exp(magnitude * _const(2.0), name)
    large = name("tanh_large", _const(1.0) - _const(2.0) / (exponential + _const(1.0)))
    signed = prim.Select(x < _const(0.0), _const(0.0) - large, large)
    value = prim.Select(magnitude < _const(_TANH_SMALL), small, signed)
    # NaN fails this comparison; those of a maximum may have dropped it.
    return prim.Select(z >= _const(0.0), value, x)


def erf(x: Any, name: Name) -> Any:
    """Build erf(x) for a float32 expression."""
    x = name("erf_in", x)
    high = name("erf_high", prim.Select(x > _const(_ERF_BOUND), _const(_ERF_BOUND), x))
    x = name("erf_x", prim.Select(high < _const(-_ERF_BOUND), _const(-_ERF_BOUND), high))
    z = name("erf_z", x * x)
    return x * _polynomial(_ERF_P, z) / _polynomial(_ERF_Q, z)


def rsqrt(x: Any, name: Name) -> Any:
    """Build 1 / sqrt(x), which TVM does not widen to vectors by itself, for any float type."""
    return tirx.const(1.0, str(x.ty.dtype)) / tirx.sqrt(x)


_FORMULAS: dict[str, Callable[[Any, Name], Any]] = {
    "exp": exp,
    "log": log,
    "log1p": log1p,
    "sigmoid": sigmoid,
    "tanh": tanh,
    "erf": erf,
    "rsqrt": rsqrt,
}


def has_formula(call: Any) -> bool:
    """Whether `use_vector_math` replaces a call."""
    space, _, function = getattr(call.op, "name", "").partition(".")
    if space not in ("tirx", "prim") or function not in _FORMULAS:
        return False
    dtype = str(call.ty.dtype)
    return dtype in (_FLOAT, *_HALF) or (function == "rsqrt" and dtype == "float64")


def use_vector_math(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Replace the functions that have a vector formula in the body of ``func``.

    ``func``: with plain loops, as our rules make them; calls under a condition are left alone,
    since their arguments may not be evaluated before it. Returned: intermediate values are bound in
    front of the statement that uses them.
    """

    def on_statement(statement: Any, mutator: Any) -> Any:
        binds: list[Any] = []
        changed = _Rewriter(binds).run(statement)
        return tirx.SeqStmt([*binds, changed]) if binds else changed

    def on_sequence(sequence: Any, mutator: Any) -> Any:
        flat: list[Any] = []
        for statement in sequence.seq:
            changed = mutator.mutate(statement)
            flat.extend(changed.seq if isinstance(changed, tirx.SeqStmt) else [changed])
        return tirx.SeqStmt(flat)

    body = mutate(
        func.body, [((tirx.Bind, tirx.BufferStore), on_statement), (tirx.SeqStmt, on_sequence)]
    )
    return func if body.same_as(func.body) else func.with_body(body)


class _Rewriter:
    """Rewrites the expressions of one statement; named values are appended to ``binds``."""

    def __init__(self, binds: list[Any]) -> None:
        self._binds = binds

    def run(self, statement: Any) -> Any:
        return mutate(statement, (tvm.ir.Call, self._on_call))

    def _name(self, hint: str, value: Any) -> Any:
        statements, kept = keep(hint, value)
        self._binds += statements
        return kept

    def _on_call(self, call: Any, mutator: Any) -> Any:
        if is_guard(call):
            condition = mutator.mutate(call.args[0])
            return tirx.if_then_else(condition, *call.args[1:])
        if not has_formula(call):
            return mutator.default_mutate(call)
        formula = _FORMULAS[call.op.name.partition(".")[2]]
        dtype = str(call.ty.dtype)
        argument = mutator.mutate(call.args[0])
        if dtype not in _HALF:
            return formula(argument, self._name)
        return tirx.Cast(dtype, formula(tirx.Cast(_FLOAT, argument), self._name))
