"""Recurrent layers as library calls: they have no other form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm import relax

from relax_disc.recurrence_kinds import KINDS

if TYPE_CHECKING:
    from relax_disc.transform.libraries.dispatch_library import Site


def recurrence(call: relax.Call, site: Site) -> relax.Expr:
    """Dispatch `relax_disc.recurrence` and its gradient, float32 and float64."""
    name = call.op.name.removeprefix("relax_disc.")
    flags = (
        tuple(KINDS).index(call.attrs["kind"]),
        int(call.attrs["batch_first"]),
        int(call.attrs["reverse"]),
    )
    return site.call(name, [*call.args, *flags], list(site.original.ty.fields))
