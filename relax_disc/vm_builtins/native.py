"""Find or build, and load, the C++ part of the package: `vm_builtins/src/*/*.cc`.

A wheel carries it (`vm_builtins/lib`, made by CMakeLists.txt), once for each of a few instruction
sets, of which the best that the processor has is loaded.  From a source tree the first use on a
machine compiles every source (in parallel, one object each) into the user's cache; later uses only
open the file. The file name is a hash of everything that the result
depends on: sources, flags, versions and paths of the libraries, and the processor, since the code
is made for this processor. Static initialisers in the sources register global functions
`relax_disc.*` with TVM's registry.

Limits: g++ or clang++ with C++20, Linux (macOS best effort). The cache is never cleaned up.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import tvm_ffi
from tvm_ffi import libinfo

from relax_disc.errors import RelaxDiscError
from relax_disc.progress import phase

_logger = logging.getLogger(__name__)

SOURCES = Path(__file__).with_name("src")
LIBRARIES = Path(__file__).with_name("lib")
# What the levels of x86-64 add, best first, as /proc/cpuinfo names it (x86-64 psABI, table 3.1).
_LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"},
    "x86-64-v2": {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"},
}
_COMPILE_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-Wall", "-Wno-unknown-pragmas")
# Sources in this folder may include PyTorch's headers, which are slow to read and need C++20; a
# header that others include must not.
_ATEN = "aten"
# From so many sources on it is faster to precompile what they include.
_PRECOMPILED_FROM = 4
_INCLUDE = re.compile(rb'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


@tvm_ffi.register_error
class NativeBuildError(RelaxDiscError, RuntimeError):
    """There is no library for this machine, or its sources do not compile; says what to do."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """What sources are compiled with; every field is part of the cache key."""

    compile_flags: tuple[str, ...]  # flags of one compilation, include paths among them
    aten_flags: tuple[str, ...]  # what comes after them for sources that use PyTorch's headers
    link_flags: tuple[str, ...]  # flags of the one link, libraries and run paths among them
    identity: str  # versions of the libraries and the processor's features

    def flags_of(self, source: Path) -> tuple[str, ...]:
        """Flags of the compilation of a source."""
        extra = self.aten_flags if source.parent.name == _ATEN else ()
        return (*self.compile_flags, *extra)


def cache_directory() -> Path:
    """Directory of built libraries: `RELAX_DISC_CACHE`, else below the user's cache directory."""
    chosen = os.environ.get("RELAX_DISC_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "relax_disc"


def find_compiler() -> str | None:
    """Path of the C++ compiler: `CXX`, else g++, clang++, c++; None if there is none."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    return None


@functools.cache
def load() -> tvm_ffi.Module:
    """Load the native library: the wheel's, else the cache's, which is built if it is not there.

    Raises `NativeBuildError`: there is neither a library for this processor nor a C++ compiler, or
    if a source does not compile or link.
    """
    library = found() or build(SOURCES, cache_directory())
    _logger.info("the native library is %s", library)
    return tvm_ffi.load_module(str(library), keep_module_alive=True)


def found() -> Path | None:
    """Return the library that needs no compiler; None if there is none.

    `RELAX_DISC_LIBRARIES` names the folder of a wheel's libraries that a source tree uses, which it
    takes as they are, whatever its own sources say.

    Raises `NativeBuildError`: that folder has none for this processor.
    """
    named = os.environ.get("RELAX_DISC_LIBRARIES")
    if not named:
        return carried(LIBRARIES, processor_flags())
    library = carried(Path(named), processor_flags())
    if library is None:
        raise NativeBuildError(
            f"RELAX_DISC_LIBRARIES names {named}, which has no library of relax_disc for this "
            "processor; unset it, and the library is built from the sources."
        )
    return library


def carried(folder: Path, flags: Set[str]) -> Path | None:
    """Choose among the libraries of a wheel.

    ``folder``: holds `relax_disc-<instruction set>.so`; may be missing. ``flags``: what the
    processor can do, as `processor_flags` names it. Returned: for the best instruction set that the
    processor has; None if there is none for it.
    """
    generic = folder / "relax_disc-generic.so"
    if generic.exists():
        return generic
    libraries = [folder / f"relax_disc-{level}.so" for level in levels(flags)]
    return next((library for library in libraries if library.exists()), None)


def levels(flags: Set[str]) -> list[str]:
    """List the levels of x86-64 that a processor has, best first; ``flags`` as for `carried`."""
    found: list[str] = []
    needed: set[str] = set()
    for level, added in reversed(_LEVELS.items()):
        needed |= added
        if needed <= flags:
            found.insert(0, level)
    return found


def processor_flags() -> frozenset[str]:
    """What the processor and the system under it can do; empty where that is not known."""
    for line in processor_identity().splitlines():
        name, _, values = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(values.split())
    return frozenset()


def _is_whole(library: Path) -> bool:
    """Say whether a library or object is as long as its header says; the loader does not ask."""
    with library.open("rb") as file:
        header = file.read(64)
        if len(header) < 64 or header[:5] != b"\x7fELF\x02":  # of another system
            return len(header) == 64
        (start,) = struct.unpack_from("<Q", header, 40)
        size, count = struct.unpack_from("<HH", header, 58)
    return start + size * count <= library.stat().st_size


def build(sources: Path, cache: Path) -> Path:
    """Compile all `*.cc` in a directory into one shared library in `cache`.

    Objects are cached one by one, keyed by their source and the headers it includes, so that an
    edit of one source compiles one. Safe against other processes doing the same.

    Raises `NativeBuildError`: it is not cached and there is no compiler, or if a source does not
    compile or link.
    """
    files = sorted(sources.rglob("*.cc"))
    chain = _toolchain()
    objects = {path: _object_key(path, chain, sources) for path in files}
    link = _digest(*objects.values(), *chain.link_flags)
    library = cache / f"relax_disc-{link}.so"
    if library.is_dir():
        raise NativeBuildError(f"{library} is a folder, and has to be a file: remove it.")
    if library.exists() and _is_whole(library):
        return library
    compiler = find_compiler()
    if compiler is None:
        raise NativeBuildError(
            "relax_disc has no compiled library for this machine. Install a C++ compiler (g++ or "
            "clang++; CXX names another), with which it is built at first use, or a wheel of "
            "relax_disc, which carries it for Linux on x86-64: `pip wheel --no-deps .` makes one "
            "from the sources on a machine that has a compiler."
        )
    try:
        (cache / "objects").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NativeBuildError(
            f"relax_disc builds its C++ library in {cache}, which cannot be written ({error}): set "
            "RELAX_DISC_CACHE to a folder that can."
        ) from error
    with phase("build the C++ library, once per machine"), _locked(cache / "build.lock"):
        if library.exists():
            if _is_whole(library):
                return library
            _logger.warning("%s is damaged and is built again", library)
            library.unlink()
        _logger.info("building the native library of relax_disc into %s", cache)
        targets = {
            path: cache / "objects" / f"{path.stem}-{key}.o" for path, key in objects.items()
        }
        missing = {
            path: target
            for path, target in targets.items()
            if not target.is_file() or not _is_whole(target)
        }
        _compile(compiler, chain, sources, missing)
        inputs = [str(target) for target in targets.values()]
        command = [compiler, "-shared", *inputs, *chain.link_flags]
        try:
            _run(command, library)
        except NativeBuildError:
            if len(missing) == len(targets):
                raise
            _logger.warning("objects in %s do not link and are compiled again", cache / "objects")
            _compile(compiler, chain, sources, targets)
            _run(command, library)
    return library


def _compile(compiler: str, chain: Toolchain, sources: Path, targets: Mapping[Path, Path]) -> None:
    """Compile sources, each into its object, on all processors; ``targets``: the objects."""
    groups: dict[Path, list[Path]] = {}
    for path in targets:
        groups.setdefault(_prelude(path, sources), []).append(path)
    with (
        tempfile.TemporaryDirectory(prefix="relax_disc-") as folder,
        ThreadPoolExecutor(max_workers=os.cpu_count()) as pool,
    ):
        headers = {}
        # Before the sources, so that who waits for one waits for a job that runs.
        for index, (prelude, paths) in enumerate(groups.items()):
            command = [compiler, *chain.flags_of(paths[0]), f"-I{sources}"]
            if prelude.exists() and len(paths) >= _PRECOMPILED_FROM:
                header = Path(folder, f"{index}.h")
                headers[prelude] = pool.submit(_precompile, command, prelude, header)

        def compile_one(path: Path) -> None:
            header = headers.get(_prelude(path, sources))
            included = () if header is None else header.result()
            command = [compiler, *chain.flags_of(path), f"-I{sources}", *included]
            _run([*command, "-c", str(path)], targets[path])

        # The largest first, which would otherwise be waited for alone at the end.
        ordered = sorted(targets, key=lambda path: path.stat().st_size, reverse=True)
        list(pool.map(compile_one, ordered))


def _prelude(source: Path, sources: Path) -> Path:
    """Return where the header lies that is precompiled for a source, if there is one."""
    return (source.parent if source.parent.name == _ATEN else sources) / "prelude.h"


def _precompile(command: Sequence[str], prelude: Path, header: Path) -> Sequence[str]:
    """Precompile a header, included by another; return the flags that use it, none if it fails."""
    # Read instead by a compiler that finds nothing precompiled that it can use.
    header.write_text(f'#include "{prelude}"\n')
    try:
        _run([*command, "-x", "c++-header", str(header)], header.with_name(f"{header.name}.gch"))
    except NativeBuildError as error:
        _logger.info("headers are not precompiled: %s", error)
        return ()
    return ("-include", str(header))


def _toolchain() -> Toolchain:
    """Flags for this machine and the versions of what is linked."""
    native = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    pytorch = Path(torch.__file__).parent
    libraries = (
        (Path(libinfo.find_libtvm_ffi()).parent, "tvm_ffi"),
        (pytorch / "lib", "torch_cpu"),
        (pytorch / "lib", "c10"),
    )
    link: list[str] = ["-pthread"]
    for folder, name in libraries:
        # -Wl would cut a path at its commas.
        link += [f"-L{folder}", "-Xlinker", "-rpath", "-Xlinker", str(folder), f"-l{name}"]
    versions = (torch.__version__, tvm_ffi.__version__)
    return Toolchain(
        (*_COMPILE_FLAGS, native, *(f"-I{path}" for path in libinfo.include_paths())),
        ("-std=c++20", f"-isystem{pytorch / 'include'}"),
        tuple(link),
        "\n".join((*versions, os.environ.get("CXX", ""), processor_identity())),
    )


def processor_name() -> str:
    """Name the processor as its maker does; its architecture where it tells no name."""
    lines = processor_identity().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def processor_identity() -> str:
    """Name and features of the processor: what is compiled and measured here is for it alone."""
    lines = [platform.machine(), platform.processor()]
    information = Path("/proc/cpuinfo")
    if information.exists():
        wanted = ("model name", "flags", "Features", "CPU part")
        seen: dict[str, str] = {}
        for line in information.read_text().splitlines():
            name = line.partition(":")[0].strip()
            if name in wanted:
                seen.setdefault(name, line)
        lines += seen.values()
    return "\n".join(lines)


def _object_key(path: Path, chain: Toolchain, sources: Path) -> str:
    """Hash of a source with the headers it includes (by quotes), and of the tool chain."""
    ordered = [content for _, content in sorted(with_headers(path, sources).items())]
    return _digest(path.name, *ordered, *chain.flags_of(path), chain.identity)


def with_headers(path: Path, sources: Path) -> dict[Path, bytes]:
    """Read a source and the headers that it includes by quotes, from the folder ``sources``."""
    parts: dict[Path, bytes] = {}
    waiting = [path]
    while waiting:
        current = waiting.pop()
        if current in parts or not current.exists():
            continue
        parts[current] = current.read_bytes()
        names = _INCLUDE.findall(parts[current])
        waiting += [sources / os.fsdecode(name) for name in names]
    return parts


def _digest(*parts: str | bytes) -> str:
    """Short hash of a sequence of strings, boundaries included."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()[:20]


def _run(command: Sequence[str], target: Path) -> None:
    """Run a compiler that writes `target`, which appears whole or not at all."""
    draft = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    result = subprocess.run(
        [*command, "-o", str(draft)], capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        draft.unlink(missing_ok=True)
        raise NativeBuildError(
            f"{' '.join(command)} failed with status {result.returncode}:\n{result.stderr}"
        )
    draft.replace(target)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, waiting for whoever holds it."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)
