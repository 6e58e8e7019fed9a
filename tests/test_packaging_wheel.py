"""What ends up in a wheel: the C++ sources and tuned data too, tests and benchmarks not."""

import subprocess
import sys
import zipfile

import pytest


@pytest.mark.slow
def test_wheel_holds_the_sources_of_the_runtime(repository, tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    tree = tmp_path / "tree"
    subprocess.run(["git", "clone", "-q", str(repository), str(tree)], check=True, timeout=60)
    done = subprocess.run(
        [*build, "-w", str(tmp_path), str(tree)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("relax_disc-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    listed = ["git", "ls-files", "relax_disc/vm_builtins/src"]
    tracked = subprocess.run(
        listed, cwd=repository, capture_output=True, text=True, check=True
    ).stdout.split()
    assert tracked
    assert set(tracked) <= names
    assert "relax_disc/py.typed" in names
    assert not any(name.startswith(("tests/", "benchmarks/", "tutorials/")) for name in names)
