"""The file of a saved step: one header, then raw parts, under one checksum.

Layout, numbers little-endian: 16 bytes that name the kind of file, 32 bytes SHA-256 of all that
follows, 8 bytes size of the header, the header (JSON), the parts one after another in the order and
with the sizes that the header's ``"parts"`` lists.  Nothing is pickled.  A checksum finds damage,
not malice: the parts are native code, so open files that you trust only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tvm
from tvm.support import cc

from relax_disc.bytes_text import format_bytes
from relax_disc.errors import ArtefactError

FORMAT = 13
"""Version of the header's contents; raised with every change of them or of the run time."""

_MAGIC = b"relax_disc step\n"
_DIGEST_BYTES, _SIZE_BYTES = 32, 8
_LEAST_FREE_BYTES = 32 * 2**20
"""LLVM ends the process when it cannot write; objects and libraries of programs have some MiB."""
_NO_RUNTIME = re.compile(r"created using \{(\w+)\} but a loader of that name is not registered")
"""What tvm_ffi says of a program for a device whose run time TVM was built without."""


def write(
    path: str | os.PathLike[str], header: Mapping[str, Any], parts: Mapping[str, bytes]
) -> None:
    """Write a file that appears whole or not at all.

    The header is what JSON can hold, without a key ``"parts"``.
    """
    listed = [[name, len(content)] for name, content in parts.items()]
    text = json.dumps({**header, "parts": listed}, sort_keys=True).encode()
    body = b"".join((len(text).to_bytes(_SIZE_BYTES, "little"), text, *parts.values()))
    write_whole(Path(path), _MAGIC + hashlib.sha256(body).digest() + body)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Read a file and check every byte of it.

    The header as written, with ``"parts"``, and the parts by name.

    Raises `ArtefactError`: the file is none of ours, damaged, or of another format.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ArtefactError(f"{path} cannot be read: {error.strerror}.") from error
    start = len(_MAGIC) + _DIGEST_BYTES
    if not content.startswith(_MAGIC):
        raise ArtefactError(f"{path} is no saved step; it was not written by TrainingStep.save.")
    if hashlib.sha256(content[start:]).digest() != content[len(_MAGIC) : start]:
        raise ArtefactError(
            f"{path} is damaged: its checksum does not fit its {len(content)} bytes. Copy it again "
            "or save the step again."
        )
    size = int.from_bytes(content[start : start + _SIZE_BYTES], "little")
    start += _SIZE_BYTES
    header = json.loads(content[start : start + size])
    if header.get("format") != FORMAT:
        raise ArtefactError(
            f"{path} has format {header.get('format')}, this version reads {FORMAT}; compile the "
            "step again and save it."
        )
    parts, start = {}, start + size
    for name, length in header["parts"]:
        parts[name] = content[start : start + length]
        start += length
    return header, parts


def export_library(executable: Any) -> bytes:
    """Turn a built executable into the content of a shared library.

    Raises `ArtefactError`: there is no C++ compiler, which links it, or no room, or it fails.
    """
    if cc.get_cc() is None:
        raise ArtefactError("no C++ compiler (g++ or clang++) was found, which links the program.")
    with tempfile.TemporaryDirectory(prefix="relax_disc-") as folder:
        if (free := shutil.disk_usage(folder).free) < _LEAST_FREE_BYTES:
            raise ArtefactError(
                f"{tempfile.gettempdir()} has {format_bytes(free)} left, and linking may need "
                f"{format_bytes(_LEAST_FREE_BYTES)}: make room there, or set TMPDIR."
            )
        path = Path(folder) / "program.so"
        try:
            executable.export_library(str(path))
        except (OSError, RuntimeError) as error:
            raise ArtefactError(f"the program cannot be linked: {error}") from error
        return path.read_bytes()


def load_library(content: bytes) -> tvm.runtime.Module:
    """Load a shared library; from here on its native code can run.

    Raises `ArtefactError`: it is for a device that this machine's TVM cannot run programs on.
    """
    with tempfile.TemporaryDirectory(prefix="relax_disc-") as folder:
        path = Path(folder) / "program.so"
        path.write_bytes(content)
        try:
            return tvm.runtime.load_module(str(path))
        except RuntimeError as error:
            if not (kind := _NO_RUNTIME.search(str(error))):
                raise
            raise ArtefactError(
                f"the program is for {kind[1]}, and the TVM of this machine was built without that "
                "runtime, so it cannot run here: compile with target='llvm' for the processor, or "
                "on a machine whose TVM has it. analyze_memory(..., target=...) needs no runtime."
            ) from error


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside its place and move it there, so that no reader sees a part of it."""
    handle, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
