"""Write what a step calls as the recipe of a loop (:mod:`relax_disc.ops.loop`)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from relax_disc.errors import UnsupportedOperatorError
from relax_disc.frontend.capture.loops.cut import Place
from relax_disc.ops import aten
from relax_disc.ops.loop import VERSION, LoopCall

_ATEN = torch.ops.aten
_PLACEMENT = ("layout", "pin_memory", "generator")
_AS_IT_LIES = {_ATEN.view.default: _ATEN.reshape.default}
"""A part of an operand, such as ``x[:, t]``, is traced as if it were contiguous, and is not: where
that has made a view of a reshape, it is one again."""
_FORMATS = (
    torch.contiguous_format,
    torch.preserve_format,
    torch.channels_last,
    torch.channels_last_3d,
)
"""In the order of c10's numbers for them."""
_UNKEPT = (_ATEN.detach.default, _ATEN.alias.default, _ATEN.lift_fresh.default)


@dataclass(slots=True)
class Record:
    """Calls in their order: operator, arguments, keywords, what it returned, tensors in a list."""

    calls: list[tuple[OpOverload, Any, Any, list[Any]]] = field(default_factory=list)
    made: list[Any] = field(default_factory=list)
    given: list[Any] = field(default_factory=list)

    def needed(self, roots: Sequence[Tensor]) -> set[int]:
        """Identities of the tensors that go into some, and into what is written in place."""
        wanted = {id(root) for root in roots}
        for target, args, kwargs, made in reversed(self.calls):
            if target._schema.is_mutable or any(id(x) in wanted for x in made):
                leaves = pytree.tree_leaves((args, kwargs))
                wanted |= {id(x) for x in [*leaves, *made] if isinstance(x, Tensor)}
        return wanted


class _Recorder(TorchDispatchMode):
    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves(made)
        if any(isinstance(x, Tensor) for x in leaves):
            self._record.calls.append((func, args, kwargs or {}, leaves))
        return made


@contextlib.contextmanager
def recording() -> Iterator[Record]:
    """Record the calls that reach PyTorch's kernels."""
    record = Record()
    with _Recorder(record):
        yield record


class RecipeBuilder:
    """Writes one recipe; ``keys`` name the operands that are tensors, in order."""

    def __init__(self, record: Record, line: str, count: Any, reverse: bool = False) -> None:
        self.keys: list[Any] = []
        self._record, self._line, self._count, self._reverse = record, line, count, reverse
        self._operands: list[Tensor] = []
        self._step: list[Tensor] = []
        self._slots: dict[int, int] = {}
        self._held: list[Any] = []  # tensors whose identity stands for a slot
        self._numbers: list[Any] = []
        self._number_slots: dict[str, int] = {}
        self._inputs: list[list[Any]] = []
        self._results: list[tuple[str, Tensor, list[Any]]] = []
        self._roots: list[Tensor] = []
        self._needed: set[int] = set()
        self._nexts: list[Tensor] = []
        self._made: list[Tensor] = []  # by the calls

    def keep(self, roots: Sequence[Any]) -> None:
        """Say what of the record is wanted."""
        self._roots = list(roots)
        self._needed = self._record.needed(self._roots)

    def reads(self, value: Tensor) -> bool:
        """Whether a value goes into what is wanted."""
        return id(value) in self._needed

    def operand(self, key: Any, whole: Tensor, step: Tensor) -> int:
        """Add an operand; ``step``: what a step touches of it."""
        if key not in self.keys:
            self.keys.append(key)
            self._operands.append(whole)
            self._step.append(step)
        return self.keys.index(key)

    def _slot(self, value: Any) -> int:
        if id(value) not in self._slots:
            self._slots[id(value)] = len(self._slots) + len(self._number_slots)
            self._held.append(value)
        return self._slots[id(value)]

    def carry(self, value: Tensor, key: Any, operand: Tensor, following: Any) -> None:
        """Let a value be an operand in the first step, and another value of the step before."""
        place = self.operand(key, operand, value)
        self._inputs.append(["carry", self._slot(value), place, following])

    def part(self, value: Tensor, key: Any, operand: Tensor, place: Place) -> None:
        """Let a value be the part of an operand that belongs to the step."""
        at = self.operand(key, operand, value)
        self._inputs.append(["step", self._slot(value), at, *self._position(place)])

    def whole(self, value: Tensor, key: Any, operand: Tensor) -> None:
        """Let a value be an operand."""
        at = self.operand(key, operand, value)
        self._inputs.append(["whole", self._slot(value), at])

    def result(
        self,
        kind: str,
        like: Tensor,
        value: Any,
        source: int | None = None,
        place: Place | None = None,
        step: Tensor | None = None,
    ) -> None:
        """Add a result of the type of ``like``; ``value``: a tensor of the record or a number."""
        entry = [kind, value]
        if source is not None:
            entry.append(source)
        if place is not None:
            entry += self._position(place)
        self._results.append((kind, like, entry))
        self._step.append(like if step is None else step)

    def _position(self, place: Place) -> list[Any]:
        return [place.axis, self._number(place.factor), self._number(place.offset)]

    def _number(self, value: Any) -> list[Any]:
        """Write an integer; one that depends on sizes becomes an operand behind the tensors."""
        expression = value.node.expr if isinstance(value, torch.SymInt) else value
        if isinstance(expression, int) or expression.is_Integer:
            return ["int", int(expression)]
        texts = [str(number.node.expr) for number in self._numbers]
        if str(expression) not in texts:
            if not isinstance(value, torch.SymInt):
                env = self._count.node.shape_env
                value = env.create_symintnode(expression, hint=None)
            self._numbers.append(value)
            texts.append(str(expression))
        return ["operand", texts.index(str(expression))]

    def call(self) -> LoopCall:
        """Finish."""
        calls, freed_last = self._calls()
        inputs = [
            [kind, at, k, *(map(self._slot, rest) if kind == "carry" else rest)]
            for kind, at, k, *rest in self._inputs
        ]
        texts = [str(number.node.expr) for number in self._numbers]
        numbers = [
            ["whole", at, ("number", texts.index(text))] for text, at in self._number_slots.items()
        ]
        results = [
            [kind, value if isinstance(value, int) else self._slot(value), *rest]
            for _, _, (kind, value, *rest) in self._results
        ]
        text = {
            "version": VERSION,
            "line": self._line,
            "count": self._number(self._count),
            "reverse": self._reverse,
            "inputs": [*inputs, *numbers],
            "calls": calls,
            "results": results,
            "kept": freed_last,
            "slots": len(self._slots) + len(self._number_slots),
        }
        text = self._behind_tensors(text)
        return LoopCall(
            json.dumps(text, separators=(",", ":")),
            tuple(self._operands),
            tuple(self._numbers),
            tuple(like for _, like, _ in self._results),
            (*self._step, *self._made),
            self._count,
        )

    def _behind_tensors(self, text: dict[str, Any]) -> dict[str, Any]:
        """Shift the places of numbers behind those of the tensors."""
        first = len(self._operands)

        def shift(value: Any) -> Any:
            return [value[0], value[1] + first] if _is_number(value) else value

        text["count"] = shift(text["count"])
        for name in ("inputs", "results"):
            text[name] = [
                [first + x[1] if isinstance(x, tuple) else shift(x) for x in entry]
                for entry in text[name]
            ]
        return text

    def _calls(self) -> tuple[list[Any], list[int]]:
        """Write the calls that are needed, and the slots that stay full until a step ends."""
        chosen: list[tuple[OpOverload, Any, Any, list[Any]]] = []
        for call in self._record.calls:
            target, args, _, made = call
            if target in _UNKEPT and isinstance(args[0], Tensor):
                if any(id(x) in self._needed for x in made):
                    self._slots[id(made[0])] = self._slot(args[0])
                    self._held.append(made[0])
                continue
            if target._schema.is_mutable or any(id(x) in self._needed for x in made):
                chosen.append(call)
        inputs = {entry[1] for entry in self._inputs}
        entries: list[dict[str, Any]] = []
        for target, args, kwargs, made in chosen:
            arguments = self._arguments(entries, target, args, kwargs, made)
            slots = [
                self._slot(x) if isinstance(x, Tensor) and id(x) in self._needed else -1
                for x in made
            ]
            self._made += [x for x in made if isinstance(x, Tensor)]
            target = _AS_IT_LIES.get(target, target)
            name, overload = target._schema.name, target._overloadname
            entries.append(
                {
                    "operator": name,
                    "overload": "" if overload == "default" else overload,
                    "arguments": arguments,
                    "slots": slots,
                }
            )
        kept = {self._slot(root) for root in self._roots} | inputs
        kept |= set(self._number_slots.values())
        last: dict[int, int] = {}
        for k, entry in enumerate(entries):
            for s in (*entry["slots"], *_slots_in(entry["arguments"])):
                last[s] = k
        for k, entry in enumerate(entries):
            entry["freed"] = sorted(s for s, at in last.items() if at == k and s not in kept | {-1})
        made_slots = {s for entry in entries for s in entry["slots"]}
        return entries, sorted((made_slots & kept) - inputs)

    def _arguments(
        self, entries: list[Any], target: OpOverload, args: Any, kwargs: Any, made: list[Any]
    ) -> list[Any]:
        found = []
        for k, parameter in enumerate(target._schema.arguments):
            if k < len(args) and not parameter.kwarg_only:
                value = args[k]
            elif parameter.name in kwargs:
                value = kwargs[parameter.name]
            else:
                value = parameter.default_value if parameter.has_default_value() else None
            if parameter.name in _PLACEMENT:
                found.append(["none"])
            elif isinstance(value, torch.memory_format):
                found.append(["int", _FORMATS.index(value)])
            elif "Device" in str(parameter.real_type):
                found.append(["none"] if value is None else ["device"])
            elif isinstance(parameter.real_type, torch.TensorType) and isinstance(
                value, bool | int | float | torch.SymInt
            ):
                found.append(self._scalar_tensor(entries, value, args))
            else:
                found.append(self._encode(target, value))
        return found

    def _scalar_tensor(self, entries: list[Any], value: Any, args: Any) -> list[Any]:
        """Make the tensor that PyTorch makes of a number, which raises no other operand's type."""
        tensors = [x for x in pytree.tree_leaves(args) if isinstance(x, Tensor)]
        like = tensors[0].dtype if tensors else torch.get_default_dtype()
        if isinstance(value, float) and not like.is_floating_point:
            like = torch.get_default_dtype()
        if any(x.dim() and x.dtype.is_floating_point for x in tensors):
            like = torch.float64  # beside an axis it raises no type, and 0.9 is not rounded
        holder = object()
        self._held.append(holder)
        slot = self._slot(holder)
        kind = ["dtype", str(like).removeprefix("torch.")]
        entries.append(
            {
                "operator": "aten::scalar_tensor",
                "overload": "",
                "arguments": [self._encode(None, value), kind, ["none"], ["device"], ["none"]],
                "slots": [slot],
            }
        )
        return ["operand", slot]

    def _encode(self, target: Any, value: Any) -> list[Any]:
        if (encoded := aten.plain(value)) is not None:
            return encoded
        if isinstance(value, list | tuple):
            return ["list", [self._encode(target, x) for x in value]]
        if isinstance(value, Tensor):
            return ["operand", self._slot(value)]
        if isinstance(value, torch.SymInt):
            number = self._number(value)
            if number[0] == "int":
                return number
            text = str(value.node.expr)
            if text not in self._number_slots:
                self._number_slots[text] = len(self._slots) + len(self._number_slots)
            return ["operand", self._number_slots[text]]
        raise UnsupportedOperatorError(
            f"{self._line}: the loop cannot be run as one step: {target} takes "
            f"{type(value).__name__}; compute that number before the loop, as a tensor.",
            ((str(target), str(self._line)),),
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and value[0] == "operand"


def _slots_in(arguments: list[Any]) -> list[int]:
    found = []
    for argument in arguments:
        if argument[0] == "operand":
            found.append(argument[1])
        elif argument[0] == "list":
            found += _slots_in(argument[1])
    return found
