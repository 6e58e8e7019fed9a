"""Python loops over a dynamic length: one build trains as eager PyTorch at every length."""

from __future__ import annotations

import copy
import types
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional

import relax_disc
from relax_disc.errors import ShapeRangeError
from tests.tiers import every
from tests.training.beside_eager import assert_gradients_as_eager
from tests.training.trained_loops import (
    LONGEST,
    Recurrent,
    assert_trains_as_eager,
    compiled,
    loss_of,
)


class Appended(Recurrent):
    def run(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 8)
        outs = []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            outs.append(h)
        return torch.stack(outs, dim=1) + outs[-1][:, None]


class KeepsElsewhere(Recurrent):
    """As OpenNMT's decoder: what each step attends to goes into lists that others hold."""

    def run(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 8)
        outs, seen, kept = [], {"weights": [h]}, types.SimpleNamespace(states=[])
        for row in x.split(1, dim=1):
            h = self.cell(row.squeeze(1), h)
            seen["weights"].append(h.softmax(-1))
            kept.states.append(h * 2)
            outs += [h]
        for _ in range(2):
            seen["weights"].append(h)
        weights = torch.stack(seen["weights"], 1)
        return (
            torch.stack(outs, 1) + weights[:, 1:-2] - weights[:, :1] + torch.stack(kept.states, 1)
        )


class Pair(Recurrent):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(6, 8)

    def run(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        state = (x.new_zeros(batch, 8), x.new_zeros(batch, 8))
        outs = []
        for t in range(length):
            state = self.cell(x[:, t, :], state)
            outs.append(state[0].unsqueeze(1))
        return torch.cat(outs, dim=1) + state[1].mean()


class SelectiveScan(Recurrent):
    def __init__(self) -> None:
        super().__init__()
        self.log_a = nn.Parameter(torch.randn(6, 4))
        self.project = nn.Linear(6, 14)
        self.out = nn.Linear(6, 3)

    def run(self, x: Tensor) -> Tensor:
        b, c, dt = self.project(x).split([4, 4, 6], -1)
        dt = functional.softplus(dt)[..., None]
        decay, added = torch.exp(-torch.exp(self.log_a) * dt), dt * b[:, :, None] * x[..., None]
        h = torch.zeros(x.shape[0], 6, 4)
        outs = []
        for t in range(x.shape[1]):
            h = decay[:, t] * h + added[:, t]
            outs.append(torch.matmul(h, c[:, t, :].unsqueeze(-1))[:, :, 0])
        return torch.stack(outs, dim=-1).transpose(1, 2)


class WritesInPlace(Recurrent):
    def run(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.size(0), 8)
        out = torch.zeros(x.size(0), x.size(1), 8)
        for t in range(x.size(1)):
            h = torch.tanh(h + self.cell(x[:, t], h))
            out[:, t] = h
        return out


class WritesSlices(Recurrent):
    """Masks by rows, as litgpt's sliding window, and slices of what a gradient goes through."""

    def run(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        h = self.cell(x.flatten(0, 1)).unflatten(0, (-1, length))
        windows = torch.full((length, length), float("-inf"))
        columns, ends = torch.zeros(length, length), torch.zeros(length, length)
        mixed = torch.zeros(h.shape) + h
        for t in range(length):
            windows[t, max(0, t - 2) : t + 1] = 0.0
            columns[t:, t] = 0.5
            ends[t, t - length :] = 1.0
            mixed[:, t, 1:-3] = h[:, t].mean()
        weights = (h @ mixed.transpose(1, 2) + windows).softmax(-1) * (columns + ends)
        return weights @ mixed


class Backwards(Recurrent):
    def run(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 8)
        out = torch.zeros(x.shape[0], x.shape[1], 8)
        for t in reversed(range(x.shape[1])):
            h = self.cell(x[:, t], h)
            out[:, t] = h
        return out


class TwoLayers(Recurrent):
    def run(self, x: Tensor) -> Tensor:
        hs = [torch.zeros(x.shape[0], 8) for _ in range(2)]
        outs = []
        for t in range(x.shape[1]):
            hs[0] = self.cell(x[:, t], hs[0])
            hs[1] = self.second(hs[0], hs[1])
            outs.append(hs[-1])
        return torch.stack(outs, 1) + hs[0][:, None]


class ByKey(Recurrent):
    def run(self, x: Tensor) -> Tensor:
        state = {"h": torch.zeros(x.shape[0], 8), "before": [torch.zeros(x.shape[0], 8)]}
        outs = []
        for t in range(x.shape[1]):
            state["before"][0], state["h"] = state["h"], self.cell(x[:, t], state["h"])
            outs.append(state["h"] + state["before"][0])
        return torch.stack(outs, 1) + state["h"][:, None]


class NumberFirst(Recurrent):
    def run(self, x: Tensor) -> Tensor:
        total = 0.0
        outs = []
        for t in range(x.shape[1]):
            total = total + self.cell(x[:, t])
            outs.append(total)
        return torch.stack(outs, 1)


class UpdatesInPlace(Recurrent):
    def run(self, x: Tensor) -> Tensor:
        total, before = torch.zeros(x.shape[0], 8), torch.zeros(x.shape[0], 8)
        outs = []
        for t in range(x.shape[1]):
            now = self.cell(x[:, t], before)
            total += now
            before = now
            outs.append(now.tanh())
        return torch.stack(outs, 1) + total[:, None]


class Chunked(Recurrent):
    """The gated delta rule by chunks of four, as state-space language models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(6, 8) for _ in range(3))
        self.gates = nn.Linear(6, 2)

    def run(self, x: Tensor) -> Tensor:
        batch, length, size = x.shape[0], x.shape[1], 4
        parts = [f(x)[:, None] for f in (self.query, self.key, self.value)]
        beta, decay = functional.softplus(self.gates(x)).split(1, -1)
        pad = (size - length % size) % size
        query, key, value = (functional.pad(part, (0, 0, 0, pad)) for part in parts)
        beta, decay = (functional.pad(part[:, None, :, 0], (0, pad)) for part in (beta, -decay))
        query, key, value, weighted = (
            part.reshape(batch, 1, -1, size, 8)
            for part in (query, functional.normalize(key, dim=-1), value, value * beta[..., None])
        )
        decay = decay.reshape(batch, 1, -1, size).cumsum(-1)
        upper = torch.ones(size, size, dtype=torch.bool).triu(1)
        between = (decay[..., None] - decay[..., None, :]).masked_fill(upper, float("-inf")).exp()
        system = (key @ key.transpose(-1, -2)) * between
        if not torch.compiler.is_exporting():  # an operator that exports may lack
            news = torch.linalg.solve_triangular(system, weighted, upper=False, unitriangular=True)
        else:
            raise AssertionError("this way would not be eager PyTorch's")
        state = torch.zeros(batch, 1, 8, 8)
        out = torch.zeros_like(news)
        for i in range((length + pad) // size):
            new = news[:, :, i] - (key[:, :, i] * decay[:, :, i, :, None].exp()) @ state
            inside = (query[:, :, i] @ key[:, :, i].transpose(-1, -2)) * between[:, :, i]
            out[:, :, i] = query[:, :, i] @ state + inside @ new
            last = decay[:, :, i, -1, None, None].exp()
            state = state * last + key[:, :, i].transpose(-1, -2) @ new
        return out.reshape(batch, 1, -1, 8)[:, 0, :length]


class ReadsItsLast(Recurrent):
    def run(self, x: Tensor) -> Tensor:
        outs = [torch.zeros(x.shape[0], 8)]
        for t in range(x.shape[1]):
            outs.append(self.cell(x[:, t], outs[-1]))
        for row in x.unbind(1):  # goes on with the same list
            outs += [self.second(self.cell(row), outs[-1])]
        first, second = outs[1:].copy(), outs[: -x.shape[2] + 5]
        return torch.stack(first, 1)[:, : x.shape[1]] + torch.stack(second, 1)[:, -x.shape[1] :]


class OverRows(Recurrent):
    """Each way to run over an axis: its parts, their numbers, two at once, from the end."""

    def run(self, x: Tensor) -> Tensor:
        h, total = torch.zeros(x.shape[0], 8), 0.0
        inputs = x.unbind(1)
        for row in inputs:
            h = self.cell(row, h)
        for _, (row, gate) in enumerate(zip(x.transpose(0, 1), inputs)):  # noqa: B905
            h = self.cell(row * gate.sigmoid(), h)
        for part in torch.split(x, 1, dim=1):
            part = part.squeeze(1) + 1
            h = self.cell(part, h)
        outs = []
        for number in range(len(inputs)):
            h = self.second(self.cell(inputs[number], h))
            outs += [h]
            total = total + h.mean()
        for row in reversed(outs):
            h = h * 0.5 + row
        return torch.stack(tuple(outs), 1) + (h + part.mean())[:, None] + total


class Listed(Recurrent):
    """Lists that are as long as an axis, read as Python reads lists."""

    def run(self, x: Tensor) -> Tensor:
        zero = torch.zeros(x.shape[0], 8)
        outs = [self.cell(x[:, t], zero) for t in range(x.shape[1])]
        mean = sum(outs) / len(outs)
        shifted = [mean, *outs[:-1]]
        turned = outs[::-1]
        turned.append(turned.pop(0))
        turned.insert(0, turned.pop())
        rows = torch.stack(list(self.second(row, row) for row in x_of(outs)))
        samples = torch.stack([self.cell(sample).tanh() for sample in x])
        both = torch.stack(shifted, 1) + torch.stack(turned, 1) + rows.transpose(0, 1)
        joined = torch.cat([row[:, None] for row in outs], dim=1)
        return both + samples + joined + sum(row.mean() for row in outs)


def _single(total: Any) -> Tensor:  # pytest rewrites functions that assert, not as their source
    assert total.dtype == torch.float32
    return total


class WithNumbers(Recurrent):
    """What is computed with the number of a step, and parts that begin there."""

    def run(self, x: Tensor) -> Tensor:
        h, outs, total = torch.zeros(x.shape[0], 8), [], 0.0
        ends = (x[:, :, 0] > 0).sum(1)
        around = functional.pad(x, (0, 0, 1, 1))
        for t, row in enumerate(x.unbind(1)):
            h = torch.where((t < ends)[:, None], self.cell(row, h), h * 0.5)
            near = around[:, t : t + 3].mean(1) + x[:, t : t + 1].sum(1)
            outs.append(0.9**t * h + self.cell(near) * (t + 1) / x.shape[1])
            total = total + 0.9**t * h.mean() * (1 / x.shape[1])
        for t in reversed(range(x.shape[1])):
            h = h + x[:, t].reshape(-1).view(x.shape[0], 6).mean(1, keepdim=True) / (1 + t)
        return torch.stack(outs, 1) + h[:, None] + _single(total)


class AppendsTuples(Recurrent):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(6, 8)  # pyright: ignore[reportAttributeAccessIssue]

    def run(self, x: Tensor) -> Tensor:
        states = [(x.new_zeros(x.shape[0], 8), x.new_ones(x.shape[0], 8))]
        for row in x.unbind(1):
            states.append(self.cell(row, states[-1]))
        hs, cs = map(torch.stack, zip(*states[1:]))  # noqa: B905
        twice, _ = zip(*[(self.second(h, c), h) for h, c in states[:-1]])  # noqa: B905
        return torch.stack(twice, 1) + hs.transpose(0, 1) + cs[-1][:, None]


class OnADevice(Recurrent):
    """As tutorials on translation are written; a name that has another shape before the loop."""

    def run(self, x: Tensor) -> Tensor:
        outs = torch.zeros(x.shape[0], x.shape[1], 8).to(x.device)
        h, row = torch.zeros(x.shape[0], 8).to("cpu", x.dtype), x.mean((1, 2))
        scale = row[:, None].tanh()
        for t in range(x.shape[1]):
            row = x[:, t]
            h = self.cell(row, h).to(outs) * scale
            outs[:, t] = h
        return outs


class TablesAndSizes(Recurrent):
    def run(self, x: Tensor) -> Tensor:
        kept = [(x[:, 0, k] > 0).nonzero(as_tuple=True)[0] for k in range(3)]
        counts = x.new_tensor([len(rows) for rows in kept])
        outs = []
        for row in x.unbind(1):
            outs.append(self.cell(row) * counts.sum() / (1 + x.new_tensor([len(x), 1]).sum()))
        return torch.stack(outs, 1)


def x_of(rows: Any) -> Any:
    """Return a list of the model's from a function of its own."""
    return [row * 2 for row in rows]


_TRAIN = (
    ReadsItsLast,
    OverRows,
    KeepsElsewhere,
    WithNumbers,
    AppendsTuples,
    Listed,
    Chunked,
    ByKey,
    UpdatesInPlace,
    Appended,
    Pair,
    SelectiveScan,
    WritesInPlace,
    WritesSlices,
    Backwards,
    TwoLayers,
    NumberFirst,
    OnADevice,
    TablesAndSizes,
)


def _optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _compiled(model: nn.Module) -> Any:
    return compiled(model, _optimizer)


@pytest.mark.parametrize("kind", every(2, _TRAIN))
def test_a_loop_trains_at_every_length(kind: type[Recurrent]) -> None:
    torch.manual_seed(0)
    sizes = ((3, 7), (1, 1), (2, 2), (8, LONGEST), (1, LONGEST), (8, 1))
    assert_trains_as_eager(kind(), _optimizer, sizes)


def test_a_loop_computed_again_under_a_budget_is_the_same_bit_for_bit() -> None:
    torch.manual_seed(0)
    model = SelectiveScan()
    other = copy.deepcopy(model)
    free, tight = _compiled(model), _compiled(other)
    for batch, length in ((8, LONGEST), (5, 9), (1, 30)):
        x, y = torch.randn(batch, length, 6), torch.randn(batch, length, 3)
        plan = free.plan(batch=batch, length=length)
        tight.memory_budget = int(plan.least_bytes)
        assert tight.memory_budget < plan.peak_bytes
        for _ in range(2):
            assert torch.equal(free(x, y), tight(x, y))
        report, planned = tight.memory_report(), tight.plan(batch=batch, length=length)
        assert report.peak_bytes == planned.peak_bytes <= tight.memory_budget
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(ours, theirs)


def test_a_loop_over_two_tensors_of_one_dim() -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        losses = [functional.mse_loss(model(a), b) for a, b in zip(x, y, strict=True)]
        return torch.stack(losses).sum() / len(x)

    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    shapes = ({0: Dim("batch", min=1, max=8), 1: Dim("length", min=1, max=LONGEST)},) * 2
    example = (torch.randn(4, 12, 6), torch.randn(4, 12, 3))
    step = relax_disc.compile(model, None, example, dynamic_shapes=shapes, loss_fn=loss)
    sizes = ((3, 7), (1, 1), (8, LONGEST))
    batches = ((torch.randn(*size, 6), torch.randn(*size, 3)) for size in sizes)
    assert_gradients_as_eager(step, batches, loss)


def _assert_loss_is_eagers(loss: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 8)
    shape = ({0: Dim("batch", min=1, max=8), 1: Dim("length", min=1, max=30)},)
    example = (torch.randn(3, 12, 6),)
    step = relax_disc.compile(model, None, example, dynamic_shapes=shape, loss_fn=loss)
    for batch, length in ((3, 7), (1, 1), (8, 30)):
        x = torch.randn(batch, length, 6)
        torch.testing.assert_close(step(x, update=False), loss(model, x).detach())


def test_a_loop_in_a_lambda_on_the_line_of_a_function() -> None:
    def loss() -> Any: return lambda m, x: torch.stack([m(row).tanh() for row in x]).mean()  # fmt: skip # noqa: E501

    _assert_loss_is_eagers(loss())


def test_a_function_that_is_called_as_one_of_pythons_stays_the_users() -> None:
    def sum(values: Any) -> Any:
        return torch.stack(values).amax(0)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return sum([model(x[:, t]).mean() for t in range(x.shape[1])])

    _assert_loss_is_eagers(loss)


def test_numbers_in_a_loop_of_bfloat16_are_not_rounded() -> None:
    def loss(model: nn.Module, x: Tensor) -> Any:
        y = model(x).bfloat16()
        h, outs = torch.zeros(x.shape[0], 8, dtype=torch.bfloat16), []
        for t in range(x.shape[1]):
            h = h * 0.9 + y[:, t] / x.shape[1] + 0.9**t
            outs.append(h)
        return torch.stack(outs).float().mean(), torch.stack(outs)

    torch.manual_seed(0)
    model = nn.Linear(6, 8)
    shape = ({0: Dim("batch", min=1, max=8), 1: Dim("length", min=1, max=300)},)
    step = relax_disc.compile(
        model, None, (torch.randn(3, 12, 6),), dynamic_shapes=shape, loss_fn=loss
    )
    for batch, length in ((3, 7), (1, 1), (8, 299)):
        x = torch.randn(batch, length, 6)
        _, extras = step(x, update=False)
        assert torch.equal(extras[0], loss(model, x)[1])


class MayHaveNoStep(Recurrent):
    def run(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 8)
        outs = [h]
        for t in range(1, x.shape[1]):
            h = self.cell(x[:, t] - x[:, t - 1], h)
            outs.append(h)
        return torch.stack(outs, 1)


class OwnList(Recurrent):
    """Each step fills a list of its own, as an RNN transducer's does along the target."""

    def run(self, x: Tensor) -> Tensor:
        h, outs = torch.zeros(x.shape[0], 8), []
        for t in range(x.shape[1]):
            columns = [self.cell(x[:, t], h)]
            for k in range(3):
                columns.append(torch.tanh(columns[-1] * 0.5 + columns[0] * k))
            columns.pop(1)
            h = torch.stack(columns).mean(0)
            outs.append(h)
        return torch.stack(outs, 1)


def test_a_step_grows_and_reads_a_list_of_its_own() -> None:
    torch.manual_seed(0)
    assert_trains_as_eager(OwnList(), _optimizer, ((3, 5), (1, 1), (8, LONGEST)))


class SumsChanges(Recurrent):
    def run(self, x: Tensor) -> Tensor:
        h = self.cell(x[:, 0], torch.zeros(x.shape[0], 8))
        outs = [h]
        for t in range(1, x.shape[1]):
            h = h + torch.tanh(x[:, t] - x[:, t - 1]).sum(1, keepdim=True)
            outs.append(h)
        return torch.stack(outs, 1)


def test_a_loop_from_the_second_element_trains_where_it_has_no_step() -> None:
    torch.manual_seed(0)
    sizes = ((3, 5), (2, 1), (1, 2), (2, 1), (8, LONGEST))
    assert_trains_as_eager(SumsChanges(), _optimizer, sizes)


class TwoLoops(Recurrent):
    """As in a CRF: one parameter is read in the steps of two loops alone."""

    def run(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 8)
        score = h
        for t in range(1, x.shape[1]):
            score = score + self.cell(x[:, t], h)
        for t in range(1, x.shape[1]):
            h = self.cell(x[:, t - 1], h)
        return (h + score).unsqueeze(1).expand(-1, x.shape[1], -1)


@pytest.mark.parametrize("kind", every(1, [MayHaveNoStep, TwoLoops]))
def test_a_loop_without_a_step_is_refused_where_it_would_train_alone(
    kind: type[Recurrent],
) -> None:
    torch.manual_seed(0)
    model = kind()
    eager = copy.deepcopy(model)
    step, optimizer = _compiled(model), _optimizer(eager.parameters())
    for length in (2, 1, 7, 2):
        x, y = torch.randn(3, length, 6), torch.randn(3, length, 3)
        if length == 1:
            with pytest.raises(ShapeRangeError, match=r"length=1: .*trains model\.cell\..* alone"):
                step(x, y)
            continue
        expected = loss_of(eager, x, y)
        torch.testing.assert_close(step(x, y), expected.detach(), rtol=1e-4, atol=1e-5)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), eager.state_dict(), rtol=1e-3, atol=1e-4)


def test_the_functions_of_a_model_are_its_own_again() -> None:
    before = Appended.run.__code__
    _compiled(Appended())
    assert Appended.run.__code__ is before
    assert not any(name.startswith("__relax_disc") for name in globals())
