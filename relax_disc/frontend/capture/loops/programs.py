"""Record a loop's step and its gradient as flat lists of PyTorch's operators, as recipes.

The gradient's step reads the states before each step, which the loop keeps, and computes the rest
of the step again: what a loop keeps does not grow with what a step computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from relax_disc.frontend.capture.loops.cut import LoopBody, Place
from relax_disc.frontend.capture.loops.recipe import RecipeBuilder, Record, recording
from relax_disc.frontend.capture.sizes.counted import general_ways
from relax_disc.ops.loop import enter_call


class LoopPrograms:
    """What runs a loop forwards and backwards."""

    def __init__(self, body: LoopBody) -> None:
        self.body = body
        placeholders = [n.meta["val"] for n in body.graph.nodes if n.op == "placeholder"]
        self._mode = next(v.fake_mode for v in placeholders)
        self._inputs = [self._empty(v.shape, v) for v in placeholders]
        self._forward = self._recorded(lambda: self._step(self._inputs))
        self._outputs: list[Tensor] = self._forward.made
        self._gradient: tuple[Record, list[Tensor], list[Tensor | None]] | None = None
        self._known: dict[Any, tuple[int, list[Any]]] = {}
        self._kinds = ("carry",) * body.carries + ("part",) * len(body.parts)
        self._kinds += ("whole",) * body.wholes

    def _empty(self, shape: Any, like: Tensor) -> Tensor:
        with _disable_current_modes(), self._mode:
            return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)

    def _recorded(self, function: Callable[[], list[Any]]) -> Record:
        with (
            _disable_current_modes(),
            self._mode,
            enable_python_dispatcher(),
            general_ways(),
            torch.no_grad(),
            recording() as record,
        ):
            record.made = function()
        return record

    def _step(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        made = _run(self.body.graph, inputs)
        first = len(made) - len(self.body.written)
        for k, piece in enumerate(self.body.pieces):
            value = made[first + k]
            made[first + k] = value.to(piece.dtype).expand(piece.shape)
        return made

    @property
    def states_read(self) -> list[int]:
        """The states of which the gradient reads the values before each step."""
        record, leaves, grads = self._gradients()
        roots = [g for g in grads if g is not None]
        used = record.needed(roots)
        return [k for k in range(self.body.carries) if id(leaves[k]) in used]

    # -- forwards -------------------------------------------------------------------------------

    def forward(self, keeps_states: bool) -> tuple[int, list[Any]]:
        """Return the number of the call, and its operands among the loop's.

        With ``keeps_states`` its last results are those of :attr:`states_read` before each step.
        """
        key = ("forward", keeps_states)
        if key not in self._known:
            self._known[key] = self._make_forward(keeps_states)
        return self._known[key]

    def _make_forward(self, keeps_states: bool) -> tuple[int, list[Any]]:
        body, count = self.body, self.body.count
        build = RecipeBuilder(self._forward, str(body.line), count)
        outs = self._outputs
        build.keep(outs)
        for k, (kind, value) in enumerate(zip(self._kinds, self._inputs, strict=True)):
            operand = body.operands[k]
            if kind == "carry":
                build.carry(value, k, operand, outs[k])
            elif build.reads(value) and kind == "part":
                build.part(value, k, operand, body.parts[k - body.carries])
            elif build.reads(value):
                build.whole(value, k, operand)
        for k in range(body.carries):
            build.result("carry", self._inputs[k], k)
        place = body.carries
        for value in outs[place : place + body.lasts]:
            build.result("last", value, value)
        place += body.lasts
        for value in outs[place : place + body.stacked]:
            build.result("stack", self._stacked(value), value, step=value)
        place += body.stacked
        first = body.carries + len(body.parts) + body.wholes
        for k, (value, where) in enumerate(zip(outs[place:], body.written, strict=True)):
            base = body.operands[first + k]
            source = build.operand(first + k, base, value)
            build.result("write", base, value, source, where, step=value)
        for k in self.states_read if keeps_states else ():
            build.result("before", self._stacked(self._inputs[k]), k, step=self._inputs[k])
        return enter_call(build.call()), build.keys

    def _stacked(self, value: Tensor) -> Tensor:
        return self._empty((self.body.count, *value.shape), value)

    # -- backwards ------------------------------------------------------------------------------

    def _gradients(self) -> tuple[Record, list[Tensor], list[Tensor | None]]:
        """Record the gradient of a step; also its leaves, and gradients of all that have one."""
        if self._gradient is None:
            leaves = [
                self._empty(v.shape, v).requires_grad_(v.is_floating_point()) for v in self._inputs
            ]
            given = [self._empty(x.shape, x) for x in self._outputs]
            found: list[Tensor | None] = []

            def gradient() -> list[Any]:
                with torch.enable_grad():
                    made = self._step(leaves)
                pairs = [(m, g) for m, g in zip(made, given, strict=True) if m.requires_grad]
                wanted = [x for x in leaves if x.requires_grad]
                if pairs and wanted:
                    outs, grads = zip(*pairs, strict=True)
                    each = iter(torch.autograd.grad(outs, wanted, grads, allow_unused=True))
                else:
                    each = iter([None] * len(wanted))
                found.extend(next(each) if x.requires_grad else None for x in leaves)
                for k in range(self.body.carries):
                    if found[k] is None and leaves[k].requires_grad:
                        found[k] = torch.zeros_like(given[k])
                first = self.body.carries
                return [torch.zeros_like(x) for x in given[first : first + self.body.lasts]]

            record = self._recorded(gradient)
            record.given = given
            self._gradient = record, leaves, found
        return self._gradient

    def backward(self, wanted: Sequence[bool]) -> tuple[int, list[Any], list[int]]:
        """Return the number of the gradient's call, its operands, and whose gradients it makes.

        ``wanted``: which of the loop's operands.  An operand is an index into the loop's operands,
        ``("before", k)`` or ``("given", k)``: a state before each step, the gradient of a result.
        """
        key = ("backward", *wanted)
        if key not in self._known:
            self._known[key] = self._make_backward(wanted)
        number, keys = self._known[key]
        return number, keys, self._made_by(wanted)

    def _made_by(self, wanted: Sequence[bool]) -> list[int]:
        _, _, grads = self._gradients()
        first = len(self._inputs)
        inner = [k for k in range(first) if wanted[k] and grads[k] is not None]
        base = [k for k in range(first, len(wanted)) if wanted[k]]
        return inner + base

    def _make_backward(self, wanted: Sequence[bool]) -> tuple[int, list[Any]]:
        body = self.body
        record, leaves, grads = self._gradients()
        given: list[Tensor] = record.given
        made = self._made_by(wanted)
        states = [k for k in range(body.carries) if grads[k] is not None]
        inner = [k for k in made if k < len(leaves)]
        build = RecipeBuilder(record, str(body.line), body.count, reverse=True)
        build.keep([*(grads[k] for k in {*states, *inner}), *record.made])
        for k in states:
            build.carry(given[k], ("given", k), body.operands[k], grads[k])
        for k, zero in enumerate(record.made, body.carries):
            if given[k].is_floating_point():
                build.carry(given[k], ("given", k), self._outputs[k], zero)
        place = body.carries + body.lasts
        for k in range(place, place + body.stacked):
            if build.reads(given[k]):
                build.part(given[k], ("given", k), self._stacked(given[k]), Place(0, 1, 0))
        place += body.stacked
        base = len(leaves)
        for k, where in enumerate(body.written):
            if build.reads(given[place + k]):
                operand = body.operands[base + k]
                build.part(given[place + k], ("given", place + k), operand, where)
        for k, (kind, leaf) in enumerate(zip(self._kinds, leaves, strict=True)):
            if not build.reads(leaf):
                continue
            if kind == "carry":
                build.part(leaf, ("before", k), self._stacked(leaf), Place(0, 1, 0))
            elif kind == "part":
                build.part(leaf, k, body.operands[k], body.parts[k - body.carries])
            else:
                build.whole(leaf, k, body.operands[k])
        for k in made:
            if k >= base:
                where, operand = body.written[k - base], body.operands[k]
                source = build.operand(("given", place + k - base), operand, body.pieces[k - base])
                build.result("erased", operand, 0, source, where, step=body.pieces[k - base])
            elif self._kinds[k] == "carry":
                build.result("carry", leaves[k], states.index(k))
            elif self._kinds[k] == "part":
                where = body.parts[k - body.carries]
                build.result("scatter", body.operands[k], grads[k], -1, where, step=leaves[k])
            else:
                build.result("sum", leaves[k], grads[k])
        return enter_call(build.call()), build.keys


def _run(graph: fx.Graph, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Compute a graph whose arguments may hold sizes."""
    values: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
            continue
        args, kwargs = pytree.tree_map_only(
            fx.Node, values.__getitem__, (tuple(node.args), dict(node.kwargs))
        )
        if node.op == "output":
            return list(args[0])
        values[node] = node.target(*args, **kwargs)
    raise AssertionError("a graph ends with its output")


class _DynamicLoop(torch.autograd.Function):
    """All steps, with the gradient that runs against them."""

    @staticmethod
    def forward(ctx: Any, programs: LoopPrograms, *operands: Tensor) -> Any:
        number, keys = programs.forward(keeps_states=True)
        results = torch.ops.relax_disc.loop_call(number, [operands[k] for k in keys])
        states = programs.states_read
        made = results[: len(results) - len(states)]
        ctx.programs = programs
        ctx.save_for_backward(*operands, *results[len(made) :])
        ctx.mark_non_differentiable(*(x for x in made if not x.is_floating_point()))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        programs, saved = ctx.programs, ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        operands = saved[: len(wanted)]
        before = dict(zip(programs.states_read, saved[len(wanted) :], strict=True))
        number, keys, made = programs.backward(wanted)
        found: list[Any] = [None] * len(wanted)
        if made:
            chosen = [
                operands[key]
                if isinstance(key, int)
                else before[key[1]]
                if key[0] == "before"
                else gradients[key[1]]
                for key in keys
            ]
            results = torch.ops.relax_disc.loop_call(number, chosen)
            for k, result in zip(made, results, strict=True):
                found[k] = result
        return None, *found


def run_loop(programs: LoopPrograms, operands: Sequence[Tensor]) -> list[Tensor]:
    """Put all steps of a loop into the trace."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
        return list(_DynamicLoop.apply(programs, *operands))
    number, keys = programs.forward(keeps_states=False)
    return list(torch.ops.relax_disc.loop_call(number, [operands[k] for k in keys]))


class Loops:
    """The loops of one program; each is recorded where it is met first, so under its autocast."""

    def __init__(self, bodies: Sequence[LoopBody]) -> None:
        self._bodies = bodies
        self._programs: dict[int, LoopPrograms] = {}

    def run(self, number: int, operands: Sequence[Tensor]) -> list[Tensor]:
        """Put all steps of a loop into the trace."""
        if number not in self._programs:
            self._programs[number] = LoopPrograms(self._bodies[number])
        return run_loop(self._programs[number], operands)
