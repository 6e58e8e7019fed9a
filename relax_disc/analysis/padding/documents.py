"""Masks that keep apart documents which share a sequence, as positions that start again tell.

A mask that lets a row see the keys of its document whose *positions* are not behind its own,
``p[key] <= p[query] and d[key] == d[query]``, lets it see no later row, if the documents ``d``
number the places where positions do not go on by one: ``d`` adds up ``p[i] - p[i - 1] != 1`` along
the sequence. For where two rows have the same number no such place lies between them, so that
their positions are as far apart as their places.

Hugging Face's models make such a mask of ``position_ids`` where no other mask is given.
Limits: whole numbers do not overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from relax_disc.analysis.padding.masked_rows import decided, summed
from relax_disc.analysis.padding.values import (
    BATCH,
    INNER,
    KEY,
    QUERY,
    Value,
    is_truth,
    mentions_others,
    replaced,
)

_BEFORE: Value = ("index", "before")  # a place that is not the last
_NEXT: Value = ("add", _BEFORE, 1)
_PLACES: dict[Value, Value] = {KEY: ("index", "place of key"), QUERY: ("index", "place of query")}


def with_places(found: Sequence[Value], is_whole: Callable[[Value], bool]) -> list[Value]:
    """Write conditions on the positions of key and query as the same on their places.

    ``found``: all of which must hold for a query to see a key. ``is_whole``: whether an expression
    is made of whole numbers of the batch alone.
    """
    positions = [p for p in map(_position, found) if p is not None and is_whole(p)]
    return [_placed(condition, positions) for condition in found]


def _placed(condition: Value, positions: Sequence[Value]) -> Value:
    """Put places for positions where these are compared by how far they are apart."""
    if not isinstance(condition, tuple) or condition[0] not in ("lt", "le", "gt", "ge"):
        return condition
    for position in positions:
        written = condition
        for index, place in _PLACES.items():
            written = replaced(written, replaced(position, KEY, index), place)
        terms = summed(("sub", *written[1:]))
        if terms is None or not terms.keys() <= {None, *_PLACES.values()}:
            continue
        if terms.get(_PLACES[KEY]) == -terms.get(_PLACES[QUERY], 0):
            for index, place in _PLACES.items():
                written = replaced(written, place, index)
            return written
    return condition


def _position(condition: Value) -> Value | None:
    """Return the position of the key, if a condition is that key and query are of one document."""
    if not isinstance(condition, tuple) or condition[0] != "eq":
        return None
    for key, query in (condition[1:], condition[:0:-1]):
        is_number = isinstance(key, tuple) and key[0] == "cumsum" and key[3] == KEY
        if is_number and replaced(key, KEY, QUERY) == query and is_truth(key[1]):
            return _goes_on(key[1])
    return None


def _goes_on(starts: Value) -> Value | None:
    """Return ``p`` at the key, if documents start where ``p[i] - p[i - 1] != 1``, but for i = 0."""
    found = _settled(replaced(starts, INNER, _NEXT))
    if not isinstance(found, tuple) or found[0] != "ne" or found[2] != 1:
        return None
    if not isinstance(found[1], tuple) or found[1][0] != "sub":
        return None
    _, here, before = found[1]
    position = replaced(here, _NEXT, KEY)
    is_same = _settled(replaced(position, KEY, _BEFORE)) == before
    return position if is_same and not mentions_others(position, (BATCH, KEY)) else None


def _settled(value: Value) -> Value:
    """Choose where it is decided what is chosen, and write places as one index and a number."""
    if not isinstance(value, tuple) or value[0] in ("index", "size"):
        return value
    kind, *parts = value[0], *map(_settled, value[1:])
    if kind == "choose" and (known := decided(parts[0])) is not None:
        return parts[1] if known else parts[2]
    if kind in ("add", "sub"):
        terms = summed((kind, *parts))
        if terms is not None and terms.keys() <= {None, _BEFORE} and terms.get(_BEFORE) == 1:
            number = terms.get(None, 0)
            return ("add", _BEFORE, number) if number else _BEFORE
    return (kind, *parts)
