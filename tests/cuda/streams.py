"""Two streams of the device, which run what they were asked for out of step.

What the stand-in's device is asked for goes into the queue of the virtual machine's stream, copies
to and from pinned memory into that of a second one. One of them runs whatever it may, the other
only what somebody waits for, or chance decides; so what lacks an event runs too early or too late,
and reads or leaves wrong bits. The package's own calls come here: PyTorch's interface to streams
and events is answered by `src/streams.cc`, its copies by a kernel for tensors that claim to be on
the device.

>>> streams = Streams(emulator, "copies")    # run late
>>> with streams.running():
...     loss = step(*batch)
>>> streams.finish()
"""

from __future__ import annotations

import ctypes
import functools
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch

from tests.cuda.emulator import Emulator, _compiled

KERNELS, COPIES = 0, 1
Late = Literal["copies", "kernels", "chance"]
_ANSWERS = (
    ("record", ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)),
    ("block", ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)),
    ("query", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)),
    ("synchronize", ctypes.CFUNCTYPE(None, ctypes.c_int64)),
)


class Streams:
    """Their queues, the events, and what the caller asked for in its order.

    Parameters
    ----------
    emulator : Emulator
        Whose kernels run on the first stream.
    late : str
        Which stream runs only what must be.
    ignored : collection of str
        Waits that a broken build would lack: "copies wait" for kernels; "kernels wait for
        offloads", "kernels wait for reloads".
    """

    def __init__(self, emulator: Emulator, late: Late, ignored: Collection[str] = ()) -> None:
        self._emulator, self._late, self._ignored = emulator, late, ignored
        self._chance = random.Random(0)
        self._queues: tuple[deque[Any], deque[Any]] = (deque(), deque())
        self._kinds: dict[int, str] = {}  # of events: what the stream did before
        self._last_kind = ""
        self.asked: list[str] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, the device has these streams; at the end the second still has work to do."""
        library = _library()
        kept = [kind(getattr(self, name)) for name, kind in _ANSWERS]
        _ANSWERING[:] = [*_ANSWERING, *kept]  # whoever has an event may ask later, too
        table = (ctypes.c_void_p * len(kept))(
            *(ctypes.cast(each, ctypes.c_void_p).value for each in kept)
        )
        before = self._emulator.ask
        self._emulator.ask = functools.partial(self._ask, KERNELS)
        self._emulator.memory = self._emulator.memory or []
        _copies(self)
        library.emu_install(table)
        try:
            # While a model is exported PyTorch would put a device without streams in its place.
            with mock.patch.object(torch._C, "_ensureCUDADeviceGuardSet", lambda: None):
                yield
        finally:
            library.emu_install(None)
            self._emulator.ask = before

    def finish(self) -> None:
        """Run what is left, as reading a result would."""
        while self._step(KERNELS) or self._step(COPIES):
            pass
        assert not any(self._queues), "the streams wait for each other"

    def poison(self) -> None:
        """Let whoever reads what the device had before see NaN."""
        for memory in self._emulator.memory or ():
            memory.fill_(0xFF)

    def record(self, stream: int) -> int:
        """Make an event of all that a stream was asked for."""
        event = next(_NUMBERS)
        self._kinds[event] = self._last_kind if stream == COPIES else "kernel"
        self._put(stream, ("record", event))
        return event

    def block(self, event: int, stream: int) -> None:
        """Let a stream wait for an event."""
        copies = stream == COPIES
        name = "copies wait" if copies else f"kernels wait for {self._kinds[event]}s"
        self.asked.append(name)
        if name not in self._ignored:
            self._put(stream, ("wait", event))

    def query(self, event: int) -> int:
        """Tell whether an event has come."""
        return event in _DONE

    def synchronize(self, event: int) -> None:
        """Let the caller wait."""
        self.asked.append("synchronise")
        while event not in _DONE:
            assert self._step(KERNELS) or self._step(COPIES)

    def copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        """Copy between the device and the host, on the stream that is current."""
        stream = _library().emu_current_stream()
        assert non_blocking and stream == COPIES, "such a copy would keep the caller waiting"
        self._last_kind = "offload" if target.device.type == "cpu" else "reload"
        self.asked.append(self._last_kind)
        there, here, size = target.data_ptr(), source.data_ptr(), source.nbytes
        self._ask(COPIES, lambda: ctypes.memmove(there, here, size))

    def _ask(self, stream: int, work: Callable[[], Any]) -> None:
        if stream == KERNELS:
            self.asked.append("kernel")
        self._put(stream, ("run", work))

    def _put(self, stream: int, item: tuple[str, Any]) -> None:
        self._queues[stream].append(item)
        if self._late == "chance":
            for _ in range(self._chance.randrange(4)):
                self._step(self._chance.choice((KERNELS, COPIES)))
            return
        early, late = (KERNELS, COPIES) if self._late == "copies" else (COPIES, KERNELS)
        while self._step(early) or (self._queues[early] and self._step(late)):
            pass

    def _step(self, stream: int) -> bool:
        """Do what is next in a stream, unless it waits; whether it was done."""
        queue = self._queues[stream]
        if not queue or (queue[0][0] == "wait" and queue[0][1] not in _DONE):
            return False
        kind, what = queue.popleft()
        if kind == "run":
            with torch.inference_mode(False):  # the mode of whoever asked for something else
                what()
        if kind == "record":
            _DONE.add(what)
        return True


@functools.cache
def _library() -> ctypes.CDLL:
    pytorch = Path(torch.__file__).parent
    code = (Path(__file__).parent / "src/streams.cc").read_text()
    flags = [f"-L{pytorch / 'lib'}", "-lc10"]
    path = _compiled(code, ["-std=c++20", f"-isystem{pytorch / 'include'}"], flags)
    library = ctypes.CDLL(str(path))
    library.emu_current_stream.restype = ctypes.c_int64
    return library


_NUMBERS = count(1)  # of events
_DONE: set[int] = set()
_ANSWERING: list[Any] = []
_RUNNING: list[Streams] = []
_KERNEL: list[torch.library.Library] = []


def _copies(streams: Streams) -> None:
    """Let copies of tensors that claim to be on the device go to these streams."""
    _RUNNING[:] = [streams]
    if _KERNEL:
        return

    def copy_(
        target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        _RUNNING[0].copy(target, source, non_blocking)
        return target

    _KERNEL.append(torch.library.Library("aten", "IMPL"))
    _KERNEL[0].impl("copy_", copy_, "CUDA")
