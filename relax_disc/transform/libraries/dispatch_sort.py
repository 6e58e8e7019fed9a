"""Sorting as a library call: it has no other form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm import relax

if TYPE_CHECKING:
    from relax_disc.transform.libraries.dispatch_library import Site


def sort(call: relax.Call, site: Site) -> relax.Expr:
    """Dispatch `relax_disc.sort`; the results' shape says how many elements to return."""
    descending = int(call.attrs["descending"])
    return site.call("sort", [*call.args, descending], list(site.original.ty.fields))
