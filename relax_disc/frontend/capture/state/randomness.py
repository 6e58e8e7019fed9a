"""Random numbers that are not PyTorch's: a program would keep the one draw of its capture."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NoReturn
from unittest.mock import patch

import numpy as np
import torch

from relax_disc.errors import UnsupportedOperatorError
from relax_disc.frontend.capture.source_lines import SourceLine, users_line
from relax_disc.frontend.capture.state.kinds import RANDOM
from relax_disc.frontend.capture.state.sources import Place, Source

_SEEDING = ("random", "secrets", "uuid", "numpy")
"""Modules that ask the system for random bytes in the name of who calls them."""


@contextlib.contextmanager
def no_foreign_randomness(known: Sequence[tuple[Source, Place, Any]]) -> Iterator[None]:
    """Refuse a model that draws numbers of Python, NumPy or the system, but for single fractions.

    ``random.random()`` and its like, between 0 and 1, are drawn anew in each call, as torch.rand.

    ``known``: what it reaches, generators of random numbers among others.

    Raises `UnsupportedOperatorError`: the state of a generator is another one afterwards, or the
    user's code asks the system for random bytes, as generators without a seed do.
    """
    generators = {id(value): (source, value) for source, _, value in known if _has_state(value)}
    before = {key: _state(value) for key, (_, value) in generators.items()}
    python, numpy = random.getstate(), _numpy_state()
    # Functions that were imported by name are not noted.
    held = {
        _SHARED[id(x.__self__)] for _, _, x in known if id(getattr(x, "__self__", 0)) in _SHARED
    }
    with _watched_system(), _noted_draws(held) as draws, _drawn_by_torch():
        yield
    if random.getstate() != python and draws.may_be_mine(random):
        _refuse("draws numbers by Python's `random`", "random")
    if _numpy_state() != numpy and draws.may_be_mine(np.random):
        _refuse("draws numbers by Python's `numpy.random`", "numpy.random")
    for key, (source, value) in generators.items():
        home = _SHARED.get(key)
        if _state(value) != before[key] and (home is None or draws.may_be_mine(home)):
            kind = type(value).__qualname__
            _refuse(f"draws numbers from {source} (a {kind})", kind)


def _refuse(what: str, kind: str, line: SourceLine | None = None) -> NoReturn:
    who = "The model or loss_fn" if line is None else f"{line}: the model or loss_fn"
    raise UnsupportedOperatorError(
        f"{who} {what} while it runs, as LayerDrop and masks of spectrograms do; a compiled step "
        "would repeat the one draw forever. Draw with torch (torch.rand, and torch.where to "
        "choose), or draw in your loop and give the step a tensor of the batch.",
        ((kind, "the model" if line is None else str(line)),),
    )


def _has_state(value: Any) -> bool:
    return isinstance(value, RANDOM) and not isinstance(value, random.SystemRandom)


def _state(value: Any) -> bytes:
    if isinstance(value, random.Random):
        return pickle.dumps(value.getstate())
    bits = value.bit_generator if isinstance(value, np.random.Generator) else value
    if isinstance(bits, np.random.RandomState):
        return pickle.dumps(bits.get_state(legacy=False))
    return pickle.dumps(bits.state)


def _numpy_state() -> bytes:
    """Return the state of NumPy's global generator."""
    return pickle.dumps(np.random.get_state(legacy=False))


@contextlib.contextmanager
def _drawn_by_torch() -> Iterator[None]:
    """Let the user's code draw its numbers between 0 and 1 from PyTorch, which a step repeats."""
    mine = threading.get_ident()

    def drawn(function: Callable[..., Any], takes_bounds: bool) -> Callable[..., Any]:
        def number(*args: Any, **kwargs: Any) -> Any:
            is_fraction = args == () or (takes_bounds and args == (0, 1))
            is_mine = threading.get_ident() == mine
            if not is_mine or not is_fraction or kwargs or users_line() is None:
                return function(*args, **kwargs)
            return torch.rand(())

        return number

    with contextlib.ExitStack() as patches:
        for home, names in ((random, ("random", "uniform")), (np.random, _NUMPY)):
            for name in names:
                made = drawn(getattr(home, name), name == "uniform")
                patches.enter_context(patch.object(home, name, made))
        yield


class _Draws:
    """Which threads have drawn from the generators that the modules share.

    Another thread may prefetch batches meanwhile.
    """

    def __init__(self, held: Collection[Any]) -> None:
        self._mine, self._held = threading.get_ident(), held
        self._is_alone = threading.active_count() == 1
        self._known: set[tuple[Any, int]] = set()

    def note(self, home: Any) -> None:
        """Note a draw of the thread that calls."""
        self._known.add((home, threading.get_ident()))

    def may_be_mine(self, home: Any) -> bool:
        """Say whether a change of a module's generator is not explained by another thread."""
        threads = {thread for other, thread in self._known if other is home}
        if not threads:
            return self._is_alone or home in self._held
        return self._mine in threads


@contextlib.contextmanager
def _noted_draws(held: Collection[Any]) -> Iterator[_Draws]:
    """Note who draws from Python's `random` and NumPy's; ``held``: of which functions are known."""
    draws = _Draws(held)

    def noted(function: Callable[..., Any], home: Any, shared: Any) -> Callable[..., Any]:
        def draw(*args: Any, **kwargs: Any) -> Any:
            is_another = bool(args) and isinstance(args[0], random.Random) and args[0] is not shared
            if not is_another:
                draws.note(home)
            return function(*args, **kwargs)

        return draw

    with contextlib.ExitStack() as patches:
        for home, name, shared in (*_of_python(), *_of_numpy()):
            module = np.random if home is np.random else random
            made = noted(getattr(home, name), module, shared)
            patches.enter_context(patch.object(home, name, made))
        yield draws


def _of_python() -> Iterator[tuple[Any, str, Any]]:
    for home in (random, random.Random):
        # `gauss` makes two numbers at once, and keeps one.
        for name in ("random", "getrandbits", "randbytes", "gauss"):
            yield home, name, _PYTHON


def _of_numpy() -> Iterator[tuple[Any, str, Any]]:
    for name, function in vars(np.random).items():
        if getattr(function, "__self__", None) is _RAND and name not in ("get_state", "set_state"):
            yield np.random, name, None


_PYTHON: Any = random.seed.__self__  # pyright: ignore
_RAND: Any = np.random.get_state.__self__  # pyright: ignore
_SHARED = {id(_PYTHON): random, id(_RAND): np.random, id(_RAND._bit_generator): np.random}
"""The modules of the generators behind their functions, by ``id``."""
_NUMPY = ("random", "rand", "random_sample", "uniform")


@contextlib.contextmanager
def _watched_system() -> Iterator[None]:
    """Refuse random bytes of the system that the user's code asks for, in this thread."""
    mine = threading.get_ident()

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def urandom(*args: Any) -> Any:
            line = users_line(_SEEDING) if threading.get_ident() == mine else None
            if line is not None:
                _refuse("asks the system for random numbers", "os.urandom", line)
            return function(*args)

        return urandom

    seed = random.Random.seed

    def seeded(self: random.Random, a: Any = None, version: int = 2) -> None:
        is_asked = type(a) in (type(None), torch.SymInt) and threading.get_ident() == mine
        line = users_line(_SEEDING) if is_asked else None
        if line is not None:
            what = "asks the system for random numbers" if a is None else "draws numbers by data"
            _refuse(what, "random.Random", line)
        seed(self, a, version)

    with (
        patch.object(os, "urandom", watched(os.urandom)),
        patch.object(random, "_urandom", watched(os.urandom)),
        patch.object(random.Random, "seed", seeded),
    ):
        yield
