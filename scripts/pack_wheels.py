"""Make wheels small enough for a narrow way to a machine without a network, and whole again there.

``python scripts/pack_wheels.py FOLDER`` writes ``NAME.whl.xz`` for each wheel in the folder and
removes the wheel: files without the wheel's own compression, packed as one by xz, which finds what
they have in common.  ``--unpack`` does the opposite; `scripts/gpu_suite.sh` calls it.
"""

from __future__ import annotations

import argparse
import io
import lzma
import shutil
import zipfile
from pathlib import Path

FILTERS = [
    {"id": lzma.FILTER_X86},
    {"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 28},
]


def pack(wheel: Path) -> Path:
    """Pack a wheel; return what takes its place."""
    stored = io.BytesIO()
    with zipfile.ZipFile(wheel) as before, zipfile.ZipFile(stored, "w") as after:
        for entry in before.infolist():
            after.writestr(entry.filename, before.read(entry))
    packed = wheel.with_name(wheel.name + ".xz")
    packed.write_bytes(lzma.compress(stored.getvalue(), filters=FILTERS))
    wheel.unlink()
    return packed


def unpack(packed: Path) -> Path:
    """Make a wheel of what `pack` wrote, which stays."""
    wheel = packed.with_suffix("")
    with lzma.open(packed) as source, wheel.open("wb") as target:
        shutil.copyfileobj(source, target)
    return wheel


def main() -> None:
    """Pack, or unpack, all wheels of a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--unpack", action="store_true")
    arguments = parser.parse_args()
    pattern, work = ("*.whl.xz", unpack) if arguments.unpack else ("*.whl", pack)
    for path in sorted(arguments.folder.glob(pattern)):
        made = work(path)
        print(f"{made.name}: {made.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
