"""Make training cases of PyTorch's `op_db` and `module_db`: their own samples, one axis dynamic.

A case is a module whose parameters reach every differentiable input, and two batches of different
size.  The second one has a sample's rows again, nearly: they stay where the operator is defined, and
no two are equal.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

_SAMPLES = 24
"""Samples of an operator that are looked at."""

CASES = 2
"""Cases of an operator that are run."""


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
    dynamic : tuple of dict of int to bool
        For each tensor of a batch, whether its first axis varies.
    is_random : bool
        Two calls give two results.
    """

    name: str
    module: nn.Module
    batches: list[tuple[Tensor, ...]]
    dynamic: tuple[bool, ...]
    is_random: bool = False


class OperatorModule(nn.Module):
    """An operator with one sample's arguments; inputs pass through a factor and an addend."""

    def __init__(
        self,
        function: Callable[..., Any],
        leaves: list[Any],
        spec: Any,
        moving: Sequence[int],
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
                    shape = leaf.shape[1:] if k in moving else leaf.shape
                    self.factors[str(k)] = nn.Parameter(torch.ones((), dtype=leaf.dtype))
                    self.addends[str(k)] = nn.Parameter(torch.zeros(shape, dtype=leaf.dtype))
            elif trained:
                self.weights[str(k)] = nn.Parameter(leaf.detach().clone())
            else:
                self.register_buffer(f"constant{k}", leaf.detach().clone())

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


def operator_cases(name: str) -> list[Case]:
    """Make the first cases of an operator, those with a dynamic axis first."""
    info = operators()[name]
    torch.manual_seed(0)

    def function(sample: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            return sample.output_process_fn_grad(info.gradcheck_wrapper(info.op, *args, **kwargs))

        return run

    static: list[Case] = []
    found: list[Case] = []
    samples = info.sample_inputs("cpu", torch.float32, requires_grad=True)
    for index, sample in enumerate(itertools.islice(samples, _SAMPLES)):
        leaves, spec = pytree.tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
        title = f"{name} [{index}]"
        for case in _variants(title, function(sample), leaves, spec):
            (static if len(case.batches) == 1 else found).append(case)
            break
        if len(found) == CASES:
            break
    return found or static[:CASES]


def _variants(
    name: str, function: Callable[..., Any], leaves: list[Any], spec: Any
) -> Iterator[Case]:
    """Try which inputs may vary together; the last case has none that does."""
    tensors = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    trained = [k for k in tensors if leaves[k].requires_grad]
    if not trained or any(leaves[k].dtype.is_complex for k in tensors):
        return
    choices: list[list[int]] = []
    for lead in trained:
        if leaves[lead].dim() and leaves[lead].shape[0] >= 2:
            size = leaves[lead].shape[0]
            alike = [k for k in tensors if leaves[k].dim() and leaves[k].shape[0] == size]
            choices += [alike, [k for k in alike if k in trained], [lead]]
    for moving in [*choices, []]:
        fed = moving or trained[:1]
        module = OperatorModule(function, leaves, spec, moving, fed)
        batches = [tuple(leaves[k].detach() for k in fed)]
        if moving:
            batches.append(tuple(longer(leaves[k].detach()) for k in fed))
        case = Case(name, module, batches, tuple(k in moving for k in fed))
        if runs(case):
            yield case


def module_cases(name: str) -> list[Case]:
    """Make the first cases of a module."""
    info = modules()[name]
    static: list[Case] = []
    found: list[Case] = []
    inputs = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=True, training=True
    )
    for index, given in enumerate(itertools.islice(inputs, _SAMPLES)):
        if given.forward_input is None:
            continue
        torch.manual_seed(index)
        made = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs)
        forward = (tuple(given.forward_input.args), dict(given.forward_input.kwargs))
        leaves, spec = pytree.tree_flatten(forward)
        case = _module_case(f"{name} [{index}]", made.train(), leaves, spec)
        if case is not None:
            (static if len(case.batches) == 1 else found).append(case)
        if len(found) == CASES:
            break
    return found or static[:CASES]


def _module_case(name: str, made: nn.Module, leaves: list[Any], spec: Any) -> Case | None:
    tensors = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if not tensors or any(leaves[k].dtype.is_complex for k in tensors):
        return None
    for lead in tensors:
        if not leaves[lead].dim() or leaves[lead].shape[0] < 2:
            continue
        size = leaves[lead].shape[0]
        moving = [k for k in tensors if leaves[k].dim() and leaves[k].shape[0] == size]
        batches = [
            tuple(leaves[k].detach() for k in tensors),
            tuple(
                longer(leaves[k].detach()) if k in moving else leaves[k].detach() for k in tensors
            ),
        ]
        module = ModuleCase(made, leaves, spec, tensors)
        case = Case(name, module, batches, tuple(k in moving for k in tensors))
        if runs(case):
            return case
    module = ModuleCase(made, leaves, spec, tensors)
    case = Case(name, module, [tuple(leaves[k].detach() for k in tensors)], (False,) * len(tensors))
    return case if runs(case) else None


def longer(x: Tensor) -> Tensor:
    """Add rows like the first ones, a little smaller so that no two are equal."""
    extra = x[: min(3, x.shape[0])]
    return torch.cat([x, extra * 0.97 if x.is_floating_point() else extra])


def runs(case: Case) -> bool:
    """Whether eager PyTorch trains the case at all its sizes, to finite numbers."""
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in case.batches:
            before = torch.get_rng_state()
            try:
                results = case.module(*batch)
                again = case.module(*batch)
                loss = weighed(results)
                if not isinstance(loss, Tensor) or not loss.requires_grad:
                    return False
                loss.backward()
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


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.allclose(x.double(), y.double(), equal_nan=True)
