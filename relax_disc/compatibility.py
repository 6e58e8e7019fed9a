"""Refuse what the package is known not to work with, before it crashes there.

TVM's Python side, its compiler library and tvm_ffi share memory layouts that change between
releases: a wrong pair ends in a segmentation fault (with apache-tvm-ffi 0.1.15, for one, everything
that serialises), not in an error message; the C++ library is linked to PyTorch, whose interface
changes likewise. So the versions are read from the installed packages' metadata, without loading
anything.
"""

from __future__ import annotations

import fnmatch
import os
import sys
import warnings
from importlib import metadata

from relax_disc.errors import RelaxDiscWarning, UnsupportedEnvironmentError

UNTESTED_TORCH = "RELAX_DISC_UNTESTED_TORCH"
"""Set to 1 in the environment it lets another PyTorch pass, with a warning (2.11 ran a Llama)."""

SUPPORTED_VERSIONS = {
    "apache-tvm": "0.27.0.post1",
    "apache-tvm-ffi": "0.1.14.post1",
    "torch": "2.13.*",
}


def check_environment() -> None:
    """Check the platform and the versions of TVM, tvm_ffi and PyTorch.

    Raises `UnsupportedEnvironmentError`: on Windows, or when another version or none is installed;
    the message holds the command that mends it.  Another PyTorch passes where the environment
    says so (`UNTESTED_TORCH`), on machines that have no other.
    """
    if sys.platform == "win32":
        raise UnsupportedEnvironmentError(
            "relax_disc does not run on Windows: use Linux on x86-64 (WSL 2 will do); Linux on "
            "aarch64 and macOS are tried, not tested."
        )
    wrong = []
    for package, supported in SUPPORTED_VERSIONS.items():
        found = _installed_version(package)
        if found is None or not fnmatch.fnmatchcase(found, supported):
            wrong.append(f"{package} {found or '(not installed)'}")
    if os.environ.get(UNTESTED_TORCH) == "1" and all(name.startswith("torch ") for name in wrong):
        for name in wrong:
            warnings.warn(
                f"relax_disc is tested with torch {SUPPORTED_VERSIONS['torch']}; {UNTESTED_TORCH} "
                f"lets {name} pass.",
                RelaxDiscWarning,
                stacklevel=2,
            )
        return
    if wrong:
        pins = " ".join(f"'{package}=={v}'" for package, v in SUPPORTED_VERSIONS.items())
        raise UnsupportedEnvironmentError(
            f"relax_disc crashes with any other TVM or PyTorch than those it was made for; found "
            f"{' and '.join(wrong)}. Run: {sys.executable} -m pip install {pins}"
        )


def _installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
