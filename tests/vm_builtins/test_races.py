"""ThreadSanitizer watches the parallel library kernels and the tier; see `race_harness.cc`."""

import platform
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tvm_ffi import libinfo

from relax_disc.vm_builtins import native

SOURCES = (
    "kernels/attention/attention_backward",
    "kernels/attention/attention_forward",
    "kernels/embedding",
    "kernels/product/amx_kernel",
    "kernels/product/gemm",
    "kernels/product/gemm_tile",
    "kernels/product/product_choice",
    "kernels/recurrence_backward",
    "kernels/recurrence_forward",
    "offload/file_calls",
    "offload/file_tier",
    "offload/request_thread",
    "runtime/memory",
    "kernels/vocabulary_head/vocabulary_head",
    "kernels/workspace",
)


def compiles(compiler, folder):
    """Whether the compiler has ThreadSanitizer."""
    source = folder / "empty.cc"
    source.write_text("int main() { return 0; }")
    command = [compiler, "-fsanitize=thread", str(source), "-o", str(folder / "empty")]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def run(program, *arguments):
    # The sanitizer wants addresses where it expects them.
    command = ["setarch", platform.machine(), "-R", str(program), *arguments]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(program).parent
    )
    if "unexpected memory mapping" in result.stderr or "personality" in result.stderr:
        pytest.skip("ThreadSanitizer does not run on this system")
    return result


@pytest.mark.slow
def test_no_two_threads_touch_one_place(tmp_path):
    compiler = native.find_compiler()
    if compiler is None or not compiles(compiler, tmp_path):
        pytest.skip("no C++ compiler with ThreadSanitizer")
    sources = [native.SOURCES / f"{name}.cc" for name in SOURCES]
    sources.append(Path(__file__).with_name("race_harness.cc"))
    flags = ["-g", "-O1", "-std=c++17", "-fsanitize=thread", "-march=native"]
    flags += [f"-I{path}" for path in (*libinfo.include_paths(), native.SOURCES)]

    def compile_one(source):
        target = tmp_path / f"{source.stem}.o"
        command = [compiler, *flags, "-c", str(source), "-o", str(target)]
        subprocess.run(command, check=True, capture_output=True)
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sources))
    folder = Path(libinfo.find_libtvm_ffi()).parent
    link = [f"-L{folder}", "-Xlinker", "-rpath", "-Xlinker", str(folder), "-ltvm_ffi", "-pthread"]
    program = tmp_path / "race"
    subprocess.run(
        [compiler, "-fsanitize=thread", *objects, *link, "-o", str(program)],
        check=True,
        capture_output=True,
    )
    assert "data race" in run(program, "race").stderr
    result = run(program)
    assert result.returncode == 0 and "data race" not in result.stderr, result.stderr[-3000:]
    assert result.stdout.splitlines()[-1] == "done"
