"""Interpret an exported graph for tracing, by rules for the operators that are kept whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from relax_disc.errors import RelaxDiscError, UnsupportedOperatorError
from relax_disc.frontend.capture.loops.programs import Loops
from relax_disc.frontend.capture.refusals import refuse_autocast
from relax_disc.frontend.capture.replaced import inner_gradients
from relax_disc.frontend.capture.replaced.custom_functions import CustomCalls
from relax_disc.frontend.capture.sizes.counted import CountedSizes
from relax_disc.frontend.capture.sizes.exact import example_size
from relax_disc.frontend.capture.source_lines import source_line
from relax_disc.frontend.capture.traced.decompositions import RULES, under_autocast
from relax_disc.frontend.capture.traced.rewrites import (
    REWRITES,
    alike_complex,
    is_whole_complex,
    whole_complex,
)
from relax_disc.frontend.capture.traced.writes import (
    may_be_operand,
    views_parted_by_writes,
    views_written_later,
    writes,
)
from relax_disc.frontend.random_ops import Randomness


class StepInterpreter(fx.Interpreter):
    """Runs an exported graph, keeps some operators whole and enters nested graphs."""

    def __init__(
        self,
        graph: fx.GraphModule,
        randomness: Randomness,
        counted: CountedSizes,
        custom_calls: CustomCalls,
        allows_half: bool,
        loops: Loops,
        twice: bool,
    ) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.extra_traceback = False  # an error names the line itself
        self._twice = twice  # whether gradients are differentiated again
        self._allows_half = allows_half
        self._custom_calls = custom_calls
        self._loops = loops
        self._randomness = randomness
        self._counted = counted
        whole = {**REWRITES, **inner_gradients.RULES} if twice else RULES
        self._rules = whole, counted.rules(), randomness.rules()
        self._differentiated = inner_gradients.differentiated(graph)
        self._written_later = views_written_later(graph.graph)
        self._parted = views_parted_by_writes(graph.graph, _OF_COMPLEX)
        self._keeps_view = False  # whether the node that runs must not become a copy

    def run_node(self, n: fx.Node) -> Any:
        """Run one node; what PyTorch cannot trace is told with the line of the model."""
        nested = getattr(n.target, "__name__", "") == "wrap_with_autocast"
        if nested and torch.is_grad_enabled() and not self._allows_half:
            self._check_autocast(n)
        self._keeps_view = n in self._written_later
        if n in self._parted:
            raise UnsupportedOperatorError(
                f"{source_line(n)}: a complex tensor and its real numbers share memory that is "
                "written later; write into one of them before the other is taken, or compute the "
                "new value instead of writing it.",
                ((str(n.target), str(source_line(n))),),
            )
        try:
            result = super().run_node(n)
        except (RuntimeError, ValueError, TypeError) as error:
            if isinstance(error, RelaxDiscError):
                raise
            line = source_line(n)
            if inner_gradients.is_inner(n.target):
                raise UnsupportedOperatorError(
                    f"{line}: torch.autograd.grad inside the loss cannot be traced: "
                    f"{str(error).splitlines()[0]}",
                    (("torch.autograd.grad", str(line)),),
                ) from error
            if isinstance(error, TypeError):  # of complex tensors
                if "Multiple dispatch failed" not in str(error):
                    raise
                raise UnsupportedOperatorError(
                    f"{line}: {n.target} of complex tensors cannot be compiled; write it with "
                    "their real and imaginary parts.",
                    ((str(n.target), str(line)),),
                ) from error
            raise UnsupportedOperatorError(
                f"{line}: PyTorch cannot trace {n.target} with symbolic sizes: "
                f"{str(error).splitlines()[0]}",
                ((str(n.target), str(line)),),
            ) from error
        is_own = _is_own(n, result) and not may_be_operand(n)
        if is_own and any(writes(user) and user.args[0] is n for user in n.users):
            result = result.clone()  # a view of what no one else knows, of which autograd does
        self._counted.note(n, result)
        if n in self._differentiated and not result.requires_grad:
            result.requires_grad_()
        if n.target not in RULES:
            return result
        with fx_traceback.set_current_meta(n):
            return _laid_out_like(result, n.meta.get("val"))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Apply an operator's rule, else the operator itself."""
        self._counted.look_at(target, args, kwargs)
        if target in RULES:
            args, kwargs = under_autocast(target, args, kwargs)
        if target is torch.ops.aten._assert_tensor_metadata.default:  # held when it was exported
            return None
        for rules in self._rules:
            rule = None if self._keeps_view and target is _BY_STRIDES else rules.get(target)
            if rule is not None and (result := rule(*args, **kwargs)) is not None:
                return result
        if target is torch.ops.relax_disc.custom_function.default:
            call, tensors, sizes = args
            results = pytree.tree_leaves(self._custom_calls[call].run(tensors, sizes))
            return [result for result in results if isinstance(result, Tensor)]
        if target is torch.ops.relax_disc.dynamic_loop.default:
            return self._loops.run(args[0], args[2])
        name = getattr(target, "__name__", "")
        if name == "wrap_with_set_grad_enabled":
            with torch.set_grad_enabled(args[0]):
                return self._enter(args[1], args[2:])
        if name == "wrap_with_autocast":
            device, dtype, enabled, cache = args[:4]
            with torch.autocast(device, dtype, enabled, cache):
                return self._enter(args[4], args[5:])
        schema = getattr(target, "_schema", None)
        is_writing = schema is not None and schema.is_mutable
        if is_writing and is_whole_complex(args[0]):  # what is written into a copy is lost
            args, kwargs = whole_complex((args, kwargs))
        else:
            args, kwargs = alike_complex((args, kwargs))
        try:
            return super().call_function(target, args, kwargs)
        except TypeError as error:
            if "Multiple dispatch failed" not in str(error) or is_writing:
                raise
            return super().call_function(target, *whole_complex((args, kwargs)))

    def _check_autocast(self, node: fx.Node) -> None:
        """Refuse a region in float16; the region's first operator says where it is."""
        _, dtype, enabled, _, inner = node.args[:5]
        if not enabled:
            return
        assert isinstance(inner, fx.Node) and isinstance(dtype, torch.dtype)
        region = self.fetch_attr(str(inner.target))
        lines = [source_line(n) for n in region.graph.nodes if n.op == "call_function"]
        refuse_autocast(dtype, str(next((line for line in lines if line.file), source_line(node))))

    def _enter(self, graph: fx.GraphModule, args: Sequence[Any]) -> Any:
        parts = self._randomness, self._counted, self._custom_calls, self._allows_half
        return StepInterpreter(graph, *parts, self._loops, self._twice).run(*args)


_BY_STRIDES = torch.ops.aten.as_strided.default  # its rule copies what it reads
_OF_COMPLEX = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("view_as_complex", "view_as_real", "real", "imag", "conj", "_conj", "_neg_view")
)
"""Views that our complex tensors, which are two real ones, have as tensors of their own."""


def _is_own(node: fx.Node, result: Any) -> bool:
    """Whether an operator says that it makes a tensor, and its rule made it as a view of one."""
    schema = getattr(node.target, "_schema", None)
    says = schema is not None and all(each.alias_info is None for each in schema.returns)
    return says and isinstance(result, Tensor) and result._is_view()


def _laid_out_like(result: Any, recorded: Any) -> Any:
    """Copy a tensor into the layout that was recorded, where that differs and has no gaps.

    An exported graph has no ``contiguous()`` where the operator's own result was contiguous in that
    order of axes, and goes on with a view (``attention(...).transpose(1, 2).contiguous().view()``).
    Layouts are of the trace alone; in Relax the copy made here is a view or nothing.
    """
    if not isinstance(result, Tensor) or not isinstance(recorded, Tensor):
        return result
    shapes = [[_text(size) for size in tensor.shape] for tensor in (result, recorded)]
    if shapes[0] != shapes[1] or _same_strides(result, recorded):
        return result
    hints = [example_size(stride) for stride in recorded.stride()]
    if any(hint is None for hint in hints):
        return result
    order = sorted(range(recorded.dim()), key=lambda axis: (-(hints[axis] or 0), axis))
    back = [order.index(axis) for axis in range(recorded.dim())]
    copy = result.permute(order).clone(memory_format=torch.contiguous_format).permute(back)
    return copy if _same_strides(copy, recorded) else result


def _same_strides(left: Tensor, right: Tensor) -> bool:
    each = zip(left.shape, left.stride(), right.stride(), strict=True)
    return all(_text(size) == "1" or _text(a) == _text(b) for size, a, b in each)


def _text(size: int | torch.SymInt) -> str:
    """Compare symbols as they are written: asking PyTorch would be one more guard."""
    return str(size.node.expr if isinstance(size, torch.SymInt) else size)
