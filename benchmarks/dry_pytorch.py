"""Peak memory and modelled time of a training step of PyTorch's, in a dry run: no kernel runs.

Eager steps run on fake tensors, with and without layers that are computed again
(`torch.utils.checkpoint`).  For torch.compile the program that Inductor writes for the CPU runs:
its allocations are made of fake tensors, its kernels are left out.  Modes under which all
operators pass count the storages that are alive, and what the kernels would take
(`benchmarks.dry_time`).  Scratch memory inside a kernel is not seen.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint

from benchmarks.dry_time import Machine, ModelledTime, flops_of_product


@dataclass(frozen=True, slots=True)
class Counted:
    """Peak of a step in bytes, parameters and state included, and its modelled time."""

    peak_bytes: int
    nanoseconds: float


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operators have made and that are still alive.

    Attributes
    ----------
    now, peak : int
        Bytes at present, and the most since `peak` was set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator, and count what it made."""
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self.count(value)
        return result

    def count(self, tensor: Tensor) -> None:
        """Count a tensor's storage, once."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def gone(_: Any) -> None:
            self.now -= size
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


class EagerStep:
    """Training steps of a language model on fake tensors; AdamW, fused.

    Parameters
    ----------
    make : callable
        Returns the model; ``model(ids, labels)`` is its loss, ``model.blocks`` its layers.
    machine : Machine
        What times are modelled for.
    checkpointed : bool
        Compute every layer again in the backward pass.
    """

    def __init__(
        self, make: Callable[[], nn.Module], machine: Machine, *, checkpointed: bool = False
    ) -> None:
        self._machine = machine
        self._modes = FakeTensorMode(), LiveBytes()
        with self._modes[0], self._modes[1]:
            self._model: Any = make()
            if checkpointed:
                for block in self._model.blocks:
                    again = functools.partial(checkpoint, block.forward, use_reentrant=False)
                    block.forward = again
            self._optimizer = torch.optim.AdamW(self._model.parameters(), fused=True)
        self.count(1, 4)  # makes the optimizer's state

    def count(self, rows: int, length: int) -> Counted:
        """Count a step at one shape."""
        fake, live = self._modes
        with fake, live, ModelledTime(self._machine) as time:
            ids, labels = (torch.zeros(rows, length, dtype=torch.long) for _ in range(2))
            live.peak = live.now
            self._model(ids, labels).backward()
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return Counted(live.peak, time.nanoseconds)


@dataclass(frozen=True, slots=True)
class _Half:
    """A program of Inductor's: a function that takes a list, and names of what goes in and out."""

    kernels: _Kernels
    run: Callable[[list[Any]], Sequence[Any]]
    inputs: tuple[str, ...]
    values: tuple[Any, ...]
    outputs: tuple[str | None, ...]


class _Kernels:
    """Stands for the kernels of a program, which write into memory that is given.

    Attributes
    ----------
    time : ModelledTime, optional
        Is told of each.
    """

    def __init__(self) -> None:
        self.time: ModelledTime | None = None

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Look a library's kernel up: `extern_kernels` of the program."""

        def run(*args: Any, out: Tensor, **scales: Any) -> None:
            """Leave the memory as it is."""
            if self.time is not None:
                self.time.add(args, out, flops_of_product(name, args, out))

        return run

    def generated(self, argument_types: Sequence[str], source: str) -> Callable[..., None]:
        """Stand for a kernel that Inductor wrote; what it changes is read and written."""
        del argument_types
        head = re.search(r"void\s+kernel\((.*?)\)", source, re.DOTALL)
        assert head is not None, source
        names = [part.split()[-1].lstrip("*") for part in head[1].split(",")]

        def run(*args: Any) -> None:
            """Leave the memory as it is."""
            if self.time is not None:
                changed = [x for x, n in zip(args, names, strict=True) if n.startswith("in_out")]
                self.time.add(args, changed)

        return run


class _Done(Exception):
    """Ends `torch.compile` once both programs are there: nothing is to run."""


class CompiledStep:
    """Training steps of `torch.compile(dynamic=True)` without kernels; AdamW, fused.

    Parameters
    ----------
    make : callable
        Returns the model, on the CPU; its memory is not touched.
    machine : Machine
        What times are modelled for.
    rows, length : int
        What it is compiled with first; the partitioner estimates with these sizes.
    budget : float, optional
        ``activation_memory_budget``: what the backward pass may keep, of what it would without one.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        machine: Machine,
        rows: int,
        length: int,
        budget: float = 1.0,
    ) -> None:
        model = make()
        self._machine = machine
        self._halves = _compiled(model, rows, length, budget)
        assert len(self._halves) == 2, "one graph with its gradients"
        self._parameters = [p.nbytes for p in model.parameters()]

    def count(self, rows: int, length: int) -> Counted:
        """Count a step at one shape; AdamW's update is one kernel."""
        forward, backward = self._halves
        sizes = {}
        for value in forward.values:
            if isinstance(value, Tensor) and value.dtype == torch.long and value.dim() == 2:
                sizes = dict(zip(map(str, value.shape), (rows, length), strict=True))
        with FakeTensorMode(), LiveBytes() as live, ModelledTime(self._machine) as time:
            given = {
                name: _fake(value, sizes)
                for name, value in zip(forward.inputs, forward.values, strict=True)
            }
            live.now += 2 * sum(self._parameters)  # the optimizer's state
            live.peak, time.nanoseconds = live.now, 0.0
            for half in (forward, backward):
                half.kernels.time = time
            made = dict(zip(forward.outputs, forward.run(list(given.values())), strict=True))
            held = {**given, **made}
            made.clear()
            arguments = [
                torch.ones(()) if name.startswith("tangents") else held[name]
                for name in backward.inputs
            ]
            held.clear()
            gradients = [x.nbytes for x in backward.run(arguments) if isinstance(x, Tensor)]
            assert sorted(gradients) == sorted(self._parameters)
        update = 7 * sum(self._parameters) / self._machine.bytes_per_ns + self._machine.launch_ns
        return Counted(live.peak, time.nanoseconds + update)


def _fake(value: Any, sizes: Mapping[str, int]) -> Any:
    """Make an input of the program at a shape."""
    if not isinstance(value, Tensor):
        return sizes[str(value)]
    shape = [sizes.get(str(size)) or int(size) for size in value.shape]
    return torch.zeros(shape, dtype=value.dtype)


def _compiled(model: nn.Module, rows: int, length: int, budget: float) -> list[_Half]:
    """Compile forward and backward pass with Inductor, but for the kernels."""
    found: list[_Half] = []

    def keep(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        holders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        names = tuple(node.name for node in holders)
        values = tuple(node.meta["val"] for node in holders)
        returned: Any = graph.graph.output_node().args[0]
        outputs = tuple(getattr(node, "name", None) for node in returned)
        kernels = _Kernels()
        with patch.object(
            AsyncCompile, "cpp_pybinding", lambda self, *told: kernels.generated(*told)
        ):
            made: Any = compile_fx_inner(graph, inputs, **options)
        run = _without_kernels(made.current_callable, kernels)
        found.append(_Half(kernels, run, names, values, outputs))
        made.current_callable = stop
        return made

    def stop(_: Any) -> None:
        raise _Done

    tokens = torch.zeros((rows, length), dtype=torch.long)
    torch.compiler.reset()
    with ExitStack() as stack:
        stack.enter_context(functorch_config.patch(activation_memory_budget=budget))
        stack.enter_context(inductor_config.patch(force_disable_caches=True, compile_threads=1))
        compiled = torch.compile(
            model, dynamic=True, backend=lambda *given: compile_fx(*given, inner_compile=keep)
        )
        try:
            compiled(tokens, tokens)
        except _Done:
            pass
    return found


def _without_kernels(run: Any, kernels: _Kernels) -> Any:
    """Let a program of Inductor's allocate by operators, and run nothing."""
    names = getattr(run, "__func__", run).__globals__

    def allocate(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)

    def view(tensor: Tensor, size: Any, stride: Any, offset: int = 0) -> Tensor:
        return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)

    def nothing(*_: Any, **__: Any) -> None:
        """Check nothing: the memory has no contents."""

    names.update(
        empty_strided_cpu=allocate,
        reinterpret_tensor=view,
        extern_kernels=kernels,
        assert_size_stride=nothing,
        assert_alignment=nothing,
        async_compile=SimpleNamespace(),
    )
    return run
