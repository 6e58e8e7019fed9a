"""Hugging Face's ``Trainer`` with a compiled step: one import changes.

>>> from relax_disc.integrations.transformers import Trainer    # instead of from transformers

The Trainer's own loop stays: data, schedules, logging, evaluation, checkpoints.  The compiled step
is forward, gradients, their sums over batches, clipping and update.  Evaluation is eager PyTorch's.
Limits: one process, one device; callbacks between gradients and update see no gradients.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import transformers
from torch.export import Dim

import relax_disc
from relax_disc.errors import InputMismatchError, RelaxDiscWarning
from relax_disc.training_step import TrainingStep
from relax_disc.vm_builtins.tier import TierName

_LONGEST = 4096
"""Tokens, where neither the model nor the tokenizer tells."""

_TABLES = re.compile(
    "input_ids|(attention|completion|special_tokens)_mask|token_type_ids|position_ids|labels"
)
"""What inputs of one text are called, beside the text's own name."""


class CompiledTraining:
    """Mixin that compiles the step of a ``transformers.Trainer`` at the first batch.

    For another Trainer write ``class Mine(CompiledTraining, ThatTrainer): ...``.

    Parameters
    ----------
    *args, **settings
        As for the Trainer.
    memory_budget : int or str, optional
        Bytes, or text such as ``"8GiB"``, that all memory of a training step stays inside.
    offload_to : path-like, FileTier or HostTier, optional
        As for `relax_disc.compile`.
    offload : str or sequence of str
        What goes there, as for `relax_disc.compile`.
    dynamic_shapes : mapping, optional
        For each input of the model its dynamic axes, as `torch.export.export` takes them.  By
        default the first axis of all inputs is the batch, up to
        ``per_device_train_batch_size``, and the second of tables of integers is the length of
        their text, up to that of the model's positions.  Tables are of one text if their names
        differ by ``input_ids``, ``attention_mask`` and the like: ``query_input_ids`` and
        ``query_attention_mask`` are of another than ``answer_input_ids``.

    Attributes
    ----------
    step : TrainingStep or None
        The compiled step, once the first batch has come.

    Raises
    ------
    InputMismatchError
        An argument of the Trainer cannot be honoured; it is named.
    """

    _refused: Sequence[str] = (
        "fp16",
        "deepspeed",
        "fsdp",
        "torch_compile",
        "use_liger_kernel",
        "debug",
    )
    """Arguments that a compiled step would not honour."""

    def __init__(
        self,
        *args: Any,
        memory_budget: int | str | None = None,
        offload_to: TierName = None,
        offload: str | Sequence[str] = "activations",
        dynamic_shapes: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(*args, **settings)
        _refuse(self.args, self._refused)
        self.memory_budget, self.dynamic_shapes = memory_budget, dynamic_shapes
        self.offload_to, self.offload = offload_to, offload
        self.step: TrainingStep | None = None
        self._after_training = ExitStack()

    def train(self, *args: Any, **settings: Any) -> Any:
        """Train; model, optimizer and arguments may have changed since the last time."""
        self.step = None
        with ExitStack() as self._after_training:
            return super().train(*args, **settings)

    def training_step(
        self, model: torch.nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Run the compiled step, which updates where the Trainer would call its optimizer."""
        return self._run(model, inputs, num_items_in_batch)[0]

    def _run(
        self, model: torch.nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any
    ) -> tuple[torch.Tensor, Sequence[Any]]:
        """Run the compiled step; the loss, and what `_noting` was filled with, if it was."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        divisor = 1.0 if self._loss_is_mean(num_items_in_batch) else self._batches_in_update()
        batch = (dict(self._prepare_inputs(inputs)), num_items_in_batch, torch.tensor(divisor))
        with warnings.catch_warnings():
            # Classifiers note it whenever they run, here while they are compiled; it stays unread.
            warnings.filterwarnings("ignore", r"model\.config\.problem_type", RelaxDiscWarning)
            if self.step is None:
                self.step = self._compiled(model, batch)
            if self.step.max_grad_norm != self._most_norm():
                raise InputMismatchError(
                    f"args.max_grad_norm was {self.step.max_grad_norm} when the step was compiled "
                    f"and is {self._most_norm()} now: set it before train(), or set it back."
                )
            result = self.step(*batch, update=self.accelerator.sync_gradients)
        return result if isinstance(result, tuple) else (result, ())

    def _loss_is_mean(self, num_items_in_batch: Any) -> bool:
        """Whether `compute_loss` divides by the items of all batches of an update."""
        told = getattr(self, "loss_is_scaled_for_ga", None)
        if told is not None:
            return told
        by_model = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        return by_model or self.compute_loss_func is not None

    def _batches_in_update(self) -> float:
        return float(self.current_gradient_accumulation_steps)

    def _most_norm(self) -> float:
        return self.args.max_grad_norm or float("inf")

    def _compiled(self, model: torch.nn.Module, batch: tuple[Any, ...]) -> TrainingStep:
        def loss(model: Any, inputs: Any, items: Any, divisor: Any) -> Any:
            # By its name here, so that what it reads is followed.
            with self._noting() as noted:
                loss = self.compute_loss(model, dict(inputs), num_items_in_batch=items) / divisor
            return (loss, noted) if noted else loss

        shapes = self.dynamic_shapes or self._dims(batch[0])
        step = relax_disc.compile(
            model,
            self.optimizer,
            batch,
            dynamic_shapes=(shapes, None, None),
            loss_fn=loss,
            memory_budget=self.memory_budget,
            offload_to=self.offload_to,
            offload=self.offload,
            max_grad_norm=self._most_norm(),
        )
        optimizer = self.optimizer

        def updated(*_: Any, **__: Any) -> None:
            """Leave the update to the compiled step, which has made it."""
            optimizer._opt_called = True

        updated._wrapped_by_lr_sched = True  # pyright: ignore[reportFunctionMemberAccess]
        # Its own again after training: a schedule has put one of its making there already.
        self._after_training.callback(setattr, optimizer, "step", optimizer.step)
        optimizer.step = updated
        return step

    @contextmanager
    def _noting(self) -> Iterator[dict[str, Any]]:
        """Surround the loss while it is traced; filled with what else the step returns."""
        yield {}

    def _dims(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Name the axes that differ between batches."""
        config = getattr(self.model, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        told = (
            getattr(text, "max_position_embeddings", None),
            getattr(self.processing_class, "model_max_length", None),
        )
        longest = min((size for size in told if size and size < 2**31), default=_LONGEST)
        pairs = getattr(config, "is_encoder_decoder", False)
        batch = Dim("batch", min=1, max=max(self._train_batch_size, 2))
        lengths: dict[str, Any] = {}

        def length_of(name: str) -> Any:
            """The length of a table's text, such as ``query`` of ``query_input_ids``."""
            # Targets are shifted by slices, of which torch.export takes one of length 1 for fixed.
            if pairs and name.startswith(("labels", "decoder")):
                return lengths.setdefault("target", Dim("target_length", min=3, max=longest))
            text = _TABLES.sub("", name).strip("_") if _TABLES.search(name) else ""
            title = re.sub(r"\W", "_", f"length_of_{text}") if text else "length"
            return lengths.setdefault(title, Dim(title, min=2, max=longest))

        def axes(name: str, value: Any) -> dict[int, Any] | None:
            if not isinstance(value, torch.Tensor) or not value.dim():
                return None
            tokens = value.dim() == 2 and not value.is_floating_point()
            return {0: batch, 1: length_of(name)} if tokens else {0: batch}

        return {name: axes(name, value) for name, value in inputs.items()}

    def _clip_grad_norm(self, model: torch.nn.Module) -> torch.Tensor | None:
        return self.step.gradient_norm if self.step else None

    def _get_grad_norm(
        self, model: torch.nn.Module, grad_norm: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        return self._clip_grad_norm(model)


class Trainer(CompiledTraining, transformers.Trainer):
    """``transformers.Trainer`` with a compiled step: see `CompiledTraining`."""


class Seq2SeqTrainer(CompiledTraining, transformers.Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer`` with a compiled step: see `CompiledTraining`."""


def _refuse(args: Any, names: Sequence[str]) -> None:
    """Refuse by name what the compiled step would not do."""
    asked = [name for name in names if getattr(args, name, None)]
    asked += [
        f"{name} of {n}" for name in ("n_gpu", "world_size") if (n := getattr(args, name)) > 1
    ]
    if asked:
        raise InputMismatchError(
            f"{type(args).__name__}({', '.join(asked)}) cannot be honoured by a compiled step: "
            "leave it out, or use the library's own Trainer. bf16=True is supported."
        )
