"""``relax-disc doctor``: what is here, what is missing, and how to get it."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import relax_disc
from relax_disc import progress
from relax_disc.cli.user_step import Json, print_json
from relax_disc.compatibility import SUPPORTED_VERSIONS
from relax_disc.errors import ArtefactError
from relax_disc.tir_kernels import cpu_target
from relax_disc.tir_kernels.tuning import database as databases
from relax_disc.vm_builtins import native

_OPTIONAL = {
    "matplotlib": "plot",
    "transformers": "hf",
    "accelerate": "hf",
    "lightning": "lightning",
    "xgboost": "tune",
    "tokenizers": "demo",
    "safetensors": "demo",
}
_ADVICE = "install g++, or a wheel: `pip wheel --no-deps .` on a machine with a compiler"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: whether it is as it should be, and what to do if not; None: as one likes."""

    name: str
    value: str
    ok: bool | None = True
    advice: str = ""


def findings() -> list[Finding]:
    """Look at versions, library, compiler, threads, BLAS and GPU."""
    found = [
        Finding("relax-disc", relax_disc.__version__),
        Finding("Python", platform.python_version()),
    ]
    # With any other version the import would have failed and said so.
    # PyTorch's own number tells its build, such as +cu130; its package's on PyPI does not.
    own = {"torch": torch.__version__}
    found += [Finding(n, own.get(n) or metadata.version(n)) for n in SUPPORTED_VERSIONS]
    compiler = native.find_compiler()
    try:
        carried = native.found()
    except native.NativeBuildError:  # told below
        carried = None
    needed = "" if carried or compiler else _ADVICE
    found.append(
        Finding("C++ compiler", compiler or "none", True if compiler else not needed, needed)
    )
    try:
        with progress.shown():
            native.load()
        found.append(Finding("C++ library", "of the wheel" if carried else "built here"))
    except native.NativeBuildError as error:
        found.append(Finding("C++ library", "none", False, str(error).splitlines()[0]))
    cache = native.cache_directory()
    parent = next(path for path in (cache, *cache.parents) if path.exists())
    writable = os.access(parent, os.W_OK)
    free = shutil.disk_usage(parent).free // 2**20
    advice = "" if writable else "set RELAX_DISC_CACHE to a folder that can be written"
    found.append(Finding("cache", f"{cache}, {free:,} MiB free", writable, advice))
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = torch.get_num_threads()
    many = threads > (allowed or threads)
    advice = (
        f"set OMP_NUM_THREADS={allowed}: more threads than processors slow every step"
        if many
        else ""
    )
    found.append(Finding("threads", f"{threads} of {allowed} processors", not many, advice))
    found.append(Finding("processor", torch.backends.cpu.get_cpu_capability()))
    blas = "MKL" if torch.backends.mkl.is_available() else "PyTorch's other"
    onednn = " and oneDNN" if torch.backends.mkldnn.is_available() else ""
    found.append(Finding("BLAS of PyTorch", blas + onednn))
    found.append(_tuning())
    if torch.cuda.is_available():
        found.append(
            Finding("GPU", torch.cuda.get_device_name(), None, "CUDA is compiled, not yet run")
        )
    else:
        found.append(
            Finding("GPU", "none that PyTorch sees", None, "not needed: CPU is what is tested")
        )
    for package, extra in _OPTIONAL.items():
        if find_spec(package):
            found.append(Finding(package, metadata.version(package), None))
        else:
            found.append(
                Finding(package, "not installed", None, f'pip install "relax-disc[{extra}]"')
            )
    return found


def _tuning() -> Finding:
    """Tell which tuned kernels compiling uses here, and of databases that it leaves alone."""
    target = cpu_target()
    path = databases.user_path(target)
    others = len([each for each in path.parent.glob("*.json") if each != path])
    note = f"; {others} for other targets, threads or versions ignored" if others else ""
    if not path.exists():
        return Finding("tuned kernels", f"none{note}", None, "relax-disc tune FILE.py:FUNCTION")
    try:
        database = databases.read(path)
    except ArtefactError as error:
        return Finding("tuned kernels", "unreadable, ignored", False, str(error))
    count = f"{len(database.decisions())} of {len(database.kernels)} kernels"
    return Finding("tuned kernels", f"{count}, in {path}{note}", None)


def doctor(context: typer.Context, as_json: Json = False) -> None:
    """Versions, compiler, threads, BLAS and GPU: what is missing and how to get it.

    Builds the C++ library if it is not there yet.  Exit code 1: something that is needed is
    missing.
    """
    found = findings()
    if as_json:
        print_json(context, [asdict(each) for each in found])
    else:
        table = Table(show_header=False)
        marks = {True: "[green]ok[/green]", False: "[red]MISSING[/red]", None: ""}
        for each in found:
            table.add_row(marks[each.ok], each.name, escape(each.value), escape(each.advice))
        Console().print(table)
    if any(each.ok is False for each in found):
        raise typer.Exit(1)
