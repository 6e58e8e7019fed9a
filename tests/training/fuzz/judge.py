"""Eager PyTorch's own training step, and how far rounding may take another one from it.

A step of float32 is right if it computes what eager computes, each operator rounded somehow.  How
far that leads from the exact values is not to be guessed from sizes: a gradient whose exact value
is zero comes out as some 1e-9, and an optimizer that divides by the gradient's size makes a whole
learning rate of it.  So it is sampled: eager's step runs in float64 with the result of every
operator rounded to float32, up or down at random, and how far these runs get from the exact one is
what rounding explains, for every element of every tensor, through any optimizer.  Selections, sums
of zeros and whatever else float32 computes without an error stay exact in these runs.

Reference: J. Vignes, "A stochastic arithmetic for reliable scientific computation", Mathematics and
Computers in Simulation 35, 1993 (random rounding); D. S. Parker, "Monte Carlo arithmetic", 1997.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch._decomp import core_aten_decompositions, get_decompositions
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Tensors = Mapping[str, torch.Tensor]

# What is this near to eager is right: no rounding is sampled.
ABSOLUTE, RELATIVE = 1e-5, 1e-4
# A normal error is below a thirtieth of its size in all of ten samples once in 10^15 elements; a
# factor less is left for sums of another order and for functions of another library.
SAMPLES, FACTOR = 10, 30
GRADIENT = ".grad"
_ATEN = torch.ops.aten
# A mean is a sum and a quotient: of equal values, too, it need not be that value.
_MEANS = get_decompositions([_ATEN.native_batch_norm, _ATEN.var_mean, _ATEN.mean])
PARTS = {**core_aten_decompositions(), **_MEANS}


class RandomRounding(TorchDispatchMode):
    """Operators on float64 give values of float32: one of the two neighbours, at random.

    Those that PyTorch knows how to take apart are, for much cancels inside a norm's gradient.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = NotImplemented
        if func in PARTS:
            with self:
                out = PARTS[func](*args, **(kwargs or {}))
        if out is NotImplemented:
            out = func(*args, **(kwargs or {}))
        aliases = [each.alias_info for each in func._schema.returns if each.alias_info is not None]
        if not all(alias.is_write for alias in aliases):
            return out  # a view
        round_in_place = bool(aliases)

        def rounded(tensor: object) -> object:
            if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float64:
                return tensor
            value = self._rounded(tensor)
            return tensor.copy_(value) if round_in_place else value

        return pytree.tree_map(rounded, out)

    def _rounded(self, exact: torch.Tensor) -> torch.Tensor:
        nearest = exact.float()
        direction = torch.where(exact > nearest, torch.inf, -torch.inf).float()
        other = torch.nextafter(nearest, direction)
        stays = torch.rand(exact.shape, generator=self._generator) < 0.5
        stays |= (nearest == exact) | ~nearest.isfinite()
        return torch.where(stays, nearest, other).double()


def train(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], batch: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Make one step of eager PyTorch; return its results and the state that it leaves."""
    for parameter in model.parameters():
        parameter.grad = None
    results = model(*batch)
    pytree.tree_leaves(results)[0].backward()
    for optimizer in optimizers:
        optimizer.step()
    return named(results) | gradients_of(model) | state_of(model, optimizers)


def differences(
    found: Tensors,
    wanted: Tensors,
    before: tuple[nn.Module, Sequence[torch.optim.Optimizer]],
    batch: Sequence[torch.Tensor],
) -> list[str]:
    """Name the tensors that are not eager's, ``wanted``, by more than rounding explains.

    ``before`` are the model and the optimizers before the step.
    """
    off = [name for name, value in wanted.items() if not _near(found[name], value)]
    if not off:
        return []
    exact = _train_wide(before, batch)
    sampled: list[Tensors] = [wanted]
    for seed in range(SAMPLES):
        with RandomRounding(seed):
            sampled.append(_train_wide(before, batch))
    texts = []
    for name in off:
        samples = torch.stack([sample[name].double() for sample in sampled])
        bound = ABSOLUTE + RELATIVE * exact[name].abs()
        bound += FACTOR * (samples - exact[name]).abs().amax(0)
        finite = wanted[name].isfinite()
        right = (found[name].double() - exact[name]).abs() <= bound
        right = torch.where(finite, right, finite == found[name].isfinite())
        undecided = (samples.isfinite() != finite).any(0)
        if found[name].dtype != wanted[name].dtype or not bool((right | undecided).all()):
            texts.append(
                f"{name} is {found[name]}, eager's {wanted[name]}, in float64 {exact[name]}, "
                f"rounding explains {bound}"
            )
    return texts


def state_of(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, torch.Tensor]:
    """Collect parameters, buffers, plain tensors of modules, and the optimizers' state."""
    found = dict(model.state_dict())
    for owner, module in model.named_modules():
        found |= {f"{owner}.{k}": v for k, v in vars(module).items() if torch.is_tensor(v)}
    for number, optimizer in enumerate(optimizers):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for place, parameter in enumerate(parameters):
            state = optimizer.state.get(parameter, {})
            tensors = {k: v for k, v in state.items() if torch.is_tensor(v)}
            found |= {f"{number}.{place} {k}": v for k, v in tensors.items()}
    return found


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Collect the gradients that are there, by names that end in `GRADIENT`."""
    gradients = ((name, parameter.grad) for name, parameter in model.named_parameters())
    return {name + GRADIENT: grad.detach() for name, grad in gradients if grad is not None}


def named(results: object) -> dict[str, torch.Tensor]:
    """Give the tensors that a step returns names."""
    leaves = pytree.tree_leaves(results)
    return {f"result {number}": tensor.detach() for number, tensor in enumerate(leaves)}


def identical(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bits, but for those of what is not a number."""
    return (
        one.dtype == other.dtype
        and torch.equal(one.isnan(), other.isnan())
        and bool(((one == other) | one.isnan()).all())
    )


def _train_wide(
    before: tuple[nn.Module, Sequence[torch.optim.Optimizer]], batch: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    model, optimizers = copy.deepcopy(before)
    model.double()
    for state in (state for o in optimizers for state in o.state.values()):
        state |= {k: v.double() for k, v in state.items() if torch.is_tensor(v) and v.dim()}
    wide = [t.double() if t.is_floating_point() else t for t in batch]
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # of constants in the model
    try:
        return train(model, optimizers, wide)
    finally:
        torch.set_default_dtype(usual)


def _near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    near = (found - wanted).abs() <= ABSOLUTE + RELATIVE * wanted.abs()
    return bool((near | (found == wanted) | (found.isnan() & wanted.isnan())).all())
