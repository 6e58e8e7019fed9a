"""The native build: caching, errors and the way without a compiler."""

import ctypes
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from relax_disc.vm_builtins import native

GOOD = """
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>
#include "answer.h"
TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef().def("relax_disc_test.answer",
                                        []() -> int64_t { return ANSWER; });
}
"""

needs_compiler = pytest.mark.skipif(native.find_compiler() is None, reason="no C++ compiler")


@needs_compiler
def test_objects_are_cached_one_by_one_and_headers_count(tmp_path: Path) -> None:
    sources, cache = tmp_path / "src", tmp_path / "cache"
    sources.mkdir()
    (sources / "answer.h").write_text("#define ANSWER 41\n")
    (sources / "one.cc").write_text(GOOD)
    (sources / "two.cc").write_text("int relax_disc_test_other() { return 1; }\n")
    first = native.build(sources, cache)
    objects = set((cache / "objects").iterdir())
    assert first is not None and len(objects) == 2
    assert native.build(sources, cache) == first
    (sources / "answer.h").write_text("#define ANSWER 42\n")
    second = native.build(sources, cache)
    assert second is not None and second != first
    new = set((cache / "objects").iterdir()) - objects
    assert [path.name.startswith("one-") for path in new] == [True]
    program = (
        "import sys, tvm_ffi; tvm_ffi.load_module(sys.argv[1]);"
        "print(tvm_ffi.get_global_func('relax_disc_test.answer')())"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(second)], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "42"


@needs_compiler
@pytest.mark.parametrize("is_broken", [False, True], ids=["good", "broken"])
def test_what_many_sources_include_is_precompiled(tmp_path: Path, is_broken: bool) -> None:
    sources, cache = tmp_path / "a, b" / "src", tmp_path / "cache"
    (sources / "aten").mkdir(parents=True)
    count = native._PRECOMPILED_FROM
    for number in range(count):
        given = "#ifndef GIVEN\n#define GIVEN 0\n#endif\n"
        code = f'extern "C" int relax_disc_test_{number}() {{ return {number} + GIVEN; }}\n'
        (sources / f"{number}.cc").write_text(given + code)
    (sources / "aten" / "few.cc").write_text('extern "C" int relax_disc_test_few() { return 7; }\n')
    (sources / "aten" / "prelude.h").write_text("#error not read for one source\n")
    (sources / "prelude.h").write_text("#error no\n" if is_broken else "#define GIVEN 10\n")
    library = ctypes.CDLL(str(native.build(sources, cache)))
    found = [getattr(library, f"relax_disc_test_{number}")() for number in range(count)]
    assert found == [number + 10 * (not is_broken) for number in range(count)]
    assert library.relax_disc_test_few() == 7
    assert {path.suffix for path in cache.rglob("*") if path.is_file()} == {".lock", ".o", ".so"}


_BUILD = """
import sys
from pathlib import Path
from relax_disc.vm_builtins import native
sources, cache, ready = map(Path, sys.argv[1:])
ready.touch()
print(native.build(sources, cache))
"""


@needs_compiler
def test_two_processes_at_once_build_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, cache, ready = tmp_path / "src", tmp_path / "cache", tmp_path / "ready"
    sources.mkdir()
    (sources / "answer.cc").write_text('extern "C" int relax_disc_test_answer() { return 42; }\n')
    log, slow_compiler = tmp_path / "log", tmp_path / "slow_compiler"
    printed = tmp_path / "printed"
    slow_compiler.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\nsleep 0.3\nexec {native.find_compiler()} "$@"\n'
    )
    slow_compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(slow_compiler))
    command = [sys.executable, "-c", _BUILD, str(sources), str(cache), str(ready)]
    # Into a file: a pipe stays open as long as anything that the compiler started.
    with printed.open("w") as out, subprocess.Popen(command, stdout=out) as other:
        while not ready.exists() and other.poll() is None:
            time.sleep(0.001)
        library = native.build(sources, cache)
        other.wait(timeout=600)
    assert other.returncode == 0 and printed.read_text().strip() == str(library)
    assert len(log.read_text().splitlines()) == 2, "one compilation and one link"
    assert ctypes.CDLL(str(library)).relax_disc_test_answer() == 42
    files = sorted(path.suffix for path in cache.rglob("*") if path.is_file())
    assert files == [".lock", ".o", ".so"]


@needs_compiler
def test_a_source_that_does_not_compile_raises_with_the_compilers_message(tmp_path: Path) -> None:
    (tmp_path / "bad.cc").write_text("int broken( { return nonsense; }\n")
    with pytest.raises(native.NativeBuildError, match=r"bad\.cc:1"):
        native.build(tmp_path, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.so"))


@needs_compiler
@pytest.mark.parametrize("part", [0, 0.5])
def test_a_damaged_library_is_built_again(tmp_path: Path, part: float) -> None:
    sources, cache = tmp_path / "src", tmp_path / "cache"
    sources.mkdir()
    (sources / "one.cc").write_text('extern "C" int relax_disc_test_one() { return 1; }\n')
    library = native.build(sources, cache)
    whole = library.read_bytes()
    library.write_bytes(whole[: int(len(whole) * part)])
    assert native.build(sources, cache) == library
    assert library.read_bytes()[:64] == whole[:64] and library.stat().st_size == len(whole)
    assert ctypes.CDLL(str(library)).relax_disc_test_one() == 1


@needs_compiler
@pytest.mark.parametrize("damage", [b"", b"\x7fELF\x02", None])
def test_damaged_objects_are_compiled_again(tmp_path: Path, damage: bytes | None) -> None:
    sources, cache = tmp_path / "src", tmp_path / "cache"
    sources.mkdir()
    for name in ("one", "two"):
        code = f'extern "C" const char* relax_disc_test_{name}() {{ return "{name}"; }}\n'
        (sources / f"{name}.cc").write_text(code)
    library = native.build(sources, cache)
    (one,) = (cache / "objects").glob("one-*.o")
    whole = one.read_bytes()
    library.unlink()
    # As long as it was, with other bytes behind the header: only the linker finds that.
    one.write_bytes(whole[:64] + bytes(len(whole) - 64) if damage is None else damage)
    assert native.build(sources, cache) == library
    named = ctypes.CDLL(str(library)).relax_disc_test_one
    named.restype = ctypes.c_char_p
    assert named() == b"one" and one.read_bytes() == whole


@needs_compiler
def test_a_folder_where_the_library_belongs_is_named(tmp_path: Path) -> None:
    (tmp_path / "one.cc").write_text('extern "C" int relax_disc_test_three() { return 3; }\n')
    library = native.build(tmp_path, tmp_path / "cache")
    library.unlink()
    library.mkdir()
    with pytest.raises(native.NativeBuildError, match=f"{library.name} is a folder.*remove it"):
        native.build(tmp_path, tmp_path / "cache")


@needs_compiler
def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "one.cc").write_text('extern "C" int relax_disc_test_two() { return 2; }\n')
    (tmp_path / "file").write_text("")
    with pytest.raises(
        native.NativeBuildError, match=r"file, which cannot be written.*RELAX_DISC_CACHE"
    ):
        native.build(tmp_path, tmp_path / "file")


def test_without_a_compiler_the_error_names_both_remedies(tmp_path, monkeypatch):
    (tmp_path / "one.cc").write_text("int relax_disc_test_nothing() { return 1; }\n")
    monkeypatch.setattr(native, "find_compiler", lambda: None)
    with pytest.raises(native.NativeBuildError, match=r"(?s)C\+\+ compiler .* or a wheel"):
        native.build(tmp_path, tmp_path / "cache")


V2 = {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"}
V3 = V2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        (V4 | {"amx_bf16"}, "v4"),
        (V4 - {"avx512vl"}, "v3"),
        (V4 - {"fma"}, "v2"),  # half of a level is not that level, nor one above it
        (V3, "v3"),
        (V2, "v2"),
        (V2 - {"popcnt"}, None),
        (set(), None),
    ],
)
def test_the_best_library_that_the_processor_can_run_is_chosen(tmp_path, flags, level):
    for each in ("v2", "v3", "v4"):
        (tmp_path / f"relax_disc-x86-64-{each}.so").touch()
    chosen = native.carried(tmp_path, flags)
    assert chosen == (None if level is None else tmp_path / f"relax_disc-x86-64-{level}.so")


def test_a_wheel_may_lack_some_libraries_or_have_one_for_all(tmp_path):
    assert native.carried(tmp_path / "missing", V4) is None
    (tmp_path / "relax_disc-x86-64-v2.so").touch()
    assert native.carried(tmp_path, V4).name == "relax_disc-x86-64-v2.so"
    (tmp_path / "relax_disc-generic.so").touch()
    assert native.carried(tmp_path, set()).name == "relax_disc-generic.so"


_TYPE = re.compile(
    r"namespace\s*(?P<space>[\w:]*)\s*\{"
    r"|\b(?:struct|class|union|enum(?:\s+class)?)\s+(?:alignas\([^)]*\)\s*)?(?P<type>\w+)"
    r"(?:\s+final)?\s*(?::[^;{}]*)?\{|\{|\}"
)
_NO_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])\'', re.DOTALL)


def types_of(source: str) -> list[str]:
    """List the types that other sources can see: not in functions or namespaces without a name."""
    around: list[str] = []
    found = []
    for part in _TYPE.finditer(_NO_CODE.sub(" ", source)):
        if part[0] == "}":
            around and around.pop()
        elif part["space"] is not None:
            around.append(part["space"])
        else:
            if part["type"] and all(around):
                found.append("::".join([*around, part["type"]]))
            around.append(part["type"] or "")
    return found


def test_no_name_stands_for_two_types() -> None:
    """The linker would take the code of one for both: it crashed wheels, and not other builds."""
    seen = types_of(
        "namespace a { struct B { struct C {}; }; namespace { class D {}; } } // struct E{}"
    )
    assert seen == ["a::B", "a::B::C"]
    places: dict[str, set[str]] = {}
    for path in (*native.SOURCES.rglob("*.h"), *native.SOURCES.rglob("*.cc")):
        for name in types_of(path.read_text()):
            places.setdefault(name, set()).add(path.name)
    assert len(places) > 50
    assert not {name: files for name, files in places.items() if len(files) > 1}


def reads_intrinsics(source: Path) -> bool:
    """Say whether a source, or a header of ours that it includes, includes the processor's."""
    texts = native.with_headers(source, native.SOURCES).values()
    return any(b"<immintrin.h>" in text for text in texts)


needs_levels = pytest.mark.skipif(
    native.find_compiler() is None or platform.machine() != "x86_64",
    reason="no C++ compiler for the levels of x86-64",
)


def check_compiles(sources: list[Path], extensions: str, folder: Path) -> None:
    """Compile for a level of x86-64, quickly; ``extensions``: such as ``"v4 -mavx512bf16"``."""
    compiler, flags = native.find_compiler(), native._toolchain().compile_flags
    flags = [flag for flag in flags if not flag.startswith(("-O", "-march"))]
    flags += ["-O0", *f"-march=x86-64-{extensions}".split(), f"-I{native.SOURCES}"]
    for source in sources:
        command = [compiler, *flags, "-c", str(source), "-o", str(folder / "object")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{source.name}:\n{done.stderr}"


@needs_levels
@pytest.mark.parametrize("extensions", ["v4", "v4 -mavx512bf16 -mavx512vbmi"])
def test_tiles_compile_for_processors_without_them(extensions, tmp_path):
    """Wheels for AVX-512 have them, and so does a build on an AMD processor with AVX-512."""
    source = native.SOURCES / "kernels" / "product" / "amx_kernel.cc"
    check_compiles([source], extensions, tmp_path)


@needs_levels
@pytest.mark.slow
@pytest.mark.parametrize("extensions", ["v2", "v3", "v4", "v4 -mavx512bf16 -mavx512vbmi"])
def test_what_depends_on_the_processor_compiles_for_every_level(extensions, tmp_path):
    sources = [x for x in sorted(native.SOURCES.rglob("*.cc")) if x.parent.name != "aten"]
    sources = [source for source in sources if reads_intrinsics(source)]
    assert len(sources) > 10
    check_compiles(sources, extensions, tmp_path)


def test_a_named_folder_without_a_library_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("RELAX_DISC_LIBRARIES", str(tmp_path))
    with pytest.raises(native.NativeBuildError, match=r"RELAX_DISC_LIBRARIES names .*unset it"):
        native.found()
    level = native.levels(native.processor_flags())[0]
    (tmp_path / f"relax_disc-{level}.so").touch()
    assert native.found() == tmp_path / f"relax_disc-{level}.so"
