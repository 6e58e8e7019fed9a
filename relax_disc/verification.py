"""Run PyTorch beside a compiled step and name the first tensor that differs beyond rounding.

For each batch both start from the same state; then loss, extra outputs, buffers, optimizer states
and parameters are compared.  A difference counts beyond ``tolerance`` times the largest change of
the tensor in PyTorch's own step, with a floor relative to the largest gradient of the model, below
which gradients are rounding noise, and beyond PyTorch's own rounding, which a step in float64
shows: the gradient of a bias before a batch norm is nothing else.  Before a difference is reported,
more such steps start from parameters a rounding away: one activation that is so taken across
a ReLU's kink changes the gradients of all layers before it.  Model and optimizer are left as they
were.

Limits: tensors inside the program are not seen, so a wrong operator shows in the first parameter or
output behind it; what Adam does to elements whose gradient is noise is not judged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from relax_disc.errors import InputMismatchError
from relax_disc.frontend.capture.exported.export import wrap_step
from relax_disc.frontend.optimizer.several import optimizers_of, owners_of
from relax_disc.training_step import TrainingStep

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 5e-4}
_HALF_TOLERANCE = 5e-2
_FLOOR = 1e-2
"""Times the tolerance: gradients this far below the model's largest are noise."""
_OWN = 8.0
"""Other orders of a sum round otherwise: differences up to so many times PyTorch's own error."""
_SAMPLES, _NUDGE = 4, 4.0
"""Steps from other parameters, and how far those are, in units of their last place: sums of many
products err by some."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor that differs beyond rounding.

    Attributes
    ----------
    batch : int
        Number of the batch, from 0.
    tensor : str
        What it is: ``"loss"``, ``"parameter head.weight"``, ...
    source : str
        The model's line that uses it first, ``"file:line"``, or ``""`` where unknown.
    error, allowed : float
        Largest absolute difference, and what rounding explains.
    """

    batch: int
    tensor: str
    source: str
    error: float
    allowed: float

    def __str__(self) -> str:
        where = f" (used at {self.source})" if self.source else ""
        return (
            f"batch {self.batch}: {self.tensor}{where} differs by {self.error:.3g}, rounding "
            f"explains {self.allowed:.3g}"
        )


@dataclass(frozen=True, slots=True)
class VerificationReport:
    """What `verify` found.

    Attributes
    ----------
    batches, tensors : int
        How many batches were run, and how many tensors were compared.
    differences : tuple of Difference
        In the order of batches and, within one, of the program; empty when all agree.
    """

    batches: int
    tensors: int
    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing differs beyond rounding."""
        return not self.differences

    def __str__(self) -> str:
        head = f"{self.batches} batches, {self.tensors} tensors compared with PyTorch: "
        if self.ok:
            return head + "all agree within rounding"
        lines = [f"{len(self.differences)} differ; the first:", *map(str, self.differences[:5])]
        return head + "\n  ".join(lines)


@dataclass(frozen=True, slots=True)
class _Pair:
    """One tensor after both steps, and before them; ``judged`` marks elements that count.

    ``exact`` is what PyTorch's step makes of it in float64, None where it runs in float32 only;
    ``nudged`` the same from parameters that are a rounding away.
    """

    name: str
    target: str
    mine: torch.Tensor
    theirs: torch.Tensor
    before: torch.Tensor | None
    judged: torch.Tensor | None = None
    exact: torch.Tensor | None = None
    nudged: Sequence[torch.Tensor] = ()


def verify(
    step: TrainingStep,
    batches: Iterable[tuple[Any, ...]],
    *,
    loss_fn: Callable[..., Any] | None = None,
) -> VerificationReport:
    """Compare a compiled step with PyTorch on some batches; changes nothing.

    Parameters
    ----------
    step : TrainingStep
        Without random operators, whose numbers differ from PyTorch's.
    batches : iterable of tuple
        Positional arguments of the step, one tuple for each call.
    loss_fn : callable, optional
        As given to `relax_disc.compile`; needed for a loaded step that was compiled with one.

    Raises
    ------
    InputMismatchError
        The step draws random numbers, or a batch does not fit it.
    """
    if step.rng_state is not None:
        raise InputMismatchError(
            "The step draws random numbers (dropout), which PyTorch would draw otherwise; compile "
            "it with dropout probability 0 or in eval() mode to verify it."
        )
    if step.optimizer is None:
        raise InputMismatchError("verify() compares updates; compile the step with an optimizer.")
    found: list[Difference] = []
    count = compared = 0
    for number, batch in enumerate(batches):
        function = loss_fn or step.loss_fn
        pairs = _run_both(step, batch, function)
        count, compared = number + 1, compared + len(pairs)
        if _judge(step, number, pairs):
            pairs = _with_nudged(pairs, step, batch, function)
        found += _judge(step, number, pairs)
    return VerificationReport(count, compared, tuple(found))


def _run_both(
    step: TrainingStep, batch: tuple[Any, ...], loss_fn: Callable[..., Any] | None
) -> list[_Pair]:
    model, optimizer = copy.deepcopy((step.model, step.optimizer))
    with step.restored():
        before = {name: tensor.clone() for name, _, tensor in _state(step.model, step.optimizer)}
        output = step(*batch)
        mine = {name: tensor.clone() for name, _, tensor in _state(step.model, step.optimizer)}
    wide = _in_float64(step, batch, loss_fn)
    expected = _step(step, model, optimizer, batch, loss_fn)
    flat = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    pairs = []
    for k, (a, b) in enumerate(zip(flat, expected, strict=False)):
        name = "loss" if k == 0 else f"extra output {k}"
        pairs.append(_Pair(name, "", a, b, None, None, wide.get(name)))
    momenta = {}
    for name, target, theirs in _state(model, optimizer):
        if name not in mine:
            continue
        if name.startswith("exp_avg of"):
            momenta[target] = theirs.abs()
        judged = _well_above_noise(momenta, target) if name.startswith("parameter") else None
        exact = wide.get(name)
        pairs.append(_Pair(name, target, mine[name], theirs, before.get(name), judged, exact))
    return pairs


def _step(
    step: TrainingStep,
    model: torch.nn.Module,
    optimizer: Any,
    batch: tuple[Any, ...],
    loss_fn: Callable[..., Any] | None,
) -> list[torch.Tensor]:
    """Take PyTorch's step; return the loss and the extra outputs."""
    model.zero_grad()
    loss, extras = wrap_step(model, loss_fn).eager(*batch)
    scale = 1.0 if step.scaler is None else step.scaler.get_scale()
    (loss * scale).backward()
    found = {p: p.grad for p in model.parameters() if p.grad is not None}
    skipped = {
        id(p) for p, gradient in found.items() if step.scaler and not gradient.isfinite().all()
    }
    for gradient in found.values():
        gradient.div_(scale)
    if step.max_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), step.max_grad_norm)
    for member in optimizers_of(optimizer):
        if not any(id(p) in skipped for group in member.param_groups for p in group["params"]):
            type(member).step(member)
    others = (x for x in pytree.tree_leaves(extras) if isinstance(x, torch.Tensor))
    return [x.detach() for x in (loss, *others)]


def _with_nudged(
    pairs: list[_Pair],
    step: TrainingStep,
    batch: tuple[Any, ...],
    loss_fn: Callable[..., Any] | None,
) -> list[_Pair]:
    others = [_in_float64(step, batch, loss_fn, _nudged(seed)) for seed in range(_SAMPLES)]
    return [
        replace(pair, nudged=[each[pair.name] for each in others if pair.name in each])
        for pair in pairs
    ]


def _in_float64(
    step: TrainingStep,
    batch: tuple[Any, ...],
    loss_fn: Callable[..., Any] | None,
    change: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> dict[str, torch.Tensor]:
    """Take PyTorch's step on copies in float64, of changed parameters; nothing where it cannot."""
    model, optimizer = copy.deepcopy((step.model, step.optimizer))
    changed = [change(parameter.detach()) for parameter in model.parameters()]
    model.double()
    for parameter, value in zip(model.parameters(), changed, strict=True):
        parameter.data.copy_(value)
    for state in (s for member in optimizers_of(optimizer) for s in member.state.values()):
        state.update({key: _wide(value) for key, value in state.items()})
    try:
        outputs = _step(step, model, optimizer, pytree.tree_map(_wide, batch), loss_fn)
    except RuntimeError:  # it names float32 somewhere
        return {}
    names = ("loss", *(f"extra output {k}" for k in range(1, len(outputs))))
    exact = dict(zip(names, outputs, strict=True))
    exact.update({name: tensor for name, _, tensor in _state(model, optimizer)})
    return exact


def _nudged(seed: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what moves each number by a few units of its last place."""
    generator = torch.Generator().manual_seed(seed)

    def nudge(tensor: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        return tensor.cpu() * (1 + _NUDGE * torch.finfo(tensor.dtype).eps * noise)

    return nudge


def _wide(value: Any) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if floating else value


def _well_above_noise(momenta: dict[str, torch.Tensor], target: str) -> torch.Tensor | None:
    """Mark the elements whose Adam step rounding cannot turn round; None without Adam."""
    mine = momenta.get(target)
    if mine is None or not mine.numel():
        return None
    strongest = max(float(tensor.max()) for tensor in momenta.values() if tensor.numel())
    tolerance = _TOLERANCE.get(mine.dtype, _HALF_TOLERANCE)
    return mine > max(_FLOOR * float(mine.max()), tolerance * strongest)


def _state(model: torch.nn.Module, optimizer: Any) -> Iterator[tuple[str, str, torch.Tensor]]:
    """List (name, owner, tensor): buffers, states, parameters; each in the model's order."""
    owners = owners_of(optimizer)
    for name, buffer in model.named_buffers():
        yield f"buffer {name}", name, buffer
    for name, parameter in model.named_parameters():
        owner = owners.get(id(parameter))
        for key, value in owner.state.get(parameter, {}).items() if owner is not None else ():
            if isinstance(value, torch.Tensor) and key != "step":
                yield f"{key} of {name}", name, value
    for name, parameter in model.named_parameters():
        yield f"parameter {name}", name, parameter.detach()


def _judge(step: TrainingStep, number: int, pairs: list[_Pair]) -> list[Difference]:
    scales: dict[str, float] = {}
    for pair in pairs:
        kind = _kind(pair)
        scales[kind] = max(scales.get(kind, 0.0), _change(pair))
    return [
        Difference(number, pair.name, step.first_use(pair.target), *numbers)
        for pair in pairs
        if (numbers := _excess(pair, scales[_kind(pair)])) is not None
    ]


def _kind(pair: _Pair) -> str:
    return pair.name.partition(" ")[0]


def _values(pair: _Pair, tensor: torch.Tensor) -> torch.Tensor:
    """Take the root of second moments, so that they grow with the gradient as all others do."""
    wide = tensor.double()
    return wide.sqrt() if _kind(pair) == "exp_avg_sq" else wide


def _change(pair: _Pair) -> float:
    if not pair.theirs.numel():
        return 0.0
    theirs = _values(pair, pair.theirs)
    if pair.before is not None and pair.before.shape == pair.theirs.shape:
        theirs = theirs - _values(pair, pair.before)
    return _greatest(theirs)


def _greatest(values: torch.Tensor) -> float:
    """Return the greatest magnitude among the finite values."""
    return float(values.nan_to_num(0.0, 0.0, 0.0).abs().max())


def _excess(pair: _Pair, scale: float) -> tuple[float, float] | None:
    """Return (error, allowed) where a pair differs beyond rounding."""
    if not pair.theirs.numel():
        return None
    mine, theirs = _values(pair, pair.mine), _values(pair, pair.theirs)
    if not pair.theirs.dtype.is_floating_point:
        error = float((mine - theirs).abs().max())
        return (error, 0.0) if error else None
    tolerance = _TOLERANCE.get(pair.theirs.dtype, _HALF_TOLERANCE)
    rounding = 8 * torch.finfo(pair.theirs.dtype).eps * _greatest(theirs)
    allowed = tolerance * (_change(pair) + _FLOOR * scale) + rounding
    if pair.exact is not None and pair.exact.shape == theirs.shape:
        exact = _values(pair, pair.exact)
        others = (theirs, *(_values(pair, each) for each in pair.nudged))
        allowed += _OWN * max(_greatest(each - exact) for each in others)
    wrong = torch.where(mine.isnan() & theirs.isnan(), 0.0, (mine - theirs).abs())
    if pair.judged is not None:
        wrong = wrong[pair.judged]
    error = float(wrong.max()) if wrong.numel() else 0.0
    return None if error <= allowed else (error, allowed)
