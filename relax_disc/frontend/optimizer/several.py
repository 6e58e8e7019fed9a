"""One or several optimizers over a model: Muon for the matrices and AdamW for the rest, say.

Their groups are numbered one after the other; each parameter's state stays with its own optimizer.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from relax_disc.errors import InputMismatchError, UnsupportedOperatorError

_DELEGATING = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")
"""Packages whose wrappers hand ``step`` on to the optimizer that they hold."""


def optimizers_of(given: Any) -> tuple[Optimizer, ...]:
    """Return the optimizers that were given: none, one, or a list; wrappers are taken off.

    Raises `UnsupportedOperatorError`: a wrapper may do more in its step than the optimizer that it
    holds. Raises `InputMismatchError`: something else was given, or two of them hold one parameter.
    """
    if given is None:
        return ()
    listed = given if isinstance(given, list | tuple) else (given,)
    members = tuple(_unwrapped(each) for each in listed)
    owners: dict[int, int] = {}
    for k, member in enumerate(members):
        for group in member.param_groups:
            for parameter in group["params"]:
                if owners.setdefault(id(parameter), k) != k:
                    raise InputMismatchError(
                        f"Optimizers {owners[id(parameter)]} and {k} hold the same parameter, of "
                        f"shape {tuple(parameter.shape)}; give it to one of them."
                    )
    return members


def _unwrapped(optimizer: Any) -> Optimizer:
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        kind = type(optimizer)
        if kind.__module__.partition(".")[0] not in _DELEGATING:
            raise UnsupportedOperatorError(
                f"{kind.__name__} wraps {type(inner).__name__} and may do more than that does in a "
                "step; pass its .optimizer to leave that away.",
                ((kind.__name__, "the optimizer"),),
            )
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise InputMismatchError(
            "optimizer must be a torch.optim.Optimizer, a list of them or None, not "
            f"{type(optimizer).__name__}."
        )
    return optimizer


def groups_of(given: Any) -> list[tuple[Optimizer, dict[str, Any]]]:
    """List the groups of all optimizers, each with its owner."""
    return [(member, group) for member in optimizers_of(given) for group in member.param_groups]


def owners_of(given: Any) -> dict[int, Optimizer]:
    """Tell which optimizer holds a parameter, by the parameter's ``id``."""
    return {id(p): member for member, group in groups_of(given) for p in group["params"]}
