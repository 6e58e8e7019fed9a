"""From settings to data, model and optimizer; the same settings give the same numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from _corpus import Batches, alpaca_records, library_records, load_tokenizer, tokenize
from _llama import Llama, LlamaSizes

from relax_disc.vm_builtins.native import cache_directory

LIBRARY = "Python's standard library"
_SMOKE_MODULES = 40


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the numbers of a run depend on; a resumed run must agree in all of them."""

    data: str = LIBRARY
    vocabulary: int = 8192
    hidden: int = 320
    layers: int = 6
    longest: int = 384
    batch: int = 8
    learning_rate: float = 1e-3
    seed: int = 0
    modules: int | None = None


def smoke_settings(settings: Settings) -> Settings:
    """Shrink the sizes until a run takes seconds."""
    return replace(
        settings,
        vocabulary=512,
        hidden=64,
        layers=2,
        longest=128,
        batch=4,
        modules=_SMOKE_MODULES,
    )


def make_batches(settings: Settings) -> Batches:
    """Read the records, train or load their tokenizer, and cut them into batches.

    Raises
    ------
    OSError, ValueError
        If the file of records cannot be read, or is not in Alpaca's format.
    """
    if settings.data == LIBRARY:
        records = library_records(modules=settings.modules)
    else:
        records = alpaca_records(Path(settings.data))
    tokenizer = load_tokenizer(records, settings.vocabulary, cache_directory())
    examples = tokenize(records, tokenizer, settings.longest)
    return Batches(examples, settings.batch, seed=settings.seed)


def make_model(settings: Settings) -> tuple[Llama, torch.optim.Optimizer]:
    """Make the model with its initial weights, and AdamW over them."""
    torch.manual_seed(settings.seed)
    sizes = LlamaSizes(
        vocabulary=settings.vocabulary,
        hidden=settings.hidden,
        layers=settings.layers,
        heads=max(1, settings.hidden // 64),
        feed_forward=settings.hidden * 27 // 10,
        longest=settings.longest,
    )
    model = Llama(sizes)
    return model, torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
