"""Guard tensors that are no inputs, and things that code reaches by more than one name.

A tensor is one input of the program, however many names it has: they must go on to lead to one
tensor.  Of one that is no input, because nobody computes with it, the shape and type may have been
asked, or that there is one.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from relax_disc.frontend.capture.state.outer import Guard
from relax_disc.frontend.capture.state.reads import Trace, is_recorded, may_read
from relax_disc.frontend.capture.state.sources import Place, Source, is_replaced, resolve

_MOST_NAMES = 100
_OF_CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)


class Names:
    """The names by which a trace has reached things."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None, trace: Trace) -> None:
        self._model, self._loss_fn, self._trace = model, loss_fn, trace
        self._objects: dict[Source, Any] = {}

    def read(self, source: Source, held: Any) -> list[Source]:
        """List the paths to an object that the code may have gone; ``source``: one of them."""
        self._objects[source] = held  # the trace has others in the place of parameters
        ways, known = [source], {source}
        for path in ways:  # grows
            for n in range(len(path.steps), 0, -1):
                held = self._object_at(Source(path.root, path.steps[:n]))
                for other in self._trace.known.again.get(id(held), ()):
                    way = Source(other.root, (*other.steps, *path.steps[n:]))
                    if way not in known and len(ways) < _MOST_NAMES:
                        known.add(way)
                        ways.append(way)
        return [way for way in ways if self._is_read(way)]

    def of_tensors(self) -> Iterator[Guard]:
        """Guard tensors of the trace by their other names, and what was asked of the others."""
        for source, tensor in self._trace.tensors.values():
            yield from self._same(source, tensor)
        for key, (source, place) in self._trace.known.tensors.items():
            if key in self._trace.tensors and key not in self._trace.asked:
                continue
            if source.steps[-1][0] == "child" and key not in self._trace.known.again:
                continue
            if key in self._trace.known.again and source.steps[-1][0] != "child":
                yield from self._same(source, place.get())
            for path in self.read(source, place.get()):
                if path.steps[-1][0] != "child":  # those are bound, all of them
                    yield from self._form(path, key in self._trace.asked)

    def of_holders(self, paths: Iterable[Source]) -> Iterator[Guard]:
        """Guard by their other names modules, and the objects on the way to what was read."""
        prefixes = {
            Source(path.root, path.steps[:n]) for path in paths for n in range(len(path.steps))
        }
        held = {prefix: self._object_at(prefix) for prefix in sorted(prefixes, key=str)}
        held |= dict(self._trace.known.modules.values())
        for source, value in held.items():
            if id(value) not in self._trace.known.again or isinstance(value, _OF_CODE):
                continue
            if is_replaced(value):
                yield from self._same(source, value)
                continue
            for path in self.read(source, value):
                place = self._place_of(path)
                if path != source and place is not None and not self._is_changed(path):
                    yield Guard(str(path), path, place, value)

    def _same(self, source: Source, held: Any) -> Iterator[Guard]:
        first = self._place_of(source)
        for path in self.read(source, held):
            place = self._place_of(path)
            if path != source and place is not None and first is not None:
                yield Guard(str(path), path, place, (source, first), part="same")

    def _form(self, path: Source, is_asked: bool) -> Iterator[Guard]:
        place = self._place_of(path)
        if place is None or self._is_changed(path):
            return
        tensor = place.get()
        value = (tuple(tensor.shape), str(tensor.dtype)) if is_asked else None
        yield Guard(str(path), path, place, value, part="form")

    def _is_changed(self, path: Source) -> bool:
        place = resolve(path, self._model, self._loss_fn)
        return (id(place.container), place.key) in self._trace.changed

    def _is_read(self, path: Source) -> bool:
        """Say whether the code may have gone a path, from its end to its beginning."""
        for n in range(len(path.steps), 0, -1):
            kind, key = path.steps[n - 1]
            way = Source(path.root, path.steps[:n])
            holder = self._object_at(Source(path.root, path.steps[: n - 1]))
            if kind == "child":
                table, name = key
                of_name = (id(holder), name) in self._trace.absent
                if not of_name and (id(holder), table) not in self._trace.tables:
                    return False
            elif kind == "attribute" and is_recorded(holder):
                was_read = (id(holder), key) in self._trace.reads
                if not was_read and id(holder) not in self._trace.whole:
                    return False
            elif not may_read(self._trace.known, way, holder):
                return False
        return True

    def _place_of(self, path: Source) -> Place | None:
        try:
            place = resolve(path, self._model, self._loss_fn, is_lasting=True)
            place.get()
        except (LookupError, ValueError):  # inside a tuple that was made for the walk
            return None
        return place

    def _object_at(self, path: Source) -> Any:
        if path not in self._objects:
            place = self._place_of(path)
            self._objects[path] = None if place is None else place.get()
        return self._objects[path]
