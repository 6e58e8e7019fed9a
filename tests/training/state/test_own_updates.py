"""Optimizers of the user's own, and updates that the user makes himself."""

import copy
import functools

import pytest
import torch
from torch import nn, optim
from torch.export import Dim
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import relax_disc
from relax_disc.errors import (
    ArtefactError,
    InputMismatchError,
    NonFiniteLossError,
    RelaxDiscWarning,
    UnsupportedOperatorError,
)
from tests.training.state.optimizing import (
    CASES,
    Small,
    batch,
    check_equal,
    compiled,
    eager_step,
    pair,
)


class Counting(optim.Optimizer):
    """Plain numbers as state, a count in the group, and every third step averages."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["slow"] = 0, p.clone()
                state["step"] += 1
                p.sub_(p.grad.sign() * group["lr"] / max(1, group["count"] - 3))
                if state["step"] % 3 == 0:
                    state["slow"].lerp_(p, 0.5)
                    p.copy_(state["slow"])


class Descent(optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


def test_a_subclass_compiles_after_its_class_was_used():
    model, optimizer, _, _ = pair(lambda p: optim.SGD(p, 0.1))
    compiled(model, optimizer)(*batch(3))  # PyTorch wraps `SGD.step` for its profiler then
    model, optimizer, eager, followed = pair(lambda p: Descent(p, 0.1, momentum=0.9))
    step = compiled(model, optimizer)
    for rows in (3, 7):
        torch.testing.assert_close(step(*batch(rows)), eager_step(eager, followed, batch(rows)))
        check_equal(model, optimizer, eager, followed)


def test_an_optimizer_of_the_users_own():
    model, optimizer, eager, followed = pair(lambda p: Counting(p, 0.1))
    step = compiled(model, optimizer)
    with torch.no_grad():  # the first step copies what it finds then
        model.first.weight.mul_(2), eager.first.weight.mul_(2)
    for k in range(7):
        step(*batch(4, k)), eager_step(eager, followed, batch(4, k))
        check_equal(model, optimizer, eager, followed)


class ScheduleFree(optim.Optimizer):
    """Schedule-free SGD (arXiv 2405.15682), its counts in the group; ``warmup`` updates rise."""

    def __init__(self, parameters, lr, warmup):
        counts = {"k": 0, "largest": -1.0, "weights": 0.0}
        super().__init__(parameters, {"lr": lr, "warmup": warmup, **counts})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            k = group["k"]
            lr = group["lr"] * ((k + 1) / group["warmup"] if k < group["warmup"] else 1.0)
            largest = group["largest"] = max(lr, group["largest"])
            group["weights"] = group["weights"] + largest**2
            share = largest**2 / group["weights"]
            for y in group["params"]:
                if y.grad is None:
                    continue
                if "z" not in self.state[y]:
                    self.state[y]["z"] = torch.clone(y)
                z = self.state[y]["z"]
                y.lerp_(end=z, weight=share)
                y.add_(y.grad, alpha=lr * (0.9 * (1 - share) - 1))
                z.addcmul_(tensor1=y.grad, tensor2=torch.ones_like(y), value=-lr)
            group["k"] = k + 1


@pytest.mark.parametrize("warmup", [0, 3])
def test_a_condition_on_what_the_step_counts_in_its_group_goes_both_ways(warmup):
    model, optimizer, eager, followed = pair(lambda p: ScheduleFree(p, 0.1, warmup))
    step = compiled(model, optimizer)
    for k in range(6):
        step(*batch(4, k)), eager_step(eager, followed, batch(4, k))
        check_equal(model, optimizer, eager, followed)
        counts = ("k", "largest", "weights")
        ours, theirs = optimizer.param_groups[0], followed.param_groups[0]
        assert [ours[key] for key in counts] == [theirs[key] for key in counts]


class Careful(optim.SGD):
    """Takes a gradient that is NaN as 0, and no step below a bound that may be NaN."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    zero, one = torch.zeros_like(p.grad), torch.ones_like(p.grad)
                    gradient = torch.where(torch.isnan(p.grad), zero, p.grad)
                    bounded = torch.maximum(p.grad, -one)
                    wrong = torch.where(bounded != bounded, one, zero)
                    p.sub_(group["lr"] * (gradient + wrong))


def test_an_update_that_looks_for_nan():
    model, optimizer, eager, followed = pair(lambda p: Careful(p, 0.1))
    step = compiled(model, optimizer)
    x, y = batch(4)
    for value in (1.0, float("nan"), 2.0):
        x[0, 0] = value
        step(x, y), eager_step(eager, followed, (x, y))
        check_equal(model, optimizer, eager, followed)


class Replacing(optim.Optimizer):
    """Writes parameters by ``p.data = ...``, from a copy of them, as mixed precision is written."""

    def __init__(self, parameters, way):
        self.way = way
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            lr = self.param_groups[0]["lr"]
            if self.way == "difference":
                p.data = p.data - lr * p.grad.data
                continue
            state = self.state[p]
            if not state:
                state["master"] = p.detach().clone()
            state["master"].add_(p.grad, alpha=-lr)
            p.data = state["master"] if self.way == "state" else state["master"].to(p.dtype) * 1


@pytest.mark.parametrize("way", ["difference", "state", "product"])
def test_data_that_is_put_in_the_place_of_a_parameters(way):
    model, optimizer, eager, followed = pair(lambda p: Replacing(p, way))
    step = compiled(model, optimizer)
    before = model.first.weight.detach().clone()
    for k in range(4):
        step(*batch(4, k)), eager_step(eager, followed, batch(4, k))
        check_equal(model, optimizer, eager, followed)
    assert (model.first.weight - before).abs().max() > 0.001


class Reshaping(Replacing):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.data = p.data.flatten()[:2]


class SharingItself(Replacing):
    """Its copy of a float32 parameter is the parameter."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["master"] = p.detach().float()
            state["master"].add_(p.grad, alpha=-0.1)


class SharingStates(Replacing):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["mean"] = torch.zeros_like(p)
                state["last"] = state["mean"]
            state["mean"].add_(p.grad)
            p.data.sub_(state["last"])


class Marking(Replacing):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if not hasattr(p, "velocity"):
                p.velocity = torch.zeros_like(p)
            p.velocity.add_(p.grad)
            p.data.sub_(p.velocity)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Reshaping, "data of another shape"),
        (SharingItself, "keeps the parameter as master too"),
        (SharingStates, "keeps mean as last too"),
        (Marking, "keeps velocity on the parameter itself"),
    ],
)
def test_steps_that_lose_what_they_write_are_refused(kind, why):
    model = Small()
    with pytest.raises(UnsupportedOperatorError, match=f"{kind.__name__} cannot be .*{why}"):
        compiled(model, kind(model.parameters(), ""))


class Coupled(Counting):
    """All parameters share the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            p.sub_(p.grad / norm)


class Deciding(Counting):
    """Looks at the gradient to choose a way."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad.norm() > 1:
                p.sub_(p.grad)


class Remembering(Counting):
    """Counts in an attribute."""

    calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad / self.calls)


@pytest.mark.parametrize(
    ("kind", "why"),
    [(Coupled, "others'"), (Deciding, "branches on a value"), (Remembering, "attribute.*calls")],
)
def test_steps_that_cannot_be_followed_are_refused_by_name(kind, why):
    model, optimizer, *_ = pair(lambda p: kind(p, 0.1))
    with pytest.raises(UnsupportedOperatorError, match=f"{kind.__name__}.*{why}.*update=False"):
        compiled(model, optimizer)


def test_an_optimizer_with_a_closure_takes_the_gradients():
    torch.manual_seed(0)
    model = Small().double()
    eager = copy.deepcopy(model)
    step = compiled(model, None)
    with pytest.raises(InputMismatchError, match=r"update=False.*step\(\) and zero_grad"):
        step(*batch(4))
    mine, theirs = (optim.LBFGS(each.parameters(), max_iter=5) for each in (model, eager))

    def closures(n):
        def compiled_closure():
            mine.zero_grad()
            return step(*batch(n), update=False)

        def eager_closure():
            theirs.zero_grad()
            loss = eager(*batch(n))
            loss.backward()
            return loss

        return compiled_closure, eager_closure

    for n in (4, 7, 16):
        ours, reference = closures(n)
        mine.step(ours), theirs.step(reference)
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)
    grads = [p.grad.clone() for p in model.parameters()]
    step(*batch(16), update=False)
    assert not any(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))


def test_a_step_without_optimizer_is_saved_and_has_a_budget(tmp_path):
    torch.manual_seed(0)
    model = Small().double()
    step = compiled(model, None)
    step.save(tmp_path / "step")
    step(*batch(16), update=False)
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loaded = relax_disc.TrainingStep.load(tmp_path / "step", model, None)
    loaded.memory_budget = loaded.plan(n=16).least_bytes
    assert loaded.largest("n") == 16
    loaded(*batch(16), update=False)
    assert loaded.memory_report().peak_bytes <= loaded.memory_budget
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    loaded.check_finite = True
    x, y = batch(4)
    with pytest.raises(NonFiniteLossError):
        loaded(x / 0, y, update=False)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    with pytest.raises(InputMismatchError, match="clip_grad_norm_"):
        compiled(model, None, max_grad_norm=1.0)
    with pytest.raises(ArtefactError, match="no optimizer"):
        relax_disc.TrainingStep.load(tmp_path / "step", model, optim.SGD(model.parameters()))


@pytest.mark.parametrize("case", ["sgd-dampening", "adam-amsgrad"])
def test_the_users_own_step_after_summing(case):
    model, optimizer, eager, followed = pair(CASES[case])
    step = compiled(model, optimizer)
    for k in range(3):
        step(*batch(4, k), update=False)
        optimizer.step()
        optimizer.zero_grad()
        eager_step(eager, followed, batch(4, k))
        step(*batch(7, k)), eager_step(eager, followed, batch(7, k))
        check_equal(model, optimizer, eager, followed)


def test_wrappers_are_unwrapped_or_refused_by_name():
    accelerate = pytest.importorskip("accelerate")
    model, optimizer, *_ = pair(CASES["adamax"])
    wrapped = accelerate.Accelerator(cpu=True).prepare(optimizer)
    before = model.first.weight.detach().clone()
    step = compiled(model, wrapped)
    assert step.optimizer is optimizer
    step(*batch(4))
    assert not torch.equal(before, model.first.weight)

    class Lookahead:
        def __init__(self, inner):
            self.optimizer = inner

    with pytest.raises(UnsupportedOperatorError, match=r"Lookahead wraps Adamax.*\.optimizer"):
        compiled(model, Lookahead(optimizer))
    with pytest.raises(InputMismatchError, match="not str"):
        compiled(model, "SGD")


def quadratic(**options):
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, **options)


def compiled_with(model, optimizer):
    x = torch.ones(3, 4)
    shapes = ({0: Dim("batch", min=1, max=8)},)
    loss_fn = lambda model, x: model(x).pow(2).mean()  # noqa: E731
    return relax_disc.compile(model, optimizer, (x,), dynamic_shapes=shapes, loss_fn=loss_fn), x


@pytest.mark.parametrize(
    ("name", "of_all"),
    [
        ("register_step_pre_hook", register_optimizer_step_pre_hook),
        ("register_step_post_hook", register_optimizer_step_post_hook),
    ],
)
def test_step_hooks_added_later_are_refused(name, of_all):
    model, optimizer = quadratic()
    step, x = compiled_with(model, optimizer)
    handle = getattr(optimizer, name)(lambda *_: None)
    before = model.weight.detach().clone()
    with pytest.raises(InputMismatchError, match=r"step p\w+-hook of SGD was registered after"):
        step(x)
    assert torch.equal(model.weight, before)
    handle.remove()
    step(x)
    handle = of_all(lambda *_: None)
    try:
        with pytest.raises(InputMismatchError, match="step hook of all optimizers"):
            step(x)
        with pytest.raises(UnsupportedOperatorError, match="hooks around step"):
            compiled_with(*quadratic())
    finally:
        handle.remove()
    step(x)


def test_a_step_of_the_object_itself_is_refused():
    model, optimizer = quadratic()
    optimizer.step = lambda: None
    with pytest.raises(UnsupportedOperatorError, match="replaced on this object"):
        compiled_with(model, optimizer)


class Annealed(torch.optim.SGD):
    """Reads attributes of its own and of its defaults."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.strength, self.unread = 0.5, 1

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=self.strength * self.defaults["lr"])


def test_a_step_that_is_replaced_later_is_refused():
    model, optimizer = quadratic()
    step, x = compiled_with(model, optimizer)
    step(x)
    schedule = optim.lr_scheduler.StepLR(optimizer, 1)  # counts the calls of step
    step(x)
    schedule.step()
    of_schedule = optimizer.step

    @functools.wraps(of_schedule)
    def halving(*args):
        of_schedule(*args)
        for p in model.parameters():
            p.data.mul_(0.5)

    before = copy.deepcopy(model.state_dict())
    optimizer.step = halving
    with pytest.raises(InputMismatchError, match="step of SGD was replaced on this object"):
        step(x)
    torch.testing.assert_close(model.state_dict(), before)
    optimizer.step = of_schedule
    step(x)


def test_attributes_of_the_optimizer_that_its_step_reads():
    model = nn.Linear(4, 1)
    optimizer = Annealed(model.parameters())
    step, x = compiled_with(model, optimizer)
    optimizer.unread = 2
    step(x)
    optimizer.strength = 0.25
    with pytest.raises(InputMismatchError, match=r"Annealed: strength was 0\.5 .* now it is 0\.25"):
        step(x)
    optimizer.strength, optimizer.defaults["lr"] = 0.5, 0.2
    with pytest.raises(InputMismatchError, match=r"Annealed: defaults\['lr'\] was 0\.1"):
        step(x)
    again, _ = compiled_with(model, optimizer)
    loss = model(x).pow(2).mean()
    loss.backward()
    expected = model.weight.detach() - 0.5 * 0.2 * model.weight.grad
    model.zero_grad()
    again(x)
    torch.testing.assert_close(model.weight.detach(), expected)


def test_the_users_own_step_after_the_compiled_one():
    model, optimizer = quadratic()
    step, x = compiled_with(model, optimizer)
    optimizer.step()  # nothing has been trained yet
    step(x)
    weight = model.weight.detach().clone()
    with pytest.warns(RelaxDiscWarning, match=r"SGD\.step\(\) was called, but the compiled step"):
        optimizer.step()
    optimizer.step()  # told once
    assert torch.equal(model.weight, weight)
    step(x, keep_gradients=True)
    weight = model.weight.detach().clone()
    with pytest.raises(InputMismatchError, match="a second time"):
        optimizer.step()
    assert torch.equal(model.weight, weight)
    step(x, update=False)
    optimizer.step()  # the user's own update
    assert not torch.equal(model.weight, weight)
