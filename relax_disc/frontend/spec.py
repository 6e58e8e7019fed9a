"""What a captured function takes, returns and means: plain data, no TVM and no tracing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import tvm
from torch.utils import _pytree as pytree

from relax_disc.frontend.capture.batch_spec import BatchSpec
from relax_disc.frontend.capture.state.outer import Outer

InputKind = Literal[
    "shape",
    "batch",
    "parameter",
    "buffer",
    "constant",
    "number",
    "rng",
    "scale",
    "gradient",
    "output_gradient",
    "adding",
    "state",
    "hyper",
    "packing",
]
OutputKind = Literal[
    "loss", "extra", "norm", "overflow", "gradient", "buffer", "parameter", "state", "guard"
]


@dataclass(frozen=True, slots=True)
class DimSpec:
    """One free dim: the user's name, and the least and greatest size; ``None`` is no limit."""

    name: str
    lower: int
    upper: int | None


@dataclass(frozen=True, slots=True)
class CountedDim:
    """A dim whose size the function finds out while it runs.

    It is entered with its bound, or with no less than the batch tells
    (`relax_disc.transform.memory.count_at_entry`).

    ``bound``: an expression over the dims, and over the counted dims before it. ``least``: 0, or 1
    where a call that counts nothing is refused.
    """

    name: str
    bound: int | str
    least: int = 0


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One parameter of the captured function.

    Attributes
    ----------
    name : str
        Name of the Relax variable.
    kind : str
        ``"shape"`` (a tuple of the dims' sizes, there only when a dim is no extent of a batch
        tensor), ``"batch"``, ``"parameter"``, ``"buffer"``, ``"constant"`` (a tensor that the
        model or the loss function reaches and that is neither), ``"number"`` (a Python number that
        they read, float64 without axes), ``"rng"`` (``[seed, offset]``, int64,
        there only when the model draws random numbers; the caller raises the offset by one after
        each step), ``"scale"`` (what the loss is multiplied with before its gradients are taken,
        float32 without axes), ``"gradient"`` (the sum so far), ``"output_gradient"`` (in a function
        of two halves), ``"adding"`` (what the addition of gradients reads: `SUM_HYPER` of
        :mod:`.optimizer.kernels`), ``"state"`` (of the optimizer), ``"hyper"``
        (:mod:`.optimizer.program`) or ``"packing"`` (which rows of the batch are kept:
        :mod:`relax_disc.transform.padding.remove_padding`).
    target : str or int
        Full name in the model (``"state"``: of its parameter; ``"hyper"``: of the first parameter
        of its update group; ``"adding"``: the element type); for ``"batch"`` the index of the leaf
        of the flattened batch.
    state_key : str
        For ``"state"`` the key in ``optimizer.state[parameter]``.
    group : int
        For ``"state"`` and ``"hyper"``, and for parameters that are updated: the index in
        `CapturedStep.update_groups`; otherwise -1.
    shape : tuple of int or str
        Extents; a string is an expression over the dims, such as ``"8*k"``.
    dtype : str
        Element type, such as ``"float32"``.
    """

    name: str
    kind: InputKind
    target: str | int
    state_key: str
    group: int
    shape: tuple[int | str, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """One tensor of the output tuple; ``replaces`` is the input that it is the new value of."""

    name: str
    kind: OutputKind
    replaces: int | None = None


@dataclass(frozen=True, slots=True)
class UpdateGroup:
    """Parameters updated with the same hyper-parameters and the same count of steps.

    Attributes
    ----------
    param_group : int
        Index in ``optimizer.param_groups``.
    targets : tuple of str
        Full names of the parameters.
    hyper_input : int
        Index of the input with the vector of :class:`.optimizer.program.UpdateProgram`.
    """

    param_group: int
    targets: tuple[str, ...]
    hyper_input: int


@dataclass(frozen=True, slots=True)
class SizeOutput:
    """An extra output that is a number which follows from the dims, ``"b*s"`` say."""

    expression: str


@dataclass(frozen=True, slots=True)
class IndexCheck:
    """Values that a part of a batch tensor may have, because it is used as an index."""

    leaf: int  # index among the leaves of the flattened batch
    # which part: ``(name, *numbers)`` of :data:`.batch.VIEWS`, one after the other; a number is an
    # integer or an expression over the dims
    views: tuple[tuple[Any, ...], ...]
    # least and greatest value, expressions over the dims; ``None`` is no limit
    lower: int | str | None
    upper: int | str | None
    ignored: int | None  # one more value that is allowed
    where: str  # the operator that uses it and its line


@dataclass(frozen=True, slots=True)
class SizeCheck:
    """A condition on the dims beyond their ranges; a call that breaks it is refused at entry."""

    # expressions over the dims
    size: int | str
    # ``"<="``: the size must not be above the limit; ``"!="``: they must differ
    relation: Literal["<=", "!="]
    limit: int | str
    # why; ``{size}`` and ``{limit}`` stand for the two values, ``{shape[0]}`` for an extent
    message: str
    shape: tuple[int | str, ...] = ()  # more expressions for the message


@dataclass(frozen=True, slots=True)
class Packing:
    """Which rows of one length a function computes; a row is one position of one sequence.

    Expressions are those of :mod:`relax_disc.analysis.padding.values` over ``batch`` and
    ``length``; the parameter of a ``"load"`` is the index among the leaves of the flattened batch.
    """

    tokens: str  # name of the dim that counts the rows which are computed
    batch: str  # names of the dims of the batch
    length: str
    counted: Any  # true where a label counts
    kept: Any  # true where a mask leaves the row; None: there is no mask
    is_prefix: bool  # whether all rows before the last counted one are computed
    shown: Any = None  # keys that masks leave which hide by numbers: what sees none reads all
    is_near: bool = False  # whether these may hide all keys before a row but its own
    times: int = 1  # sequences there are for each of the dim `batch`

    def sequences(self, sizes: Mapping[str, int]) -> int:
        """Count the sequences of a batch."""
        return self.times * sizes[self.batch]

    def positions(self, sizes: Mapping[str, int]) -> int:
        """Count the positions of a padded batch."""
        return self.sequences(sizes) * sizes[self.length]


@dataclass(frozen=True, slots=True)
class PaddingReason:
    """Why rows that do not count are computed."""

    line: str  # of the model, ``"file:line"``; empty where unknown
    operator: str  # what needs them; empty for what is about the step as a whole
    reason: str


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A PyTorch function as one Relax function with symbolic shapes.

    Attributes
    ----------
    module : tvm.IRModule
        Holds the function; its attributes are listed in :mod:`relax_disc.frontend`.
    inputs, outputs : tuple
        Parameters of the function, and the tensors of the tuple that it returns, in order.
    dims : tuple of DimSpec
        The free dims.
    batch : BatchSpec
        How to flatten the arguments of a call.
    update_groups : tuple of UpdateGroup
        Empty when nothing is updated.
    extras : TreeSpec or None
        Structure of the outputs of kind ``"extra"`` and of ``plain_extras`` together.
    plain_extras : mapping of int to object
        Extra outputs that are no tensors, by their place among the leaves of ``extras``:
        `SizeOutput`, or the value itself.
    function : str
        Its name in the module.
    index_checks, size_checks : tuple
        What a batch must fulfil beyond the declared dims.
    outer : Outer
        Where the inputs of kinds ``"constant"`` and ``"number"`` lie, and what else was read.
    packings : tuple of Packing
        The rows that are computed, for each length of the sequences of a batch; empty: all.
    padding : tuple of PaddingReason
        Why rows that do not count are computed after all.
    counted : tuple of CountedDim
        More dims: those that the function counts.
    count_checks : tuple of SizeCheck
        What they must fulfil beyond their ranges; looked at once they have been counted.
    """

    module: tvm.IRModule
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    dims: tuple[DimSpec, ...]
    batch: BatchSpec
    update_groups: tuple[UpdateGroup, ...] = ()
    extras: pytree.TreeSpec | None = None
    plain_extras: Mapping[int, Any] = field(default_factory=dict)
    function: str = "main"
    index_checks: tuple[IndexCheck, ...] = ()
    size_checks: tuple[SizeCheck, ...] = ()
    outer: Outer = field(default_factory=Outer)
    packings: tuple[Packing, ...] = ()
    padding: tuple[PaddingReason, ...] = ()
    counted: tuple[CountedDim, ...] = ()
    count_checks: tuple[SizeCheck, ...] = ()
