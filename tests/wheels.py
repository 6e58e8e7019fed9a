"""Build wheels of the checkout; `python -m tests.wheels FOLDER` builds one for this machine."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from relax_disc.vm_builtins import native

REPOSITORY = Path(__file__).resolve().parents[1]


def build_wheel(repository, folder, *settings):
    """Build a wheel of what git tracks, or would; return it."""
    tree = folder / "tree"
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listing, cwd=repository, capture_output=True, check=True).stdout
    for name in filter(None, names.decode().split("\0")):
        if (repository / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((repository / name).read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    scripts = Path(sys.executable).parent  # cmake and ninja may be here alone
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [*build, *settings, "-w", str(folder), str(tree)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("relax_disc-*.whl")
    return wheel


def build_for_this_machine(folder):
    """Build a wheel of one instruction set and lay its library beside it, in `lib`; return it."""
    best = native.levels(native.processor_flags())[0]
    setting = f"--config-settings=cmake.define.RELAX_DISC_VARIANTS={best}"
    wheel = build_wheel(REPOSITORY, folder, setting)
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".so"):
                (folder / "lib").mkdir(exist_ok=True)
                (folder / "lib" / Path(name).name).write_bytes(archive.read(name))
    return wheel


if __name__ == "__main__":
    build_for_this_machine(Path(sys.argv[1]))
