"""All models of the table, in its order."""

from __future__ import annotations

from benchmarks.models import (
    families,
    graphs,
    language,
    networks,
    perception,
    pictures,
    sequences,
)
from benchmarks.models.entry import Entry

ENTRIES: tuple[Entry, ...] = (
    *language.ENTRIES,
    *perception.ENTRIES,
    *networks.ENTRIES,
    *sequences.ENTRIES,
    *families.ENTRIES,
    *pictures.ENTRIES,
    *graphs.ENTRIES,
)


def entry_named(name: str) -> Entry:
    """Find an entry.

    Raises
    ------
    KeyError
        There is none of that name.
    """
    return {entry.name: entry for entry in ENTRIES}[name]
