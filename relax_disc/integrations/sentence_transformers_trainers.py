"""Sentence Transformers' trainers with a compiled step: one import changes.

>>> from relax_disc.integrations.sentence_transformers_trainers import SentenceTransformerTrainer

Losses, data and arguments are the library's own; parameters of a loss are trained with the model's.
Each column of texts, which has a length of its own, is embedded by itself: the library would pad
several to one length, which is another program for each order of their lengths.  Each dataset of
several has a step, since its columns and its loss are its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import patch

import sentence_transformers  # pyright: ignore[reportMissingImports]
import torch
from sentence_transformers.cross_encoder import losses  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn

from relax_disc.errors import InputMismatchError
from relax_disc.integrations.transformers import CompiledTraining
from relax_disc.training_step import TrainingStep

try:
    from sentence_transformers.base.losses.merged_forward import (  # pyright: ignore[reportMissingImports]
        column_merging_disabled,
    )
except ImportError:  # before columns were merged
    column_merging_disabled = contextlib.nullcontext


class SentenceTransformersTraining(CompiledTraining):
    """Mixin that compiles the steps of a trainer; parameters as of `CompiledTraining`.

    ``steps`` holds the compiled step of each dataset by its name, of a single one by None.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.steps: dict[str | None, TrainingStep] = {}
        self._components: dict[str, Tensor] | None = None

    def train(self, *args: Any, **settings: Any) -> Any:
        """Train, as `CompiledTraining.train`."""
        self.steps = {}
        return super().train(*args, **settings)

    def training_step(
        self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Run the compiled step of the dataset that the batch is of."""
        name = inputs.get("dataset_name")
        self.step = self.steps.get(name)
        loss, noted = self._run(model, inputs, num_items_in_batch)
        assert self.step is not None
        self.steps[name] = self.step
        if noted:
            super().track_loss_components(noted[0])
        return loss

    def compute_loss(self, model: nn.Module, *args: Any, **settings: Any) -> Any:
        """Compute the loss, each column by itself."""
        if isinstance(model, nn.ModuleList):  # with what the loss has
            model = model[0]
        with column_merging_disabled():
            return super().compute_loss(model, *args, **settings)

    def track_loss_components(self, loss: dict[str, Tensor]) -> None:
        """Add to what is logged; while a step is traced, note what it returns."""
        if self._components is None:
            super().track_loss_components(loss)
        else:
            self._components.update(loss)

    @contextlib.contextmanager
    def _noting(self) -> Iterator[dict[str, Any]]:
        self._components = noted = {}
        try:
            yield noted
        finally:
            self._components = None

    def create_optimizer(self, *args: Any, **settings: Any) -> torch.optim.Optimizer:
        """Make the optimizer; of several losses' own parameters, each loss's are a group."""
        optimizer = super().create_optimizer(*args, **settings)
        if isinstance(self.loss, dict):
            for loss in self.loss.values():
                _split_groups(optimizer, _own_parameters(loss, self.model))
        return optimizer

    def _loss_of(self, inputs: Mapping[str, Any]) -> Any:
        return self.loss[inputs["dataset_name"]] if isinstance(self.loss, dict) else self.loss

    def _compiled(self, model: nn.Module, batch: tuple[Any, ...]) -> TrainingStep:
        loss = self._loss_of(batch[0])
        if not isinstance(loss, nn.Module):
            return super()._compiled(model, batch)
        for part in loss.modules():
            name = type(part).__name__
            if name.startswith("Cached"):
                raise InputMismatchError(
                    f"{name} computes a batch by pieces to save memory, and a compiled step does "
                    f"so by recomputation: use {name.removeprefix('Cached')} and state a "
                    "memory_budget."
                )
            if name == "OnlineContrastiveLoss":
                raise InputMismatchError(
                    f"{name} goes another way for batches with one pair of a kind or none, which "
                    "would end the training there: use ContrastiveLoss."
                )
        own = _own_parameters(loss, model)
        return super()._compiled(nn.ModuleList([model, loss]) if own else model, batch)


class SentenceTransformerTrainer(
    SentenceTransformersTraining, sentence_transformers.SentenceTransformerTrainer
):
    """``sentence_transformers.SentenceTransformerTrainer`` with compiled steps."""


class SparseEncoderTrainer(
    SentenceTransformersTraining, sentence_transformers.SparseEncoderTrainer
):
    """``sentence_transformers.SparseEncoderTrainer`` with compiled steps.

    A callback of the library changes the weights of regularizers before each step.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._weights: dict[tuple[int, str], Tensor] = {}

    def training_step(
        self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Run the compiled step, which reads the weights of regularizers as tensors."""
        loss = self._loss_of(inputs)
        numbers = {
            name: value
            for name in ("document_regularizer_weight", "query_regularizer_weight")
            if isinstance(value := getattr(loss, name, None), float)
        }
        for name, number in numbers.items():
            key = (id(loss), name)
            tensor = self._weights.setdefault(key, torch.tensor(number, dtype=torch.float64))
            setattr(loss, name, tensor.fill_(number))
        try:
            return super().training_step(model, inputs, num_items_in_batch)
        finally:
            for name, number in numbers.items():
                setattr(loss, name, number)


class CrossEncoderTrainer(SentenceTransformersTraining, sentence_transformers.CrossEncoderTrainer):
    """``sentence_transformers.CrossEncoderTrainer`` with compiled steps.

    Its losses turn pairs of texts into tokens while they run, which a compiled step cannot: the
    trainer does that before the step, for losses that do so once, of all pairs.
    """

    def training_step(
        self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Run the compiled step of the dataset that the batch is of, on its tokens."""
        loss = self._loss_of(inputs)
        if type(loss) not in _LOSSES_OF_PAIRS:
            known = ", ".join(kind.__name__ for kind in _LOSSES_OF_PAIRS)
            raise InputMismatchError(
                f"{type(loss).__name__} makes tokens of its texts while it runs, which a compiled "
                f"step cannot. Losses that can be compiled: {known}."
            )
        told = {name: value for name, value in inputs.items() if name in _TOLD}
        columns = [value for name, value in inputs.items() if name not in _TOLD]
        settings = {name: told.get(name) for name in ("prompt", "task")}
        tokens = self.model.preprocess(list(zip(*columns, strict=True)), **settings)
        return super().training_step(model, {**tokens, **told}, num_items_in_batch)

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **settings: Any) -> Any:
        """Compute the loss, of tokens while a step is traced."""
        if self._components is None:
            return super().compute_loss(model, inputs, *args, **settings)
        tokens = {name: value for name, value in inputs.items() if name not in _TOLD}
        told = {name: value for name, value in inputs.items() if name in _TOLD}
        with patch.object(self.model, "preprocess", lambda *_, **__: tokens):
            no_texts = {"first": [], "second": []}
            return super().compute_loss(model, {**told, **no_texts}, *args, **settings)


_TOLD = ("label", "dataset_name", "prompt", "task")
_LOSSES_OF_PAIRS = (losses.BinaryCrossEntropyLoss, losses.CrossEntropyLoss, losses.MSELoss)


def _own_parameters(loss: nn.Module, model: nn.Module) -> set[int]:
    """Ids of the parameters that a loss has beside the model's, which it may hold too."""
    return {id(p) for p in loss.parameters()} - {id(p) for p in model.parameters()}


def _split_groups(optimizer: torch.optim.Optimizer, own: set[int]) -> None:
    """Give parameters groups of their own, each with the settings of the group that it was in."""
    for group in list(optimizer.param_groups):
        apart = [p for p in group["params"] if id(p) in own]
        if apart and len(apart) < len(group["params"]):
            group["params"] = [p for p in group["params"] if id(p) not in own]
            optimizer.add_param_group({**group, "params": apart})
