"""Export one program that is right at all declared sizes.

torch.export makes a program at the sizes of the example and keeps what the model's code does there.
What it relies on is checked at all declared sizes.  Where that fails it is made again at sizes that
tell more; and where the model's code branches on a size, once for each way that it takes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch._dynamo.exc import UserError
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from relax_disc.errors import ShapeRangeError, UnsupportedOperatorError
from relax_disc.frontend.capture.example_values import example_values
from relax_disc.frontend.capture.exported.torch_call import call_export
from relax_disc.frontend.capture.exported.unread import erase_unread
from relax_disc.frontend.capture.loops.choices import settle_choices
from relax_disc.frontend.capture.loops.cut import LoopBody, cut_loops
from relax_disc.frontend.capture.loops.recorded import LongerExample, RecordedLoops
from relax_disc.frontend.capture.model_checks import EagerBranches, tensor_checks
from relax_disc.frontend.capture.replaced.custom_functions import CustomCalls, custom_functions
from relax_disc.frontend.capture.sizes.branches import (
    SizeBranches,
    lines_that_fix_sizes,
    size_branches,
)
from relax_disc.frontend.capture.sizes.counted import merge_equal_masks, refuse_other_sizes
from relax_disc.frontend.capture.sizes.dims import (
    DimTable,
    Sizes,
    dim_table,
    enlarge,
    root_of,
    roots_stay,
    size_at,
    symbol_of,
)
from relax_disc.frontend.capture.sizes.evaluation import OPEN_END
from relax_disc.frontend.capture.sizes.guards import (
    ProvedConditions,
    SizeBranch,
    branches_of_loops,
    branches_of_squeezes,
    check_asked,
    check_assertions,
    check_derived_dims,
    check_numbers,
    check_several_dims,
    refusal_of_ways,
    varying_branches,
)
from relax_disc.frontend.capture.sizes.joint_ways import JointWays, Region
from relax_disc.frontend.capture.sizes.longer_example import sizes_beyond_one
from relax_disc.frontend.capture.sizes.next_multiples import general_next_multiples
from relax_disc.frontend.capture.sizes.refused import ModelsError, RefusedSizes, models_own
from relax_disc.frontend.capture.sizes.same_program import Side, parting_line
from relax_disc.frontend.capture.sizes.ways import Ways
from relax_disc.frontend.capture.source_lines import SourceLine

_logger = logging.getLogger(__name__)

_MOST_WAYS = 8
"""Ways that a model's code takes beyond these are not exported: each takes as long as the first."""

_MOST_EXAMPLES = 3
"""A program of one size may rely on what fails at others, and be right for all when made there."""


@dataclass(slots=True)
class Recording:
    """What one export has recorded, with its loops cut out."""

    program: ExportedProgram
    bodies: list[LoopBody]
    branches: SizeBranches
    lines: list[SourceLine]
    calls: CustomCalls
    example: Any  # what data decided
    dims: DimTable = field(default_factory=lambda: DimTable({}, {}))
    varying: tuple[SizeBranch, ...] = ()


@dataclass(frozen=True, slots=True)
class Task:
    """What is exported, and for which sizes."""

    wrapped: Any
    example: Any
    dynamic_shapes: Any
    declared: Mapping[int, Mapping[int, Any]]
    leaves: Sequence[Any]
    by_source: Mapping[str, Any]
    apart: dict[SourceLine, str] = field(default_factory=dict)
    """Steps of loops that an export had to record by themselves, for the exports that follow."""

    def export(self) -> Recording:
        """Export one program that is right at all declared sizes.

        Raises `ShapeRangeError`: there is none; and what `call_export` raises.
        """
        ways, run, first = Ways(self.by_source), None, None
        try:
            run = self._checked(ways, {}, {})
        except ShapeRangeError as error:
            first = error
        if ways.joint and (run is None or run.varying):
            joint = self._joint()
            if joint is not None:
                return joint
            first = None if first is None else self._of_two_ways(first, ways)
        if first is not None and not ways:
            raise first from first.__cause__
        if run is not None and not ways:
            self._check_next_call(run)
            return self._longer(run)
        try:
            return self._all_ways(ways, run)
        except _AnotherProgram as parting:
            error = refusal_of_ways(ways, parting.at)
            raise parting.worded(error) from parting.__cause__

    def _check_next_call(self, run: Recording) -> None:
        """Export once more from what the model's code leaves behind, if it leaves something.

        Raises `UnsupportedOperatorError`: the next call would be another program.
        """
        outer = self.wrapped.outer
        left = outer.next_call
        if not left:
            return
        kept = outer.kept()
        try:
            with left.begun():
                line = _parting(run, self._checked(Ways(self.by_source), {}, {}))
        except Exception as error:  # the model's own too
            _logger.info("a next call cannot be exported: %s", error)
            line = SourceLine("", 0)
        outer.put_back(kept)
        if line is not None:
            raise _another_next_call(left.names, line)

    def _longer(self, run: Recording) -> Recording:
        """Export at longer sizes where the example is too short to tell, if that goes as well."""
        sizes = sizes_beyond_one(run.program, run.dims)
        if not sizes:
            return run
        outer, ways = self.wrapped.outer, Ways(self.by_source)
        kept = outer.kept()
        try:
            longer = self._checked(ways, {}, sizes)
            if not ways:
                return longer
        except Exception as error:  # the model's own too, which may refuse those sizes
            _logger.info("a longer example does not go through: %s", error)
        outer.put_back(kept)
        return run

    def _all_ways(self, ways: Ways, run: Recording | None) -> Recording:
        """Return the program of one way that at the sizes of all others is what they are.

        Of the way of most sizes, if that is one.  ``run``: one that is right for the example's way.
        Ways that end in an error of the model's own are left to calls, which refuse their sizes.
        Raises `_AnotherProgram`: none is, or some way cannot be exported.
        """
        outer, runs, relied_on = self.wrapped.outer, {}, []
        refused = RefusedSizes()
        mine = dict(ways.example_sizes)
        kept = outer.kept()
        ways.are_free = True
        while True:
            every = ways.classes()
            classes = {_key(part): part for part in every if not refused.holds(part)}
            most = next(iter(classes))
            if run is not None and _holds(classes[most], mine):
                runs[most] = run
            missing = [key for key in reversed(classes) if key not in runs]
            if not missing:
                break
            part = classes[missing[0]]
            if max(len(classes), len(relied_on)) > _MOST_WAYS:
                raise _AnotherProgram(part)
            before = outer.kept()
            try:
                runs[missing[0]] = self._way(ways, part)
            except _AnotherProgram as error:
                if error.raised is not None and len(classes) > 1:
                    refused.add(part, error.raised)
                    outer.put_back(before)  # with numbers that were held to be at fault
                elif len(ways.classes()) == len(every):
                    raise  # else what was asked on this way divides the sizes further
            relied_on.append(outer.relied_on())
        chosen = _of_all_sizes(runs, classes)
        if runs[chosen] is run:
            outer.put_back(kept)
        elif list(runs)[-1] != chosen:
            runs[chosen] = self._way(ways, classes[chosen])
        outer.rely_also(relied_on)  # on what the code of other ways read
        found = runs[chosen]
        if refused:
            left = refused.branches(ways.asked, list(classes.values()), found.dims)
            if left is None:
                raise _AnotherProgram(next(part for part in every if refused.holds(part)))
            found.varying = (*found.varying, *left)
        return found

    def _joint(self) -> Recording | None:
        """Return the program of likely answers to conditions on several dims, if it is right.

        None: at some sizes the model does something else, or cannot be exported for them, or there
        are too many ways.
        """
        outer, ways = self.wrapped.outer, JointWays(self.by_source)
        kept = outer.kept()
        for ways.are_clamped in (False, True):
            try:
                return self._likely(ways)
            except Exception as error:  # the model's own too, which may refuse those sizes
                _logger.info("dims that are compared with others: %r", error)
                outer.put_back(kept)
            if not ways.could_clamp:
                break
        return None

    def _of_two_ways(self, error: ShapeRangeError, ways: Ways) -> ShapeRangeError:
        """Say what line compares dims, where PyTorch tells what the example's way needs of one."""
        joint = JointWays(self.by_source)
        differ = (
            (each, line)
            for each, line in ways.joint.items()
            if joint.differs(each) or joint.is_too_wide(each)
        )
        found = next(differ, None) if isinstance(error.__cause__, UserError) else None
        if found is None:
            return error
        condition, line = found
        worded = ShapeRangeError(
            f"{line}: the model goes one way where {condition} and another elsewhere, and "
            + (
                "there are more sizes than can be compared: declare narrower ranges"
                if joint.is_too_wide(condition)
                else "no one program is both"
            )
            + ". Compute with sizes that hold for all, such as pad by max(a, b) - a, which is 0 "
            f"where nothing is missing; or compile a step of each way. {error}"
        )
        vars(worded).update(vars(error))
        return worded

    def _likely(self, ways: JointWays) -> Recording:
        """Export by likely answers and compare that with what the model does at all sizes.

        Raises `_AnotherProgram`: it does something else at some; and what export raises.
        """
        outer, relied_on = self.wrapped.outer, []
        ways.are_general = True
        run = self._checked(ways, {}, {}, equals=True)
        kept, regions = outer.kept(), ways.split(ways.region())
        ways.are_general = False
        while regions:
            region = regions.pop(0)
            way, parting = None, _AnotherProgram(region.sizes)
            if len(relied_on) >= _MOST_WAYS:
                raise parting
            try:
                way = self._way(ways, region.sizes, region)
            except _AnotherProgram as error:
                parting = error
            relied_on.append(outer.relied_on())
            parts = ways.split(region)
            if len(parts) > 1:  # what was asked on this way divides the sizes further
                regions = [*parts, *regions]
            elif way is None or _parting(run, way) is not None:
                raise parting
        outer.put_back(kept)
        outer.rely_also(relied_on)  # on what the code of other ways read
        return run

    def _way(self, ways: Ways, part: Sizes, region: Region | None = None) -> Recording:
        """Export for the sizes of a class, which are a region if conditions are on several dims."""
        sizes = ways.example(part) if region is None else region.example
        where, equal = ((), {}) if region is None else (region.where, region.equal)
        one_for = {name: ways.dims()[other] for name, other in equal.items()}
        shapes = pytree.tree_map(
            lambda dim: _within(one_for.get(getattr(dim, "__name__", ""), dim), part),
            self.dynamic_shapes,
        )
        dims = [dim for by_axis in self.declared.values() for dim in by_axis.values()]
        roots = {root_of(dim).__name__ for dim in dims if root_of(dim) is not dim}
        if roots & part.keys():  # other sizes are declared by one of them
            shapes = self.dynamic_shapes
            if 1 in sizes.values():
                raise _AnotherProgram(part)
        try:
            return replace(self, dynamic_shapes=shapes)._checked(ways, part, sizes, where)
        except Exception as error:  # the model's own too, which may refuse those sizes
            _logger.info("a way cannot be exported: %s", error)
            raise _AnotherProgram(part, raised=models_own(error)) from error

    def _checked(
        self,
        ways: Ways,
        part: Sizes,
        sizes: Mapping[str, int],
        where: tuple[Any, ...] = (),
        equals: bool = False,
    ) -> Recording:
        """Export a program that is right at all declared sizes, or at a part of them.

        Where one that was made at ``sizes`` is not, it is made at others.  ``where``: what holds of
        the part. ``equals``: whether the example's sizes were equal where others are not.
        """
        first: ShapeRangeError | None = None
        ways.part = part
        equals = equals or bool(part)
        is_longer = False  # whether the example was too short to tell what stands in the way
        for left in reversed(range(_MOST_EXAMPLES)):
            proved = ProvedConditions(self.by_source, part, where)
            try:
                with roots_stay(self.by_source):
                    run = self._recorded(sizes, ways, equals, proved, may_grow=bool(left))
                self._check(run, equals, part, where)
            except Exception as error:
                # torch.export took sizes for numbers
                fixed = isinstance(error.__cause__, UserError)
                known = proved.fails_at if fixed else {}
                fails_at = known or getattr(error, "fails_at", {})
                grown = {**sizes, **_in_range(fails_at, self.declared)}
                last = not left or (fixed and (first is not None or not fails_at))
                last = last or not _holds(part, grown, where) or ways.are_unseen
                if not isinstance(error, ShapeRangeError) or not error.dims or last:
                    if first is None or (is_longer and not fixed):
                        raise
                    raise first from None
                is_longer = is_longer or bool(known)
                equals = equals or not fixed
                if not isinstance(error, LongerExample):
                    first = first or error
                sizes = grown
            else:
                if first is not None and not part:
                    self._check_example(run)
                return run
        raise AssertionError("the last example raises or returns")

    def _check_example(self, run: Recording) -> None:
        """Refuse a program of other sizes that the user's own example is not one of.

        Raises `ShapeRangeError`: it goes another way where the model branches on several dims.
        """
        sizes = {
            root_of(dim).__name__: leaf.shape[axis]
            for leaf in self.leaves
            for axis, dim in self.declared.get(id(leaf), {}).items()
            if root_of(dim) is dim
        }
        by_symbol = {key: sizes[name] for key, name in run.dims.names.items() if name in sizes}
        for branch in run.varying:
            at = {s: by_symbol.get(str(s)) for s in branch.condition.free_symbols}
            if None in at.values() or branch.condition.xreplace(at) != sympy.false:
                continue
            words = {s: symbol_of(run.dims.names[str(s)]) for s in at}
            raise ShapeRangeError(
                f"{branch.line}: the example goes a way of its own, where "
                f"{sympy.Not(branch.condition.xreplace(words))}. Give one of other sizes; calls "
                "refuse those that go that way."
            )

    def _recorded(
        self, sizes: Mapping[str, int], ways: Ways, equals: bool, proved: Any, may_grow: bool
    ) -> Recording:
        """Export; where a loop cannot be one step, once more as it is written.

        ``may_grow``: where another example would help, that is left to the caller.
        """
        wrapped = self.wrapped
        args, kwargs = _enlarged(self.example, self.declared, sizes)
        loops = RecordedLoops(self.by_source, self.apart, may_grow)
        eager_branches = EagerBranches()
        while True:
            ways.begin()
            with (
                eager_branches.answered(),
                tensor_checks(),
                size_branches(ways) as branches,
                general_next_multiples(ways),
                proved.kept_back(branches),
                lines_that_fix_sizes() as lines,
                custom_functions() as calls,
                example_values(wrapped, self.leaves) as example,
            ):
                branches.ones_are_general = equals
                try:
                    program = call_export(
                        wrapped, args, kwargs, self.dynamic_shapes, lines, branches, loops
                    )
                    refusal = settle_choices(program)
                    bodies = cut_loops(program, loops)
                except Exception as error:
                    grows = may_grow and isinstance(error.__cause__, UserError) and proved.fails_at
                    grows = grows or isinstance(error, LongerExample)
                    if grows or (ways.are_unseen and isinstance(error, ShapeRangeError)):
                        raise loops.explained(error) from error.__cause__
                    if eager_branches.give_up() or loops.give_up(error):
                        continue
                    if not wrapped.outer.give_up_live_numbers(error):
                        raise loops.explained(error) from error.__cause__
                else:
                    if refusal is not None:
                        raise refusal
                    return Recording(program, bodies, branches, lines, calls, example)

    def _check(self, run: Recording, equals: bool, part: Sizes, where: tuple[Any, ...]) -> None:
        program, branches = run.program, run.branches
        erase_unread(program.graph_module)
        refuse_other_sizes(program)
        merge_equal_masks(program.graph_module)
        run.dims = table = dim_table(program, self.leaves, self.declared, part, where)
        varying = varying_branches(program, table, branches)
        squeezes = branches_of_squeezes(program, table, branches.squeezes)
        run.varying = varying = (*varying, *squeezes, *branches_of_loops(run.bodies))
        check_assertions(program, table, branches, varying)
        check_derived_dims(program, table, branches, run.lines, varying)
        check_several_dims(program, table, branches, varying)
        if equals:
            check_asked(program, table, branches)
        check_numbers(program, table, branches)


def _enlarged(
    example: Any, declared: Mapping[int, Mapping[int, Any]], sizes: Mapping[str, int]
) -> Any:
    """Make every dynamic axis of the example at least 2 long, and some of the sizes of dims."""
    sizes = {**dict.fromkeys(_ones(example, declared), 2), **sizes}
    return pytree.tree_map_only(
        torch.Tensor, lambda tensor: enlarge(tensor, declared.get(id(tensor), {}), sizes), example
    )


def _ones(example: Any, declared: Mapping[int, Mapping[int, Any]]) -> set[str]:
    """Name the dims that are 1 in the example, of which others are a multiple perhaps."""
    return {
        root_of(dim).__name__
        for tensor in pytree.tree_leaves(example)
        for axis, dim in declared.get(id(tensor), {}).items()
        if hasattr(root_of(dim), "__name__") and axis < tensor.dim()
        if tensor.shape[axis] == size_at(dim, 1)
    }


def _in_range(
    sizes: Mapping[str, int], declared: Mapping[int, Mapping[int, Any]]
) -> dict[str, int]:
    """Cut sizes of dims, by name, to the greatest that is declared for each."""
    dims = (dim for by_axis in declared.values() for dim in by_axis.values())
    roots = map(root_of, dims)
    most = {root.__name__: root.max for root in roots if isinstance(root, torch.export.Dim)}
    return {name: int(min(size, most.get(name, size))) for name, size in sizes.items()}


def _of_all_sizes(runs: Mapping[Any, Recording], classes: Mapping[Any, Sizes]) -> Any:
    """Name the class whose program all others' are at their sizes: the first of those in order.

    Raises `_AnotherProgram`: there is none; it tells where the first class's parts from another.
    """
    parted = None
    for base, part in classes.items():
        if parted is not None and any(len(sizes) == 1 for sizes in part.values()):
            continue  # that size is a number in its program
        other = _another(runs[base], runs, classes)
        if other is None:
            return base
        parted = parted or other
    assert parted is not None
    raise parted


def _another(
    base: Recording, runs: Mapping[Any, Recording], classes: Mapping[Any, Sizes]
) -> _AnotherProgram | None:
    for key, part in classes.items():  # where one dim alone parts them, it is the one that is named
        run = runs[key]
        if run is base:
            continue
        parting = _parting(base, run)
        if parting is not None:
            return _AnotherProgram(part, parting)
    return None


def _another_next_call(names: Sequence[str], line: SourceLine) -> UnsupportedOperatorError:
    what = ", ".join(dict.fromkeys(names))
    return UnsupportedOperatorError(
        f"{f'{line}: ' if line.line else ''}what the model or loss_fn leaves in {what} makes its "
        "next call another program, and each compiled step would be like the first one. If it is "
        "what a first call prepares, call the model once before compile; else keep it in a buffer "
        "that is written in place, or set it in your loop.",
        (("state that Python keeps", what),),
    )


def _parting(base: Recording, run: Recording) -> SourceLine | None:
    """Return the line at which two programs part at the sizes of the second, if they do."""
    line = parting_line(_side(base), _side(run))
    return SourceLine("", 0) if line is None and not base.calls.are_like(run.calls) else line


def _key(part: Sizes) -> tuple[Any, ...]:
    return tuple((name, sizes.tobytes()) for name, sizes in part.items())


def _holds(part: Sizes, sizes: Mapping[str, int], where: Sequence[Any] = ()) -> bool:
    """Whether sizes are among those of a part, ``where`` that holds."""
    by_name = {symbol_of(name): size for name, size in sizes.items()}
    return all(name not in sizes or sizes[name] in some for name, some in part.items()) and all(
        condition.xreplace(by_name) == sympy.true for condition in where
    )


def _within(dim: Any, part: Sizes) -> Any:
    """Declare a dim for the sizes of a class; PyTorch has no symbol for one size alone."""
    sizes = part.get(getattr(dim, "__name__", ""))
    if sizes is None:
        return dim
    if len(sizes) == 1:
        return Dim.STATIC
    is_open = sizes[-1] == OPEN_END and dim.max > OPEN_END
    return Dim(dim.__name__, min=int(sizes[0]), max=None if is_open else int(sizes[-1]))


def _side(run: Recording) -> Side:
    return Side(run.program, run.dims, run.bodies)


class _AnotherProgram(Exception):
    """The model's code is another program at some sizes, from a line on, if that is known.

    ``raised``: what it raises there, if that is an error of its own.
    """

    def __init__(
        self, part: Sizes, line: SourceLine | None = None, raised: ModelsError | None = None
    ) -> None:
        super().__init__()
        self.raised = raised
        self.at = {name: int(sizes[-1]) for name, sizes in part.items()}
        self._line = line

    def worded(self, error: ShapeRangeError) -> ShapeRangeError:
        """Add it to an error, which tells of the branch."""
        where = f" from {self._line} on" if self._line is not None and self._line.file else ""
        at = ", ".join(f"{name}={size}" for name, size in self.at.items())
        worded = ShapeRangeError(f"{error} At {at} the model's code is another program{where}.")
        vars(worded).update(vars(error))
        return worded
