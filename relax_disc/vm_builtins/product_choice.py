"""Choose once for a machine which kernels multiply float32: our own, or PyTorch's.

Neither wins everywhere: MKL is slower than our products on AMD's processors and faster on Intel's,
and on both it depends on the sizes.  Products fall into classes of layout, narrowest extent and
work (``product_class`` of the library).  The first compile on a processor with a number of threads
times one product of each class both ways, in some seconds, and keeps the result in the folder
`products` of the cache directory; PyTorch's kernels take the classes in which they are faster by
more than 5 percent.

Results differ between both by rounding.  So that they are the same bits in every run, a table never
changes in a process, the first file of a machine stays, and where none can be kept our own kernels
multiply; so they do on a number of threads that nothing was compiled or loaded for.
``RELAX_DISC_PRODUCTS=own`` or ``=pytorch`` pins the choice instead.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tvm_ffi

from relax_disc.errors import InputMismatchError
from relax_disc.progress import phase
from relax_disc.vm_builtins import native

_logger = logging.getLogger(__name__)

VARIABLE = "RELAX_DISC_PRODUCTS"
_PINNED = {"own": 0, "pytorch": 1, "measured": -1}
_FORMAT = 2
_LEAST_GAIN = 1.05  # PyTorch's kernels need memory of their own
_LEAST_GAIN_ALONE = 0.95  # on one thread, for those that are timed on more: 1.04 became 1.12
# The least time of a kernel is believed when it was reached so often, but for a tenth: on a busy
# machine a product on several threads is disturbed more often than not.
_REACHED, _NEAR = 5, 1.1
_MOST_ROUNDS = 20
_FEW_ROUNDS = 8  # on several threads, which on a busy machine wait milliseconds for each other
_LEAST_NS = 30_000  # of one timing, so that the clock's steps do not count
_MANY, _BATCH, _LARGE_BATCH = 128, 8, 2  # the last of what takes many milliseconds
_LONG = 4  # rows of large products in batches, such as experts', to columns and depth
_VECTOR, _THIN, _NARROW = 1, 3, 12  # smallest extents that are timed
# Widths of models are multiples of vectors; MKL takes 1.1 times as long for 813 as for 832.
_WIDTH, _LEAST_WIDE = 32, 64
_lock = threading.Lock()
_known: dict[int, bool] = {}


@dataclass(frozen=True, slots=True)
class Probe:
    """Products of `[m, k]` by `[k, n]` that stand for their class."""

    count: int
    m: int
    n: int
    k: int
    operands: int  # 0: rows contiguous, 1: columns of b, 2: columns of a

    @property
    def index(self) -> int:
        """The class."""
        sizes = (self.count, self.m, self.n, self.k, self.operands)
        return int(_library("product_class")(*sizes))


@dataclass(frozen=True, slots=True)
class Choice:
    """What was measured on one processor with one number of threads."""

    processor: str
    torch: str
    threads: int
    gains: dict[int, float]  # time of our kernel / time of PyTorch's, by class

    def classes(self) -> list[int]:
        """Name the classes that PyTorch's kernels multiply."""
        return sorted(index for index, gain in self.gains.items() if gain > _LEAST_GAIN)


def choose() -> None:
    """Set the choice of the present number of threads, once: from the cache, or by measuring.

    Raises `InputMismatchError`: the environment variable has no such value.
    """
    pinned = os.environ.get(VARIABLE, "measured")
    if pinned not in _PINNED:
        raise InputMismatchError(f"{VARIABLE}={pinned}; allowed are {', '.join(_PINNED)}.")
    if pinned != "measured":
        _library("force_products")(_PINNED[pinned])
        return
    threads = torch.get_num_threads()
    with _lock:
        if threads in _known or not _library("has_other_products")():
            return
        path = choice_path(threads)
        choice = read(path) or _measured(path, threads)
        classes = [] if choice is None else choice.classes()
        _known[threads] = bool(_library("choose_products")(threads, tvm_ffi.Shape(tuple(classes))))
        if not _known[threads]:
            _logger.warning("products ran before they were measured on %d threads", threads)


def choice_path(threads: int) -> Path:
    """Name the file of this processor with so many threads."""
    kernels = ("matrix tiles",) if _library("has_matrix_tiles")() else ()
    key = "\n".join((native.processor_identity(), torch.__version__, str(_FORMAT), *kernels))
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    return native.cache_directory() / "products" / f"{name}-{threads}.json"


def read(path: Path) -> Choice | None:
    """Read what was measured; None where there is nothing that can be used."""
    try:
        facts = json.loads(path.read_text())
        gains = {int(index): float(gain) for index, gain in facts["gains"].items()}
        return Choice(facts["processor"], facts["torch"], int(facts["threads"]), gains)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        _logger.warning("%s cannot be used, products are measured again: %s", path, error)
        path.unlink(missing_ok=True)
        return None


def keep(path: Path, choice: Choice) -> Choice | None:
    """Write what was measured, unless another process was first; return what is there."""
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(asdict(choice), indent=1))
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    except OSError as error:
        _logger.warning("own kernels multiply, the choice is not kept in %s: %s", path, error)
        return None
    return read(path)


def measure(threads: int) -> Choice:
    """Time every class both ways.

    First on one thread, whose own clock does not run while others have the core: on a busy machine
    a product on several threads waits for each of them.  Where PyTorch's kernels are nearly as fast
    there, the present threads decide, unless their times do not settle.
    """
    torch.set_num_threads(1)
    try:
        gains = {probe: _gain(probe, 1)[0] for probe in probes()}
    finally:
        torch.set_num_threads(threads)
    near = [probe for probe, gain in gains.items() if gain > _LEAST_GAIN_ALONE]
    for probe in near if threads > 1 else ():
        gain, is_settled = _gain(probe, threads)
        if is_settled:
            gains[probe] = gain
    by_class = {probe.index: gain for probe, gain in gains.items()}
    return Choice(native.processor_name(), torch.__version__, threads, by_class)


def probes() -> Iterator[Probe]:
    """One product for each class that may be chosen.

    Left out are products so small that the way to PyTorch takes longer than they do, and small
    batches with columns of b: there MKL packs, and both are equally fast.
    """
    for operands in range(3):
        for octave in range(15, 30, 2):  # the work is 2 ** octave multiply-adds
            side = _width(2 ** (octave / 3))
            yield Probe(1, side, side, side, operands)
            if octave > 21:
                narrow = (2**octave / _LONG) ** (1 / 3)
                sides = _width(_LONG * narrow), _width(narrow), _width(narrow)
                yield Probe(_BATCH if octave < 27 else _LARGE_BATCH, *sides, operands)
            elif operands != 1:
                yield Probe(_BATCH, side, side, side, operands)
            if octave <= 19:
                yield Probe(_MANY, side, side, side, operands)
        for smallest in (_THIN, _NARROW):
            for octave in range(13, 24, 2):
                yield from _thin(1, octave, smallest, operands)
        for smallest, least in ((_VECTOR, 9), (_NARROW, 11)):  # narrower ones share their classes
            for octave in range(least, 16, 2):
                yield from _thin(_MANY, octave, smallest, operands)


def _thin(count: int, octave: int, smallest: int, operands: int) -> Iterator[Probe]:
    """Products whose rows, columns or depth are few."""
    side = _width((2**octave / smallest) ** 0.5)
    yield Probe(count, smallest, side, side, operands)
    yield Probe(count, side, smallest, side, operands)
    yield Probe(count, side, side, smallest, operands)


def _width(side: float) -> int:
    return round(side) if side < _LEAST_WIDE else round(side / _WIDTH) * _WIDTH


def _measured(path: Path, threads: int) -> Choice | None:
    with phase(f"time products of matrices on {threads} threads, once per machine"):
        return keep(path, measure(threads))


def _gain(probe: Probe, threads: int) -> tuple[float, bool]:
    """Least time of our kernel / PyTorch's, over rounds that take turns; whether both settled."""
    ours, theirs = (_call(probe, prefix) for prefix in ("own_", "aten_"))
    clock = time.thread_time_ns if threads == 1 else time.perf_counter_ns
    theirs()
    repeats = max(1, _LEAST_NS // max(1, min(_timed(theirs, 1, clock) for _ in range(_REACHED))))
    times: dict[Callable[[], object], list[int]] = {ours: [], theirs: []}
    for turn in range(_MOST_ROUNDS if threads == 1 else _FEW_ROUNDS):
        for function in (ours, theirs) if turn % 2 == 0 else (theirs, ours):
            times[function].append(_timed(function, repeats, clock))
        if is_settled := all(map(_is_settled, times.values())):
            break
    return round(min(times[ours]) / max(1, min(times[theirs])), 3), is_settled


def _is_settled(times: list[int]) -> bool:
    least = min(times)
    return sum(each <= _NEAR * least for each in times) >= _REACHED


def _timed(function: Callable[[], object], repeats: int, clock: Callable[[], int]) -> int:
    start = clock()
    for _ in range(repeats):
        function()
    return clock() - start


def _call(probe: Probe, prefix: str) -> Callable[[], object]:
    """Make a call of the kernel on operands of its own."""
    batch = () if probe.count == 1 else (probe.count,)
    rows_of_a = (probe.k, probe.m) if probe.operands == 2 else (probe.m, probe.k)
    rows_of_b = (probe.n, probe.k) if probe.operands == 1 else (probe.k, probe.n)
    shapes = ((*batch, *rows_of_a), (*batch, *rows_of_b), (*batch, probe.m, probe.n))
    a, b, c = (tvm_ffi.from_dlpack(torch.zeros(shape)) for shape in shapes)
    if not batch:
        function = _library(f"{prefix}matmul")
        flags = (1, 1, int(probe.operands == 2), int(probe.operands == 1))
        return lambda: function(a, b, *flags, c)
    function = _library(f"{prefix}batch_matmul")
    axes = tuple(0x021 if probe.operands == which else 0x012 for which in (2, 1))
    return lambda: function(a, b, *axes, 0x012, c)


def _library(name: str) -> Any:
    return tvm_ffi.get_global_func(f"relax_disc.cpu.{name}")
