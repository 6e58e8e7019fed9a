"""Every optimizer of torch.optim, and some others, beside eager PyTorch: one build, two shapes."""

import copy

import pytest
import torch
from torch import nn, optim
from torch.export import Dim
from torch.nn import functional as F
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

CASES = {
    "sgd": lambda p: optim.SGD(p, lr=0.1, weight_decay=0.01),
    "sgd-dampening": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "sgd-nesterov-maximize": lambda p: optim.SGD(p, 0.01, 0.9, nesterov=True, maximize=True),
    "adam-amsgrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    "adamw-fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "adamw-amsgrad-foreach": lambda p: optim.AdamW(p, lr=0.01, amsgrad=True, foreach=True),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01),
    "rmsprop-centered": lambda p: optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.2),
    "adadelta": lambda p: optim.Adadelta(p, lr=1.0),
    "adamax": lambda p: optim.Adamax(p, lr=0.01, weight_decay=0.1),
    "nadam": lambda p: optim.NAdam(p, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "radam": lambda p: optim.RAdam(p, lr=0.01, betas=(0.8, 0.9)),
    "rprop": lambda p: optim.Rprop(p, lr=0.01),
    "asgd": lambda p: optim.ASGD(p, lr=0.01, t0=3, weight_decay=0.1),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.05, weight_decay=0.1),
    "muon": lambda p: optim.Muon([q for q in p if q.dim() == 2], lr=0.01),
}


class Small(nn.Module):
    """Matrices, vectors and a scalar."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x, y):
        return F.cross_entropy(self.last(torch.tanh(self.first(x))) * self.scale, y)


def batch(n, seed=0):
    g = torch.Generator().manual_seed(seed + n)
    return torch.randn(n, 6, generator=g, dtype=torch.float64), torch.randint(
        0, 3, (n,), generator=g
    )


def shapes():
    n = Dim("n", min=1, max=16)
    return ({0: n}, {0: n})


def pair(make):
    torch.manual_seed(0)
    model = Small().double()
    eager = copy.deepcopy(model)
    return model, make(list(model.parameters())), eager, make(list(eager.parameters()))


def compiled(model, optimizer, **options):
    return relax_disc.compile(model, optimizer, batch(4), dynamic_shapes=shapes(), **options)


def eager_step(model, optimizer, *batches, max_norm=None):
    optimizer.zero_grad()
    for each in batches:
        loss = model(*each)
        loss.backward()
    if max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return loss.detach()


def check_equal(model, optimizer, eager, followed, tolerance=1e-9):
    close = {"rtol": tolerance, "atol": tolerance}
    for (name, mine), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **close, msg=lambda m, n=name: f"{n}: {m}")
    mine, theirs = optimizer.state_dict(), followed.state_dict()
    assert sorted(mine["state"]) == sorted(theirs["state"])
    for key, state in theirs["state"].items():
        assert list(mine["state"][key]) == list(state)
        for name, value in state.items():
            found = mine["state"][key][name]
            assert type(found) is type(value)
            if isinstance(value, torch.Tensor):
                single = 1e-6 if value.dtype is torch.float32 else tolerance
                torch.testing.assert_close(
                    found, value, rtol=single, atol=single, msg=lambda m, n=name: f"{n}: {m}"
                )
            else:
                assert found == value
    assert mine["param_groups"] == theirs["param_groups"]


@pytest.mark.parametrize("case", CASES)
def test_training_follows_eager(case):
    model, optimizer, eager, followed = pair(CASES[case])
    step = compiled(model, optimizer)
    assert len(optimizer.state) == len(followed.state) == (5 if case == "adagrad" else 0)
    schedules = [
        optim.lr_scheduler.LambdaLR(each, lambda k: 1 / (1 + 0.3 * k))
        for each in (optimizer, followed)
    ]
    rounding = 2e-2 if case == "muon" else 1e-9  # whose products are in bfloat16
    for k, n in enumerate((4, 7, 4, 1, 16, 7, 4)):
        loss = step(*batch(n, k))
        torch.testing.assert_close(
            loss, eager_step(eager, followed, batch(n, k)), rtol=rounding, atol=0
        )
        for schedule in schedules:
            schedule.step()
        check_equal(model, optimizer, eager, followed, rounding)
    # State goes over both ways: eager takes ours, the compiled step takes eager's.
    mine, theirs = (copy.deepcopy(each.state_dict()) for each in (optimizer, followed))
    optimizer.load_state_dict(theirs)
    followed.load_state_dict(mine)
    model.load_state_dict(eager.state_dict())
    step(*batch(4)), eager_step(eager, followed, batch(4))
    check_equal(model, optimizer, eager, followed, rounding)


def test_clipping_and_sums_with_an_update_of_many_kernels():
    model, optimizer, eager, followed = pair(CASES["adafactor"])
    step = compiled(model, optimizer, max_grad_norm=0.1)
    for k in range(3):
        step(*batch(4, k), update=False)
        assert len(optimizer.state) == len(followed.state)
        step(*batch(7, k))
        eager_step(eager, followed, batch(4, k), batch(7, k), max_norm=0.1)
        check_equal(model, optimizer, eager, followed, 1e-8)
        step(*batch(16, k)), eager_step(eager, followed, batch(16, k), max_norm=0.1)
    check_equal(model, optimizer, eager, followed, 1e-8)


@pytest.mark.parametrize("case", ["radam", "adafactor"])
def test_saved_steps_and_every_budget_give_the_same_bits(case, tmp_path):
    def trained(budget, load=False):
        model, optimizer, *_ = pair(CASES[case])
        if load:
            step = relax_disc.TrainingStep.load(tmp_path / "step", model, optimizer)
        else:
            step = compiled(model, optimizer)
            step.save(tmp_path / "step")
        step.memory_budget = step.plan(n=16).least_bytes if budget else None
        for k in range(6):
            step(*batch(16, k))
        return torch.cat([p.detach().ravel() for p in model.parameters()])

    plain = trained(False)
    assert torch.equal(plain, trained(True)) and torch.equal(plain, trained(True, load=True))


def test_a_step_saved_for_another_update_is_refused(tmp_path):
    model, optimizer, *_ = pair(CASES["rmsprop"])
    compiled(model, optimizer).save(tmp_path / "step")
    other = optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9)
    with pytest.raises(ArtefactError, match=r"parameter group 0.*momentum"):
        relax_disc.TrainingStep.load(tmp_path / "step", model, other)


@pytest.mark.parametrize(
    ("case", "setting", "value"),
    [
        ("sgd", "momentum", 0.9),
        ("sgd-nesterov-maximize", "nesterov", False),
        ("sgd-dampening", "momentum", 0.0),
        ("adamw-amsgrad-foreach", "amsgrad", False),
        ("rmsprop-centered", "centered", False),
        ("adafactor", "maximize", True),
    ],
)
def test_settings_that_choose_the_update_are_refused_by_name(case, setting, value):
    model, optimizer, *_ = pair(CASES[case])
    step = compiled(model, optimizer)
    step(*batch(4))
    before = copy.deepcopy(model.state_dict())
    kept = optimizer.param_groups[0][setting]
    optimizer.param_groups[0][setting] = value
    with pytest.raises(InputMismatchError, match=f"{setting}.*now it is {value}.*compile"):
        step(*batch(4))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.param_groups[0][setting] = kept
    step(*batch(4))


def test_numbers_are_read_at_each_call():
    model, optimizer, eager, followed = pair(
        lambda p: optim.RMSprop(p, 0.01, momentum=0.5, weight_decay=0.1)
    )
    step = compiled(model, optimizer)
    for settings in (
        {},
        {"lr": 0.2, "alpha": 0.7},
        {"eps": 1e-3, "momentum": 0.9, "weight_decay": 0.3},
    ):
        for each in (optimizer, followed):
            each.param_groups[0].update(settings)
        step(*batch(4)), eager_step(eager, followed, batch(4))
    check_equal(model, optimizer, eager, followed)


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.ASGD])
@pytest.mark.parametrize("decays", [(0.0, 0.3), (0.3, 0.0)])
def test_weight_decay_may_become_zero_and_begin_there(kind, decays):
    model, optimizer, eager, followed = pair(lambda p: kind(p, lr=0.01, weight_decay=decays[0]))
    step = compiled(model, optimizer)
    for decay in (decays[0], decays[1], decays[0]):
        for each in (optimizer, followed):
            each.param_groups[0]["weight_decay"] = decay
        step(*batch(4)), eager_step(eager, followed, batch(4))
        check_equal(model, optimizer, eager, followed)
    optimizer.param_groups[0]["unknown"] = True  # what nobody reads makes no difference
    step(*batch(4))


def test_groups_that_change_are_refused_by_name():
    torch.manual_seed(0)
    model = Small().double()
    optimizer = optim.AdamW(model.last.parameters(), lr=0.01)
    step = compiled(model, optimizer)
    step(*batch(4))
    optimizer.add_param_group({"params": list(model.first.parameters())})
    with pytest.raises(InputMismatchError, match=r"group 1 was added.*first\.weight, first\.bias"):
        step(*batch(4))
    added = optimizer.param_groups.pop()
    step(*batch(4))
    optimizer.param_groups[0]["params"].append(added["params"][0])
    with pytest.raises(InputMismatchError, match=r"group 0 changed.*first\.weight"):
        step(*batch(4))
    optimizer.param_groups[0]["params"].pop()
    model.last.bias.requires_grad_(False)
    with pytest.raises(InputMismatchError, match=r"last\.bias was trained.*frozen now"):
        step(*batch(4))
    kept = optimizer.param_groups.pop()
    with pytest.raises(InputMismatchError, match="groups were removed"):
        step(*batch(4))
    optimizer.param_groups.append(kept)


def test_a_scalar_keeps_its_type():
    model = nn.ParameterDict({"scale": nn.Parameter(torch.tensor(1.5))})
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, dampening=0.2)
    eager = copy.deepcopy(model)
    followed = optim.SGD(eager.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, dampening=0.2)
    rows = Dim("rows", max=9)
    step = relax_disc.compile(
        model,
        optimizer,
        (torch.randn(3),),
        dynamic_shapes=({0: rows},),
        loss_fn=lambda model, x: (model["scale"] * x).square().mean(),
    )
    for k in range(3):
        x = torch.randn(3 + k)
        step(x)
        followed.zero_grad()
        (eager["scale"] * x).square().mean().backward()
        followed.step()
        check_equal(model, optimizer, eager, followed, 1e-6)


def test_groups_keep_their_own_settings():
    def make(parameters):
        matrices = [p for p in parameters if p.dim() == 2]
        rest = [p for p in parameters if p.dim() != 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}]
        return optim.NAdam(groups, lr=0.01)

    model, optimizer, eager, followed = pair(make)
    step = compiled(model, optimizer)
    for k in range(4):
        step(*batch(4, k)), eager_step(eager, followed, batch(4, k))
    check_equal(model, optimizer, eager, followed)


def test_a_failed_first_step_leaves_no_state():
    model, optimizer, *_ = pair(CASES["asgd"])
    step = compiled(model, optimizer)
    step.check_finite = True
    x, y = batch(4)
    with pytest.raises(NonFiniteLossError):
        step(x * float("nan"), y)
    assert not optimizer.state
    report = relax_disc.verify(step, [batch(4), batch(7)])
    assert report.ok, str(report)
    assert not optimizer.state


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


def test_an_optimizer_of_the_users_own():
    model, optimizer, eager, followed = pair(lambda p: Counting(p, 0.1))
    step = compiled(model, optimizer)
    with torch.no_grad():  # the first step copies what it finds then
        model.first.weight.mul_(2), eager.first.weight.mul_(2)
    for k in range(7):
        step(*batch(4, k)), eager_step(eager, followed, batch(4, k))
        check_equal(model, optimizer, eager, followed)


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


@pytest.mark.parametrize("name", ["lion", "madgrad", "adabelief", "adopt", "lars", "adafactor"])
def test_optimizers_of_timm(name):
    timm = pytest.importorskip("timm.optim", reason="timm is an extra of the benchmarks")
    model, optimizer, eager, followed = pair(
        lambda p: timm.create_optimizer_v2(p, opt=name, lr=0.01, weight_decay=0.1)
    )
    step = compiled(model, optimizer)
    for k in range(5):
        step(*batch(4, k)), eager_step(eager, followed, batch(4, k))
    check_equal(model, optimizer, eager, followed)


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


def rprop_and_adamw(parameters):
    matrices = [p for p in parameters if p.dim() == 2]
    rest = [p for p in parameters if p.dim() != 2]
    return [optim.Rprop(matrices, lr=0.01), optim.AdamW(rest, lr=0.01)]


def test_several_optimizers_step_together(tmp_path):
    model, several, eager, followed = pair(rprop_and_adamw)
    step = compiled(model, several)
    assert step.optimizer == tuple(several)
    for k in range(3):
        step(*batch(4, k))
        eager.zero_grad()
        eager(*batch(4, k)).backward()
        for each in followed:
            each.step()
    for mine, theirs in zip(several, followed, strict=True):
        check_equal(model, mine, eager, theirs)
    report = relax_disc.verify(step, [batch(7)])
    assert report.ok, str(report)
    step.save(tmp_path / "step")
    relax_disc.TrainingStep.load(tmp_path / "step", model, several)(*batch(4))
    with pytest.raises(ArtefactError, match=r"Rprop \+ AdamW"):
        relax_disc.TrainingStep.load(tmp_path / "step", model, several[0])
    several[1].param_groups[0]["amsgrad"] = True
    with pytest.raises(InputMismatchError, match="group 0 of AdamW: amsgrad"):
        step(*batch(4))
    with pytest.raises(InputMismatchError, match="hold the same parameter"):
        compiled(model, [several[0], optim.SGD(model.parameters())])


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
    with pytest.raises(InputMismatchError, match="Annealed: defaults was"):
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
