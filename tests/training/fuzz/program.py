"""Random training programs, run by eager PyTorch and compiled, step by step.

A program is a module of random pieces, a loss, an optimizer, and what a training loop does between
its steps: other batches, other learning rates, writes into the model, odd values.  Every step must
equal eager's, or end in one of the package's errors with nothing written.

``python -m tests.training.fuzz SEED`` runs one program and prints what it does.
"""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch

import relax_disc
from relax_disc.errors import RelaxDiscError, RelaxDiscWarning
from tests.training.fuzz import judge
from tests.training.fuzz.habits import HABITS
from tests.training.fuzz.net import LOSSES, OPTIMIZERS, Net
from tests.training.fuzz.pieces import CLASSES, LARGEST, LONGEST, PIECES, READERS, WIDTH

HABITS_A_PROGRAM = 5


class Mismatch(AssertionError):
    """A step neither equals eager's nor was refused with nothing written."""


class Program:
    """One module and optimizer, compiled once; `habits` runs a random loop with it."""

    def __init__(self, seed: int) -> None:
        self.seed, self.log, self.has_summed = seed, [], False
        choose = random.Random(seed)
        torch.manual_seed(seed)
        names = choose.sample(sorted(PIECES), choose.randint(2, 4))
        self.shrinks = any("shrink" in name for name in names)
        loss, optimizer = choose.choice(sorted(LOSSES)), choose.choice(sorted(OPTIMIZERS))
        self.reader = choose.choice(sorted(READERS)) if choose.random() < 0.25 else None
        self.model = Net(names, loss, choose.random() < 0.3, self.reader, choose.random() < 0.5)
        self.model.train(choose.random() < 0.9)
        if choose.random() < 0.2:
            frozen = choose.choice(list(self.model.parameters()))
            frozen.requires_grad_(False)
        made = OPTIMIZERS[optimizer]([p for p in self.model.parameters() if p.requires_grad])
        self.optimizers = made if isinstance(made, list) else [made]
        self.note(
            f"{self.reader} {names}, {loss}, {optimizer}, training={self.model.training}, "
            f"returns={self.model.returns}"
        )
        batch = torch.export.Dim("batch", min=1, max=LARGEST)
        shapes = [{0: batch}, {0: batch}, {0: batch}]
        if self.reader is not None:
            shapes[0][1] = torch.export.Dim("length", min=1, max=LONGEST)
        example = tuple(self.batch(choose, 4))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RelaxDiscWarning)
            self.step = relax_disc.compile(self.model, made, example, dynamic_shapes=tuple(shapes))

    def groups(self) -> list[dict]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def saved(self) -> Callable:
        """Return what puts model and optimizers back to their values of now."""
        model = copy.deepcopy(self.model.state_dict())
        states = [copy.deepcopy(optimizer.state_dict()) for optimizer in self.optimizers]

        def put_back() -> None:
            self.model.load_state_dict(model)
            for optimizer, state in zip(self.optimizers, states, strict=True):
                optimizer.load_state_dict(state)

        return put_back

    def note(self, text: str) -> None:
        self.log.append(text)

    def batch(self, choose: random.Random, size: int | None = None) -> list[torch.Tensor]:
        size = choose.choice([1, 2, 3, 5, 8, LARGEST]) if size is None else size
        ids = torch.randint(0, CLASSES, (size, 3))
        inner = (WIDTH,) if self.reader is None else (choose.randint(1, LONGEST - 1), WIDTH)
        return [torch.randn(size, *inner), ids, torch.randn(size, WIDTH)]

    def tensors(self) -> dict[str, torch.Tensor]:
        found = judge.state_of(self.model, self.optimizers) | judge.gradients_of(self.model)
        return {name: tensor.detach().clone() for name, tensor in found.items()}

    def habits(self, seed: int) -> None:
        """Run a random loop.

        Raises
        ------
        Mismatch
            Names the step and what differs.
        """
        torch.manual_seed(seed)
        choose = random.Random(seed)
        self.note(f"habits {seed}")
        for _ in range(HABITS_A_PROGRAM):
            name = choose.choice(sorted(HABITS))
            batch = self.batch(choose)
            self.note(f"  {name}, batch of {len(batch[0])}")
            self.regions, self.call, self.alias = [], {}, None
            undo = HABITS[name](self, choose, batch)
            self._compare(batch, self.regions, self.call)
            if undo is not None:
                undo()

    def _compare(self, batch: list[torch.Tensor], regions: Sequence[Callable], call: dict) -> None:
        before = self.tensors()
        given = [torch.as_tensor(each).detach().clone() for each in batch]
        model, optimizers = copy.deepcopy((self.model, self.optimizers))
        before_step = copy.deepcopy((model, optimizers))
        failure, wanted = None, {}
        try:
            with _all(regions):
                wanted = judge.train(model, optimizers, [tensor.clone() for tensor in given])
        except (RuntimeError, IndexError, KeyError, ValueError, TypeError) as error:
            failure = error
        try:
            with _all(regions), warnings.catch_warnings():
                warnings.simplefilter("ignore", RelaxDiscWarning)
                results = self.step(*batch, **call)
        except RelaxDiscError as error:
            self.note(f"    refused: {type(error).__name__}: {str(error)[:100]}")
            after = self.tensors()
            for name in before.keys() | after.keys():
                same = name in before and name in after
                if not same or not judge.identical(before[name], after[name]):
                    raise Mismatch(self.report(f"{name} was written by a refused step")) from error
            return
        if failure is not None:
            raise Mismatch(self.report(f"eager raises {failure!r}, the step gives {results}"))
        for number, (tensor, was) in enumerate(zip(batch, given, strict=True)):
            now = torch.as_tensor(tensor).detach()
            if self.alias is not tensor and not judge.identical(now, was):
                raise Mismatch(self.report(f"argument {number} of the batch was written"))
        found = judge.named(results) | judge.gradients_of(self.model)
        adds = call.get("update") is False
        if not adds and not call.get("keep_gradients"):
            wanted = {k: v for k, v in wanted.items() if not k.endswith(judge.GRADIENT)}
        if adds:
            for optimizer in self.optimizers:
                optimizer.step()
        found |= judge.state_of(self.model, self.optimizers)
        # PyTorch's own forms of a gradient then differ, those of softshrink by a tensor's size; and
        # here no decay of an infinite parameter is not a number (0 times infinity).
        odd, broken = (
            not all(tensor.isfinite().all() for tensor in tensors)
            for tensors in (given, before.values())
        )
        if not wanted["result 0"].isfinite() or broken or (odd and self.shrinks):
            wanted = {k: v for k, v in wanted.items() if k.startswith("result")}
        off = judge.differences(found, wanted, before_step, given)
        if off:
            raise Mismatch(self.report("\n".join(off)))

    def report(self, what: str) -> str:
        lines = "\n".join(self.log)
        return f"{what}\n{lines}\npython -m tests.training.fuzz {self.seed}"


@contextlib.contextmanager
def _all(regions: Sequence[Callable]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for region in regions:
            stack.enter_context(region())
        yield


def run(seed: int, loops: int = 4) -> list[str]:
    """Compile a program and run some loops with it; return what was done.

    Raises
    ------
    Mismatch
        What differs, all that was done, and the command that does it again.
    """
    try:
        program = Program(seed)
    except RelaxDiscError as error:
        return [f"{seed}: not compiled: {str(error)[:300]}"]
    for loop in range(loops):
        program.habits(1000 * seed + loop)
    return program.log
