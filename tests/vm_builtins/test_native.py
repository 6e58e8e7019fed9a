"""The native build: caching, errors and the way without a compiler."""

import ctypes
import os
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
    slow_compiler.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\nsleep 0.3\nexec {native.find_compiler()} "$@"\n'
    )
    slow_compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(slow_compiler))
    command = [sys.executable, "-c", _BUILD, str(sources), str(cache), str(ready)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        while not ready.exists() and other.poll() is None:
            time.sleep(0.001)
        library = native.build(sources, cache)
        printed, _ = other.communicate(timeout=60)
    assert other.returncode == 0 and printed.strip() == str(library)
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


def test_without_a_compiler_there_is_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one.cc").write_text("int relax_disc_test_nothing() { return 1; }\n")
    monkeypatch.setattr(native, "find_compiler", lambda: None)
    assert native.build(tmp_path, tmp_path / "cache") is None


def test_native_code_can_be_switched_off() -> None:
    program = (
        "from relax_disc.vm_builtins import native; assert native.load() is None;"
        "import tvm_ffi;"
        "assert tvm_ffi.get_global_func('relax_disc.cpu.thread_count', allow_missing=True) is None"
    )
    environment = {**os.environ, "RELAX_DISC_NATIVE": "0"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
