"""A CUDA device's libraries and stream for whole training steps, in host memory.

PyTorch's CPU tensors pass for the device's: they are relabelled where the package hands them to
compiled code. Kernels run on the emulator, library calls are PyTorch's on the CPU, and everything
that a device would do appears in `Emulator.events` in the order of its one stream; `streams.py` has
another one for copies. A `Recorder` captures what the device is asked for, as a CUDA graph does,
and replays it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import tvm
import tvm_ffi
from torch.overrides import TorchFunctionMode

from relax_disc import pipeline
from relax_disc.training import compiled_function
from relax_disc.training.call import binding
from relax_disc.vm_builtins import runtime
from relax_disc.vm_builtins.capturing import capturing, is_capturing
from relax_disc.vm_builtins.guard import BY_TORCH, GUARD
from relax_disc.vm_builtins.libraries import install
from tests.cuda.attention_kernels import attention_kernels
from tests.cuda.emulator import Emulator, Relabelled, announced

_CPU, _CUDA, _PINNED = 1, 2, 3
_LIBRARIES = ("relax_disc.cuda.", "relax_disc.aten.")
ENTRY_WAITS = {
    "wait tolist in batch.py:_check_indices",  # the range of token ids
    "wait nonzero in packing.py:place_rows",  # how many positions are computed
    # the others read what lies on the host
    "wait __bool__ in guard.py:guard",
    "wait item in counters.py:advance",
    "wait __int__ in random_state.py:_draw",
}
"""The only waits of a step, at its entry; see `WaitsRecorded`."""
_WAITS = {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "nonzero", "equal"}


@contextmanager
def emulator_without_findings() -> Iterator[Emulator]:
    """Inside, steps compiled for CUDA run on the emulator, which knows of none before them.

    Fails at the end if it has found something wrong with a kernel.
    """
    emulator = Emulator.load()
    emulator.take_findings()
    emulator.forget()
    with cuda_stand_in(emulator):
        yield emulator
    assert not emulator.take_findings()


@contextmanager
def cuda_stand_in(emulator: Emulator) -> Iterator[None]:
    """Inside, steps compiled for CUDA run on the emulator; models and batches are the CPU's."""
    runtime.load()
    install.install("cuda")
    replaced = {
        "relax_disc.device_allocate": lambda device, size: _allocate(emulator, device, size),
        "relax_disc.device_copy": lambda source, target: _copy(emulator, source, target),
        "relax_disc.device_synchronize": lambda device: emulator.events.append("synchronise"),
    }
    for name in _library_names():
        function = tvm_ffi.get_global_func(name)
        if name == "relax_disc.cuda.matmul_add":
            function = _addend_last(function)
        replaced[name] = _on_host(emulator, name, function)
    replaced[GUARD] = _in_order(emulator, tvm_ffi.get_global_func(BY_TORCH))
    before = {name: tvm_ffi.get_global_func(name) for name in replaced}
    for name, function in replaced.items():
        tvm_ffi.register_global_func(name, function, override=True)
    device, from_dlpack = tvm.runtime.device, torch.from_dlpack
    plain_from_dlpack = tvm.runtime.from_dlpack

    def as_runtime(tensor: torch.Tensor, what: str) -> Any:
        if what == "hyper-parameters":  # on the host: no kernel may read them there
            return plain_from_dlpack(tensor)
        return binding.as_runtime(tensor, what)

    def as_torch(tensor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(tensor, torch.Tensor) and tensor.__dlpack_device__()[0] == _CUDA:
            tensor = Relabelled(tensor, _CPU)
        return from_dlpack(tensor, *args, **kwargs)

    @tvm.transform.module_pass(opt_level=0, name="announced")
    def announce(module: tvm.IRModule, _: Any) -> tvm.IRModule:
        return announced(module)

    def with_announcements(options: Any = None) -> Any:
        return tvm.transform.Sequential([pipeline.pipeline(options), announce])

    with ExitStack() as stack:
        stack.callback(_register_all, before)
        stack.enter_context(emulator.compiling())
        stack.enter_context(attention_kernels())
        for owner, name, value in (
            (torch, "from_dlpack", as_torch),
            (tvm.runtime, "from_dlpack", _to_device(plain_from_dlpack)),
            (compiled_function, "as_runtime", as_runtime),
            (tvm.runtime, "device", lambda kind, index=0: device("cuda", index)),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(mock.patch("relax_disc.compiler.pipeline", with_announcements))
        yield


class WaitsRecorded(TorchFunctionMode):
    """Notes each time that PyTorch would wait for the device to know a value."""

    def __init__(self, emulator: Emulator) -> None:
        super().__init__()
        self._emulator = emulator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _WAITS:
            caller = sys._getframe(1)
            place = f"{Path(caller.f_code.co_filename).name}:{caller.f_code.co_name}"
            self._emulator.events.append(f"wait {name} in {place}")
        return func(*args, **(kwargs or {}))


class Recorder:
    """PyTorch's interface to CUDA graphs, answered by lists of what the device was asked for.

    As on a device, nothing that is captured runs until it is replayed, addresses and numbers are
    those of the capture, and the host's part of a library call runs at the capture alone.

    Attributes
    ----------
    graphs : list
        All that were captured, each with its ``work``.
    """

    def __init__(self, emulator: Emulator) -> None:
        self._emulator = emulator
        self.graphs: list[Any] = []
        self._streams: list[Any] = [_Stream(0)]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, PyTorch has CUDA graphs."""
        recorder, emulator = self, self._emulator

        class Graph:
            def __init__(self) -> None:
                self.work: list[Callable[[], Any]] = []
                recorder.graphs.append(self)

            def replay(self) -> None:
                emulator.events.append("replay")
                with capturing():  # so a host's part that looks at a value refuses
                    for work in self.work:
                        emulator.ask(work)

        with ExitStack() as stack:
            for name, value in (
                ("CUDAGraph", Graph),
                ("graph", self._capture),
                ("graph_pool_handle", lambda: (0, 1)),
                ("stream", self.on),
                ("current_stream", lambda device=None: self._streams[-1]),
            ):
                stack.enter_context(mock.patch.object(torch.cuda, name, value))
            yield

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Make a stream current inside."""
        depth = len(self._streams)
        self._streams.append(stream)
        try:
            yield
        finally:
            del self._streams[depth:]

    @contextmanager
    def _capture(self, graph: Any, pool: Any, *, capture_error_mode: str) -> Iterator[None]:
        del pool, capture_error_mode
        before, self._emulator.ask = self._emulator.ask, graph.work.append
        self._streams.append(_Stream(len(self.graphs)))
        self._emulator.events.append("capture")
        try:
            yield
            self._streams.pop()  # PyTorch does not where a capture cannot be ended
        finally:
            self._emulator.ask = before


@dataclass(frozen=True)
class _Stream:
    """As far as the package looks at a stream."""

    cuda_stream: int
    device_index: int = 0


def _library_names() -> list[str]:
    ask = tvm_ffi.get_global_func("ffi.FunctionListGlobalNamesFunctor")()
    names = [str(ask(k)) for k in range(ask(-1))]
    return sorted(name for name in names if name.startswith(_LIBRARIES))


def _on_host(emulator: Emulator, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        given = [_as_host(value) for value in arguments]
        if is_capturing():
            _rehearse(function, given)
        returned = []  # a number that the host waited for

        def work() -> None:
            emulator.events.append(f"library {name.removeprefix('relax_disc.')}")
            returned.append(function(*given))

        emulator.ask(work)
        return returned[0] if returned else None

    return run


def _addend_last(function: Callable[..., None]) -> Callable[..., None]:
    """Let a product be rounded as cuBLAS rounds it, which adds the addend to the finished sum.

    PyTorch's `addmm` on a CPU (2.13, MKL) adds product after product to it where there are no more
    than three rows: with 64 of them, a hundredth as large, its error is eight times as large.
    """

    def addmm(addend: Any, left: Any, right: Any, *, out: Any) -> Any:
        return torch.add(addend, left @ right, out=out)

    def run(*arguments: Any) -> None:
        with mock.patch.object(torch, "addmm", addmm):
            function(*arguments)

    return run


def _in_order(emulator: Emulator, function: Callable[..., None]) -> Callable[..., None]:
    """Let what PyTorch copies to the device be copied in the order of the stream."""

    def run(*arguments: Any) -> None:
        given = arguments
        if is_capturing():
            given = [_as_host(value) for value in arguments]
            _rehearse(function, given)
        emulator.ask(lambda: function(*given))

    return run


def _rehearse(function: Callable[..., None], given: Sequence[Any]) -> None:
    """Run the host's part of a function that is captured; what makes its tensors has not run."""
    function(*(_zeros_for(value) for value in given))


def _zeros_for(value: Any) -> Any:
    if not isinstance(value, tvm_ffi.Tensor):
        return value
    return tvm_ffi.from_dlpack(torch.zeros_like(torch.from_dlpack(value)))


def _as_host(value: Any) -> Any:
    if hasattr(value, "__dlpack_device__") and value.__dlpack_device__()[0] == _CUDA:
        # By way of PyTorch, whose tensors have sizes of their own: a binding changes its views'.
        return tvm_ffi.from_dlpack(torch.from_dlpack(Relabelled(value, _CPU)))
    return value


def _to_device(from_dlpack: Callable[..., Any]) -> Callable[..., Any]:
    def relabelled(tensor: Any) -> Any:
        if isinstance(tensor, torch.Tensor):
            tensor = Relabelled(tensor, _CUDA)
        return from_dlpack(tensor)

    return relabelled


def _allocate(emulator: Emulator, device: Any, size: int) -> Any:
    pinned = device.dlpack_device_type() == _PINNED
    emulator.events.append(f"pin {size}" if pinned else "allocate")
    memory = torch.full((size + 255,), 0xFF, dtype=torch.uint8)  # NaN, until something is written
    if emulator.memory is not None:
        emulator.memory.append(memory)
    first = -memory.data_ptr() % 256
    if pinned:
        return tvm_ffi.from_dlpack(memory[first : first + size])
    return tvm_ffi.from_dlpack(Relabelled(memory[first : first + size], _CUDA))


def _copy(emulator: Emulator, source: Any, target: Any) -> None:
    there, here = torch.from_dlpack(target), torch.from_dlpack(source)

    def work() -> None:
        emulator.events.append("copy")
        there.copy_(here)

    emulator.ask(work)


def _register_all(functions: dict[str, Any]) -> None:
    for name, function in functions.items():
        tvm_ffi.register_global_func(name, function, override=True)
