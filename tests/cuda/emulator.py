"""Run the CUDA C that TVM emits on the CPU, and find what is wrong with it.

`src/device.cc` is a CUDA device in host memory; `src/emulator.h` lets a C++ compiler compile
kernels.

>>> emulator = Emulator.load()
>>> with emulator.compiling():
...     program = tvm.compile(module, cuda_target("sm_90"))
>>> program(emulator.tensor(x), emulator.tensor(y))
>>> emulator.take_findings()
[Finding(kernel='scale_kernel', line=3, what='out of bounds', ...)]
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import tvm
import tvm_ffi
from tvm import tirx

SOURCES = Path(__file__).parent / "src"
_CPU, _CUDA = 1, 2
_SMALL_SHARE = 4
_SCALAR_SECTORS = 16
_SIGNATURE = re.compile(
    r'extern "C" __global__ void (?:__launch_bounds__\(\d+\) )?(\w+)\((.*)\) \{'
)
_POINTER = re.compile(r"(?:const )?((?:un)?signed )?(\w+)\*(?: __restrict__)? (\w+)")
_CAST = re.compile(r"\((?:const )?(?:volatile )?((?:(?:un)?signed )?\w+)\*\)")
_SHARED = re.compile(r"__shared__ (?:alignas\(\d+\) )?((?:(?:un)?signed )?\w+) (\w+)\[(\d+)\];")
_DYNAMIC = re.compile(r"extern __shared__ (?:alignas\(\d+\) |__align__\(\d+\) )?(\w+) (\w+)\[\];")


@dataclass(frozen=True)
class Finding:
    """Something that no kernel may do; ``line`` and ``text`` are of the CUDA source."""

    kernel: str
    line: int
    what: str
    detail: str
    times: int
    text: str

    def __str__(self) -> str:
        where = f"{self.kernel}, line {self.line}: {self.what} ({self.detail}), {self.times} times"
        return f"{where}\n    {self.text[:240]}"


@dataclass(frozen=True)
class Traffic:
    """Sectors of 32 bytes that a call moved between an argument and its kernels."""

    read: int
    written: int
    least_read: int
    least_written: int


@dataclass(frozen=True)
class Counts:
    """What a launch did, told from a sample of its blocks (`Emulator.sampling`).

    ``instructions``, ``sectors``: of the warps, loads and stores of global memory and the sectors
    that they ask for; ``longest``: of those, the thread's that has most; ``shared_bytes``: a block.
    """

    instructions: float
    sectors: float
    longest: float
    shared_bytes: float


@dataclass
class Call:
    """One call of a kernel's host function: its launches, and the traffic of each argument."""

    function: str
    launches: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    counts: list[Counts] = field(default_factory=list)
    traffic: dict[str, Traffic] = field(default_factory=dict)

    def traffic_ratio(self) -> float:
        """Sectors moved over the least that touches each sector once.

        What is small beside the largest argument (a bias, statistics of rows) stays in the device's
        cache, so each of its sectors counts once.
        """
        least = {name: t.least_read + t.least_written for name, t in self.traffic.items()}
        large = max(least.values(), default=0) / _SMALL_SHARE
        moved = {
            name: t.read + t.written if least[name] > large else least[name]
            for name, t in self.traffic.items()
        }
        return sum(moved.values()) / max(sum(least.values()), 1)

    @property
    def is_one_thread(self) -> bool:
        """Whether one thread does what many could."""
        sectors = sum(t.least_read + t.least_written for t in self.traffic.values())
        single = any(extents == (1,) * 6 for _, extents in self.launches)
        return single and sectors > _SCALAR_SECTORS


class Emulator:
    """The device of this process; see `load`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._sources: dict[str, list[str]] = {}
        self._names: dict[str, bytes] = {}
        self.events: list[str] = []
        self.calls: list[Call] = []
        self.seed = 0
        # How work of the device's stream is done, and what it allocates where that is kept.
        self.ask: Callable[[Callable[[], None]], None] = lambda work: work()
        self.memory: list[torch.Tensor] | None = None

    @staticmethod
    @functools.cache
    def load() -> Emulator:
        """Make the device, once per process.

        Raises
        ------
        RuntimeError
            The process has a real one.
        """
        if tvm_ffi.get_global_func("device_api.cuda", allow_missing=True) is not None:
            raise RuntimeError("this process has a CUDA run time")
        tvm_ffi.register_global_func("relax_disc.emulator.record", _record)
        packages = [Path(module.__file__ or "").parent for module in (tvm, tvm_ffi)]
        flags = [f"-I{package}/include" for package in packages]
        flags += [f"-L{package}/lib" for package in packages] + ["-ltvm_runtime", "-ltvm_ffi"]
        path = _compiled((SOURCES / "device.cc").read_text(), ["-O2"], flags)
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        for name in ("emu_take_findings", "emu_traffic"):
            getattr(library, name).restype = ctypes.c_char_p
        emulator = Emulator(library)
        tvm_ffi.register_global_func("relax_disc.emulator.begin_call", emulator._begin_call)
        return emulator

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Inside, what is compiled for CUDA runs here; its kernels call by `announced`."""
        name = "target.build.cuda"
        build = tvm_ffi.get_global_func(name)
        host_target = tvm.target.Target("llvm")

        def build_and_register(module: tvm.IRModule, target: Any) -> Any:
            made = build(module, target)
            self._register(module, made.inspect_source())
            # Not that one: it refuses to run.  Kernels are found among the global functions.
            return tvm_ffi.get_global_func("target.build.llvm")(tvm.IRModule(), host_target)

        tvm_ffi.register_global_func(name, build_and_register, override=True)
        try:
            yield
        finally:
            tvm_ffi.register_global_func(name, build, override=True)

    @contextmanager
    def sampling(self, most_blocks: int) -> Iterator[None]:
        """Inside, at most so many blocks of a launch run: results are not all there.

        What is counted is told for all blocks, and is in `Call.counts`, too; races are not looked
        for.
        """
        self._library.emu_sample(ctypes.c_int64(most_blocks))
        try:
            yield
        finally:
            self._library.emu_sample(ctypes.c_int64(0))

    def add_source(self, source: str) -> dict[str, Callable[..., None]]:
        """Compile CUDA C; kernels by name, called as ``kernel(grid, block, *arguments)``."""
        body, library = self._compile(source)
        found: dict[str, Callable[..., None]] = {}
        for match in _SIGNATURE.finditer(body):
            name, parameters = match.group(1), match.group(2)

            def run(
                grid: int, block: int, *values: Any, name: str = name, types: str = parameters
            ) -> None:
                tensors = [v for v in values if isinstance(v, torch.Tensor)]
                self._begin_call(
                    name,
                    *(
                        x
                        for i, t in enumerate(tensors)
                        for x in (f"argument {i}", t.data_ptr(), t.numel() * t.element_size())
                    ),
                )
                kinds = [
                    ctypes.c_int64 if "int64_t" in t else ctypes.c_int for t in types.split(",")
                ]
                cells = [
                    ctypes.c_void_p(v.data_ptr()) if isinstance(v, torch.Tensor) else kind(v)
                    for v, kind in zip(values, kinds, strict=True)
                ]
                self._launch(library, name, cells, (grid, 1, 1, block, 1, 1), 0)

            found[name] = run
        return found

    def take_findings(self) -> list[Finding]:
        """Return what was found since the last time."""
        found = []
        for row in self._library.emu_take_findings().decode().splitlines():
            kernel, line, what, detail, times = row.split("\t")
            source = self._sources.get(kernel, [])
            text = source[int(line) - 1].strip() if 0 < int(line) <= len(source) else ""
            found.append(Finding(kernel, int(line), what, detail, int(times), text))
        return found

    def forget(self) -> None:
        """Forget events and calls so far."""
        self.events.clear()
        self.calls.clear()

    def tensor(self, values: torch.Tensor) -> tvm.runtime.Tensor:
        """View a torch tensor's memory as TVM's on the device."""
        return tvm.runtime.from_dlpack(Relabelled(values.detach(), _CUDA))

    def _register(self, module: tvm.IRModule, source: str) -> None:
        _, library = self._compile(source)
        for _, function in module.functions_items():
            name = str(function.attrs["global_symbol"])
            tags = [str(tag) for tag in function.attrs["tirx.kernel_launch_params"]]
            types = [_c_type(parameter) for parameter in function.params]

            def launch(
                *values: Any, name: str = name, tags: list[str] = tags, types: Any = types
            ) -> None:
                extents = dict.fromkeys(
                    [f"{kind}Idx.{axis}" for kind in ("block", "thread") for axis in "xyz"], 1
                )
                given = dict(zip(tags, values[len(types) :], strict=True))
                dynamic = int(given.pop("tirx.use_dyn_shared_memory", 0))
                # as TVM does: `ThreadWorkLoad Extract` in src/runtime/thread_storage_scope.h
                extents.update({tag: int(extent) or 1 for tag, extent in given.items()})
                cells = [
                    kind(_address(value)) if kind is ctypes.c_void_p else kind(value)
                    for kind, value in zip(types, values, strict=False)
                ]
                self._launch(library, name, cells, tuple(extents.values()), dynamic)

            tvm_ffi.register_global_func(name, launch, override=True)

    def _launch(
        self,
        library: ctypes.CDLL,
        name: str,
        cells: list[Any],
        extents: tuple[int, ...],
        dynamic: int,
    ) -> None:
        function = getattr(library, f"{name}__entry")
        has_fibres = ctypes.c_int.in_dll(library, f"{name}__fibres").value
        smallest = ctypes.c_int.in_dll(library, f"{name}__smallest").value

        def run() -> None:
            pointers = (ctypes.c_void_p * len(cells))(*(ctypes.addressof(cell) for cell in cells))
            self._library.emu_launch(
                self._name(name),
                function,
                pointers,
                (ctypes.c_int * 6)(*extents),
                ctypes.c_int64(dynamic),
                has_fibres,
                smallest,
                self.seed,
            )
            self.events.append(f"launch {name}")
            if self.calls:
                self.calls[-1].launches.append((name, extents))
                counted = (ctypes.c_double * 4)()
                self._library.emu_counted(counted)
                self.calls[-1].counts.append(Counts(*counted))
                self._read_traffic()

        self.ask(run)

    def _read_traffic(self) -> None:
        for row in self._library.emu_traffic().decode().splitlines():
            name, *numbers = row.split("\t")
            self.calls[-1].traffic[name] = Traffic(*map(int, numbers))

    def _begin_call(self, function: str, *described: Any) -> None:
        """Announce what the launches of a host function may touch: (name, address, bytes)..."""
        names = [self._name(str(name)) for name in described[::3]]
        count = len(names)
        addresses = (ctypes.c_void_p * count)(*(_address(value) for value in described[1::3]))
        sizes = (ctypes.c_int64 * count)(*(int(value) for value in described[2::3]))
        name = str(function)

        def run() -> None:
            self._library.emu_begin_call(count, (ctypes.c_char_p * count)(*names), addresses, sizes)
            self.calls.append(Call(name))

        self.ask(run)

    def _name(self, name: str) -> bytes:
        """The device keeps the address of a name, so each lives as long as this process."""
        return self._names.setdefault(name, name.encode())

    def _compile(self, source: str) -> tuple[str, ctypes.CDLL]:
        body = cuda_body(source)
        lines = body.splitlines()
        for match in _SIGNATURE.finditer(body):
            self._sources[match.group(1)] = lines
        path = _compiled(translate(body), ["-O1", f"-I{SOURCES}"], [])
        return body, ctypes.CDLL(str(path))


def announced(module: tvm.IRModule) -> tvm.IRModule:
    """Make every kernel's host function say which memory its launches may touch."""
    result = tvm.IRModule(module.functions, attrs=module.attrs)
    for variable, function in module.functions_items():
        if not isinstance(function, tirx.PrimFunc):
            continue
        described: list[Any] = []
        for parameter in function.params:
            if hasattr(parameter, "strides"):  # a buffer, not a size
                size = tirx.const(tvm.DataType(str(parameter.dtype)).itemsize, "int64")
                for extent in parameter.shape:
                    size = size * extent.astype("int64")
                described += [str(parameter.name), parameter.data, size]
        call = tirx.call_packed("relax_disc.emulator.begin_call", variable.name_hint, *described)
        body = tirx.SeqStmt([tirx.Evaluate(call), function.body])
        result.update_func(variable, function.with_body(body))
    return result


def cuda_body(source: str) -> str:
    """Cut off TVM's head, which is for NVIDIA's compilers."""
    end = "#define ushort unsigned short\n#endif\n"
    return source[source.index(end) + len(end) :] if end in source else source


def translate(body: str) -> str:
    """CUDA C as C++ for `emulator.h`, line by line: pointers and shared arrays are its classes."""

    def signature(match: re.Match[str]) -> str:
        parameters = _POINTER.sub(r"emu::Pointer<\1\2> \3", match.group(2))
        return f'extern "C" void {match.group(1)}({parameters}) {{'

    text = "\n".join(
        ""
        if line.startswith(("#include", "#pragma"))
        or ("__global__" in line and line.endswith(");"))
        else line
        for line in body.splitlines()
    )
    text = _SIGNATURE.sub(signature, text)
    text = _CAST.sub(r"(emu::Pointer<\1>)", text)
    text = _SHARED.sub(r"EMU_SHARED(\1, \2, \3);", text)
    text = _DYNAMIC.sub(r"EMU_SHARED(\1, \2, -1);", text)
    parts = [
        '#include "emulator.h"\n#define uint unsigned int\n#define uchar unsigned char\n'
        '#define ushort unsigned short\n#line 1 "kernel.cu"\n' + text + "\n"
    ]
    kernels = list(_SIGNATURE.finditer(body))
    for k, match in enumerate(kernels):
        name = match.group(1)
        end = kernels[k + 1].start() if k + 1 < len(kernels) else len(body)
        code = body[match.start() : end]
        fibres = int(
            any(word in code for word in ("__syncthreads", "__shfl", "__activemask", "__ballot"))
        )
        parts.append(
            f'extern "C" void {name}__entry(void** p) {{ emu::call({name}, p); }}\n'
            f'extern "C" {{ int {name}__fibres = {fibres}; }}\n'
            f'extern "C" {{ int {name}__smallest = {_smallest(code)}; }}\n'
        )
    return "".join(parts)


def _smallest(code: str) -> int:
    """Bytes of the smallest element that a kernel may touch."""
    types = {match.group(2) for match in _POINTER.finditer(code)}
    types |= {match.group(1).split()[-1] for match in _CAST.finditer(code)}
    types |= {
        match.group(1).split()[-1] for match in [*_SHARED.finditer(code), *_DYNAMIC.finditer(code)]
    }
    if types & {"bool", "char", "uchar", "int8_t", "uint8_t"}:
        return 1
    short = {"half", "__half", "nv_bfloat16", "__nv_bfloat16", "short", "ushort"}
    return 2 if types & short else 4


def _compiled(code: str, before: list[str], after: list[str]) -> Path:
    """Make a shared library of C++, unless an earlier process has."""
    compiler = shutil.which("g++") or "g++"
    flags = [compiler, "-std=c++17", "-fPIC", "-shared", "-w", "-ffp-contract=off", *before]
    header = (SOURCES / "emulator.h").read_text()
    key = hashlib.sha256("\0".join([*flags, *after, header, code]).encode()).hexdigest()[:20]
    folder = Path(tempfile.gettempdir()) / "relax_disc_emulator"
    folder.mkdir(exist_ok=True)
    path = folder / f"{key}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as draft:
            source = Path(draft) / "code.cc"
            source.write_text(code)
            command = [*flags, f"-I{SOURCES}", str(source), "-o", f"{draft}/made.so", *after]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"the kernels do not compile:\n{done.stderr[:3000]}")
            Path(draft, "made.so").replace(path)
    return path


class Relabelled:
    """A tensor by DLPack whose memory claims to be on another device."""

    def __init__(self, tensor: Any, device: int) -> None:
        self._tensor, self._device = tensor, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device, 0

    def __dlpack__(self, **_: object) -> Any:
        capsule = self._tensor.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        # A DLManagedTensor begins with the address; then come device type and device id.
        address = pointer(capsule, b"dltensor")
        ctypes.c_int32.from_address(address + 8).value = self._device
        ctypes.c_int32.from_address(address + 12).value = 0
        return capsule


def _record(what: str) -> None:
    Emulator.load().events.append(what)


def _address(value: Any) -> int:
    if isinstance(value, int):
        return value
    return int(getattr(value, "value", value) or 0)


def _c_type(parameter: Any) -> Any:
    named = {
        "int64": ctypes.c_int64,
        "int32": ctypes.c_int32,
        "bool": ctypes.c_bool,
        "float32": ctypes.c_float,
        "float64": ctypes.c_double,
        "uint32": ctypes.c_uint32,
    }
    return named.get(str(parameter.ty), ctypes.c_void_p)
