"""Text to fine-tune on: docstring and source of every documented function in Python's library.

A record is an instruction ("write the function ...") and its answer (the source), or comes from a
file in Alpaca's format.  The tokenizer is a byte-level BPE trained on the records themselves, kept
in the user's cache.  Batches are padded to their own longest record, as data loaders do: nearly
every batch has another shape.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from _llama import IGNORED
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

PROMPT = (
    "Below is an instruction that describes a task. Write a response that completes the "
    "request.\n\n### Instruction:\n{instruction}\n\n### Response:\n"
)
END = "<end>"
# Tests and the like repeat themselves, and idle's code is little documented.
_SKIPPED_FOLDERS = frozenset({"__pycache__", "idlelib", "site-packages", "test", "tests"})


@dataclass(frozen=True, slots=True)
class Record:
    """One example to learn from, as text."""

    instruction: str
    answer: str


@dataclass(frozen=True, slots=True)
class Example:
    """One example as token ids; the first `prompt` of them are given, not learnt."""

    ids: tuple[int, ...]
    prompt: int


def library_records(*, modules: int | None = None) -> list[Record]:
    """Read the documented functions of the standard library, of its first `modules` files."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        path
        for path in root.rglob("*.py")
        if not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
    )
    records = []
    for path in files[:modules]:
        records.extend(
            _records_of_file(path, ".".join(path.relative_to(root).with_suffix("").parts))
        )
    return records


def _records_of_file(path: Path, module: str) -> Iterator[Record]:
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except SyntaxError:  # the library ships a few files that are broken on purpose
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            document = ast.get_docstring(node)
            if document and len(node.body) > 1:
                answer = textwrap.dedent(_without_docstring(node, text))
                instruction = f"Write the Python function {node.name} of {module}.\n{document}"
                yield Record(instruction, answer)


def _without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef, text: str) -> str:
    lines = text.splitlines()
    docstring = node.body[0]
    end = docstring.end_lineno or docstring.lineno
    return "\n".join(lines[node.lineno - 1 : docstring.lineno - 1] + lines[end : node.end_lineno])


def alpaca_records(path: Path) -> list[Record]:
    """Read a JSON list of objects with `instruction`, `output` and, if wanted, `input`.

    Raises
    ------
    ValueError
        If the file is no such list, or an entry lacks a field; names the entry.
    """
    entries = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path} holds no list of records")
    records = []
    for index, entry in enumerate(entries):
        try:
            instruction, answer = entry["instruction"], entry["output"]
            given = entry.get("input")
        except (AttributeError, KeyError, TypeError):
            raise ValueError(f"{path}: entry {index} lacks `instruction` or `output`") from None
        records.append(Record(f"{instruction}\n{given}" if given else instruction, answer))
    return records


def load_tokenizer(records: Sequence[Record], vocabulary: int, cache: Path) -> Tokenizer:
    """Train a byte-level BPE of at most `vocabulary` tokens, or take it from `cache`."""
    texts = [PROMPT.format(instruction=r.instruction) + r.answer for r in records]
    digest = hashlib.sha256("\0".join([str(vocabulary), *texts]).encode("utf-8", "replace"))
    path = cache / f"bpe-{digest.hexdigest()[:16]}.json"
    if path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    cache.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{id(tokenizer)}.partial")
    tokenizer.save(str(partial))
    partial.replace(path)
    return tokenizer


def tokenize(records: Sequence[Record], tokenizer: Tokenizer, longest: int) -> list[Example]:
    """Encode the records; those of more than `longest` tokens are left out."""
    (end,) = tokenizer.encode(END).ids
    prompts = tokenizer.encode_batch([PROMPT.format(instruction=r.instruction) for r in records])
    answers = tokenizer.encode_batch([record.answer for record in records])
    return [
        Example((*prompt.ids, *answer.ids, end), len(prompt.ids))
        for prompt, answer in zip(prompts, answers, strict=True)
        if len(prompt.ids) + len(answer.ids) <= longest
    ]


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded `ids` and `labels`, int64 [batch, length]; `tokens` of the positions are real."""

    ids: Tensor
    labels: Tensor
    tokens: int


class Batches:
    """An endless, repeatable sequence of batches: batch `n` is a function of seed and `n` alone.

    So the number of steps done is the whole position in the data.
    """

    def __init__(self, examples: Sequence[Example], batch: int, *, seed: int = 0) -> None:
        if len(examples) < batch:
            raise ValueError(f"{len(examples)} examples do not fill one batch of {batch}")
        self._examples = examples
        self._batch = batch
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    @property
    def records(self) -> int:
        """Examples to draw from."""
        return len(self._examples)

    @property
    def per_epoch(self) -> int:
        """Full batches of one pass over the examples; what is left over waits for another pass."""
        return len(self._examples) // self._batch

    def __getitem__(self, number: int) -> Batch:
        epoch, place = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            self._order = torch.randperm(len(self._examples), generator=generator).tolist()
            self._epoch = epoch
        chosen = self._order[place * self._batch : (place + 1) * self._batch]
        return pad([self._examples[index] for index in chosen])


def pad(examples: Sequence[Example]) -> Batch:
    """Make the batch in which each position predicts the next token of its answer."""
    length = max(len(example.ids) for example in examples) - 1
    ids = torch.zeros(len(examples), length, dtype=torch.long)
    labels = torch.full((len(examples), length), IGNORED)
    for row, example in enumerate(examples):
        tokens = torch.tensor(example.ids)
        ids[row, : len(tokens) - 1] = tokens[:-1]
        labels[row, example.prompt - 1 : len(tokens) - 1] = tokens[example.prompt :]
    return Batch(ids, labels, sum(len(example.ids) - 1 for example in examples))
