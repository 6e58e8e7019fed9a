"""TVM is loaded as it loads itself, without the errors that it asks for and ignores."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_COUNT = r"""
#include <stddef.h>
#include <stdio.h>
typedef struct { const char* data; size_t size; } Bytes;
static Bytes none = {"", 0};
const Bytes* TVMFFIBacktrace(const char* file, int line, const char* function, int cross) {
  fprintf(stderr, "an error at %s:%d\n", file, line);
  return &none;
}
"""
"""Stands in for what words the traceback of each error of TVM's."""


def _run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="no C compiler")
def test_nothing_asks_for_an_error(tmp_path: Path) -> None:
    source, library = tmp_path / "count.c", tmp_path / "count.so"
    source.write_text(_COUNT)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    raising = "import relax_disc, tvm\ntry: tvm.ir.Op.get('no.such')\nexcept Exception: pass"
    told = _run(raising, LD_PRELOAD=str(library)).stderr
    assert [line for line in told.splitlines() if line.startswith("an error at")] == [
        line for line in told.splitlines() if "/op.cc:" in line
    ], told
    assert told.count("an error at") == 1  # that of the call above


@pytest.mark.slow
def test_operators_are_those_of_tvm_alone() -> None:
    ask = """
import json, sys
from tvm.ir import Op
functions = sys.modules["tvm.ir._ffi_api"]
names = sorted(Op.list_op_names())
printed = [str(functions.OpGetAttr(Op.get(name), "TScriptPrinterName")) for name in names]
kinds = [str(type(function)) for function in (functions.GetOp, functions.RegisterOpAttr)]
print(json.dumps([names, printed, kinds]))
"""
    alone, with_us = (
        json.loads(_run(head + ask).stdout) for head in ("import tvm", "import relax_disc")
    )
    ours: Any = {name for name in with_us[0] if name not in alone[0]}
    assert not {name for name in ours if not name.startswith("relax_disc.")}
    kept = [(n, p) for n, p in zip(*with_us[:2], strict=True) if n not in ours]
    assert kept == list(zip(*alone[:2], strict=True))
    assert with_us[2] == alone[2]
