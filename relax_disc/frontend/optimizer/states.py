"""What the optimizers of PyTorch ask of a compiled step: states, flags and hyper-parameters.

The update itself is a kernel (:mod:`.update_kernels`) that reads one small vector for each group of
parameters.  The vector is computed here at every call, in float64, by PyTorch's own formulas, so
that learning-rate schedules and changed settings take effect and nothing drifts.

Layout of the vector
--------------------
Adam and AdamW, `ADAM_HYPER`:
    ``sign, decay, coupled, one_minus_beta1, beta2, one_minus_beta2, step_size, root_correction,
    eps, check`` with ``decay = 1 - lr * weight_decay`` for AdamW (else 1), ``coupled =
    weight_decay`` for Adam (else 0), ``step_size = lr / (1 - beta1**t)``, ``root_correction =
    sqrt(1 - beta2**t)``.
SGD, `SGD_HYPER`:
    ``sign, lr, weight_decay, momentum, one_minus_dampening, nesterov, first, check`` where
    ``first`` is 1 at the step that makes the momentum buffer (which PyTorch sets to the gradient
    itself).
The sum of gradients over batches, no optimizer's rule but a kernel like theirs, `SUM_HYPER`:
    ``sign, check``.

``sign`` is -1 for ``maximize``, else 1; flags are 0 or 1.  With ``check`` a loss that is not finite
stops the step before the first update (:mod:`relax_disc.vm_builtins.guard`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from relax_disc.errors import UnsupportedOperatorError

Rule = Literal["adam", "sgd", "sgd_momentum", "sum"]

ADAM_HYPER = (
    "sign",
    "decay",
    "coupled",
    "one_minus_beta1",
    "beta2",
    "one_minus_beta2",
    "step_size",
    "root_correction",
    "eps",
    "check",
)
SGD_HYPER = (
    "sign",
    "lr",
    "weight_decay",
    "momentum",
    "one_minus_dampening",
    "nesterov",
    "first",
    "check",
)

SUM_HYPER = ("sign", "check")

# Flags that change what is computed, or where, in a way that the kernels do not follow.
# `foreach` and `fused` only choose among PyTorch's own implementations and are accepted.
_REFUSED = ("amsgrad", "capturable", "differentiable")


def update_rule(optimizer: Optimizer, group: Mapping[str, Any]) -> Rule:
    """Say which kernel updates the parameters of a group.

    Raises
    ------
    UnsupportedOperatorError
        The optimizer is not exactly SGD, Adam or AdamW, has hooks around its step, or a flag
        cannot be honoured.
    """
    kind = type(optimizer)
    if kind not in (SGD, Adam, AdamW):
        raise UnsupportedOperatorError(
            f"torch.optim.{kind.__name__} cannot be compiled; use SGD, Adam or AdamW.",
            ((kind.__name__, "the optimizer"),),
        )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise UnsupportedOperatorError(
            f"{kind.__name__} has hooks around step(), which a compiled step does not call; call "
            "them yourself before or after it.",
            ((f"{kind.__name__}.register_step_hook", "the optimizer"),),
        )
    for flag in _REFUSED:
        if group.get(flag):
            raise UnsupportedOperatorError(
                f"{kind.__name__}({flag}=True) cannot be compiled; construct it without {flag}.",
                ((f"{kind.__name__}.{flag}", "the optimizer"),),
            )
    if kind is SGD:
        return "sgd_momentum" if group["momentum"] != 0 else "sgd"
    return "adam"


def required_state(optimizer: Optimizer, group: Mapping[str, Any]) -> tuple[str, ...]:
    """Name the state tensors, shaped like the parameter, that the update of a group needs.

    Adam and AdamW also keep ``step``, a float32 scalar that the caller raises by one before it asks
    for `hyper_values`; it is no input of the compiled function.
    """
    rule = update_rule(optimizer, group)
    if rule == "adam":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if rule == "sgd_momentum" else ()


def hyper_names(rule: Rule) -> tuple[str, ...]:
    """Name the entries of the vector that the kernel of a rule reads."""
    if rule == "sum":
        return SUM_HYPER
    return ADAM_HYPER if rule == "adam" else SGD_HYPER


def hyper_values(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    step: int,
    *,
    first: bool = False,
    check: bool = False,
) -> list[float]:
    """Compute the vector of hyper-parameters of a group for one step.

    Parameters
    ----------
    optimizer : Optimizer
        SGD, Adam or AdamW.
    group : mapping
        One of ``optimizer.param_groups``, read as it is now.
    step : int
        The number of this step, 1 for the first: ``state["step"]`` after it was raised.  SGD does
        not look at it.
    first : bool
        SGD with momentum: the buffers of these parameters do not exist yet.
    check : bool
        Stop before the first update when the loss is not finite.

    Returns
    -------
    list of float
        In float64, in the layout that the module's documentation gives.
    """
    rule = update_rule(optimizer, group)
    sign = -1.0 if group.get("maximize") else 1.0
    lr, decay = _number(group["lr"]), _number(group["weight_decay"])
    if rule != "adam":
        return [
            sign,
            lr,
            decay,
            _number(group["momentum"]),
            1.0 - _number(group["dampening"]),
            float(bool(group["nesterov"])),
            float(first),
            float(check),
        ]
    beta1, beta2 = (_number(beta) for beta in group["betas"])
    decoupled = isinstance(optimizer, AdamW) or bool(group.get("decoupled_weight_decay"))
    return [
        sign,
        1.0 - lr * decay if decoupled else 1.0,
        0.0 if decoupled else decay,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        lr / (1.0 - beta1**step),
        math.sqrt(1.0 - beta2**step),
        _number(group["eps"]),
        float(check),
    ]


def _number(value: float | torch.Tensor) -> float:
    return float(value.item()) if isinstance(value, torch.Tensor) else float(value)


def state_step(optimizer: Optimizer, parameter: torch.Tensor) -> int:
    """Return how many steps of a parameter PyTorch has counted."""
    state = optimizer.state.get(parameter, {})
    if "step" in state:
        return int(_number(state["step"]))
    return int(state.get("momentum_buffer") is not None)
