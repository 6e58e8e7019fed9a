"""The functions of a machine that compute the same: a call runs the first that fits the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from tvm import relax

from relax_disc.errors import InputMismatchError, MemoryBudgetError
from relax_disc.vm_builtins.session import ArenaFacts, CallReport, Session

_Found = TypeVar("_Found")
_OTHERS = ("{}__by_rows",)  # see `relax_disc.transform.memory.split_gradients`


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the functions, with its run-time state."""

    function: Any
    session: Session
    forget_result: Any  # a machine keeps its last result until it runs something else: this


class Variants:
    """The plain function, and that which makes the largest gradients by rows, if there is one.

    ``plain``, ``ran``: the first; that which ran last. ``replayed``: of the last call, if that was
    the replay of one that had been captured.
    """

    def __init__(self, machine: relax.VirtualMachine, name: str) -> None:
        """Find them.

        Raises `InputMismatchError`: the program was built without an arena, whose plan tells what
        calls take.
        """
        if not machine.module.implements_function(f"{name}__session"):
            raise InputMismatchError(
                "The program was built without plan_arena, by which a call knows its memory: leave "
                'it on, and build a module with relax_pipeline="relax_disc". Without it a program '
                "runs on TVM's own relax.VirtualMachine."
            )
        found = [name, *(other.format(name) for other in _OTHERS)]
        self._all = tuple(
            Variant(machine[each], Session.of(machine, each), machine[f"{each}__session"])
            for each in found
            if each == name or machine.module.implements_function(each)
        )
        self.plain = self.ran = self._all[0]
        self.replayed: CallReport | None = None

    def sessions(self) -> list[Session]:
        """List the states of all."""
        return [variant.session for variant in self._all]

    def call(self, arguments: Sequence[Any]) -> Any:
        """Call the first that fits.

        Raises `MemoryBudgetError`: none does, and none has begun; of that which needs least.
        """
        if len(self._all) == 1:
            return self._call(self._all[0], arguments)
        return next(self.each(lambda variant: self._call(variant, arguments)))

    def _call(self, variant: Variant, arguments: Sequence[Any]) -> Any:
        before, self.ran, self.replayed = self.ran, variant, None
        try:
            return variant.function(*arguments)
        except MemoryBudgetError:
            self.ran = before
            raise

    def report(self) -> CallReport:
        """Tell what the last call did."""
        return self.replayed or self.ran.session.report()

    def each(self, run: Callable[[Variant], _Found]) -> Iterator[_Found]:
        """Run something with each that fits.

        Raises `MemoryBudgetError`: none does; of that which needs least.
        """
        refusals: list[MemoryBudgetError] = []
        for variant in self._all:
            try:
                result = run(variant)
            except MemoryBudgetError as error:
                refusals.append(error)
                continue
            yield result
        if len(refusals) == len(self._all):
            raise min(refusals, key=lambda error: error.least_bytes)

    def check_budget(self, dims: Sequence[int]) -> None:
        """Raise what a call at this shape would raise for its budget."""
        next(self.each(lambda variant: variant.session.check_budget(dims)))

    def plan(self, dims: Sequence[int], budget: int | None) -> tuple[Session, ArenaFacts]:
        """Plan as a call would: by the first that fits, else by that which needs least."""
        sessions = self.sessions()
        if budget is None:
            sessions = sessions[:1]
        elif len(sessions) > 1:
            fitting = next((session for session in sessions if session.fits(dims, budget)), None)
            sessions = [fitting] if fitting else sessions
        plans = [(session, session.plan(dims, budget)) for session in sessions]
        return min(plans, key=lambda plan: plan[1].least_bytes)

    def fits(self, dims: Sequence[int], budget: int) -> bool:
        """Tell whether any of them fits: quicker than a plan where none does."""
        return any(session.fits(dims, budget) for session in self.sessions())

    @contextmanager
    def only(self, variant: Variant) -> Iterator[None]:
        """Inside, calls run this one."""
        before, self._all = self._all, (variant,)
        try:
            yield
        finally:
            self._all = before

    @property
    def torn(self) -> bool:
        """Whether a call failed after it had written into a tensor of the caller."""
        return any(session.torn for session in self.sessions())

    def clear_torn(self) -> None:
        """Forget that a call failed half-way: the caller's tensors have been loaded again."""
        for session in self.sessions():
            session.clear_torn()
