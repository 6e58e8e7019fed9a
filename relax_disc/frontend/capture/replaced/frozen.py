"""Parameters that a loss freezes for a while: ``requires_grad_(False)`` around a discriminator.

What is computed of a parameter meanwhile is computed of ``parameter.detach()``.  Parameters of
other networks get no gradients in any case, and keep their ``requires_grad``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from relax_disc.errors import UnsupportedOperatorError
from relax_disc.frontend.capture.source_lines import SourceLine, calling_line

_SET = Tensor.requires_grad.__set__  # pyright: ignore[reportAttributeAccessIssue]
_GET = Tensor.requires_grad.__get__  # pyright: ignore[reportAttributeAccessIssue]


class FrozenParameters:
    """Notes which parameters of a trace are frozen."""

    def __init__(self) -> None:
        self._frozen: dict[int, tuple[Tensor, SourceLine]] = {}
        self._others: dict[int, tuple[Tensor, bool]] = {}  # and whether they were trained

    def note(self, func: Any, args: Sequence[Any], kwargs: Any) -> None:
        """Look at a call before it is made.

        Raises `UnsupportedOperatorError`: it thaws a parameter that was frozen from the start.
        """
        if func not in (Tensor.requires_grad_, _SET) or not isinstance(args[0], nn.Parameter):
            return
        parameter = args[0]
        if not isinstance(parameter, FakeTensor):
            self._others.setdefault(id(parameter), (parameter, parameter.requires_grad))
            return
        wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
        if wanted:
            if self._frozen.pop(id(parameter), None) is None and not parameter.requires_grad:
                raise _error(
                    calling_line(), "lets a parameter be trained that was frozen when", "Thaw"
                )
        elif parameter.requires_grad:
            self._frozen[id(parameter)] = parameter, calling_line()

    def detached(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Put what has no gradient in the places of frozen parameters."""
        if not self._frozen or func in (Tensor.requires_grad_, Tensor.detach, _SET, _GET):
            return args, kwargs

        def detach(x: Tensor) -> Tensor:
            return x.detach() if id(x) in self._frozen else x

        return pytree.tree_map_only(Tensor, detach, (args, kwargs))

    def put_back(self) -> None:
        """Let the parameters of other networks be trained as before."""
        for parameter, was in self._others.values():
            parameter.requires_grad_(was)

    def check_end(self) -> None:
        """Raise `UnsupportedOperatorError` where a parameter is still frozen."""
        for _, line in self._frozen.values():
            raise _error(line, "freezes a parameter for good, which is trained when", "Freeze")


def _error(line: SourceLine, what: str, remedy: str) -> UnsupportedOperatorError:
    return UnsupportedOperatorError(
        f"{line}: requires_grad in the model or loss_fn {what} the step is compiled. {remedy} it "
        "before you compile; inside, freezing and thawing again is followed.",
        (("requires_grad", str(line)),),
    )
