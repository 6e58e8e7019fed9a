"""Bind PyTorch's own tensors to the parameters of the compiled program, without copying.

PyTorch replaces tensors at times: ``optimizer.load_state_dict`` makes new state, ``.to()`` and
``.data =`` move a parameter.  So every call compares the object and the address of what was bound
and binds anew what changed; a changed dtype, shape, device or layout is refused.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
import tvm

from relax_disc.errors import InputMismatchError
from relax_disc.frontend.capture.state.outer import Outer, OuterTensor
from relax_disc.frontend.capture.state.sources import Place
from relax_disc.frontend.optimizer.several import owners_of
from relax_disc.frontend.spec import InputSpec
from relax_disc.training.call.assigned_states import AssignedStates
from relax_disc.training.call.state_dicts import state_dicts
from relax_disc.vm_builtins.state_file import StateFile

_ALIGNMENT = 64


@dataclass(slots=True)
class _Slot:
    """One bound tensor: where to look for it, and what was found at the last call."""

    index: int
    what: str
    look: Callable[[], torch.Tensor | None]
    tensor: torch.Tensor | None  # None: not bound now
    address: int
    layout: dict[str, Any]
    trained: bool | None  # None: it makes no difference
    # Where it is: a table and a key, a parameter of an optimizer and a key; None: `look` knows.
    place: tuple[dict[str, Any], str] | None = None
    state: tuple[Any, int, str] | None = None


def _layout(tensor: torch.Tensor) -> dict[str, Any]:
    """What the compiled program relies on; a tensor object can change it under ``.data =``."""
    return {"dtype": tensor.dtype, "shape": tuple(tensor.shape), "device": tensor.device}


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of the one behind its last."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.data_ptr()
    return first, first + (last + 1) * tensor.element_size()


def _is_as_bound(slot: _Slot, tensor: torch.Tensor) -> bool:
    """Whether the tensor of a slot lies where it was bound, and as it was: contiguous."""
    return (
        tensor.data_ptr() == slot.address
        and tensor.is_contiguous()
        and _layout(tensor) == slot.layout
    )


def _bytes(layout: Mapping[str, Any]) -> int:
    return math.prod(layout["shape"]) * layout["dtype"].itemsize


def as_runtime(tensor: torch.Tensor, what: str) -> tvm.runtime.Tensor:
    """View a torch tensor as TVM's, sharing memory.

    A tensor that some file reader placed at an address that is no multiple of 64 bytes (safetensors
    does), or that has another order of axes in memory (channels-last), is moved first: the object
    stays, with memory of its own.

    Raises `InputMismatchError`: the tensor is not contiguous, and others lie in its memory.
    """
    is_neg = tensor.is_neg()
    if is_neg or not tensor.is_contiguous():
        if _is_shared(tensor):
            raise InputMismatchError(
                f"{what} has strides {tuple(tensor.stride())}{', its negative bit set,' * is_neg} "
                "and shares its memory with another tensor; the compiled step needs contiguous "
                "tensors: assign `.contiguous()` to it."
            )
        tensor.data = tensor.detach().contiguous().resolve_neg()
    if tensor.numel() and tensor.data_ptr() % _ALIGNMENT:
        tensor.data = tensor.detach().clone()
    return tvm.runtime.from_dlpack(tensor.detach())


def _is_shared(tensor: torch.Tensor) -> bool:
    """Whether another tensor lies in the same memory; the look itself counts as one."""
    users = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return users > 2


class Number:
    """A Python number that the program reads from a tensor of its own, where its kernels run."""

    def __init__(self, outer: OuterTensor, device: torch.device) -> None:
        assert outer.place is not None
        self.what, self._place = str(outer.source), outer.place
        self.tensor = torch.zeros((), dtype=torch.float64, device=device)
        self._last: object = None
        self.read()

    def read(self) -> None:
        """Write the number into the tensor if it is another one than at the last call.

        Raises `InputMismatchError`: it is no number any more.
        """
        try:
            value = self._place.get()
        except (LookupError, ValueError):
            value = None
        if value is not self._last:
            if not isinstance(value, int | float):
                raise InputMismatchError(
                    f"{self.what} was a number when the step was compiled and is {value!r} now: "
                    "put a number there or compile again."
                )
            self.tensor.fill_(value)
            self._last = value


class _Unchanged:
    """Compares what was bound with what is there in loops that Python runs quickly.

    ``others``: those that are not compared here.
    """

    def __init__(self, slots: Sequence[_Slot], in_file: frozenset[int]) -> None:
        stored = [slot for slot in slots if slot.place is not None]
        # What lies in a file is looked at more closely.
        of_state = [slot for slot in slots if slot.state is not None and slot.index not in in_file]
        compared = [*stored, *of_state]
        indices = {slot.index for slot in compared}
        self.others = [slot for slot in slots if slot.index not in indices]
        self._places = [slot.place for slot in stored if slot.place is not None]
        self._owners = {slot.state[0]: None for slot in of_state if slot.state is not None}
        self._states = [slot.state for slot in of_state if slot.state is not None]
        self._tensors = [slot.tensor for slot in compared]
        self._addresses = [slot.address for slot in compared]
        self._shapes = [slot.layout["shape"] for slot in compared]
        trained = [slot for slot in compared if slot.trained is not None]
        self._parameters: list[Any] = [slot.tensor for slot in trained]
        self._trained = [slot.trained for slot in trained]

    def holds(self) -> bool:
        """Say whether every tensor is the object that was bound, as it was, and trained or not.

        A slot whose tensor is gone differs, too.
        """
        now: list[Any] = [table.get(key) for table, key in self._places]
        dicts = {owner: state_dicts(owner) for owner in self._owners}
        now += [dicts[owner].get(place, _NO_STATE).get(key) for owner, place, key in self._states]
        return (
            all(map(is_, now, self._tensors))
            and [tensor.data_ptr() for tensor in now] == self._addresses
            and [tensor.shape for tensor in now] == self._shapes
            and all(map(_is_contiguous, now))
            and [tensor.requires_grad for tensor in self._parameters] == self._trained
        )


_NO_STATE: Mapping[str, Any] = {}
_is_contiguous = torch.Tensor.is_contiguous


class Binding:
    """The parameters, buffers, constants and optimizer state of one step."""

    def __init__(
        self,
        specs: Sequence[InputSpec],
        model: torch.nn.Module,
        optimizer: Any,
        outer: Outer,
    ) -> None:
        self._specs = tuple(specs)
        self._model, self._optimizer = model, optimizer
        self._owners = owners_of(optimizer)
        self._takes_gradients = optimizer is not None or any(x.kind == "gradient" for x in specs)
        self.arguments: list[object] = [None] * len(self._specs)
        self._slots: list[_Slot] = []
        self._by_input: dict[int, _Slot] = {}
        # Addresses, before anything is moved: of the first byte, and behind the last; the input.
        self._found_in: list[tuple[int, int, int]] = []
        self._parents: list[tuple[dict, str, object]] = []
        self._numbers: list[Number] = []
        self._state_file: StateFile | None = None
        self._in_file: frozenset[int] = frozenset()
        self._listed: list[torch.Tensor] | None = None
        self._quick: _Unchanged | None = None
        for index, spec in enumerate(self._specs):
            if spec.kind in ("parameter", "buffer"):
                place = self._place(spec)
                look = functools.partial(place[0].get, place[1])
                self._bind(index, f"{spec.kind} {spec.target}", look, place)
            elif spec.kind == "constant":
                self._bind(index, f"constant {spec.target}", _look(outer.inputs[str(spec.target)]))
            elif spec.kind == "number":
                device = next((p.device for p in model.parameters()), torch.device("cpu"))
                number = Number(outer.inputs[str(spec.target)], device)
                self.arguments[index] = as_runtime(number.tensor, number.what)
                self._numbers.append(number)
            elif spec.kind == "gradient":
                self._await_gradient(index, spec)
            elif spec.kind == "state":
                self._await_state(index, spec)
        self.states = AssignedStates([*self._assigned_places(outer)])
        self._tied = self._find_tied(outer.assigned)
        # What only reads may lie in the same memory: a detached weight, say.
        addresses = Counter(slot.address for slot in self._slots if slot.tensor is not None)
        self._read_twice = {address for address, count in addresses.items() if count > 1}

    def _assigned_places(self, outer: Outer) -> Iterator[tuple[str, Place, bool]]:
        for slot in self._slots:
            spec = self._specs[slot.index]
            if str(spec.target) not in outer.assigned:
                continue
            if spec.kind == "buffer" and slot.place is not None:
                yield slot.what, Place(*slot.place), str(spec.target) in outer.written
            elif spec.kind == "constant":
                found = outer.inputs[str(spec.target)]
                if found.place is not None:
                    yield str(found.source), found.place, str(spec.target) in outer.written

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of the bound tensors in memory, by kind; tied tensors are counted once."""
        result: dict[str, int] = {}
        seen: set[int] = set()
        for slot in self._slots:
            kind = self._specs[slot.index].kind
            if slot.tensor is None and kind != "state":
                continue
            if slot.tensor is not None and slot.address in seen and slot.tensor.numel():
                continue
            seen.add(slot.address)
            if slot.index not in self._in_file:
                result[kind] = result.get(kind, 0) + _bytes(slot.layout)
        return result

    def tensor(self, index: int) -> torch.Tensor:
        """Return the torch tensor bound to an input of the function."""
        tensor = self._by_input[index].tensor
        assert tensor is not None
        return tensor

    def tensors(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Return the tensors bound to inputs, which are the same ones at each call."""
        if self._listed is None:
            self._listed = [self.tensor(index) for index in indices]
        return self._listed

    def is_bound(self, index: int) -> bool:
        """Say whether there is a tensor for an input."""
        return self._by_input[index].look() is not None

    def look(self, index: int) -> torch.Tensor | None:
        """Return the tensor that PyTorch has now for an input, bound or not."""
        return self._by_input[index].look()

    def release_gradients(self) -> None:
        """Let go of the gradients, so that their memory is free when PyTorch drops them."""
        for slot in self._slots:
            if self._specs[slot.index].kind == "gradient":
                self.arguments[slot.index] = slot.tensor = None
                slot.address = 0
        self._listed = None

    def keep_state_in(self, file: StateFile | None) -> tuple[int, ...]:
        """Keep the optimizer's larger tensors in a file from the next `refresh` on; None: no more.

        Returns the inputs that they are.
        """
        slots = [
            slot
            for slot in self._slots
            if self._specs[slot.index].kind == "state"
            and _bytes(slot.layout) >= StateFile.LEAST_BYTES
        ]
        if file is None and self._state_file is not None:
            for slot in slots:
                tensor = slot.look()
                if tensor is not None and self._state_file.holds(tensor):
                    tensor.data = tensor.detach().clone()
        self._state_file = file
        self._in_file = frozenset() if file is None else frozenset(slot.index for slot in slots)
        for slot in slots:
            slot.address = 0  # that it is bound anew
        self._quick = None
        return tuple(sorted(self._in_file))

    def refresh(self, *, early: bool = False) -> bool:
        """Bind anew whatever PyTorch has replaced since the last call.

        Says whether anything was bound anew; ``early`` accepts that there is no state yet.

        Raises `InputMismatchError`: a tensor or module disappeared, or a tensor changed its dtype,
        shape, device or layout.
        """
        for children, name, child in self._parents:
            if children.get(name) is not child:
                raise InputMismatchError(
                    f"The model's submodule {name!r} was replaced after compiling; compile the "
                    "step again."
                )
        for number in self._numbers:
            number.read()
        changed = False
        if self._quick is not None and self._quick.holds():
            slots = self._quick.others
        else:
            slots, self._quick, self._listed = self._slots, None, None
        for slot in slots:
            tensor = slot.look()
            if tensor is not None and tensor is slot.tensor:
                if slot.trained is not None and tensor.requires_grad is not slot.trained:
                    self._refuse_thaw(slot)
                if _is_as_bound(slot, tensor):
                    if slot.index in self._in_file and self._state_file:
                        self._state_file.check_written(tensor)
                    continue
            if tensor is None and early and self._specs[slot.index].kind == "state":
                self.arguments[slot.index] = slot.tensor = None
                continue
            if tensor is None:
                raise InputMismatchError(
                    f"{slot.what} no longer exists; compile the step again for the changed model."
                )
            self._check_same(slot, tensor)
            self._check_known(slot, tensor)
            if slot.index in self._in_file and self._state_file is not None:
                self._state_file.move(tensor)
            self.arguments[slot.index] = as_runtime(tensor, slot.what)
            slot.tensor, slot.address = tensor, tensor.data_ptr()
            changed = True
        if changed:
            self._listed = None
            self._check_tying()
        for what, (table, key), slot in self._tied:
            if table.get(key) is not slot.tensor:
                raise InputMismatchError(
                    f"{what} was the same tensor as {slot.what} when the step was compiled and is "
                    "another one now: tie them again or compile again."
                )
        if self._quick is None and all(slot.tensor is not None for slot in self._slots):
            self._quick = _Unchanged(self._slots, self._in_file)
        return changed

    def mark_written(self, indices: Sequence[int]) -> None:
        """Tell autograd that tensors were written in place, by the program."""
        torch.autograd.graph.increment_version(self.tensors(indices))
        if self._state_file is not None:
            for index in self._in_file.intersection(indices):
                self._state_file.note_version(self.tensor(index))

    def refuse_shared_writes(self, indices: Sequence[int]) -> None:
        """Refuse inputs that the program writes and that another one is a part of.

        Raises `InputMismatchError`: there is one; the program reads each as if it were apart.
        """
        found = sorted(self._found_in)
        for k, (_, end, index) in enumerate(found):
            for start, _, other in found[k + 1 :]:
                if start >= end:
                    break
                if index in indices or other in indices:
                    one, another = (self._by_input[i].what for i in sorted((index, other)))
                    raise InputMismatchError(
                        f"{one} and {another} share memory that the step writes; a compiled step "
                        "keeps them apart: make one a clone, or take it from the other where it "
                        "is used."
                    )

    def _bind(
        self,
        index: int,
        what: str,
        look: Callable[[], torch.Tensor | None],
        place: tuple[dict[str, Any], str] | None = None,
    ) -> None:
        tensor = look()
        if tensor is None:
            raise InputMismatchError(f"{what} does not exist.")
        if tensor.numel():
            self._found_in.append((*_range(tensor), index))
        self.arguments[index] = as_runtime(tensor, what)
        # Of others than parameters a compiled step takes no gradient in any case.
        is_trained = self._takes_gradients and self._specs[index].kind == "parameter"
        trained = tensor.requires_grad if is_trained else None
        slot = _Slot(index, what, look, tensor, tensor.data_ptr(), _layout(tensor), trained, place)
        self._slots.append(slot)
        self._by_input[index] = slot

    def _find_tied(
        self, assigned: Container[str]
    ) -> list[tuple[str, tuple[dict[str, Any], str], _Slot]]:
        """List the other names of bound parameters and buffers: what it is, and where.

        Of those ``assigned`` only one name is read, and only that is given other tensors.
        """
        bound = {
            id(slot.tensor): slot
            for slot in self._slots
            if slot.place is not None and str(self._specs[slot.index].target) not in assigned
        }
        places = [slot.place for slot in bound.values() if slot.place is not None]
        known = {(id(table), key) for table, key in places}
        found: list[tuple[str, tuple[dict[str, Any], str], _Slot]] = []
        for path, module in self._model.named_modules():
            for kind, table in (("parameter", module._parameters), ("buffer", module._buffers)):
                for key, tensor in table.items():
                    if id(tensor) in bound and (id(table), key) not in known:
                        what = f"{kind} {path}.{key}" if path else f"{kind} {key}"
                        found.append((what, (table, key), bound[id(tensor)]))
        return found

    def _place(self, spec: InputSpec) -> tuple[dict[str, Any], str]:
        """Find the table of a module in which a parameter or buffer is, and its name there."""
        *path, leaf = str(spec.target).split(".")
        module = self._model
        for name in path:
            child = module._modules[name]
            assert child is not None
            link = (module._modules, name, child)
            if not any(known[0] is link[0] and known[1] == name for known in self._parents):
                self._parents.append(link)
            module = child
        table = module._buffers if spec.kind == "buffer" else module._parameters
        return table, leaf

    def _await_gradient(self, index: int, spec: InputSpec) -> None:
        """Find ``p.grad`` at each call; it comes and goes."""
        table, leaf = self._place(spec)
        parameter = table[leaf]

        def look() -> torch.Tensor | None:
            current = table.get(leaf)
            gradient = None if current is None else current.grad
            if gradient is not None and gradient.layout is not torch.strided:
                raise InputMismatchError(
                    f"The gradient of {spec.target} is {gradient.layout}; the compiled step adds "
                    "to dense gradients only: clear it."
                )
            return gradient

        what = f"gradient of {spec.target}"
        slot = _Slot(index, what, look, None, 0, _layout(parameter), trained=False)
        self._slots.append(slot)
        self._by_input[index] = slot

    def _await_state(self, index: int, spec: InputSpec) -> None:
        """Find the optimizer's state at each call; it is there from the first step on."""
        parameter, key = self._model.get_parameter(str(spec.target)), spec.state_key
        owner = self._owners[id(parameter)]
        shape = tuple(int(extent) for extent in spec.shape)
        layout = {**_layout(parameter), "dtype": getattr(torch, spec.dtype), "shape": shape}
        empty: dict[str, torch.Tensor] = {}  # reading state[parameter] would create it

        def look() -> torch.Tensor | None:
            return owner.state.get(parameter, empty).get(key)

        what = f"state {key} of {spec.target}"
        state = (owner, id(parameter), str(key))
        slot = _Slot(index, what, look, None, 0, layout, trained=False, state=state)
        self._slots.append(slot)
        self._by_input[index] = slot

    @staticmethod
    def _refuse_thaw(slot: _Slot) -> None:
        was, now = ("trained", "frozen") if slot.trained else ("frozen", "trained")
        raise InputMismatchError(
            f"{slot.what} was {was} when the step was compiled and is {now} now "
            "(requires_grad); set it back or compile again."
        )

    @staticmethod
    def _check_same(slot: _Slot, tensor: torch.Tensor) -> None:
        for what, now in _layout(tensor).items():
            if now != slot.layout[what]:
                raise InputMismatchError(
                    f"{slot.what} changed its {what} from {slot.layout[what]} to {now} after "
                    "compiling; compile the step again."
                )

    def _check_known(self, slot: _Slot, tensor: torch.Tensor) -> None:
        """Refuse a new object in place of a parameter that the optimizer goes on updating."""
        spec = self._specs[slot.index]
        if self._optimizer is None or spec.kind != "parameter" or tensor is slot.tensor:
            return
        known = owners_of(self._optimizer)
        if id(slot.tensor) in known and id(tensor) not in known:
            raise InputMismatchError(
                f"{slot.what} was replaced by another object, which the optimizer does not know "
                "(load_state_dict(assign=True) does this): copy values into the old one, or make "
                "a new optimizer and compile again."
            )

    def _check_tying(self) -> None:
        """Refuse tensors that share memory now but did not when the step was compiled."""
        owner: dict[int, _Slot] = {}
        for slot in self._slots:
            if slot.tensor is None or slot.tensor.numel() == 0 or slot.address in self._read_twice:
                continue
            other = owner.setdefault(slot.address, slot)
            if other is not slot:
                raise InputMismatchError(
                    f"{slot.what} and {other.what} share memory now and did not when the step was "
                    "compiled; compile the step again."
                )


def _look(outer: OuterTensor) -> Callable[[], torch.Tensor | None]:
    """Find a tensor where the user's code keeps it, at each call."""
    place = outer.place
    if place is None:
        return lambda: outer.tensor

    def look() -> torch.Tensor | None:
        try:
            found = place.get()
        except (LookupError, ValueError):
            return None
        return found if isinstance(found, torch.Tensor) else None

    return look
