"""Kinds of Python values: which are compared, which are entered, which go on when they are read.

PyTorch, numpy and Python's own library are not entered.
"""

from __future__ import annotations

import argparse
import array
import collections
import datetime
import enum
import functools
import random
import sys
import threading
import time
import types
from collections.abc import Iterator
from queue import Queue, SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import nn

from relax_disc.frontend.capture.source_lines import is_installed

FOREIGN = {"torch", "numpy", "relax_disc", "tvm", "tvm_ffi", "_pytest", "pytest", "pluggy"}
FOREIGN |= {"einx"}  # keeps a backend; sees stand-ins for sizes (`sizes.stand_ins`)
FOREIGN |= set(sys.stdlib_module_names) - {"__main__"}
"""Top names of the modules that the walk does not enter."""
MOST_ELEMENTS = 10_000
CONTAINERS = (dict, collections.OrderedDict, collections.defaultdict, list, set, collections.deque)
"""Whose elements are looked at; of subclasses only where `is_listed`."""
NAMESPACES = (
    types.SimpleNamespace,
    argparse.Namespace,
    threading.local,
    collections.UserDict,
    collections.UserList,
    collections.ChainMap,
)
"""Classes of Python's own whose instances are entered like the user's."""
ARRAYS = (np.ndarray, bytearray, array.array)
"""Numbers in one block of memory, compared by value."""
RANDOM = (
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
)
_STEPS = frozenset({"__next__", "send", "throw"})
_TAKES = frozenset({"get", "get_nowait"})
_ASKS = frozenset({"is_set", "isSet", "wait"})
CLOCKS = frozenset(
    name
    for name in dir(time)
    if name.removesuffix("_ns") in ("time", "perf_counter", "monotonic", "process_time")
    or name in ("thread_time", "thread_time_ns", "localtime", "gmtime", "ctime")
)
"""Functions of the module `time` that tell the time of the call."""
_PLAIN = frozenset({bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})


def is_listed(value: Any) -> bool:
    """Say whether a list, set or deque holds its elements as Python's own do."""
    kind = type(value)
    base = next((base for base in (list, set, collections.deque) if issubclass(kind, base)), None)
    return base is not None and all(
        getattr(kind, name) is getattr(base, name, None)
        for name in ("__iter__", "__len__", "__getitem__")
        if hasattr(kind, name)
    )


def is_plain(value: Any) -> bool:
    """Say whether a value can be compared and written down: a number, a text, None, a tuple."""
    if type(value) is tuple:
        return len(value) <= MOST_ELEMENTS and all(map(is_plain, value))
    if type(value) in (slice, range):
        return True
    if type(value) is frozenset:
        return all(map(is_plain, value))
    return value is None or type(value) in _PLAIN or isinstance(value, np.generic | enum.Enum)


def moved_by(value: Any) -> frozenset[str]:
    """Name the methods by which an object goes on, so that the next read finds another value.

    ``"__call__"``: to call it. Generators of random numbers are found by their state instead.
    """
    if isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
        holder = value.__self__
        moves = holder is time and value.__name__ in CLOCKS
        if moves or value.__name__ in _moved_by(type(holder)):
            return frozenset({"__call__"})
        return frozenset()
    if value is datetime.datetime or value is datetime.date:
        return frozenset({"now", "utcnow", "today"})
    return frozenset({"datetime", "date"}) if value is datetime else _moved_by(type(value))


@functools.cache
def _moved_by(kind: type) -> frozenset[str]:
    if issubclass(kind, Iterator):
        return _STEPS if is_foreign(kind.__module__) else frozenset()
    if issubclass(kind, threading.Event):
        return _ASKS
    return _TAKES if issubclass(kind, Queue | SimpleQueue) else frozenset()


def moves(value: Any) -> bool:
    """Say whether another read finds another value, also of a method by its object."""
    bound = isinstance(value, types.BuiltinFunctionType | types.MethodType)
    return bool(moved_by(value)) or isinstance(value.__self__ if bound else value, RANDOM)


@functools.cache
def is_library(kind: type | types.FunctionType) -> bool:
    """Say whether a class or a function is one that a library defines."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return is_foreign(kind.__module__) or is_installed(file)


def is_layer(holder: Any) -> bool:
    """Say whether an object is a library's module: its numbers are sizes, which nobody anneals."""
    if not isinstance(holder, nn.Module):
        return False
    kinds = holder.__class__.__mro__  # of a weakref.proxy, as Lightning keeps: what it stands for
    return any(map(is_library, kinds[: kinds.index(nn.Module)]))


def is_foreign(module: str | None) -> bool:
    """Say whether a module is one that the walk does not enter."""
    return (module or "").split(".")[0] in FOREIGN
