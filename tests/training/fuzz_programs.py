"""Random training programs, run by eager PyTorch and compiled, step by step.

A program is a module of random pieces, a loss, an optimizer, and what a training loop does between
its steps: other batches, other learning rates, writes into the model, odd values.  Every step must
equal eager's, or end in one of the package's errors with nothing written.

``python tests/training/fuzz_programs.py SEED`` runs one program and prints what it does.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import relax_disc
from relax_disc.errors import RelaxDiscError

WIDTH, CLASSES, LARGEST = 6, 5, 9
HABITS_A_PROGRAM = 5


class Piece(nn.Module):
    """A layer from ``[batch, WIDTH]`` and ids ``[batch, 3]`` to ``[batch, WIDTH]``."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        makers, self._apply_piece = PIECES[name]
        self.layers = nn.ModuleList(make() for make in makers)

    def forward(self, h: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self._apply_piece(h, ids, *self.layers)

    def extra_repr(self) -> str:
        return self.name


def _linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def _embedding() -> nn.Module:
    return nn.Embedding(CLASSES, WIDTH)


def _attention(h, ids, one, two):
    q, k, v = (f(h).reshape(-1, 1, 2, 3) for f in (one, two, one))
    return F.scaled_dot_product_attention(q, k, v).reshape(-1, WIDTH)


def _simple(function: Callable) -> tuple:
    return [], lambda h, ids: function(h)


def _layer(make: Callable, before=lambda h: h, after=lambda h: h) -> tuple:
    return [make], lambda h, ids, layer: after(layer(before(h)))


def _row(h):
    return h[:, None]


def _picture(h):
    return h.reshape(-1, 1, 2, 3)


def _flat(h):
    return h.reshape(h.shape[0], -1)[:, :WIDTH]


PIECES: dict[str, tuple] = {
    "linear": _layer(_linear),
    "no bias": _layer(lambda: nn.Linear(WIDTH, WIDTH, bias=False)),
    "bilinear": (
        [lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH)],
        lambda h, ids, layer: layer(h, h.tanh()),
    ),
    "relu": _simple(F.relu),
    "gelu": _simple(F.gelu),
    "tanh gelu": _simple(lambda h: F.gelu(h, approximate="tanh")),
    "silu": _simple(F.silu),
    "elu": _simple(F.elu),
    "selu": _simple(F.selu),
    "celu": _simple(F.celu),
    "leaky": _simple(F.leaky_relu),
    "softplus": _simple(F.softplus),
    "mish": _simple(F.mish),
    "hardswish": _simple(F.hardswish),
    "hardtanh": _simple(F.hardtanh),
    "hardsigmoid": _simple(F.hardsigmoid),
    "softshrink": _simple(F.softshrink),
    "tanhshrink": _simple(F.tanhshrink),
    "logsigmoid": _simple(F.logsigmoid),
    "softsign": _simple(F.softsign),
    "glu": _simple(lambda h: F.glu(torch.cat([h, h.sin()], 1))),
    "prelu": _layer(nn.PReLU),
    "softmax": _simple(lambda h: F.softmax(h, -1)),
    "log softmax": _simple(lambda h: F.log_softmax(h, 1)),
    "normalize": _simple(F.normalize),
    "batch norm": _layer(lambda: nn.BatchNorm1d(WIDTH)),
    "plain batch norm": _layer(lambda: nn.BatchNorm1d(WIDTH, affine=False, momentum=0.3)),
    "batch norm 2d": _layer(lambda: nn.BatchNorm2d(1), _picture, _flat),
    "layer norm": _layer(lambda: nn.LayerNorm(WIDTH)),
    "rms norm": _layer(lambda: nn.RMSNorm(WIDTH)),
    "group norm": _layer(lambda: nn.GroupNorm(2, WIDTH)),
    "instance norm": _layer(
        lambda: nn.InstanceNorm1d(2, affine=True), lambda h: h.reshape(-1, 2, 3), _flat
    ),
    "conv1d": _layer(lambda: nn.Conv1d(1, 2, 3, padding=1), _row, lambda h: h.mean(1)),
    "strided conv1d": _layer(
        lambda: nn.Conv1d(1, 2, 2, stride=2), _row, lambda h: h.reshape(-1, WIDTH)
    ),
    "conv2d": _layer(lambda: nn.Conv2d(1, 2, 3, padding=1), _picture, _flat),
    "grouped conv": _layer(
        lambda: nn.Conv1d(2, 4, 3, padding=1, groups=2), lambda h: h.reshape(-1, 2, 3), _flat
    ),
    "transposed conv": _layer(
        lambda: nn.ConvTranspose1d(1, 1, 3, padding=1), _row, lambda h: h[:, 0]
    ),
    "average pool": _layer(lambda: nn.AvgPool1d(3, 1, 1), _row, lambda h: h[:, 0]),
    "max pool": _layer(lambda: nn.MaxPool1d(3, 1, 1), _row, lambda h: h[:, 0]),
    "adaptive pool": _layer(lambda: nn.AdaptiveAvgPool1d(WIDTH), _row, lambda h: h[:, 0]),
    "gru": _layer(
        lambda: nn.GRU(2, WIDTH, batch_first=True),
        lambda h: h.reshape(-1, 3, 2),
        lambda out: out[0][:, -1],
    ),
    "lstm": _layer(
        lambda: nn.LSTM(2, WIDTH, batch_first=True),
        lambda h: h.reshape(-1, 3, 2),
        lambda out: out[0].mean(1),
    ),
    "encoder": _layer(
        lambda: nn.TransformerEncoderLayer(2, 1, 4, dropout=0.0, batch_first=True),
        lambda h: h.reshape(-1, 3, 2),
        _flat,
    ),
    "attention": ([_linear, _linear], _attention),
    "embedding": ([_embedding], lambda h, ids, e: h + e(ids[:, 0])),
    "padded embedding": (
        [lambda: nn.Embedding(CLASSES, WIDTH, padding_idx=0)],
        lambda h, ids, e: h * e(ids[:, :2]).sum(1).sigmoid(),
    ),
    "bag": ([lambda: nn.EmbeddingBag(CLASSES, WIDTH)], lambda h, ids, e: h + e(ids)),
    "rows": ([_embedding], lambda h, ids, e: h + e.weight[ids[:, 1] - 1]),
    "computed rows": (
        [_embedding],
        lambda h, ids, e: h + e.weight[(h.detach().argmax(1) * 0 + ids[:, 2])],
    ),
    "index select": ([_embedding], lambda h, ids, e: h * e.weight.index_select(0, ids[:, 2])),
    "gather": ([], lambda h, ids: h + h.gather(1, ids[:, :1])),
    "scatter": ([], lambda h, ids: h.scatter(1, ids[:, 1:2], 0.5)),
    "scatter add": ([], lambda h, ids: h.scatter_add(1, ids[:, :2], h[:, :2] * 2)),
    "one hot": ([], lambda h, ids: h * (1 + F.one_hot(ids[:, 0], WIDTH).cumsum(1))),
    "cumsum": _simple(lambda h: h.cumsum(1) / 3),
    "sort": _simple(lambda h: h.sort(1).values),
    "topk": _simple(lambda h: h + h.topk(2, 1).values.sum(1, keepdim=True)),
    "extremes": _simple(lambda h: h - h.amax(1, keepdim=True) + h.min(1, keepdim=True).values),
    "flip": _simple(lambda h: h.flip(1) + h.roll(1, 1)),
    "where": _simple(lambda h: torch.where(h > 0, h, h * h)),
    "clamp": _simple(lambda h: h.clamp(-0.8, 0.9)),
    "einsum": ([_linear], lambda h, ids, f: torch.einsum("bi,bj->bj", h, f(h))),
    "outer": _simple(lambda h: (h[:, :, None] * h[:, None, :]).logsumexp(2)),
    "pad": _simple(lambda h: F.pad(h, (1, 1))[:, 1:-1] + F.pad(h, (0, 1))[:, 1:]),
    "unbind": _simple(lambda h: torch.stack(h.unbind(1)[::-1], 1)),
    "chunk": _simple(lambda h: torch.cat([part.exp() for part in h.chunk(2, 1)], 1).log1p()),
    "batch mean": _simple(lambda h: h - h.mean(0)),
    "batch share": _simple(lambda h: h / (1 + h.abs().sum(0))),
    "variance": _simple(lambda h: h * h.var(1, keepdim=True)),
    "detach": ([_linear], lambda h, ids, f: f(h) + h.detach()),
    "residual": ([_linear, _linear], lambda h, ids, f, g: h + g(F.relu(f(h)))),
    "weight norm": _layer(lambda: nn.utils.parametrizations.weight_norm(_linear())),
}


class CountedNorm(nn.Module):
    """Writes buffers of its own in every forward pass in training."""

    seen: torch.Tensor
    level: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("level", torch.zeros(WIDTH))

    def forward(self, h: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.add_(1)
            self.level.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return h - self.level


LOSSES: dict[str, Callable] = {
    "cross entropy": lambda h, ids, y: F.cross_entropy(h, ids[:, 0]),
    "smoothed": lambda h, ids, y: F.cross_entropy(h, ids[:, 1], label_smoothing=0.1),
    "nll": lambda h, ids, y: F.nll_loss(h.log_softmax(1), ids[:, 2]),
    "mse": lambda h, ids, y: F.mse_loss(h, y),
    "l1": lambda h, ids, y: F.smooth_l1_loss(h, y),
    "huber": lambda h, ids, y: F.huber_loss(h, y, reduction="sum"),
    "bce": lambda h, ids, y: F.binary_cross_entropy_with_logits(h, y.sigmoid()),
    "kl": lambda h, ids, y: F.kl_div(h.log_softmax(1), y.softmax(1), reduction="batchmean"),
    "cosine": lambda h, ids, y: F.cosine_similarity(h, y).mean(),
    "margin": lambda h, ids, y: F.multi_margin_loss(h, ids[:, 0]),
    "soft margin": lambda h, ids, y: F.soft_margin_loss(h, y.sign()),
    "poisson": lambda h, ids, y: F.poisson_nll_loss(h, y.exp()),
}

OPTIMIZERS: dict[str, Callable] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.8, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


class Net(nn.Module):
    def __init__(self, names: list[str], loss: str, counts: bool) -> None:
        super().__init__()
        self.first = _linear()
        self.pieces = nn.ModuleList(Piece(name) for name in names)
        if counts:
            self.pieces.append(CountedNorm())
        self.last = _linear()
        self.loss = loss

    def forward(self, x: torch.Tensor, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for piece in self.pieces:
            h = piece(h, ids)
        return LOSSES[self.loss](self.last(h), ids, y)


class Mismatch(AssertionError):
    """A step neither equals eager's nor was refused with nothing written."""


class Program:
    """One module and optimizer, compiled once; `habits` runs a random loop with it."""

    def __init__(self, seed: int) -> None:
        self.seed, self.log = seed, []
        choose = random.Random(seed)
        torch.manual_seed(seed)
        names = choose.sample(sorted(PIECES), choose.randint(2, 4))
        loss, optimizer = choose.choice(sorted(LOSSES)), choose.choice(sorted(OPTIMIZERS))
        self.model = Net(names, loss, choose.random() < 0.3)
        self.model.train(choose.random() < 0.9)
        if choose.random() < 0.2:
            frozen = choose.choice(list(self.model.parameters()))
            frozen.requires_grad_(False)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = OPTIMIZERS[optimizer](trained)
        self.note(f"{names}, {loss}, {optimizer}, training={self.model.training}")
        batch = torch.export.Dim("batch", min=1, max=LARGEST)
        shapes = ({0: batch},) * 3
        self.step = relax_disc.compile(
            self.model, self.optimizer, tuple(self.batch(choose, 4)), dynamic_shapes=shapes
        )

    def note(self, text: str) -> None:
        self.log.append(text)

    def batch(self, choose: random.Random, size: int | None = None) -> list[torch.Tensor]:
        size = choose.choice([1, 2, 3, 5, 8, LARGEST]) if size is None else size
        ids = torch.randint(0, CLASSES, (size, 3))
        return [torch.randn(size, WIDTH), ids, torch.randn(size, WIDTH)]

    def tensors(self) -> dict[str, torch.Tensor]:
        found = _state(self.model, self.optimizer)
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                found[f"{name}.grad"] = parameter.grad
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
            undo = HABITS[name](self, choose, batch)
            self._compare(batch)
            if undo is not None:
                undo()

    def _compare(self, batch: list[torch.Tensor]) -> None:
        before = self.tensors()
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        before_step = copy.deepcopy((model, optimizer))
        failure = loss = None
        optimizer.zero_grad()
        try:
            loss = model(*(tensor.detach().clone() for tensor in batch))
            loss.backward()
            optimizer.step()
        except (RuntimeError, IndexError, ValueError) as error:
            failure = error
        try:
            found = self.step(*batch)
        except RelaxDiscError as error:
            self.note(f"    refused: {type(error).__name__}: {str(error)[:100]}")
            after = self.tensors()
            for name in before.keys() | after.keys():
                same = name in before and name in after
                if not same or not _identical(before[name], after[name]):
                    raise Mismatch(self.report(f"{name} was written by a refused step")) from error
            return
        if failure is not None:
            raise Mismatch(self.report(f"eager raises {failure!r}, the step gives {found}"))
        # Adam turns a gradient that is rounding alone into a step of the learning rate.
        rate = max(group["lr"] for group in optimizer.param_groups)
        is_adam = isinstance(optimizer, torch.optim.Adam)
        found = {"loss": found} | self.tensors()
        wanted = {"loss": loss.detach()} | _state(model, optimizer)
        if not loss.isfinite():  # gradients then differ between PyTorch's own forms
            found, wanted = ({"loss": values["loss"]} for values in (found, wanted))
        trained = {name for name, _ in self.model.named_parameters()}
        off = []
        for name, value in wanted.items():
            slack = 3 * rate if is_adam and name in trained else 0.0
            if not _close(found[name], value, 2e-4 + slack):
                off.append(name)
        if not off:
            return
        exact = self._in_float64(before_step, batch)
        for name in off:
            error, usual = (
                float((values[name].double() - exact[name]).abs().max())
                for values in (found, wanted)
            )
            if not error <= 30 * usual:
                text = f"{name} is {found[name]}, eager's {wanted[name]}, in float64 {exact[name]}"
                raise Mismatch(self.report(text))

    def _in_float64(self, before: tuple, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Eager's step once more, wide: what rounding explains is no mismatch."""
        model, optimizer = copy.deepcopy(before)
        model.double()
        for state in optimizer.state.values():
            state |= {k: v.double() for k, v in state.items() if torch.is_tensor(v) and v.dim()}
        optimizer.zero_grad()
        loss = model(*(t.detach().double() if t.is_floating_point() else t for t in batch))
        loss.backward()
        optimizer.step()
        return {"loss": loss.detach()} | _state(model, optimizer)

    def report(self, what: str) -> str:
        lines = "\n".join(self.log)
        return f"{what}\n{lines}\npython tests/training/fuzz_programs.py {self.seed}"


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = dict(model.state_dict())
    for number, state in enumerate(optimizer.state.values()):
        found |= {f"{number} {k}": v for k, v in state.items() if torch.is_tensor(v)}
    return found


def _close(found: torch.Tensor, wanted: torch.Tensor, atol: float) -> bool:
    return torch.allclose(found, wanted, rtol=2e-3, atol=atol, equal_nan=True)


def _identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and torch.equal(a.isnan(), b.isnan())
        and bool(((a == b) | a.isnan()).all())
    )


HABITS: dict[str, Callable] = {}


def habit(function: Callable) -> Callable:
    HABITS[function.__name__] = function
    return function


@habit
def nothing(program, choose, batch):
    pass


@habit
def another_rate(program, choose, batch):
    for group in program.optimizer.param_groups:
        group["lr"] *= choose.choice([0.5, 0.9, 1.1])


@habit
def another_decay(program, choose, batch):
    program.optimizer.param_groups[0]["weight_decay"] = choose.choice([0.0, 0.02])


@habit
def scheduler(program, choose, batch):
    torch.optim.lr_scheduler.StepLR(program.optimizer, 1, gamma=0.9)


@habit
def other_mode(program, choose, batch):
    was = program.model.training
    program.model.train(not was)
    return lambda: program.model.train(was)


@habit
def mode_of_a_part(program, choose, batch):
    part = choose.choice(list(program.model.modules()))
    was = part.training
    part.training = not was

    def undo():
        part.training = was

    return undo


@habit
def freeze(program, choose, batch):
    parameter = choose.choice(list(program.model.parameters()))
    was = parameter.requires_grad
    parameter.requires_grad_(not was)
    return lambda: parameter.requires_grad_(was)


@habit
def write_parameter(program, choose, batch):
    with torch.no_grad():
        choose.choice(list(program.model.parameters())).mul_(0.9)


@habit
def replace_data(program, choose, batch):
    parameter = choose.choice(list(program.model.parameters()))
    parameter.data = parameter.data.clone() * 0.95


@habit
def write_buffer(program, choose, batch):
    floats = [b for b in program.model.buffers() if b.is_floating_point()]
    if floats:
        choose.choice(floats).mul_(0.9)


@habit
def load_model(program, choose, batch):
    state = {k: v.clone() for k, v in program.model.state_dict().items()}
    program.model.load_state_dict(state)


@habit
def load_optimizer(program, choose, batch):
    program.optimizer.load_state_dict(copy.deepcopy(program.optimizer.state_dict()))


@habit
def clear_gradients(program, choose, batch):
    program.optimizer.zero_grad(set_to_none=choose.random() < 0.5)


@habit
def index_out_of_range(program, choose, batch):
    row, column = choose.randrange(len(batch[1])), choose.randrange(3)
    batch[1][row, column] = choose.choice([7, -1, -7, 10**8, -(10**15), CLASSES])


@habit
def not_a_number(program, choose, batch):
    program.step.check_finite = choose.random() < 0.7
    batch[0][choose.randrange(len(batch[0])), choose.randrange(WIDTH)] = float("nan")
    if program.step.check_finite:
        return None
    saved = copy.deepcopy((program.model.state_dict(), program.optimizer.state_dict()))

    def undo():
        program.model.load_state_dict(saved[0])
        program.optimizer.load_state_dict(saved[1])

    return undo


@habit
def large_values(program, choose, batch):
    batch[0].mul_(choose.choice([0.0, 1e-6, 30.0]))


@habit
def strided_batch(program, choose, batch):
    batch[0] = torch.cat([batch[0], batch[0]], 1)[:, ::2]


@habit
def batch_wants_gradient(program, choose, batch):
    batch[0].requires_grad_()


@habit
def too_large(program, choose, batch):
    batch[:] = program.batch(choose, LARGEST + 3)


@habit
def empty(program, choose, batch):
    batch[:] = program.batch(choose, 0)


@habit
def other_type(program, choose, batch):
    place = choose.choice([0, 1])
    batch[place] = batch[place].to([torch.float64, torch.int32][place])


@habit
def sizes_that_differ(program, choose, batch):
    batch[2] = torch.randn(len(batch[0]) % LARGEST + 1, WIDTH)


@habit
def tight_budget(program, choose, batch):
    program.step.memory_budget = choose.choice([1000, 50_000, "1MiB"])

    def undo():
        program.step.memory_budget = None

    return undo


@habit
def no_grad(program, choose, batch):
    program.step.memory_report()
    torch.manual_seed(choose.randrange(100))


def run(seed: int, loops: int = 4) -> int:
    """Compile a program and run some loops with it; return how many were run.

    Raises
    ------
    Mismatch
        What differs, all that was done, and the command that does it again.
    """
    try:
        program = Program(seed)
    except RelaxDiscError as error:
        print(f"{seed}: not compiled: {str(error)[:300]}")
        return loops
    for loop in range(loops):
        program.habits(1000 * seed + loop)
    if __name__ == "__main__":
        print("\n".join(program.log))
    return loops


if __name__ == "__main__":
    for number in sys.argv[1:]:
        run(int(number))
