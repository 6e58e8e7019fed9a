"""Check the conditions on sizes that a model relies on, over the whole range of its dims.

torch.export proves little about sizes: it refuses ``x[:, : m // 2]`` because it cannot show
``m // 2 <= m``.  Exported with deferred assertions, the program lists what it relies on, and each
condition is evaluated here at every size that the ranges admit.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import sympy
import torch
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimConstraints
from torch.utils._sympy import functions as torch_sympy

from relax_disc.errors import ShapeRangeError, UnsupportedOperatorError, narrower
from relax_disc.frontend.capture.loops.cut import LoopBody
from relax_disc.frontend.capture.sizes.branches import SizeBranches, difference_of, general, places
from relax_disc.frontend.capture.sizes.counted import depends_on_data
from relax_disc.frontend.capture.sizes.dims import DimTable, Sizes, spec_of, symbol_of
from relax_disc.frontend.capture.sizes.evaluation import (
    MOST_POINTS,
    OPEN_END,
    REMAINDERS,
    example_among,
    holds,
)
from relax_disc.frontend.capture.sizes.squeezes import Squeezes
from relax_disc.frontend.capture.sizes.ways import Ways
from relax_disc.frontend.capture.source_lines import SourceLine, source_line
from relax_disc.frontend.spec import DimSpec


@dataclass(frozen=True, slots=True)
class SizeBranch:
    """A condition on which the model's own code branched, as the example has it."""

    condition: Any  # what holds at the example's sizes, over PyTorch's symbols
    line: SourceLine
    what: str = "branches"  # what the model does there
    raises: str = ""  # the model's own error where it does not hold, if it has one


def varying_branches(
    program: ExportedProgram, dims: DimTable, branches: SizeBranches
) -> tuple[SizeBranch, ...]:
    """List what a call must fulfil so that the model's own code would go the example's way.

    torch.export watches a dim by itself, but lets two differ and be equal, and one be the larger.
    """
    env = _environment(program)
    found = []
    for condition, line in branches.asked.items() if env is not None else ():
        condition = condition.xreplace(env.replacements)
        symbols = {str(symbol) for symbol in condition.free_symbols}
        if not isinstance(condition, Boolean) or not symbols <= set(dims.names):
            continue
        if len({dims.names[symbol] for symbol in symbols}) < 2:
            continue
        at_example = {s: env.backed_var_to_val.get(s, s) for s in condition.free_symbols}
        taken = condition.xreplace(at_example)
        if taken not in (sympy.true, sympy.false):
            continue
        condition = sympy.to_nnf(condition if taken == sympy.true else sympy.Not(condition))
        for each in sympy.And.make_args(condition):
            try:
                _check(each, dims, line)
            except ShapeRangeError:
                if not isinstance(each, Relational):  # one of several, which no call checks
                    raise
                found.append(SizeBranch(each, line))
    return tuple(found)


def _environment(program: ExportedProgram) -> Any:
    """Return what PyTorch has noted of the sizes; None of a program without tensors."""
    fakes = (node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder")
    return next((f.fake_mode.shape_env for f in fakes if hasattr(f, "fake_mode")), None)


def _guards(program: ExportedProgram, dims: DimTable) -> Iterator[tuple[Any, Any, set[str]]]:
    """List what PyTorch relies on of declared dims alone: as it noted that, and of which symbols.

    Yields a condition, the same over the symbols that others depend on, and the names of its dims.
    """
    env = _environment(program)
    for guard in env.guards if env is not None else ():
        condition = guard.expr.xreplace(env.replacements)
        symbols = {str(symbol) for symbol in condition.free_symbols}
        if symbols and symbols <= set(dims.names):
            yield guard.expr, condition, {dims.names[symbol] for symbol in symbols}


def branches_of_squeezes(
    program: ExportedProgram, dims: DimTable, squeezes: Squeezes
) -> tuple[SizeBranch, ...]:
    """List the sizes that must not be 1, since eager PyTorch would remove their axes."""
    found = []
    for node, size in squeezes.sizes(program.graph_module):
        if {str(symbol) for symbol in size.free_symbols} <= set(dims.names):
            branch = SizeBranch(sympy.Ne(size, 1), source_line(node), "squeezes an axis")
            try:
                _check(branch.condition, dims, branch.line)
            except ShapeRangeError:
                found.append(branch)
    return tuple(found)


def branches_of_loops(bodies: Sequence[LoopBody]) -> tuple[SizeBranch, ...]:
    """List what a call must fulfil so that a loop has a step, where it trains parameters alone.

    PyTorch gives them no gradient where it has none, and its optimizers leave such ones as they
    are.
    """
    return tuple(
        SizeBranch(
            sympy.Ge(_positive(body.count.node.expr), 1),
            body.line,
            f"trains {body.trains_alone} in the steps of a loop alone",
        )
        for body in bodies
        if body.trains_alone
    )


def _positive(size: Any) -> Any:
    """Of ``max(0, n)`` return ``n``: it is the same where it is positive."""
    if isinstance(size, sympy.Max | torch_sympy.Max) and sympy.S.Zero in size.args:
        (size,) = (part for part in size.args if part != 0)
    return size


def check_assertions(
    program: ExportedProgram,
    dims: DimTable,
    branches: SizeBranches,
    varying: Sequence[SizeBranch] = (),
) -> None:
    """Check every deferred assertion of an exported program that has to hold.

    ``varying``: what calls check.

    Raises `ShapeRangeError`: a condition fails at some size in range; names the sizes and the line.
    """
    for node in program.graph.nodes:
        if str(node.target) != "aten._assert_scalar.default":
            continue
        value = getattr(node.args[0], "meta", {}).get("val")
        expr = getattr(getattr(value, "node", None), "expr", None)
        if not isinstance(expr, sympy.Basic) or not expr.free_symbols:
            continue
        # What is relied on of sizes that depend on data is known in the trace, where masks are one.
        if depends_on_data(value) or _is_left_to_calls(expr, varying):
            continue
        if branches.decides(expr):
            _check(branches.required(expr), dims, source_line(node))


def _is_left_to_calls(condition: Any, varying: Sequence[SizeBranch]) -> bool:
    """Whether a condition is one that calls check."""
    return isinstance(condition, sympy.Ne) and any(
        isinstance(branch.condition, sympy.Ne)
        and difference_of(branch.condition) == difference_of(condition)
        for branch in varying
    )


def check_derived_dims(
    program: ExportedProgram,
    dims: DimTable,
    branches: SizeBranches,
    fixing: Sequence[SourceLine],
    varying: Sequence[SizeBranch] = (),
) -> None:
    """Check what torch.export takes for granted where a dim is a multiple such as ``8 * h``.

    Its own proof leaves out conditions over such sizes, and lets them be fixed to one number.

    Raises `ShapeRangeError`: a condition fails at some size in range, or a dim was fixed to one
    size.
    """
    for symbol, interval in program.range_constraints.items():
        spec = dims.specs.get(dims.names.get(str(symbol), ""))
        if spec is not None and interval.lower == interval.upper and spec.lower != _upper(spec):
            size = int(interval.lower)
            error = narrower(
                f"The model contradicts dynamic_shapes{places(fixing)}: it works for "
                f"{spec.name}={size} alone; declare the dim static.",
                *(spec.name, size, size),
            )
            # A size that is made of it may be 1 in the example alone.
            error.dims, error.fails_at = (spec.name,), {spec.name: 2 * size + 3}
            raise error
    for noted, condition, _ in _guards(program, dims):
        # As in a trace of operators, PyTorch's own "not equal" is the general way.
        if noted == condition or _is_left_to_calls(condition, varying):
            continue
        line = branches.line(noted)
        line = line if line.file else branches.line(condition)
        if line.file or not isinstance(condition, sympy.Ne):
            _check(condition, dims, line)


def check_several_dims(
    program: ExportedProgram,
    dims: DimTable,
    branches: SizeBranches,
    varying: Sequence[SizeBranch] = (),
) -> None:
    """Check conditions over several dims, which torch.export takes for granted.

    Its solver notes them and goes on; so ``rows[: 2 * ((batch * length + 1) // 2)]`` would have
    that many rows at every size. Its own "not equal" is the general way.

    ``varying``: what calls check.

    Raises `ShapeRangeError`: a condition fails at some size in range.
    """
    checked_by_calls = {branch.condition for branch in varying}
    for _, condition, names in _guards(program, dims):
        if len(names) < 2 or isinstance(condition, sympy.Ne):
            continue
        for each in sympy.And.make_args(sympy.to_nnf(condition)):
            if each not in checked_by_calls and not _is_left_to_calls(each, varying):
                _check(general(each), dims, branches.line(each))


def check_asked(program: ExportedProgram, dims: DimTable, branches: SizeBranches) -> None:
    """Check that all that the model's own code asked has one answer over the ranges of the dims.

    Raises `ShapeRangeError`: some sizes would take the other branch.
    """
    env = _environment(program)
    for condition, line in branches.asked.items():
        condition = condition if env is None else condition.xreplace(env.replacements)
        symbols = {str(symbol) for symbol in condition.free_symbols}
        if symbols and symbols <= set(dims.names):
            try:
                _check(condition, dims, line)
            except ShapeRangeError:
                _check(sympy.Not(condition), dims, line)


def check_numbers(program: ExportedProgram, dims: DimTable, branches: SizeBranches) -> None:
    """Check that numbers which the model's own code made of sizes are the same at all sizes.

    Raises `ShapeRangeError`: ``int(0.5 * length)``, say, is a number of the example alone.
    """
    env = _environment(program)
    for condition, line in branches.numbers.items():
        size, number = condition.args
        size = size if env is None else size.xreplace(env.replacements)
        symbols = {str(symbol) for symbol in size.free_symbols}
        if not symbols or not symbols <= set(dims.names):
            continue
        try:
            _check(sympy.Eq(size, number, evaluate=False), dims, line)
        except ShapeRangeError as error:
            words = size.xreplace({s: sympy.Symbol(dims[s].name) for s in size.free_symbols})
            raise ShapeRangeError(
                f"{line}: a plain number is made of the example's sizes, {number} of {words}, that "
                "differs at others, by int(), float() or an operator that takes no sizes there: "
                "compute with the sizes themselves (torch.sym_int for int, // for a floor), or "
                "with a tensor outside of that operator."
            ) from error


def refusal_of_ways(ways: Ways, at: Mapping[str, int]) -> ShapeRangeError:
    """Make the error of a model whose code goes another way at some sizes."""
    specs = {name: spec_of(dim) for name, dim in ways.dims().items()}
    table = DimTable({name: name for name in specs}, specs)
    sizes = {symbol_of(name): size for name, size in at.items()}
    broken = [condition for condition in ways.asked if condition.xreplace(sizes) == sympy.false]
    condition = next(iter(broken or ways.asked))
    try:
        _check(condition, table, ways.asked[condition])
    except ShapeRangeError as error:
        return error
    raise AssertionError("what was asked fails at some size")


class ProvedConditions:
    """Keeps conditions that hold at all declared sizes from torch.export's solver.

    The solver takes quotients and remainders for what they are at the example's sizes: of
    ``(length + 63) // 64 == 1``, true up to 64, it would conclude that the length is the example's.

    ``by_source``: what is declared of each axis, by the name that PyTorch has for its size.
    ``sizes``, ``where``: at which they have to hold, as `DimTable` has it.
    ``fails_at``: a size, by the name of the dim, at which an equality of that dim alone is broken
    that the example fulfils, such as the one above at 100.
    """

    def __init__(
        self, by_source: Mapping[str, Any], sizes: Sizes, where: tuple[Any, ...] = ()
    ) -> None:
        self.by_source, self._sizes, self._where = by_source, sizes, where
        self.fails_at: dict[str, int] = {}

    @contextlib.contextmanager
    def kept_back(self, branches: SizeBranches) -> Iterator[None]:
        """Keep them back while this is active; ``branches``: tells what of each must hold."""
        before = DimConstraints.add

        def add(solver: Any, condition: Any) -> bool:
            sources = solver._dcp.symbol_to_source
            proved = self._is_proved(condition, branches, sources)
            return proved or before(solver, condition)

        with patch.object(DimConstraints, "add", add):
            yield

    def _is_proved(
        self, condition: Any, branches: SizeBranches, sources: Mapping[Any, Any]
    ) -> bool:
        if not condition.atoms(torch_sympy.FloorDiv, torch_sympy.CleanDiv, *REMAINDERS):
            return False
        found = {
            symbol: self.by_source.get(sources[symbol][0].name)
            for symbol in condition.free_symbols
            if sources.get(symbol)
        }
        dims = {s: dim for s, dim in found.items() if type(dim) is Dim and dim.max <= OPEN_END}
        specs = {dim.__name__: spec_of(dim) for dim in dims.values()}
        points = math.prod(_upper(spec) - spec.lower + 1 for spec in specs.values())
        if dims.keys() != condition.free_symbols or points > OPEN_END:
            return False
        names = {str(symbol): dim.__name__ for symbol, dim in dims.items()}
        table = DimTable(names, specs, sizes=self._sizes, where=self._where)
        try:
            _check(branches.required(condition), table, SourceLine("", 0))
        except UnsupportedOperatorError:
            return False
        except ShapeRangeError as error:
            if len(specs) == 1:
                self.fails_at = {**error.fails_at, **self.fails_at}
            return False
        return True


class GuardWatch:
    """Finds what a trace has come to rely on since the watch began."""

    def __init__(self, fakes: Sequence[Any]) -> None:
        modes = (getattr(fake, "fake_mode", None) for fake in fakes)
        self._env = next((m.shape_env for m in modes if m is not None), None)
        self._count = 0 if self._env is None else len(self._env.guards)
        self._symbols = {
            symbol
            for fake in fakes
            for extent in getattr(fake, "shape", ())
            if isinstance(extent, torch.SymInt)
            for symbol in extent.node.expr.free_symbols
        }

    def check(self, dims: DimTable) -> None:
        """Check the new conditions over the ranges of the dims.

        Raises `ShapeRangeError`: a condition fails at some size in range, or a dim was fixed to one
        size.
        """
        if self._env is None:
            return
        for symbol in sorted(self._symbols, key=str):
            fixed = self._env.replacements.get(symbol)
            if fixed is not None:
                raise narrower(
                    f"Tracing fixed the dim {dims[symbol].name!r} to {fixed}: an operator of the "
                    "model works for one size only; declare the dim static.",
                    *(dims[symbol].name, int(fixed), int(fixed)),
                )
        for guard in self._env.guards[self._count :]:
            # No code of the user runs in a trace of operators: PyTorch's own "not equal" says
            # that it took the general way, which holds for equal sizes as well.
            if guard.expr.free_symbols and not isinstance(guard.expr, sympy.Ne):
                _check(general(guard.expr), dims, SourceLine("", 0))


@contextlib.contextmanager
def unequal_sizes(dims: DimTable) -> Iterator[None]:
    """Let PyTorch's C++ take sizes and strides for unequal that are equal at the example alone.

    That is the general way: it copies what it need not, or refuses sizes that do not fit.
    """
    before = SymNode.guard_bool

    def guarded(self: Any, file: str, line: int) -> bool:
        condition = self.expr
        if not isinstance(condition, sympy.Eq | sympy.Ne) or not file.endswith("SymInt.h"):
            return before(self, file, line)
        answers = everywhere(condition, dims), everywhere(sympy.Not(condition), dims)
        return (
            isinstance(condition, sympy.Ne)
            if answers == (False, False)
            else before(self, file, line)
        )

    with patch.object(SymNode, "guard_bool", guarded):
        yield


def everywhere(condition: Any, dims: DimTable) -> bool | None:
    """Whether a condition holds at all declared sizes; None where that cannot be told."""
    if not condition.free_symbols:
        return condition == sympy.true
    if not {str(symbol) for symbol in condition.free_symbols} <= set(dims.names):
        return None
    try:
        _check(condition, dims, SourceLine("", 0))
    except UnsupportedOperatorError:
        return None
    except ShapeRangeError as error:
        return None if not error.dims else False
    return True


def _check(condition: Any, dims: DimTable, line: SourceLine) -> None:
    # Two inputs may have symbols of their own for one dim.
    names: dict[str, sympy.Symbol] = {}
    symbols = sorted(condition.free_symbols, key=str)
    condition = condition.xreplace({s: names.setdefault(dims[s].name, s) for s in symbols})
    if condition == sympy.true:
        return
    symbols = sorted(condition.free_symbols, key=str)
    specs = [dims[symbol] for symbol in symbols]
    every = (np.arange(spec.lower, _upper(spec) + 1) for spec in specs)
    ranges = [dims.sizes.get(d.name, sizes) for d, sizes in zip(specs, every, strict=True)]
    text = condition.xreplace(
        {s: sympy.Symbol(d.name) for s, d in zip(symbols, specs, strict=True)}
    )
    if functools.reduce(operator.mul, map(len, ranges)) > MOST_POINTS:
        widest = max(specs, key=lambda spec: _upper(spec) - spec.lower)
        most = int(MOST_POINTS ** (1 / len(specs)))
        raise narrower(
            f"The model relies on {text}, which cannot be checked over so many sizes; give the "
            f"dims {', '.join(d.name for d in specs)} smaller ranges.",
            *(widest.name, widest.lower, widest.lower + most - 1),
        )
    grids = np.meshgrid(*ranges, indexing="ij")
    found = holds(condition, dict(zip(symbols, grids, strict=True)))
    by_name = {symbol_of(spec.name): grid for spec, grid in zip(specs, grids, strict=True)}
    for each in dims.where:
        if each.free_symbols <= by_name.keys():
            found = found | ~holds(each, by_name)
    failing = np.argwhere(~np.broadcast_to(found, grids[0].shape))
    if len(failing) == 0:
        return
    first = failing[0]
    at = ", ".join(f"{d.name}={r[k]}" for d, r, k in zip(specs, ranges, first, strict=True))
    advice, allowed = "change the model or the ranges", None
    for k, (spec, sizes) in enumerate(zip(specs, ranges, strict=True)):
        beyond = int(failing[:, k].max()) + 1  # all sizes below fail, whatever the other dims are
        if len(failing) == beyond * (grids[0].size // len(sizes)) and beyond < len(sizes):
            upper = "" if spec.upper is None else f", max={spec.upper}"
            advice = f"give Dim({spec.name!r}, min={sizes[beyond]}{upper})"
            allowed = spec.name, int(sizes[beyond]), spec.upper
        least = int(failing[:, k].min())  # all sizes from here on fail
        if least and len(failing) == (len(sizes) - least) * (grids[0].size // len(sizes)):
            advice = f"give Dim({spec.name!r}, min={sizes[0]}, max={sizes[least - 1]})"
            allowed = spec.name, int(sizes[0]), int(sizes[least - 1])
    for spec, parts in ((d, _modulus(condition, s)) for s, d in zip(symbols, specs, strict=True)):
        if parts is not None:
            advice = (
                f"give an example whose {spec.name} is a multiple of {parts}, declare it as "
                f"{parts} * Dim(...), and pad batches to multiples"
            )
    error = ShapeRangeError(
        f"The traced program needs {text}, which fails at {at} "
        f"(and {len(failing) - 1} more sizes in range): {advice}."
        + (f" It stems from {line}." if line.file else "")
    )
    error.allowed, error.dims = allowed, tuple(spec.name for spec in specs)
    points = np.stack([sizes[failing[:, k]] for k, sizes in enumerate(ranges)], axis=-1)
    points = points[(points >= 2).all(axis=1)]
    if len(points) and isinstance(condition, sympy.Eq):
        point = example_among(points)
        error.fails_at = {spec.name: int(n) for spec, n in zip(specs, point, strict=True)}
    raise error


def _modulus(condition: Any, symbol: sympy.Symbol) -> int | None:
    """Return the number by which a condition asks a size to be divided; None where it does not."""
    remainders = condition.atoms(*REMAINDERS)
    found = {n for size, n in (r.args for r in remainders) if size == symbol and n.is_Integer}
    return int(max(found)) if found else None


def _upper(spec: DimSpec) -> int:
    return OPEN_END if spec.upper is None else spec.upper
