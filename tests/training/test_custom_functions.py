"""Functions that define their own gradient train by it, as in eager PyTorch."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd.function import _SingleLevelFunction
from torch.export import Dim
from torch.utils.checkpoint import checkpoint

import relax_disc
from relax_disc.errors import InputMismatchError, UnsupportedOperatorError
from relax_disc.frontend import export_step
from tests.tiers import every
from tests.training.beside_eager import assert_gradients_as_eager


class Rounded(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx, x, step):
        return torch.round(x / step) * step

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(x, factor=0.5):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        return -ctx.factor * grad, None


class SumAndProduct(torch.autograd.Function):
    """Several results, one without a gradient, saved tensors and a size as an argument."""

    @staticmethod
    def forward(ctx, x, y, rows):
        ctx.save_for_backward(x, y)
        ctx.rows = rows
        signs = torch.sign(x)
        ctx.mark_non_differentiable(signs)
        return x + y, x * y / rows, signs, None

    @staticmethod
    def backward(ctx, grad_sum, grad_product, _signs, _none):
        x, y = ctx.saved_tensors
        return grad_sum + 2 * y * grad_product, grad_sum + x * grad_product / ctx.rows, None


class Outer(torch.autograd.Function):
    """Calls another function, whose gradient is none of its business."""

    @staticmethod
    def forward(ctx, x):
        return Rounded.apply(x, 0.5).tanh()

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-0.1, 0.1)


class Written(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Again(torch.autograd.Function):
    """Runs a module, and runs it again in the backward pass, as reversible networks do."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.save_for_backward(x)
        ctx.module = module
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            y = ctx.module(x)
        torch.autograd.backward(y, grad)
        return x.grad, None


rounded = Rounded.apply  # as models keep it


def several(x):
    total, product, signs, nothing = SumAndProduct.apply(x, x.sin(), x.shape[0])
    assert nothing is None
    return total + product + signs


class Model(nn.Module):
    def __init__(self, function, normalized=False):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6) if normalized else nn.Identity()
        self.function = function

    def forward(self, x):
        hidden = self.norm(self.first(x))
        return self.second(self.function(hidden)).square().mean()


CASES = {
    "straight through": lambda x: rounded(x, 0.25),
    "reversed": Reversed.apply,
    "reversed by a factor": lambda x: Reversed.apply(x, 2.0),
    "several results": several,
    "twice": lambda x: rounded(Reversed.apply(rounded(x, 0.25)), 0.5),
    "nested": Outer.apply,
    "in a checkpointed region": lambda x: checkpoint(Outer.apply, x, use_reentrant=False),
}


def shapes():
    return ({0: Dim("rows", min=2, max=64)},)


def compiled(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    example = torch.randn(3, 4, dtype=model.first.weight.dtype)
    return relax_disc.compile(model, optimizer, (example,), dynamic_shapes=shapes())


@pytest.mark.parametrize("normalized", every(2, [False, True]))
@pytest.mark.parametrize("name", CASES)
def test_trains_by_its_own_gradient(name, normalized):
    torch.manual_seed(0)
    model = Model(CASES[name], normalized).double()  # two normalized rows amplify rounding
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.5)
    step = compiled(model)
    for rows in (2, 7, 64):
        x = torch.randn(rows, 4, dtype=torch.float64)
        expected = eager(x)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(step(x), expected.detach())
        for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)


class Reversible(nn.Module):
    """Its inner module is called by functions only, and once by itself."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())

    def forward(self, x):
        hidden = Again.apply(self.inner(Again.apply(self.first(x), self.inner)), self.inner)
        return hidden.square().mean()


def test_modules_that_a_function_calls_are_trained():
    torch.manual_seed(0)
    model = Reversible().double()
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.5)
    step = compiled(model)
    for rows in (3, 7, 64):
        x = torch.randn(rows, 4, dtype=torch.float64)
        expected = eager(x)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(step(x), expected.detach())
        torch.testing.assert_close(model.state_dict(), eager.state_dict())


def test_a_module_of_others_that_a_function_calls_is_refused():
    other = nn.Linear(6, 6)
    with pytest.raises(
        UnsupportedOperatorError, match=r"test_custom.*other.weight of shape \(6, 6\), .* none of"
    ):
        compiled(Model(lambda x: Again.apply(x, other)))


strength, weights = 0.5, torch.ones(6)


class ByGlobal(torch.autograd.Function):
    """Reads in its backward pass what nobody passes to it."""

    factor = 0.5

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -strength * grad


class ByClass(ByGlobal):
    @staticmethod
    def backward(ctx, grad):
        return -ByClass.factor * grad


class ByWeights(ByGlobal):
    @staticmethod
    def backward(ctx, grad):
        return grad * weights


class ByModule(ByGlobal):
    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.module.strength * grad, None


class ByChoice(Reversed):
    @staticmethod
    def backward(ctx, grad):
        return (grad if ctx.factor < 0.6 else -grad), None


class Adversarial(Model):
    """Its function gets a number that the training loop changes."""

    def __init__(self, function):
        super().__init__(function)
        self.strength = 0.5

    def forward(self, x):
        return self.second(self.function(self, self.first(x))).square().mean()


@pytest.mark.parametrize(
    "function",
    [
        lambda model, x: Reversed.apply(x, model.strength),
        lambda model, x: rounded(x * model.strength, 1 / (4 * model.strength)),
        lambda model, x: Outer.apply(Reversed.apply(x, 1 - model.strength)),
    ],
)
def test_numbers_given_to_a_function_stay_live(function):
    torch.manual_seed(0)
    model = Adversarial(function).double()
    eager = copy.deepcopy(model)
    step = compiled(model)
    for progress in range(4):
        x = torch.randn(3 + progress, 4, dtype=torch.float64)
        model.strength = eager.strength = 0.5 + 0.1 * progress
        eager.zero_grad()
        expected = eager(x)
        expected.backward()
        torch.testing.assert_close(step(x, keep_gradients=True), expected.detach())
        for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
        eager.load_state_dict(model.state_dict())


@pytest.mark.parametrize(
    ("function", "holder", "name"),
    [
        (lambda model, x: ByGlobal.apply(x), globals(), "strength"),
        (lambda model, x: ByClass.apply(x), ByClass, "factor"),
        (lambda model, x: ByModule.apply(x, model), None, "strength"),
        (lambda model, x: ByChoice.apply(x, model.strength), None, "strength"),
    ],
)
def test_numbers_that_only_its_gradient_reads_are_fixed(function, holder, name, monkeypatch):
    model = Adversarial(function)
    step = compiled(model)
    step(torch.randn(3, 4))
    if isinstance(holder, dict):
        monkeypatch.setitem(holder, name, 0.7)
    else:
        monkeypatch.setattr(holder or model, name, 0.7, raising=False)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InputMismatchError, match=f"{name} was 0.5 .* and is 0.7 now"):
        step(torch.randn(3, 4))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_tensor_that_only_its_gradient_reads_is_refused():
    with pytest.raises(UnsupportedOperatorError, match=r"reads weights of shape \(6,\).* argument"):
        compiled(Model(ByWeights.apply))


def test_forward_alone():
    model = Model(several)
    function = relax_disc.compile_forward(model, (torch.randn(3, 4),), dynamic_shapes=shapes())
    x = torch.randn(9, 4)
    torch.testing.assert_close(function(x), model(x).detach())


def test_accumulates():
    torch.manual_seed(0)
    model = Model(Reversed.apply)
    eager = copy.deepcopy(model)
    step = compiled(model)
    x = torch.randn(5, 4)
    step(x, update=False)
    eager(x).backward()
    torch.testing.assert_close(model.first.weight.grad, eager.first.weight.grad)


def test_what_writes_into_its_arguments_is_refused():
    with pytest.raises(UnsupportedOperatorError, match=r"test_custom.*Written.*writes into"):
        compiled(Model(lambda x: Written.apply(x.clone())))
    assert "apply" not in _SingleLevelFunction.__dict__  # functions work again as before


class Cache:
    def __init__(self):
        self.seen, self.calls = [], 0


class Filling(torch.autograd.Function):
    """Leaves something in its second argument, which another call finds there."""

    @staticmethod
    def forward(ctx, x, kept):
        if isinstance(kept, Cache):
            kept.calls += 1
            return x * kept.calls
        kept.append(x * 2)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@pytest.mark.parametrize("make", [Cache, lambda: Cache().seen], ids=["object", "list"])
def test_what_changes_the_objects_that_it_is_given_is_refused(make):
    def function(x):
        kept = make()
        y = Filling.apply(x, kept)
        return y + kept[0] if isinstance(kept, list) and kept else y

    with pytest.raises(UnsupportedOperatorError, match=r"Filling.*(Cache|list).*use_cache"):
        compiled(Model(function))


class Axis(torch.autograd.Function):
    """Takes an axis from a module, as the entmax of TabNet does."""

    @staticmethod
    def forward(ctx, x, axis):
        counts = 1 + (x > 0).sum(dim=axis).unsqueeze(axis)
        ctx.save_for_backward(counts)
        return x / counts

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.saved_tensors[0], None


def test_an_axis_that_a_module_holds():
    class Selects(nn.Module):
        def __init__(self):
            super().__init__()
            self.axis, self.first = -1, nn.Linear(4, 4)
            self.again = self.first

        def forward(self, x):
            return Axis.apply(self.first(x), self.axis).square().sum()

    torch.manual_seed(0)
    model = Selects()
    step = compiled(model)
    assert_gradients_as_eager(step, ((torch.randn(rows, 4),) for rows in (2, 6)))


class Hides(torch.autograd.Function):
    """Asks for data in its gradient, and catches what a trace raises there."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        try:
            if ctx.saved_tensors[0].mean() > 0:
                return grad + 1
        except Exception:
            pass
        return grad


def test_a_question_that_a_gradient_hides_is_refused():
    with pytest.raises(UnsupportedOperatorError, match=r"test_custom_\w+.py:\d+: .*from data"):
        compiled(Model(Hides.apply))


def test_is_traced_at_each_start():
    """The gradient is code that the exported graph does not show."""
    model = Model(CASES["nested"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    exported = export_step(model, optimizer, (torch.randn(3, 4),), dynamic_shapes=shapes())
    assert exported.fingerprint() is None
