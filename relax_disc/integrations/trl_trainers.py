"""TRL's trainers with a compiled step: one import changes.

>>> from relax_disc.integrations.trl_trainers import SFTTrainer    # instead of from trl

Losses, data, arguments and the metrics that these trainers log are TRL's own.  A compiled step runs
no Python, so the metrics are returned beside the loss and noted after the step.  TRL's vocabulary
head, which loops over pieces of the tokens to save memory, is given as the operators that it
stands for: the compiled step plans their memory itself.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import trl  # pyright: ignore[reportMissingImports]
import trl.trainer.utils as trl_utils  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from relax_disc.errors import InputMismatchError
from relax_disc.frontend.capture.source_lines import calling_line
from relax_disc.integrations.transformers import CompiledTraining

_TRAINERS = str(Path(inspect.getfile(trl_utils)).parent)


class TrlTraining(CompiledTraining):
    """Mixin that compiles the step of a trainer of TRL's; parameters as of `CompiledTraining`."""

    _rows = 1  # of a table of tokens, for each example of the batch

    _refused = (*CompiledTraining._refused, "activation_offloading", "packing", "padding_free")

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        # A step keeps and recomputes as its budget asks, and checkpointing that TRL switches off
        # and on again around evaluations would hook the model anew each time.
        if getattr(self.args, "gradient_checkpointing", False):
            self.model.gradient_checkpointing_disable()
            for name in ("gradient_checkpointing", "activation_checkpointing"):  # one setting
                setattr(self.args, name, False)
        self._notes, self._tokens = _Notes(), _Tokens()

    def training_step(
        self, model: torch.nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Run the compiled step, and note its metrics where TRL's `log` reads them."""
        # Alike while the step is compiled and at each call, which compares what the code reads.
        metrics: dict[str, Any]
        seen: Any
        metrics, seen = self._metrics, getattr(self, "_total_train_tokens", 0)
        self._metrics, self._total_train_tokens = {"train": self._notes}, self._tokens
        try:
            with _plain_head(), self._own_metrics():
                loss, (noted,) = self._run(model, inputs, num_items_in_batch)
        finally:
            self._metrics, self._total_train_tokens = metrics, seen
        self._write_down(noted, metrics["train"])
        return loss

    def _own_metrics(self) -> contextlib.AbstractContextManager[object]:
        """Take metrics as they are: of several processes, which are refused, they are gathered.

        What gathers them asks whether the epoch ends, to drop what its last batch has twice.
        """
        return patch.object(self.accelerator, "gather_for_metrics", _itself)

    @contextlib.contextmanager
    def _noting(self) -> Iterator[dict[str, Any]]:
        appended, noted = self._notes.appended, {}
        appended.clear()  # the loss may be traced more than once
        self._tokens.added = 0
        with _Numbers() as numbers:
            yield noted
        noted["metrics"] = {name: tuple(values) for name, values in appended.items()}
        noted["positive"] = tuple(numbers.conditions)
        noted["tokens"] = torch.as_tensor(self._tokens.added)

    def _write_down(self, noted: Mapping[str, Any], metrics: dict[str, list[float]]) -> None:
        """Append what a step noted."""
        # Such a condition guards a division by a count.
        is_counted = all(map(bool, noted["positive"]))
        for name, values in noted["metrics"].items():
            numbers = [float(value) for value in values]
            metrics[name] += [n if is_counted or n == n else 0.0 for n in numbers]
        self._total_train_tokens: Any = self._total_train_tokens + int(noted["tokens"])
        metrics["num_tokens"] = [self._total_train_tokens]

    def _dims(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        dims = super()._dims(inputs)
        if self._rows == 1:
            return dims
        for name, value in inputs.items():
            if isinstance(value, Tensor) and value.dim() == 2:
                dims[name] = {**dims[name], 0: self._rows * dims[name][0]}
        return dims


class SFTTrainer(TrlTraining, trl.SFTTrainer):
    """``trl.SFTTrainer`` with a compiled step: see `TrlTraining`."""


class DPOTrainer(TrlTraining, trl.DPOTrainer):
    """``trl.DPOTrainer`` with a compiled step: see `TrlTraining`."""

    _rows = 2  # the chosen ones, then the rejected


class RewardTrainer(TrlTraining, trl.RewardTrainer):
    """``trl.RewardTrainer`` with a compiled step: see `TrlTraining`."""

    _rows = 2  # the chosen ones, then the rejected


class _Notes:
    """Stands for the metrics of one kind while a step is traced: what is appended to which."""

    def __init__(self) -> None:
        self.appended: dict[str, list[Tensor]] = defaultdict(list)

    def __getitem__(self, name: str) -> _Column:
        return _Column(self.appended[name])

    def __setitem__(self, name: str, values: list[Any]) -> None:
        if name != "num_tokens":
            raise InputMismatchError(f"The metric {name!r} is set anew, which is not known of TRL.")


class _Tokens:
    """Stands for the number of tokens so far while a step is traced: what the step adds to it."""

    added: Any = 0

    def __add__(self, count: Any) -> _Tokens:
        self.added += count
        return self


class _Column:
    def __init__(self, values: list[Tensor]) -> None:
        self._values = values

    def append(self, value: Any) -> None:
        self._values.append(torch.as_tensor(value, dtype=torch.float64).detach())


class _Numbers(TorchFunctionMode):
    """Lets ``.item()`` in TRL's own code be a tensor, and ``count > 0`` hold.

    ``conditions``: what was taken to hold. Any other branch on data is refused as ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conditions: list[Tensor] = []
        self._compared: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.item and _is_called_by_trl():
            return args[0].detach()
        if func is Tensor.__bool__ and any(args[0] is found for found in self._compared):
            self.conditions.append(args[0].detach())
            return True
        result = func(*args, **(kwargs or {}))
        is_count = func in (Tensor.gt, Tensor.__gt__) and type(args[1]) is int and not args[1]
        if is_count and _is_called_by_trl():
            self._compared.append(result)
        return result


def _is_called_by_trl() -> bool:
    return calling_line().file.startswith(_TRAINERS)


def _plain_head() -> contextlib.AbstractContextManager[object]:
    """Let TRL's vocabulary head be plain operators; older versions have no head of their own."""
    if not hasattr(trl_utils, "_ChunkedLogProbFunction"):
        return contextlib.nullcontext()
    return patch.multiple(trl_utils, _ChunkedLogProbFunction=_Head, _use_triton=_never)


def _itself(values: Any, *_args: Any, **_kwargs: Any) -> Any:
    return values


def _never(device: torch.device) -> bool:
    return False


class _Head:
    """What ``trl.kernels.ChunkedLogProbFunction`` computes, by plain operators."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:
        """Return log-probabilities of targets, entropies and the like, for each row of hidden."""
        logits = functional.linear(hidden, weight, bias).float()
        if scale != 1.0:
            logits = logits * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if temperature != 1.0:
            logits = logits / temperature
        told = dict.fromkeys(("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"))
        log_probs = logits.log_softmax(-1)
        if "entropy" in outputs:
            told["entropy"] = -(log_probs.exp() * log_probs).sum(-1)
        with torch.no_grad():
            if "log_sum_sq_probs" in outputs:
                told["log_sum_sq_probs"] = (2 * log_probs).logsumexp(-1)
            if "mean_logits" in outputs:
                told["mean_logits"] = logits.mean(-1)
            if "is_top1" in outputs:
                told["is_top1"] = logits.argmax(-1) == targets
        return -functional.cross_entropy(logits, targets, reduction="none"), *told.values()
