"""Load TVM without the errors that its own modules ask for and ignore.

When it is imported, TVM asks for a type and 111 operators that its library lacks, and names an
operator for its printer that has the name already.  Each is an error of C++ with a traceback, for
whose first line libbacktrace reads the debug information of all libraries: half of the time of
``import relax_disc``, and 46 MB that stay.  The same questions are answered here, by Python.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import patch

import tvm_ffi
from tvm_ffi import core

_OPERATORS = "tvm.ir._ffi_api"


def load_tvm() -> None:
    """Import TVM, unless somebody has."""
    if "tvm" in sys.modules:
        return
    questions = _Questions()
    with (
        patch.object(core, "_object_type_key_to_index", questions.type_index),
        patch.object(tvm_ffi, "init_ffi_api", questions.init_ffi_api),
    ):
        import tvm  # noqa: F401  # pyright: ignore[reportUnusedImport]
    questions.answer_no_more()


class _Questions:
    """What TVM's modules ask while they are imported, answered without an error of C++."""

    def __init__(self) -> None:
        self._own = {
            "type_index": core._object_type_key_to_index,
            "init_ffi_api": tvm_ffi.init_ffi_api,
        }
        self._types: frozenset[str] = frozenset()
        self._operators: frozenset[str] = frozenset()

    def type_index(self, key: str) -> int | None:
        """Return the index of a type; None for one that no library has that is loaded by now."""
        if key not in self._types:
            self._types = frozenset(tvm_ffi.registry.get_registered_type_keys())
        return self._own["type_index"](key) if key in self._types else None

    def init_ffi_api(self, namespace: str, target_module_name: str | None = None) -> None:
        """Put the functions of a namespace into a module; those about operators ask here first."""
        self._own["init_ffi_api"](namespace, target_module_name)
        if target_module_name == _OPERATORS:
            module: Any = sys.modules[_OPERATORS]
            for name, asked in (("GetOp", self._operator), ("RegisterOpAttr", self._attribute)):
                self._own[name] = getattr(module, name)
                setattr(module, name, asked)

    def answer_no_more(self) -> None:
        """Leave the functions about operators as TVM has them."""
        for name in ("GetOp", "RegisterOpAttr"):
            setattr(sys.modules[_OPERATORS], name, self._own[name])

    def _operator(self, name: str) -> Any:
        if name not in self._operators:
            functions: Any = sys.modules[_OPERATORS]
            self._operators = frozenset(functions.ListOpNames())
        if name not in self._operators:
            raise AttributeError(f"Operator {name} is not registered")
        return self._own["GetOp"](name)

    def _attribute(self, operator: str, attribute: str, value: Any, level: int) -> None:
        """Register an attribute of an operator, unless it is a name that it has."""
        if attribute == "TScriptPrinterName":
            functions: Any = sys.modules[_OPERATORS]
            if functions.OpGetAttr(self._own["GetOp"](operator), attribute) == value:
                return
        self._own["RegisterOpAttr"](operator, attribute, value, level)
