"""A CUDA device's libraries and stream for whole training steps, in host memory.

PyTorch's CPU tensors pass for the device's: they are relabelled where the package hands them to
compiled code. Kernels run on the emulator, library calls are PyTorch's on the CPU, and everything
that a device would do appears in `Emulator.events` in the order of its one stream; `streams.py` has
another one for copies.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
from relax_disc.vm_builtins.guard import GUARD
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
        replaced[name] = _on_host(emulator, name, tvm_ffi.get_global_func(name))
    replaced[GUARD] = _in_order(emulator, tvm_ffi.get_global_func(GUARD))
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


def _library_names() -> list[str]:
    ask = tvm_ffi.get_global_func("ffi.FunctionListGlobalNamesFunctor")()
    names = [str(ask(k)) for k in range(ask(-1))]
    return sorted(name for name in names if name.startswith(_LIBRARIES))


def _on_host(emulator: Emulator, name: str, function: Callable[..., None]) -> Callable[..., None]:
    def run(*arguments: Any) -> None:
        given = [_as_host(value) for value in arguments]

        def work() -> None:
            emulator.events.append(f"library {name.removeprefix('relax_disc.')}")
            function(*given)

        emulator.ask(work)

    return run


def _in_order(emulator: Emulator, function: Callable[..., None]) -> Callable[..., None]:
    """Let what PyTorch copies to the device be copied in the order of the stream."""
    return lambda *arguments: emulator.ask(lambda: function(*arguments))


def _as_host(value: Any) -> Any:
    if hasattr(value, "__dlpack_device__") and value.__dlpack_device__()[0] == _CUDA:
        return tvm_ffi.from_dlpack(Relabelled(value, _CPU))
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
