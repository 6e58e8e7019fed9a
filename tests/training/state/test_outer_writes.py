"""What a step writes besides its arguments, as far as the page does not show it."""

import contextvars
import copy
import types

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

import relax_disc
from relax_disc.errors import RelaxDiscWarning, UnsupportedOperatorError
from tests.training.state.outer_batch import X, agree, compiled


def test_a_statistic_that_a_function_writes():
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.mean, self.var = nn.Linear(4, 4), torch.zeros(4), torch.ones(4)

        def forward(self, x):
            return F.batch_norm(self.linear(x), self.mean, self.var, training=True).pow(3).mean()

    model = Norm()
    step = compiled(model, X)
    step(X)
    assert model.mean.any()
    torch.testing.assert_close(model.mean, 0.1 * model.linear(X).mean(0).detach())


def test_a_tensor_that_is_written_and_never_read():
    last = torch.zeros(())

    def loss_fn(model, x):
        nonlocal last
        loss = model(x).pow(2).mean()
        last = loss.detach()
        return loss

    step = compiled(nn.Linear(4, 4), X, loss_fn=loss_fn)
    assert last == 0
    assert step(X) == last


def test_a_reassigned_buffer_that_gradients_need():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x):
            h = self.linear(x) * self.scale
            self.scale = self.scale * 0.5
            return h.mean()

    model = Model()
    step = compiled(model, X)
    losses = [step(X).item() for _ in range(3)]
    assert losses[1] == pytest.approx(losses[0] / 2, rel=1e-5)
    assert model.scale.tolist() == [0.125] * 4
    assert losses[2] == pytest.approx(losses[0] / 4, rel=1e-5)


def test_kept_gradients_of_others_are_left_alone_and_told_of_once():
    model = nn.Linear(4, 4)
    step = compiled(model, X, loss_fn=lambda model, x: model(x).mean())
    step(X, keep_gradients=True)
    own = model.weight.grad = torch.ones(4, 4)
    with pytest.warns(RelaxDiscWarning, match=r"update=False") as caught:
        step(X)
    assert {warning.filename for warning in caught} == {__file__}
    step(X)
    assert model.weight.grad is own and model.bias.grad is None


class Growing(nn.Module):
    """Keeps what it has seen: in a buffer, an attribute or a list."""

    def __init__(self, where):
        super().__init__()
        self.layer, self.where = nn.Linear(4, 4), where
        if where == "buffer":
            self.register_buffer("seen", torch.ones(1, 4))
        else:
            self.seen = [torch.ones(1, 4)] if where == "list" else torch.ones(1, 4)

    def forward(self, x):
        h = self.layer(x)
        seen = torch.cat(self.seen) if self.where == "list" else self.seen
        loss = (h @ seen.T).logsumexp(-1).mean()
        if self.where == "list":
            self.seen.append(h.detach())
        else:
            self.seen = torch.cat([self.seen, h.detach()])
        return loss


@pytest.mark.parametrize("where", ["buffer", "attribute", "list"])
def test_state_that_grows_is_refused_by_name(where):
    with pytest.raises(UnsupportedOperatorError, match=r"model\.seen .*shape \(1, 4\)"):
        compiled(Growing(where), X)


class Cached(nn.Module):
    """Makes a table anew where the one that it holds is of another size, and reads no old one."""

    def __init__(self):
        super().__init__()
        self.layer, self.table = nn.Linear(4, 4), torch.zeros(1)

    def forward(self, x):
        if self.table.shape[0] != 4:
            self.table = torch.arange(4.0)
        return (self.layer(x) * self.table).pow(2).mean()


def test_a_table_that_is_made_anew_is_right_each_time():
    model = Cached()
    with pytest.warns(RelaxDiscWarning, match=r"model\.table"):
        step = compiled(model, X)
    agree(step, lambda model, x: copy.deepcopy(model)(x), model)
    agree(step, lambda model, x: copy.deepcopy(model)(x), model, X[:3])


class Scaled(nn.Module):
    """Writes into its scale before it reads it; `data` says by which of two names."""

    def __init__(self, trained, data):
        super().__init__()
        self.layer, self.data = nn.Linear(4, 3), data
        self.scale = nn.Parameter(torch.ones(4), requires_grad=trained)

    def forward(self, x):
        if self.data:
            self.scale.data.mul_(0.5)
        else:
            with torch.no_grad():
                self.scale.mul_(0.5)
        return self.layer(x * self.scale).square().mean()


@pytest.mark.parametrize("data", [False, True])
def test_a_frozen_parameter_that_forward_writes_is_written(data):
    model = Scaled(trained=False, data=data)
    eager = copy.deepcopy(model)
    step = compiled(model, X)
    for rows in (8, 1, 3):
        torch.testing.assert_close(step(X[:rows]), eager(X[:rows]).detach())
    torch.testing.assert_close(model.scale, eager.scale)
    torch.testing.assert_close(model.scale.detach(), torch.full((4,), 0.125))


class Replaced(Scaled):
    def forward(self, x):
        self.scale.data = self.scale.data.clamp(0, 0.9)
        return self.layer(x * self.scale).square().mean()


@pytest.mark.parametrize("make", [Scaled, Replaced])
@pytest.mark.parametrize("data", [False, True])
def test_a_trained_parameter_that_forward_writes_is_updated_as_written(make, data):
    model = make(trained=True, data=data)
    eager = copy.deepcopy(model)
    optimizer = torch.optim.Adam(eager.parameters(), lr=0.1)
    mine = torch.optim.Adam(model.parameters(), lr=0.1)
    step = relax_disc.compile(model, mine, (X,), dynamic_shapes=({0: Dim("batch", max=64)},))
    for rows in (8, 1, 3):
        optimizer.zero_grad()
        expected = eager(X[:rows])
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(step(X[:rows]), expected.detach())
        torch.testing.assert_close(model.state_dict(), eager.state_dict())
    step(X, update=False)
    eager.zero_grad()
    eager(X).backward()
    torch.testing.assert_close(model.scale, eager.scale)
    torch.testing.assert_close(model.scale.grad, eager.scale.grad)


class Collecting(nn.Module):
    """Registers a hook at its first call, as Hugging Face's models do to collect hidden states."""

    found = contextvars.ContextVar("found")

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        if not getattr(self, "hooked", False):
            self.layer.register_forward_hook(lambda *call: self.found.get().append(call[2]))
            self.hooked = True
        token = self.found.set([])
        loss = self.layer(x).mean() + sum(value.square().mean() for value in self.found.get())
        self.found.reset(token)
        return loss


class Counts(nn.Module):
    """Counts its calls in a number, and uses it or not."""

    def __init__(self, use):
        super().__init__()
        self.linear, self.use, self.step = nn.Linear(4, 4), use, 1

    def forward(self, x):
        self.step += 1
        return self.use(self.linear(x), self.step).square().mean()


USES = {
    "computes with it": lambda y, step: y * step,
    "decides by it": lambda y, step: y * 2 if step > 3 else y,
    "a weight that grows": lambda y, step: y * min(1.0, step / 10),
}


@pytest.mark.parametrize("use", USES)
def test_a_number_that_steps_count_and_use_is_refused(use):
    model = Counts(USES[use])
    with pytest.raises(UnsupportedOperatorError, match=r"model\.step is a number .* buffer"):
        compiled(model, X)
    assert model.step == 1


def test_a_number_on_a_layer_of_torch_is_refused_too():
    def loss_fn(model, x):
        model.scale = model.scale * 0.9
        return (model(x) * model.scale).square().mean()

    model = nn.Linear(4, 4)
    model.scale = 1.0
    with pytest.raises(UnsupportedOperatorError, match=r"scale'?\]? is a number"):
        relax_disc.compile(
            model, None, (X,), dynamic_shapes=({0: Dim("b", min=1, max=8)},), loss_fn=loss_fn
        )


def test_a_setting_of_a_layer_of_torch_is_refused_too():
    def loss_fn(model, x):
        model[1].negative_slope *= 2
        return model(x).square().mean()

    model = nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(0.1))
    with pytest.raises(UnsupportedOperatorError, match=r"negative_slope is a number"):
        compiled(model, X, loss_fn=loss_fn)
    assert model[1].negative_slope == 0.1


def test_a_number_that_steps_count_alone_is_told():
    with pytest.warns(RelaxDiscWarning, match=r"model\.step is changed"):
        step = compiled(Counts(lambda y, _: y), X)
    assert step(X).isfinite()
    assert step.model.step == 1


def test_a_hook_that_forward_registers_is_registered_once():
    model = Collecting()
    eager = copy.deepcopy(model)
    with pytest.warns(RelaxDiscWarning, match=r"model\.hooked is changed"):
        step = compiled(model, X)
    expected = eager(X).detach()
    torch.testing.assert_close(step(X), expected)
    torch.testing.assert_close(model(X).detach(), expected)


def test_a_warning_names_the_line_that_called_compile():
    model = nn.Linear(4, 1)
    calls = types.SimpleNamespace(count=0)

    def loss(model, x):
        calls.count += 1
        return model(x).mean()

    with pytest.warns(RelaxDiscWarning, match="count") as caught:
        compiled(model, X, loss_fn=loss)
    assert {warning.filename for warning in caught} == {compiled.__code__.co_filename}


class Renormalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4, max_norm=0.5), nn.Linear(4, 1)

    def forward(self, ids):
        return self.head(self.table(ids)).square().mean()


def test_an_embedding_that_renormalises_its_rows_is_trained_as_renormalised():
    torch.manual_seed(0)
    model = Renormalised()
    eager = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(eager.parameters(), lr=0.1)
    step = relax_disc.compile(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.1),
        (torch.tensor([0, 1, 2]),),
        dynamic_shapes=({0: Dim("count", min=1, max=16)},),
    )
    for ids in ([0, 1, 2], [3], [3, 3, 5, 6, 0], [1, 1]):
        loss = eager(torch.tensor(ids))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(step(torch.tensor(ids)), loss.detach())
        torch.testing.assert_close(model.table.weight, eager.table.weight)
