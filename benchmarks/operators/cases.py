"""Make training cases of PyTorch's `op_db` and `module_db`: their own samples, one axis dynamic.

A case is a module whose parameters reach every differentiable input, and two batches of different
size.  The second one has a sample's rows again, nearly: they stay where the operator is defined,
and no two are equal.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

_SAMPLES = 300
"""Samples of an operator that are looked at."""


@dataclass(slots=True)
class Case:
    """One sample as a training program.

    Attributes
    ----------
    name : str
        The entry of the list, and the sample's position in it.
    module : torch.nn.Module
        Called with a batch; returns a list of tensors.
    batches : list of tuple of Tensor
        One for each size; a single one where no axis can vary.
    dynamic : tuple of bool
        For each tensor of a batch, whether an axis of it varies.
    axis : int
        Which one.
    is_random : bool
        Two calls give two results.
    """

    name: str
    module: nn.Module
    batches: list[tuple[Tensor, ...]]
    dynamic: tuple[bool, ...]
    axis: int = 0
    is_random: bool = False

    @property
    def is_static(self) -> bool:
        """Whether no axis varies."""
        return len(self.batches) == 1


class OperatorModule(nn.Module):
    """An operator with one sample's arguments; inputs pass through a factor and an addend."""

    def __init__(
        self,
        function: Callable[..., Any],
        leaves: list[Any],
        spec: Any,
        moving: Sequence[int],
        axis: int,
        fed: Sequence[int],
    ) -> None:
        super().__init__()
        self.function, self.spec, self.fed = function, spec, list(fed)
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.factors, self.addends = nn.ParameterDict(), nn.ParameterDict()
        self.weights = nn.ParameterDict()
        for k, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            trained = leaf.requires_grad
            if k in fed:
                if trained:
                    shape = list(leaf.shape)
                    if k in moving:
                        shape[axis] = 1
                    self.factors[str(k)] = nn.Parameter(torch.ones((), dtype=leaf.dtype))
                    self.addends[str(k)] = nn.Parameter(torch.zeros(shape, dtype=leaf.dtype))
            elif trained:
                self.weights[str(k)] = nn.Parameter(_copy(leaf))
            else:
                self.register_buffer(f"constant{k}", _copy(leaf))

    def forward(self, *batch: Tensor) -> list[Tensor]:
        """Call the operator."""
        leaves = list(self.leaves)
        for k, tensor in zip(self.fed, batch, strict=True):
            name = str(k)
            if name in self.factors:
                tensor = tensor * self.factors[name] + self.addends[name]
            leaves[k] = tensor
        for name, weight in self.weights.items():
            leaves[int(name)] = weight
        for name, constant in self.named_buffers():
            leaves[int(name.removeprefix("constant"))] = constant
        first, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return tensors_of(self.function(first, *args, **kwargs))


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


class ModuleCase(nn.Module):
    """A module with one sample's arguments; a factor and an addend before its first input."""

    def __init__(self, module: nn.Module, leaves: list[Any], spec: Any, fed: Sequence[int]) -> None:
        super().__init__()
        self.module, self.spec, self.fed = module, spec, list(fed)
        self.leaves = [None if k in fed else leaf for k, leaf in enumerate(leaves)]
        self.factor = nn.Parameter(torch.ones(()))
        self.addend = nn.Parameter(torch.zeros(()))

    def forward(self, *batch: Tensor) -> list[Tensor]:
        """Call the module."""
        leaves = list(self.leaves)
        for position, (k, tensor) in enumerate(zip(self.fed, batch, strict=True)):
            if position == 0 and tensor.is_floating_point():
                tensor = tensor * self.factor + self.addend
            leaves[k] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return tensors_of(self.module(*args, **kwargs))


def tensors_of(result: Any) -> list[Tensor]:
    """Flatten a result; complex numbers become pairs."""
    found = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
    return [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in found]


def weighed(results: Sequence[Tensor]) -> Tensor:
    """A loss whose gradient differs from element to element."""
    total: Any = 0.0
    for result in results:
        if result.is_floating_point() and result.numel():
            count = result.numel()
            weights = torch.cos(torch.arange(count, dtype=result.dtype)).reshape(result.shape)
            total = total + (result * weights).sum() / math.prod(result.shape[1:])
    return total


def operators() -> dict[str, Any]:
    """Every entry of `op_db` that can be trained in float32."""
    return {
        name: info
        for info in op_db
        if info.supports_autograd and torch.float32 in info.supported_dtypes("cpu")
        for name in [info.formatted_name]
    }


def modules() -> dict[str, Any]:
    """Every entry of `module_db`."""
    return {info.formatted_name: info for info in module_db if torch.float32 in info.dtypes}


def operator_samples(name: str) -> Iterator[Iterator[Case]]:
    """For each sample of an operator its cases: an axis varies, another one, at last none."""
    info = operators()[name]
    torch.manual_seed(0)

    def function(sample: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            return sample.output_process_fn_grad(info.gradcheck_wrapper(info.op, *args, **kwargs))

        return run

    samples = info.sample_inputs("cpu", torch.float32, requires_grad=True)
    for index, sample in enumerate(itertools.islice(samples, _SAMPLES)):
        leaves, spec = pytree.tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
        tensors = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        trained = [k for k in tensors if leaves[k].requires_grad]
        if not trained or not all(_is_plain(leaves[k]) for k in tensors):
            continue

        call = function(sample)

        def make(
            moving: list[int],
            axis: int,
            call: Callable[..., Any] = call,
            leaves: list[Any] = leaves,
            spec: Any = spec,
            first: int = trained[0],
        ) -> tuple[nn.Module, list[int]]:
            fed = moving or [first]
            return OperatorModule(call, leaves, spec, moving, axis, fed), fed

        yield _variants(f"{name} [{index}]", make, leaves, tensors, trained)


def module_samples(name: str) -> Iterator[Iterator[Case]]:
    """For each sample of a module its cases, as `operator_samples`."""
    info = modules()[name]
    inputs = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=True, training=True
    )
    for index, given in enumerate(itertools.islice(inputs, _SAMPLES)):
        if given.forward_input is None:
            continue
        forward = (tuple(given.forward_input.args), dict(given.forward_input.kwargs))
        leaves, spec = pytree.tree_flatten(forward)
        tensors = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if not tensors or not all(_is_plain(leaves[k]) for k in tensors):
            continue

        def make(
            moving: list[int],
            axis: int,
            index: int = index,
            given: Any = given.constructor_input,
            leaves: list[Any] = leaves,
            spec: Any = spec,
            tensors: list[int] = tensors,
        ) -> tuple[nn.Module, list[int]]:
            torch.manual_seed(index)
            made = info.module_cls(*given.args, **given.kwargs).train()
            return ModuleCase(made, leaves, spec, tensors), tensors

        yield _variants(f"{name} [{index}]", make, leaves, tensors, tensors)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_complex() and tensor.numel() > 0


def _variants(
    name: str,
    make: Callable[[list[int], int], tuple[nn.Module, list[int]]],
    leaves: list[Any],
    tensors: list[int],
    leading: list[int],
) -> Iterator[Case]:
    """Let the axes of the leading inputs vary, alone and with all of that size; at last none."""
    tried: list[tuple[list[int], int]] = []
    for axis in range(max(leaves[k].dim() for k in leading)):
        for lead in leading:
            if axis >= leaves[lead].dim() or leaves[lead].shape[axis] < 2:
                continue
            size = leaves[lead].shape[axis]
            alike = [k for k in tensors if _size(leaves[k], axis) == size]
            for moving in (alike, [k for k in alike if k in leading], [lead]):
                if (moving, axis) not in tried:
                    tried.append((moving, axis))
    for moving, axis in [*tried, ([], 0)]:
        module, fed = make(moving, axis)
        given = [leaves[k].detach().contiguous() for k in fed]
        batches = [tuple(given)]
        if moving:
            longer_ = [
                longer(x, axis) if k in moving else x for k, x in zip(fed, given, strict=True)
            ]
            batches.append(tuple(longer_))
        case = Case(name, module, batches, tuple(k in moving for k in fed), axis)
        if runs(case):
            yield case


def _size(tensor: Tensor, axis: int) -> int:
    return tensor.shape[axis] if axis < tensor.dim() else -1


def longer(x: Tensor, axis: int) -> Tensor:
    """Add rows like the first ones, a little smaller so that no two are equal."""
    extra = x.narrow(axis, 0, min(3, x.shape[axis]))
    return torch.cat([x, extra * 0.97 if x.is_floating_point() else extra], axis)


def runs(case: Case) -> bool:
    """Whether eager PyTorch trains the case at all its sizes, to finite numbers."""
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in case.batches:
            before = torch.get_rng_state()
            try:
                results, again = (_seeded(case.module, batch, seed) for seed in (1, 2))
                loss = weighed(results)
                if not isinstance(loss, Tensor) or not loss.requires_grad:
                    return False
                loss.backward()
                if all(p.grad is None for p in case.module.parameters()):
                    return False  # the norm with p=0, say
            except Exception:
                return False
            finally:
                torch.set_rng_state(before)
                case.module.zero_grad()
            if not all(_same(x, y) for x, y in zip(results, again, strict=True)):
                case.is_random = True
            elif not torch.isfinite(loss):
                return False
            seen.append([x.shape for x in results])
    return True


def _seeded(module: nn.Module, batch: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Call a module with a seed that the list's own functions, which all set one, cannot change."""
    plant = torch.manual_seed
    plant(seed)
    with mock.patch.object(torch, "manual_seed", lambda _: plant(seed)):
        return module(*batch)


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.allclose(x.double(), y.double(), equal_nan=True)
