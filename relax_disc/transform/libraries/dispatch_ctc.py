"""Connectionist temporal classification as library calls: it has no other form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm import relax

if TYPE_CHECKING:
    from relax_disc.transform.libraries.dispatch_library import Site


def ctc_loss(call: relax.Call, site: Site) -> relax.Expr:
    """Dispatch `relax_disc.ctc_loss`."""
    return site.call("ctc_loss", _arguments(call), list(site.original.ty.fields))


def ctc_loss_backward(call: relax.Call, site: Site) -> relax.Expr:
    """Dispatch `relax_disc.ctc_loss_backward`."""
    return site.call("ctc_loss_backward", _arguments(call), site.original.ty)


def _arguments(call: relax.Call) -> list[object]:
    return [*call.args, int(call.attrs["blank"])]
