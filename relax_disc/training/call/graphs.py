"""CUDA graphs of a step's calls: a plan is a straight line of launches, captured once, replayed.

The first call of a shape runs plainly, so that code is loaded and the arena is there; the second is
captured; from then on a call copies its batch and hyper-parameters to where the graph reads them,
replays it, and copies what it returns.  Everything else that a graph reads stays at its address:
parameters, the optimizer's state, the state of the random operators, the arena.  Where PyTorch has
replaced one of them, or the arena has moved, the graph is captured again.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from relax_disc.errors import InputMismatchError
from relax_disc.training.call.binding import as_runtime
from relax_disc.vm_builtins.capturing import capturing
from relax_disc.vm_builtins.session import CallReport

if TYPE_CHECKING:
    from relax_disc.training.compiled_function import CompiledFunction

# As many as the plans that a session of any size remembers.
_MOST_GRAPHS = 32
_MOST_COUNTED = 4096  # shapes whose calls are counted

FIRST = "the first call of a shape"
OFFLOADED = "a budget with offload_to: transfers run on a stream of their own"
CHECKED = "check_finite reads the loss before the update"
MEASURED = "kernels are timed one by one"
SUMMED = "gradients are summed or kept in p.grad"
NO_ROOM = "the copies of the batch do not fit the memory budget"
MOVED = "the arena has moved"
FULL = "as many graphs as are kept belong to shapes that are called more often"

Launch = Callable[[Sequence[torch.Tensor]], Any]


@dataclass(frozen=True, slots=True)
class GraphReport:
    """What became of a step's calls with ``cuda_graphs=True``.

    Attributes
    ----------
    graphs : int
        Graphs that are kept, one for each shape; a new budget begins anew.
    captures, replays : int
        How often a call was captured, and how many calls were replayed, that one among them.
    plain_calls : mapping of str to int
        How many calls ran without a graph, by the reason.
    static_bytes : int
        Memory of the copies of batches that the graphs read, beside what plans count.
    """

    graphs: int
    captures: int
    replays: int
    plain_calls: Mapping[str, int]
    static_bytes: int

    def __str__(self) -> str:
        lines = [f"  {count} without a graph: {why}" for why, count in self.plain_calls.items()]
        head = f"{self.replays} calls replayed, {self.captures} captured, {self.graphs} graphs kept"
        return "\n".join([head, *lines])


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured call, and the tensors that it reads and writes besides what is bound."""

    graph: Any
    batch: list[torch.Tensor]
    outputs: list[torch.Tensor]
    report: CallReport
    arena: tuple[int, int]  # its address and size at the capture


class StepGraphs:
    """The graphs of one compiled function.

    ``function``: whose calls; ``vectors``: its hyper-parameters, on the host.
    """

    def __init__(self, function: CompiledFunction, vectors: Sequence[torch.Tensor]) -> None:
        self._function, self._vectors = function, vectors
        device = function._schema.device
        self._hyper = [torch.empty_like(vector, device=device) for vector in vectors]
        self._places = [group.hyper_input for group in function._captured.update_groups]
        self._pool: Any = None
        self._graphs: dict[Any, _Graph] = {}
        self._budget: int | None = None
        self._bound: list[object] = []  # what the graphs read that PyTorch may replace
        self._calls: Counter[Any] = Counter()  # of each shape
        self._refused: dict[Any, str] = {}
        self._captures = self._replays = 0
        self._plain: Counter[str] = Counter()

    def report(self) -> GraphReport:
        """Tell what became of the calls so far."""
        plain = MappingProxyType(dict(self._plain))
        size = self._static_bytes()
        return GraphReport(len(self._graphs), self._captures, self._replays, plain, size)

    def note_plain(self, reason: str) -> None:
        """Count a call that another function has run."""
        self._plain[reason] += 1

    def launch(
        self, tensors: Sequence[torch.Tensor], values: Mapping[str, int], check: bool, plain: Launch
    ) -> Any:
        """Run a call by its graph, or plainly.

        ``tensors``, ``values``: the batch, and its sizes. ``check``: whether values must be
        finite. ``plain``: runs the program on a batch. Returned: what the program returns.
        """
        if self._function.memory_budget != self._budget:
            self._graphs.clear()
            self._budget = self._function.memory_budget
        key = tuple(values.items())
        reason = self._reason(key, tensors, check)
        if reason is None:
            self._forget_stale()
            graph = self._graphs.get(key) or self._capture(key, tensors, plain)
            if isinstance(graph, _Graph):
                self._calls[key] += 1
                return self._replay(graph, tensors)
            reason = graph
        self._plain[reason] += 1
        result = plain(tensors)
        if len(self._calls) == _MOST_COUNTED:
            self._calls = Counter({known: self._calls[known] for known in self._graphs})
        self._calls[key] += 1
        return result

    def _reason(self, key: Any, tensors: Sequence[torch.Tensor], check: bool) -> str | None:
        """Say why a call must run plainly; None: it need not."""
        session, budget = self._function._session, self._budget
        if check:
            return CHECKED
        if not session.is_plain:
            return MEASURED
        if budget is not None and self._function.offload_to is not None:
            return OFFLOADED
        if key not in self._calls:
            return FIRST
        if key in self._graphs:
            return None
        if len(self._graphs) >= _MOST_GRAPHS and self._calls[key] <= self._calls[self._rarest()]:
            return FULL
        if budget is not None:
            more = self._static_bytes() + sum(tensor.nbytes for tensor in tensors)
            if self._function._plan_facts(dict(key), budget).peak_bytes + more > budget:
                return NO_ROOM
        return self._refused.get(key)

    def _rarest(self) -> Any:
        """Return the shape with a graph that is called least often, the oldest of several."""
        return min(self._graphs, key=self._calls.__getitem__)

    def _static_bytes(self) -> int:
        return sum(tensor.nbytes for graph in self._graphs.values() for tensor in graph.batch)

    def _forget_stale(self) -> None:
        """Drop graphs that read what has been replaced."""
        function = self._function
        # The first says the sizes, where there are any; the batch is not bound yet.
        bound = function._arguments[bool(function._shape_names) :]
        if len(bound) != len(self._bound) or not all(map(operator.is_, bound, self._bound)):
            self._graphs.clear()
            self._bound = bound
        base, held = function._session.arena
        stale = [
            key
            for key, graph in self._graphs.items()
            if graph.arena[0] != base or graph.report.arena_bytes > held
        ]
        for key in stale:
            del self._graphs[key]

    def _capture(self, key: Any, tensors: Sequence[torch.Tensor], plain: Launch) -> _Graph | str:
        """Capture a call, which runs nothing; return why it cannot be where it cannot."""
        function, session = self._function, self._function._session
        needed = function._plan_facts(dict(key), self._budget).arena_bytes
        arena = session.arena
        if arena[1] < needed:
            return MOVED  # as large a one is there after the call
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, batch = torch.cuda.CUDAGraph(), [_like(tensor) for tensor in tensors]
        arguments, before = function._arguments, [function._arguments[k] for k in self._places]
        for place, vector in zip(self._places, self._hyper, strict=True):
            arguments[place] = as_runtime(vector, "hyper-parameters of a graph")
        try:
            # PyTorch leaves the capture's stream current where the end of a capture fails.  Other
            # threads (a loader that pins memory) may use CUDA meanwhile.
            stream = torch.cuda.stream(torch.cuda.current_stream(function._schema.device))
            pool, mode = self._pool, "thread_local"
            with stream, capturing(), torch.cuda.graph(graph, pool, capture_error_mode=mode):
                outputs = function._received(plain(batch))
        except RuntimeError as error:  # of CUDA or PyTorch too: what they do not capture
            function._variants.clear_torn()  # nothing has run
            self._refused[key] = reason = str(error).splitlines()[0]
            return reason
        finally:
            for place, vector in zip(self._places, before, strict=True):
                arguments[place] = vector
        if session.arena != arena:
            return MOVED
        self._captures += 1
        if len(self._graphs) >= _MOST_GRAPHS:
            del self._graphs[self._rarest()]
        self._graphs[key] = _Graph(graph, batch, outputs, session.report(), arena)
        return self._graphs[key]

    def _replay(self, graph: _Graph, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self._replays += 1
        with torch.no_grad():
            for there, here in zip(graph.batch, tensors, strict=True):
                there.copy_(here, non_blocking=True)
            for there, here in zip(self._hyper, self._vectors, strict=True):
                there.copy_(here, non_blocking=True)
            graph.graph.replay()
            self._function._variants.replayed = graph.report
            # The next replay writes the graph's own again.
            return [output.clone() for output in graph.outputs]


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def check_graphs(wanted: bool, on_cuda: bool, has_optimizer: bool) -> None:
    """Refuse graphs where no call could have one.

    Raises `InputMismatchError`: the target has no graphs, or every call sums gradients.
    """
    if wanted and not on_cuda:
        raise InputMismatchError("cuda_graphs=True needs a target for CUDA.")
    if wanted and not has_optimizer:
        raise InputMismatchError(
            "cuda_graphs=True needs the optimizer: gradients that are summed into p.grad have no "
            "fixed place, so such calls cannot be captured."
        )
