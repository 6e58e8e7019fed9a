"""Every optimizer of torch.optim, and some others, beside eager PyTorch: one build, two shapes."""

import copy

import pytest
import torch
from torch import nn, optim
from torch.export import Dim

import relax_disc
from relax_disc.errors import (
    ArtefactError,
    InputMismatchError,
    NonFiniteLossError,
)
from tests.tiers import every
from tests.training.state.optimizing import (
    CASES,
    Small,
    batch,
    check_equal,
    compiled,
    eager_step,
    pair,
)


@pytest.mark.parametrize("case", every(2, CASES))
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
@pytest.mark.parametrize("decays", every(2, [(0.0, 0.3), (0.3, 0.0)]))
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
