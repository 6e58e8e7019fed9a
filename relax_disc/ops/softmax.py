"""Softmax whose least weights are 0, where nothing tells them from that.

Below 2^-126 float32 has subnormal numbers, which processors multiply by microcode.  Where a softmax
makes many of them (distances times a slope, as in positional attention), it took four times as
long, and so did the products after it.  A weight below 2^-100 of its row's greatest is lost in any
sum with that; only a logarithm or a division tells it from 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm import relax, te, tirx

from relax_disc.ops import registry

if TYPE_CHECKING:
    from relax_disc.transform.libraries.dispatch_library import Site

_LEAST = -69.3  # the logarithm of 2^-100

softmax = registry.operator(
    "softmax(Tensor x, SymInt axis)",
    """Softmax along an axis, where weights below 2^-100 of the greatest are 0.

    ``x``: float32. Of its type.
    """,
    lambda x, **_: [x],
    is_traced=False,
)


@registry.dispatches("relax.nn.softmax")
def dispatch(call: relax.Call, site: Site) -> relax.Expr | None:
    """Take this softmax on a CPU, if nothing reads a logarithm of a weight or divides by one."""
    kind: Any = call.ty
    if site.is_cuda or registry.dtype_name(kind) != "float32" or site.is_told_from_zero():
        return None
    attributes: Any = call.attrs
    return softmax(call.args[0], axis=int(attributes.axis) % len(kind.shape.values))


def _stages(x: Any, axis: int) -> Any:
    """Compute by the stages of TVM's softmax, whose names they have."""
    shape, dtype = list(x.shape), str(x.dtype)
    rows = [*shape[:axis], *shape[axis + 1 :]]
    along = te.reduce_axis((0, shape[axis]), name="k")

    def inside(at: tuple[Any, ...]) -> list[Any]:
        return [*at[:axis], along, *at[axis:]]

    def row(at: tuple[Any, ...]) -> list[Any]:
        return [*at[:axis], *at[axis + 1 :]]

    greatest = te.compute(
        rows, lambda *at: te.max(x(*inside(at)), axis=along), name="T_softmax_maxelem"
    )

    def weight(*at: Any) -> Any:
        below, least = x(*at) - greatest(*row(at)), tirx.const(_LEAST, dtype)
        is_nothing = below < least  # of what is not a number this is false, and it stays
        bounded = tirx.Select(is_nothing, least, below)
        return tirx.Select(is_nothing, tirx.const(0, dtype), tirx.exp(bounded))

    weights = te.compute(shape, weight, name="T_softmax_exp")
    total = te.compute(
        rows, lambda *at: te.sum(weights(*inside(at)), axis=along), name="T_softmax_expsum"
    )
    return te.compute(
        shape,
        lambda *at: weights(*at) / total(*row(at)),
        name="T_softmax_norm",
        attrs={"axis": axis},
        tag="softmax_output",
    )


def _legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    axis = int(registry.attribute(call, "axis"))
    return builder.call_te(_stages, call.args[0], axis, primfunc_name_hint="softmax")


registry.register_legalization("relax_disc.softmax", _legalize)
