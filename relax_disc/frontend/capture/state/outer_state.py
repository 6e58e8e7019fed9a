"""What a step reads and writes besides its arguments: recorded while the model is exported.

Tensors that the model or ``loss_fn`` reaches by an attribute, a closure or a global become inputs
of the program; Python numbers become inputs too where they only meet tensors in arithmetic, and
are otherwise remembered with their values, to be compared at each call.  What the user's code
assigns meanwhile is put back, and is an output of the program where it is state.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._dynamo.exc import UserError
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, track_tensor_tree
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from relax_disc.errors import RelaxDiscError, RelaxDiscWarning, UnsupportedOperatorError
from relax_disc.frontend.capture.replaced.keywords import by_position
from relax_disc.frontend.capture.source_lines import (
    SourceLine,
    callers_depth,
    calling_line,
    users_line,
)
from relax_disc.frontend.capture.state.assignments import INTERNAL, Held, assignments
from relax_disc.frontend.capture.state.environ import guards_of_environ, watched_environ
from relax_disc.frontend.capture.state.files import guards_of_files, watched_files
from relax_disc.frontend.capture.state.kinds import is_layer
from relax_disc.frontend.capture.state.live_number import LiveNumber, live_everywhere, with_tensors
from relax_disc.frontend.capture.state.moving import original_of, refused_moves
from relax_disc.frontend.capture.state.next_call import NextCall
from relax_disc.frontend.capture.state.other_names import Names
from relax_disc.frontend.capture.state.outer import Guard, OuterTensor
from relax_disc.frontend.capture.state.reachable import Reachable, reachable
from relax_disc.frontend.capture.state.reads import TABLES, Trace, is_recorded, may_read
from relax_disc.frontend.capture.state.relied_on import guards_of
from relax_disc.frontend.capture.state.snapshot import (
    Kept,
    restore,
    snapshot,
)
from relax_disc.frontend.capture.state.sources import (
    ElementsAt,
    Place,
    Source,
    is_replaced,
    resolve,
)

_OF_THE_MODEL = (
    UserError,
    RelaxDiscError,
    UnsupportedOperatorException,
    DynamicOutputShapeException,
)
"""Errors of an export that a stand-in for a number cannot cause."""

_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
_SET_DATA = Tensor.data.__set__  # pyright: ignore
_REQUIRES_GRAD = Tensor.requires_grad.__get__  # pyright: ignore
_GRAD = Tensor.grad.__get__  # pyright: ignore
_LOOKS = {
    Tensor.item: ".item()",
    Tensor.tolist: ".tolist()",
    Tensor.__repr__: "printing a tensor",
    Tensor.__format__: "formatting a tensor",
    Tensor.__float__: "float()",
    Tensor.__int__: "int()",
}
_LAYOUT = {
    Tensor.is_contiguous,
    Tensor.stride,
    Tensor.as_strided,
    torch.as_strided,
}
"""Calls whose result depends on the strides of a tensor, not on its values alone."""
_OF_EAGER: dict[Any, tuple[str, str]] = {
    Tensor.storage_offset: (
        "storage_offset()",
        "tells nothing in a compiled step, which may copy its batch; give the number as an "
        "argument",
    ),
    Tensor.grad.__get__: (  # pyright: ignore
        ".grad",
        "in the model or loss_fn is not what a compiled step has: its gradients come later, and "
        "are dropped after the update. Give what you computed from a gradient as a tensor of the "
        "batch, or take gradients inside the loss by torch.autograd.grad",
    ),
    Tensor._version.__get__: (  # pyright: ignore
        "._version",
        "counts the writes of PyTorch alone and would be fixed in a compiled step; count in your "
        "loop and give the number as a tensor of the batch",
    ),
}
"""What a tensor tells of itself in eager PyTorch alone."""
_ALL = ("__dict__", "__getstate__")
_COPYING = ("copy", "copyreg")
"""Modules that read all attributes of an object in the name of who calls them."""
_NEED_VALUES = {Tensor.numpy: ".numpy()", Tensor.__float__: "float()"}
_VALUELESS = (GuardOnDataDependentSymNode, DataDependentOutputException, RuntimeError, TypeError)


class _StandIns(TorchFunctionMode):
    """Gives the trace stand-ins for tensors and numbers that are none of its own."""

    def __init__(self, state: OuterState) -> None:
        super().__init__()
        self._state = state

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Make a call with stand-ins."""
        return self._state.call(func, args, kwargs or {})


class OuterState:
    """What one export finds; `tracing` surrounds the call of the user's code.

    ``guards``: values that the program relies on. ``reassigned``: what the user's code assigned
    anew; the trace returns the new values in this order. ``written``: the tensors of these that it
    writes in place as well, by ``id``. ``warnings``: what does nothing in a
    compiled step, in words. ``moving``: what another read finds changed, with where it lies.
    ``layout_line``: where the user's code asks how a tensor lies in memory.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self._model, self._loss_fn = model, loss_fn
        self._known: Reachable = reachable(model, loss_fn)
        self._own: dict[int, tuple[dict[str, Any], str]] = {}
        self.moving = self._known.moving
        self._registered: dict[tuple[int, str], Tensor] = {}  # the trace has others there
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        self._own[id(tensor)] = (table, name)
                        self._registered[id(table), name] = tensor
        self._inputs: dict[int, tuple[OuterTensor, Tensor]] = {}
        self._pinned: dict[int, bool] = {}  # numbers that are fixed, and whether they decide
        self._kinds: set[int] = set()  # numbers whose types are fixed
        self._numbers = self._stand_ins()
        self._begin()

    def _begin(self) -> None:
        self.guards: list[Guard] = []
        self.reassigned: list[OuterTensor] = []
        self.written: set[int] = set()
        self.warnings: dict[str, SourceLine | None] = {}  # with lines that take out a number
        self.next_call = NextCall(())
        self._pinned.clear()
        self._kinds.clear()
        self._fakes: dict[tuple[int, int], Tensor] = {}
        self._proxies: dict[tuple[int, int], Any] = {}
        self._changed: set[tuple[int, Any]] = set()
        self._reads: dict[tuple[int, str], tuple[Any, Any]] = {}
        self._absent: dict[tuple[int, str], Any] = {}
        self._environ: dict[str | None, Any] = {}
        self._files: dict[str, str] = {}
        self.layout_line: SourceLine | None = None
        self._tables: dict[tuple[int, str], nn.Module] = {}
        self._called: set[int] = set()
        self._whole: set[int] = set()
        self._flags: dict[int, Tensor] = {}
        self._attributes: dict[tuple[int, str], Tensor] = {}
        self._touched: set[int] = set()
        self._asked: set[int] = set()
        self._fake_mode: FakeTensorMode | None = None

    def give_up_live_numbers(self, error: BaseException) -> bool:
        """Trace with plain numbers from now on; False where they cannot have caused an error."""
        cause = error.__cause__ or error
        tensors = {key for key, _ in self._fakes}
        if isinstance(cause, _OF_THE_MODEL):
            blamed = False
        elif isinstance(cause, GuardOnDataDependentSymNode | DataDependentOutputException):
            numbers = (outer.tensor for outer, _ in self._inputs.values() if outer.is_number)
            blamed = any(id(tensor) in tensors for tensor in numbers)
        else:
            blamed = any(map(self._is_read, self._numbers))
        self._numbers = {}
        return blamed

    def _is_read(self, index: int) -> bool:
        source, place, holder = self._known.plain[index]
        return (id(holder), place.key) in self._reads or may_read(self._known, source, holder)

    def warn(self, deciding: Container[SourceLine | None]) -> None:
        """Tell what does nothing in a compiled step; numbers of ``deciding`` lines do something."""
        for text, line in self.warnings.items():
            if line not in deciding:
                warnings.warn(text, RelaxDiscWarning, stacklevel=callers_depth())

    def kept(self) -> dict[str, Any]:
        """Return all that the last trace found, for `put_back` after others."""
        return {**vars(self), "_pinned": dict(self._pinned), "_kinds": set(self._kinds)}

    def put_back(self, kept: dict[str, Any]) -> None:
        """Hold again what a trace before the last one found."""
        vars(self).update(kept)

    def relied_on(self) -> tuple[list[Guard], SourceLine | None]:
        """Return what the last trace relies on, for `rely_also`."""
        return self.guards, self.layout_line

    def rely_also(self, others: Iterable[tuple[list[Guard], SourceLine | None]]) -> None:
        """Let the program rely as well on what traces of other ways through the code do."""
        known = {(guard.what, guard.part, guard.names): guard for guard in self.guards}
        for guards, line in others:
            self.layout_line = self.layout_line or line
            for guard in guards:
                known.setdefault((guard.what, guard.part, guard.names), guard)
        self.guards = list(known.values())

    def outer_tensor(self, lifted: Tensor) -> OuterTensor | None:
        """Return what a constant of the exported program is, None for one that it made itself."""
        found = self._inputs.get(id(lifted))
        return None if found is None else found[0]

    def name_of(self, tensor: Tensor) -> str | None:
        """Return how the user's code reaches a tensor or another with its memory, if it does."""
        memory = tensor.untyped_storage()._cdata
        for source, place in self._known.tensors.values():
            known = place.get()
            if known.layout is torch.strided and known.untyped_storage()._cdata == memory:
                return str(source)
        return None

    @contextlib.contextmanager
    def tracing(self, args: Any) -> Iterator[_Call]:
        """Surround one call of the user's code in a trace."""
        self._begin()
        self._fake_mode = detect_fake_mode(pytree.tree_leaves(args))
        if self._fake_mode is None:
            parameters = [*self._model.parameters(), *self._model.buffers()]
            self._fake_mode = detect_fake_mode(parameters)
        call = _Call(self, args)
        for place, number in self._numbers.values():
            place.put(number)
        saved, hooks = snapshot(self._known), RemovableHandle.next_id
        try:
            with self._recorded(), _StandIns(self):
                yield call
            self.next_call = NextCall([*call.tensors, *self._model.parameters()])
            call.reassigned = self._new_values(saved)
            if RemovableHandle.next_id != hooks:
                self.next_call.is_known = False  # it would have a hook that is removed again here
            self._drop_unused(call)
        finally:
            restore(saved)
            for place, number in self._numbers.values():
                place.put(number.value)
        call.look_at_arguments()
        self._collect()

    @contextlib.contextmanager
    def tracing_gradients(self) -> Iterator[None]:
        """Surround a trace in which functions with a gradient of their own run, backward too.

        What they read by themselves, not as an argument, is fixed.
        """
        places = [place for place, _ in self._numbers.values()]
        before = [place.get() for place in places]
        for place, number in self._numbers.values():
            place.put(LiveNumber(number.value, number.leaves, number.pin, None))
        try:
            with self._recorded(), live_everywhere():
                yield
        finally:
            for place, value in zip(places, before, strict=True):
                place.put(value)
        self.guards = []
        self._collect()

    # -- stand-ins -----------------------------------------------------------------------------

    def call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Make one call of torch in the trace."""
        if not args and kwargs:  # PyTorch's own modes read `data` of torch.tensor by its place
            args, kwargs = by_position(func, None, args, kwargs)
        if func in _LOOKS:
            self._warn_of_look(func)
        if func == _REQUIRES_GRAD and type(args[0]) in _TENSORS and id(args[0]) not in self._own:
            self._flags[id(args[0])] = args[0]
            return func(*args)
        if func == _GRAD and not isinstance(args[0], nn.Parameter):
            return None  # as of all that eager PyTorch makes no gradient of
        if func in _OF_EAGER and (line := users_line()) is not None:
            name, why = _OF_EAGER[func]
            raise UnsupportedOperatorError(f"{line}: {name} {why}.", ((name, str(line)),))
        if func in _LAYOUT and self.layout_line is None:
            self.layout_line = users_line()
        args = [self._stand_in(arg) for arg in args]
        if kwargs:
            kwargs = {key: self._stand_in(value) for key, value in kwargs.items()}
        if self._numbers:
            args, kwargs = with_tensors(func, args, kwargs)
        if func == _SET_DATA and type(args[1]) not in _TENSORS:
            return self._set_data(*args)
        if func is Tensor.__format__:
            return str(args[0])  # whatever the number of digits
        try:
            return func(*args, **kwargs)
        except _VALUELESS as error:
            if func not in _NEED_VALUES:
                raise
            raise UnsupportedOperatorError(
                f"{calling_line()}: {_NEED_VALUES[func]} in the model or loss_fn needs a tensor's "
                "value, and there is none while the step is compiled: return the tensor beside the "
                "loss, as (loss, extras)."
            ) from error

    def _stand_in(self, value: Any) -> Any:
        kind = type(value)
        if kind in _TENSORS:
            return self.input(value)
        if kind in (tuple, list) and value:
            parts = [self._stand_in(part) for part in value]
            if any(new is not old for new, old in zip(parts, value, strict=True)):
                return kind(parts)
        return value

    def input(self, tensor: Tensor) -> Tensor:
        """Return the stand-in of a tensor that is none of the trace's own."""
        own = self._own.get(id(tensor))
        if own is not None:
            self._touched.add(id(tensor))
            return own[0][own[1]]
        mode = get_proxy_mode()
        if mode is None or self._fake_mode is None or tensor.layout is not torch.strided:
            return tensor
        if is_functorch_wrapped_tensor(tensor):  # the trace's own, inside vmap
            return tensor
        tracer: Any = mode.tracer  # pyright: ignore[reportAttributeAccessIssue]
        self._touched.add(id(tensor))
        key = (id(tensor), id(tracer))
        if key not in self._fakes:
            lifted = self._lifted(tensor)
            with _disable_current_modes():
                fake = self._fake_mode.from_tensor(lifted, static_shapes=True)
            name = tracer.get_fresh_qualname("_tensor_constant")
            setattr(tracer.root, name, lifted)
            proxy = tracer.create_proxy("get_attr", name, (), {})
            track_tensor_tree(fake, proxy, constant=None, tracer=tracer)
            self._fakes[key], self._proxies[key] = fake, proxy
        return self._fakes[key]

    def _drop_unused(self, call: _Call) -> None:
        """Remove stand-ins that nobody computes with; torch.export stumbles over them.

        They only gave a shape or a type, or a view or a copy that was dropped.
        """
        returned = {id(leaf) for leaf in pytree.tree_leaves((call.result, call.reassigned))}
        kept = {_node_of(leaf) for leaf in pytree.tree_leaves((call.result, call.reassigned))}
        for key, proxy in self._proxies.items():
            if id(self._fakes[key]) in returned:
                continue
            dead = _dead_after(proxy.node, kept)
            for node in dead:
                node.graph.erase_node(node)
            if dead:
                self._asked.add(key[0])

    def _lifted(self, tensor: Tensor) -> Tensor:
        """Return the object by which the exported program will know a tensor."""
        for outer, lifted in self._inputs.values():
            if outer.tensor is tensor:
                return lifted
        source, place = self._known.tensors.get(id(tensor), (None, None))
        with _disable_current_modes():
            # One that does not lie in order is moved before the first call, if it is no view of
            # another: no further name of its memory may stay.
            lifted = tensor.detach() if tensor.is_contiguous() else tensor.detach().contiguous()
        self._inputs[id(lifted)] = OuterTensor(tensor, source, place), lifted
        return lifted

    def _stand_ins(self) -> dict[int, tuple[Place, LiveNumber]]:
        """Make one for each number that a module of the user holds, or that loss_fn reaches."""
        found: dict[int, tuple[Place, LiveNumber]] = {}
        for index, (source, place, holder) in enumerate(self._known.plain):
            value = place.get()
            if type(value) not in (int, float) or isinstance(holder, tuple | type):
                continue
            if source.root == "model" and not isinstance(holder, nn.Module):
                continue
            if not place.is_writable or any(kind == "cached" for kind, _ in source.steps):
                continue
            if type(value) is int and is_layer(holder):
                continue
            tensor = torch.tensor(value, dtype=torch.float64)
            lifted = tensor.detach()
            self._inputs[id(lifted)] = OuterTensor(tensor, source, place, True), lifted
            found[index] = (
                place,
                LiveNumber(value, [index], self._pin, _maker(self, tensor)),
            )
        return found

    def _pin(self, leaf: int, decides: bool | None) -> None:
        if decides is None:
            self._kinds.add(leaf)
            return
        self._pinned[leaf] = decides or self._pinned.get(leaf, False)

    def _set_data(self, tensor: Tensor, value: Tensor) -> None:
        with torch.no_grad():
            tensor.detach().copy_(value)

    # -- reads ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        """Note the attributes that are read of modules, and of other objects that were found."""
        found = [type(value) for _, value in self._known.containers if is_recorded(value)]
        # Of a module with two names PyTorch's trace has stand-ins, with its attributes.
        modules = {
            id(vars(module)): module
            for _, module in self._known.modules.values()
            if not isinstance(module, weakref.ProxyTypes)
        }
        with contextlib.ExitStack() as stack:
            for kind in (torch.SymFloat, torch.SymInt):
                stack.enter_context(patch.object(kind, "__format__", lambda of, digits: str(of)))
            for kind in dict.fromkeys([nn.Module, *found]):
                recorder = _recorder(
                    *(kind.__getattribute__, self._reads, self._absent, self._tables),
                    *(self._called, self._whole, modules),
                )
                stack.enter_context(patch.object(kind, "__getattribute__", recorder))
            look: Any = lambda tensor, name: self._attribute(tensor, name)  # noqa: E731
            stack.enter_context(patch.object(FakeTensor, "__getattr__", look, create=True))
            stack.enter_context(watched_environ(self._environ))
            stack.enter_context(watched_files(self._files))
            stack.enter_context(refused_moves(self._known, self._warn_of_clock))
            yield

    def _attribute(self, fake: Tensor, name: str) -> Any:
        """Return what the user has set as an attribute of a parameter or buffer of the model.

        Raises `AttributeError`: there is none.
        """
        if self._known.may_name(name):
            for table, key in self._own.values():
                if table.get(key) is fake:
                    tensor = self._registered[id(table), key]
                    self._attributes[id(tensor), name] = tensor
                    if name in vars(tensor):
                        return vars(tensor)[name]
        raise AttributeError(f"{type(fake).__name__!r} object has no attribute {name!r}")

    def _collect(self) -> None:
        """Make guards of what was read, and settle by which path each input is found."""
        tensors: dict[int, tuple[Source, Tensor]] = {}
        trace = Trace(
            self._known,
            {key: (holder, original_of(value)) for key, (holder, value) in self._reads.items()},
            self._absent,
            self._tables,
            self._flags,
            self._attributes,
            self._whole,
            tensors,
            self._asked,
            self._changed,
            self._numbers,
            self._pinned,
            self._kinds,
        )
        names = Names(self._model, self._loss_fn, trace)
        self._settle_paths(names)
        inputs = [outer for outer, _ in self._inputs.values() if id(outer.tensor) in self._touched]
        for outer in inputs:
            if outer.source is not None and not outer.is_number:
                tensors[id(outer.tensor)] = outer.source, outer.tensor
        tensors |= {key: found for key in self._touched if (found := self._registered_at(key))}
        used = [outer.source for outer in inputs if outer.source is not None]
        called = [self._known.modules[key] for key in self._called if key in self._known.modules]
        # The others are on the way to a parameter or buffer.
        bare = [path for path, module in called if not [*module.parameters(), *module.buffers()]]
        used += [path.to("method", "forward") for path in bare]
        self.guards += guards_of(self._model, self._loss_fn, trace, names, used)
        self.guards += [*guards_of_environ(self._environ), *guards_of_files(self._files)]

    def _settle_paths(self, names: Names) -> None:
        """Find each tensor where the code assigns it anew, or else by a name that the code reads.

        Raises `UnsupportedOperatorError`: another name is read of what is assigned anew.
        """
        assigned: dict[int, list[OuterTensor]] = {}
        states: list[OuterTensor] = []
        for state in self.reassigned:
            assert state.source is not None and state.place is not None
            place = self._lasting(state.source, state.place)
            state = OuterTensor(state.tensor, state.source, place)
            states.append(state)
            assigned.setdefault(id(state.tensor), []).append(state)
        self.reassigned = states
        for key, states in assigned.items():
            if (registered := self._registered_at(key)) is not None:
                # A buffer is state by itself, whether the code reads it by that name or not.
                _refuse_one_left(states, [registered[0], *names.read(*registered)])
        for key, (outer, lifted) in self._inputs.items():
            if outer.is_number or outer.source is None or id(outer.tensor) not in self._touched:
                continue
            paths = names.read(outer.source, outer.tensor)
            states = assigned.get(id(outer.tensor), [])
            if states:
                _refuse_one_left(states, paths)
                self._inputs[key] = states[0], lifted
                continue
            source, place = outer.source, outer.place
            if paths and source not in paths:
                source = paths[0]
                place = self._lasting_to(source)
            self._inputs[key] = OuterTensor(outer.tensor, source, place), lifted

    def _lasting(self, source: Source, place: Place) -> Place:
        """Return a place that is found anew where the list or dict is replaced that has it."""
        parent, key = Source(source.root, source.steps[:-1]), place.key
        if isinstance(place.container, ElementsAt):
            if place.container.is_kept:
                return place
            return Place(ElementsAt(self._lasting(parent, place.container.place)), key)
        if source.steps[-1][0] != "item" or not is_replaced(place.container):
            return place
        return Place(ElementsAt(self._lasting_to(parent), is_kept=True), key)

    def _lasting_to(self, source: Source) -> Place:
        return resolve(source, self._model, self._loss_fn, is_lasting=True)

    def _registered_at(self, key: int) -> tuple[Source, Tensor] | None:
        """Return the path in the model to a parameter or buffer by its ``id``, and the tensor."""
        if key not in self._own or key not in self._known.tensors:
            return None
        source, _ = self._known.tensors[key]
        paths = [source, *self._known.again.get(key, ())]
        source = next((path for path in paths if path.steps[-1][0] == "child"), None)
        table, name = self._own[key]
        return None if source is None else (source, self._registered[id(table), name])

    # -- writes --------------------------------------------------------------------------------

    def _new_values(self, saved: list[Kept]) -> list[Tensor]:
        """List the state that was assigned anew; warn of all else that was changed."""
        held = Held(
            *(self._known, self._registered, self._own, self._touched, self._reads, self._absent),
            *(self._is_used, self._is_computed_with, self._given, self._stand_in),
        )
        found = assignments(held, saved)
        self._changed |= found.changed
        self.reassigned, self.written = found.states, found.written
        for what, left in found.lost:
            self._warn_of_write(what, *left)
        return found.values

    def _given(self) -> list[tuple[str, Tensor, Tensor]]:
        """List what the trace was given: the name, the user's tensor and the trace's."""
        found: list[tuple[str, Tensor, Tensor]] = []
        tensors = {id(outer.tensor): outer for outer, _ in self._inputs.values()}
        for (key, _), fake in self._fakes.items():
            if key in tensors and tensors[key].source is not None:
                found.append((str(tensors[key].source), tensors[key].tensor, fake))
        for table, name in self._own.values():
            if isinstance(table.get(name), FakeTensor):
                found.append((name, self._registered[id(table), name], table[name]))
        return found

    def _is_used(self, leaf: int) -> bool:
        """Say whether a number has decided something, or is a tensor of the trace."""
        place, _ = self._numbers.get(leaf, (None, None))
        inputs = (outer for outer, _ in self._inputs.values() if outer.place is place)
        return self._pinned.get(leaf, False) or any(
            id(outer.tensor) in self._touched for outer in inputs
        )

    def _is_computed_with(self, tensor: Tensor) -> bool:
        """Say whether an operator of the trace takes a tensor, more than its shape."""
        nodes = [proxy.node for (key, _), proxy in self._proxies.items() if key == id(tensor)]
        return any(node.users for node in [*nodes, _node_of(tensor)] if node is not None)

    def _warn_of_write(self, what: str, *left: Any) -> None:
        """Tell of a change; ``left``: where, and what the next call would find there."""
        if left:
            self.next_call.note(what, *left)
        self.warnings[
            f"{what} is changed by the model or by loss_fn while it runs. A compiled step runs no "
            "Python: what it was is put back, and stays. Return values that you want to see "
            "beside the loss, as (loss, extras); keep state in a buffer."
        ] = None

    def _warn_of_clock(self, clock: str, line: SourceLine) -> None:
        self.warnings[
            f"{line}: {clock}() in the model or loss_fn runs once, while the step is compiled: its "
            "time of then stays. Measure around the step, and give a time that the loss needs as "
            "a tensor of the batch."
        ] = None

    def _warn_of_look(self, func: Any) -> None:
        if func is Tensor.__format__ and users_line(("torch",)) is None:
            return  # the message of a check in a library, of which transformers writes many
        line = calling_line()
        self.warnings[
            f"{line}: {_LOOKS[func]} in the model or loss_fn runs once, while the step is "
            "compiled, where tensors have no values. Return the tensor beside the loss, as "
            "(loss, extras)."
        ] = line


class _Call:
    """One call of the user's code in a trace, with the arguments as the trace has them."""

    def __init__(self, state: OuterState, args: Any) -> None:
        self._state = state
        self.tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
        self._versions = [tensor._version for tensor in self.tensors]
        self.reassigned: list[Tensor] = []
        self.result: Any = None

    def look_at_arguments(self) -> None:
        """Note arguments that were written in place."""
        versions = [tensor._version for tensor in self.tensors]
        if versions != self._versions:
            self._state.warnings[
                "The model or loss_fn writes into a tensor of the batch. A compiled step computes "
                "with the new values, and leaves the caller's tensor as it is."
            ] = None


def _recorder(
    getter: Any,
    reads: dict[tuple[int, str], tuple[Any, Any]],
    absent: dict[tuple[int, str], Any],
    tables: dict[tuple[int, str], nn.Module],
    called: set[int],
    whole: set[int],
    modules: dict[int, nn.Module],
) -> Any:
    def read(holder: Any, name: str) -> Any:
        try:
            value = getter(holder, name)
        except AttributeError:
            if name[:2] != "__":
                holder = modules.get(_attributes_id(holder), holder)
                absent.setdefault((id(holder), name), holder)
            raise
        holder = modules.get(_attributes_id(holder), holder)
        if name == "training" or (name not in INTERNAL and name[:2] != "__"):
            reads.setdefault((id(holder), name), (holder, value))
        elif name in TABLES:
            tables.setdefault((id(holder), name), holder)
        elif name == "forward":
            called.add(id(holder))
        elif name in _ALL and id(holder) not in whole and users_line(_COPYING) is not None:
            whole.add(id(holder))
        return value

    return read


def _attributes_id(holder: Any) -> int:
    """Return the ``id`` of the dict of an object's attributes, 0 where it has none."""
    try:
        return id(object.__getattribute__(holder, "__dict__"))
    except AttributeError:
        return 0


def _maker(state: OuterState, tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: state.input(tensor)


def _node_of(value: Any) -> fx.Node | None:
    mode = get_proxy_mode()
    if mode is None or not isinstance(value, Tensor):
        return None
    tracer: Any = mode.tracer  # pyright: ignore[reportAttributeAccessIssue]
    slot: Any = get_proxy_slot(value, tracer, None)
    return None if slot is None else slot.proxy.node


def _dead_after(node: fx.Node, kept: Container[fx.Node | None]) -> list[fx.Node]:
    """List a node and all that follows from it, last first, if nothing of that has an effect."""
    found: list[fx.Node] = []
    left = [node]
    for each in left:  # grows
        is_pure = each is node or isinstance(each.target, torch._ops.OpOverload)
        if each in kept or not is_pure or (each is not node and each.is_impure()):
            return []
        found.append(each)
        left += [user for user in each.users if user not in left]
    return sorted(found, reverse=True)


def _refuse_one_left(states: Sequence[OuterTensor], paths: Iterable[Source]) -> None:
    """Refuse to read what was assigned anew by another name, which keeps the old one.

    Raises `UnsupportedOperatorError`: there is one among ``paths``.
    """
    known = {str(state.source) for state in states}
    left = [path for path in paths if str(path) not in known]
    if left:
        raise UnsupportedOperatorError(
            f"{states[0].source} and {left[0]} are one tensor, of which the model or loss_fn gives "
            f"{states[0].source} another and goes on to read {left[0]}: in a compiled step both "
            "are one input. Give each a tensor of its own before compile, such as .clone().",
            (("one tensor for two states", str(left[0])),),
        )
