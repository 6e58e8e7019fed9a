"""Parameters that a loss freezes for a while: ``requires_grad_(False)`` around a discriminator.

What is computed of a parameter meanwhile is computed of ``parameter.detach()``.  Parameters of
other networks get no gradients in any case, and keep their ``requires_grad``.  One that is frozen
when the step is compiled may be thawed for a while in which nothing with a gradient is computed of
it, as where an adapter of peft's is switched on for a reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from relax_disc.errors import UnsupportedOperatorError
from relax_disc.frontend.capture.source_lines import SourceLine, calling_line

_SET = Tensor.requires_grad.__set__  # pyright: ignore[reportAttributeAccessIssue]
_GET = Tensor.requires_grad.__get__  # pyright: ignore[reportAttributeAccessIssue]
_FLAGS = (Tensor.requires_grad_, _SET, _GET)


class FrozenParameters:
    """Notes which parameters of a trace are frozen."""

    def __init__(self) -> None:
        self._frozen: dict[int, tuple[Tensor, SourceLine]] = {}
        self._thawed: dict[int, tuple[Tensor, SourceLine]] = {}
        self._others: dict[int, tuple[Tensor, bool]] = {}  # and whether they were trained

    def note(self, func: Any, args: Sequence[Any], kwargs: Any) -> None:
        """Look at a call before it is made."""
        if func not in (Tensor.requires_grad_, _SET) or not isinstance(args[0], nn.Parameter):
            return
        parameter = args[0]
        if not isinstance(parameter, FakeTensor):
            self._others.setdefault(id(parameter), (parameter, parameter.requires_grad))
            return
        wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
        here, there = (self._thawed, self._frozen) if wanted else (self._frozen, self._thawed)
        if there.pop(id(parameter), None) is None and parameter.requires_grad != wanted:
            here[id(parameter)] = parameter, calling_line()

    def detached(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Put what has no gradient in the places of frozen parameters.

        Raises `UnsupportedOperatorError`: one that was thawed would get a gradient.
        """
        if func in _FLAGS:
            return args, kwargs
        if self._thawed and torch.is_grad_enabled() and func.__name__ != "__get__":
            self._check_thawed((args, kwargs))
        if not self._frozen or func is Tensor.detach:
            return args, kwargs

        def detach(x: Tensor) -> Tensor:
            return x.detach() if id(x) in self._frozen else x

        return pytree.tree_map_only(Tensor, detach, (args, kwargs))

    def _check_thawed(self, arguments: Any) -> None:
        for leaf in pytree.tree_leaves(arguments):
            if isinstance(leaf, Tensor) and id(leaf) in self._thawed:
                raise _thaws(self._thawed[id(leaf)][1])

    def put_back(self) -> None:
        """Let the parameters of other networks be trained as before."""
        for parameter, was in self._others.values():
            parameter.requires_grad_(was)

    def check_end(self) -> None:
        """Raise `UnsupportedOperatorError` where a parameter is still frozen, or thawed."""
        for _, line in self._thawed.values():
            raise _thaws(line)
        for _, line in self._frozen.values():
            raise _error(line, "freezes a parameter for good, which is trained when", "Freeze")


def _thaws(line: SourceLine) -> UnsupportedOperatorError:
    return _error(line, "lets a parameter be trained that was frozen when", "Thaw")


def _error(line: SourceLine, what: str, remedy: str) -> UnsupportedOperatorError:
    return UnsupportedOperatorError(
        f"{line}: requires_grad in the model or loss_fn {what} the step is compiled. {remedy} it "
        "before you compile; inside, freezing and thawing again is followed.",
        (("requires_grad", str(line)),),
    )
