"""Optimizer updates of captured steps against PyTorch's optimizers over several steps."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

from relax_disc.errors import InputMismatchError, UnsupportedOperatorError
from relax_disc.frontend import capture_step, export_step, programs_of
from tests.frontend.running import Runner


class Small(nn.Module):
    """Two layers, one frozen, a scalar parameter and one that nothing uses."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.last = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x, y):
        z = self.frozen(torch.tanh(self.first(x)))
        return F.cross_entropy(self.last(z) * self.scale, y)


def batch(n, seed=0):
    g = torch.Generator().manual_seed(seed + n)
    return torch.randn(n, 6, generator=g), torch.randint(0, 3, (n,), generator=g)


def shapes():
    n = Dim("n", min=1, max=16)
    return ({0: n}, {0: n})


def groups(model):
    decayed = [model.first.weight, model.last.weight]
    rest = [model.first.bias, model.last.bias, model.scale, model.unused]
    return [
        {"params": decayed, "weight_decay": 0.1},
        {"params": rest, "weight_decay": 0.0, "lr": 0.02},
    ]


def apply(found, captured, model, optimizer):
    """Write what a step returned into the model and the optimizer, as the binding does."""
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in found.get("parameter", []):
            named[name].copy_(value)
    by_name = dict(found.get("state", []))
    for spec in captured.inputs:
        if spec.kind == "state":
            optimizer.state[named[spec.target]][spec.state_key] = by_name[spec.name].clone()
    for group in captured.update_groups:
        for target in group.targets:
            state = optimizer.state[named[target]]
            if not isinstance(optimizer, torch.optim.SGD):
                state["step"] = torch.tensor(float(state.get("step", 0)) + 1)


CASES = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "sgd-nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), betas=(0.8, 0.95), eps=1e-6),
    "adamw-maximize": lambda p: torch.optim.AdamW(p, lr=0.01, maximize=True),
}


# Clipping scales gradients before any update: one optimizer of each family shows it, all if slow.
CLIPPED = [
    pytest.param(case, 0.05, marks=() if case in ("sgd-momentum", "adamw") else pytest.mark.slow)
    for case in CASES
]


@pytest.mark.parametrize(("case", "max_norm"), [*((case, None) for case in CASES), *CLIPPED])
def test_updates_follow_pytorch(case, max_norm):
    torch.manual_seed(0)
    model = Small()
    optimizer = CASES[case](groups(model))
    captured = capture_step(
        model, optimizer, batch(4), dynamic_shapes=shapes(), max_grad_norm=max_norm
    )
    reference = copy.deepcopy(model).double()
    eager = CASES[case](groups(reference))
    run = Runner(captured)
    scheduled = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (k + 1))
    followed = torch.optim.lr_scheduler.LambdaLR(eager, lambda k: 1 / (k + 1))
    for step, n in enumerate((4, 1, 16, 7)):
        args = batch(n, seed=step)
        found = run(model, optimizer, args)
        apply(found, captured, model, optimizer)
        eager.zero_grad()
        loss = reference(args[0].double(), args[1])
        loss.backward()
        if max_norm is not None:
            norm = nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
            assert found["norm"][0][1].item() == pytest.approx(norm.item(), rel=1e-5)
        eager.step()
        optimizer._opt_called = True
        scheduled.step(), followed.step()
        assert found["loss"][0][1].item() == pytest.approx(loss.item(), rel=1e-5)
        wanted = dict(reference.named_parameters())
        for name, value in model.named_parameters():
            torch.testing.assert_close(value.double(), wanted[name], rtol=2e-4, atol=2e-5)
    assert torch.equal(model.unused, torch.ones(2))
    assert len(captured.update_groups) == 2


def test_groups_split_by_step_count():
    model = Small()
    optimizer = torch.optim.AdamW(groups(model))
    optimizer.state[model.first.weight]["step"] = torch.tensor(5.0)
    captured = capture_step(model, optimizer, batch(4), dynamic_shapes=shapes())
    targets = [group.targets for group in captured.update_groups]
    assert targets[:2] == [("first.weight",), ("last.weight",)]
    assert [group.param_group for group in captured.update_groups] == [0, 0, 1]


def test_equal_shapes_share_one_kernel():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    captured = capture_step(
        model,
        optimizer,
        (torch.randn(3, 4),),
        dynamic_shapes=({0: Dim("n", max=9)},),
        loss_fn=lambda model, x: model(x).sum(),
    )
    updates = [g for g in captured.module.get_global_vars() if "update" in g.name_hint]
    assert len(updates) == 2


def test_pairs_join_new_values_with_old():
    model = Small()
    optimizer = torch.optim.AdamW(groups(model))
    captured = capture_step(model, optimizer, batch(4), dynamic_shapes=shapes())
    for output in captured.outputs:
        if output.replaces is not None:
            spec = captured.inputs[output.replaces]
            assert spec.kind == output.kind
            assert output.name in (spec.target, spec.name)
    pairs = captured.module["main"].attrs["relax_disc.inplace_pairs"]
    assert len(pairs) == 3 * 5
    kinds = list(captured.module["main"].attrs["relax_disc.param_kinds"])
    assert kinds == [spec.kind for spec in captured.inputs]


def test_numbers_are_pytorchs_formulas_in_float64():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.5)
    program = programs_of(optimizer).of(optimizer.param_groups[0], parameter)
    values, scalars, _ = program.host(optimizer.param_groups[0], {"step": 2.0}, False)
    assert {1 - 0.1 * 0.5, -0.1 / (1 - 0.9**3), math.sqrt(1 - 0.999**3)} < set(values)
    assert scalars == {"step": 3.0}
    assert [state.key for state in program.tensors] == ["exp_avg", "exp_avg_sq"]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True), "differentiable"),
        (lambda p: torch.optim.LBFGS(p), r"LBFGS.*closure.*optimizer=None.*update=False"),
        (lambda p: torch.optim.SparseAdam(p), r"SparseAdam does not support dense gradients"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(make, name):
    model = Small()
    optimizer = make(list(model.parameters()))
    with pytest.raises(UnsupportedOperatorError, match=name):
        capture_step(model, optimizer, batch(4), dynamic_shapes=shapes())


def test_an_optimizer_of_another_model_is_refused():
    optimizer = torch.optim.AdamW(Small().parameters())
    with pytest.raises(InputMismatchError, match="made for this model"):
        capture_step(Small(), optimizer, batch(4), dynamic_shapes=shapes())


def test_gradients_add_up():
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters())
    exported = export_step(model, optimizer, batch(4), dynamic_shapes=shapes())
    captured, _ = exported.capture_accumulation()
    run = Runner(captured)
    trained = {
        out.name: p
        for out in captured.outputs
        for n, p in model.named_parameters()
        if out.kind == "gradient" and out.name == n
    }
    assert set(trained) == {n for n, p in model.named_parameters() if p.requires_grad} - {"unused"}
    for parameter in trained.values():
        parameter.grad = torch.zeros_like(parameter)
    for n in (4, 1, 16):
        for name, value in run(model, optimizer, batch(n))["gradient"]:
            trained[name].grad = value
    reference = copy.deepcopy(model).double()
    reference.zero_grad()
    for n in (4, 1, 16):
        x, y = batch(n)
        reference(x.double(), y).backward()
    for name, parameter in reference.named_parameters():
        if name in trained:
            torch.testing.assert_close(
                trained[name].grad.double(), parameter.grad, rtol=1e-5, atol=1e-6
            )


def test_functions_of_accumulation_share_kernels_and_groups():
    model = Small()
    optimizer = torch.optim.AdamW(groups(model))
    plain = capture_step(model, optimizer, batch(4), dynamic_shapes=shapes())
    for parameter in model.parameters():  # a count that differs would make groups of its own
        optimizer.state[parameter]["step"] = torch.tensor(float(parameter.dim()))
    exported = export_step(model, optimizer, batch(4), dynamic_shapes=shapes())
    adding, updating = exported.capture_accumulation(plain.update_groups)
    assert adding.module is updating.module
    described = [
        [(g.param_group, g.targets) for g in each.update_groups] for each in (plain, adding)
    ]
    assert described[0] == described[1]
    assert {out.kind for out in adding.outputs} == {"loss", "gradient"}
    assert {out.kind for out in updating.outputs} == {"loss", "gradient", "parameter", "state"}
    names = [v.name_hint for v in adding.module.get_global_vars()]
    assert {adding.function, updating.function} < set(names)
    assert sum("update_sum" in name for name in names) <= len(
        {tuple(p.shape) for p in model.parameters()}
    )


def test_bfloat16_parameters_are_updated_in_float32():
    torch.manual_seed(0)
    model = nn.Linear(8, 4).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    captured = capture_step(
        model,
        optimizer,
        (torch.randn(4, 8).bfloat16(),),
        dynamic_shapes=({0: Dim("n", max=9)},),
        loss_fn=lambda model, x: model(x).square().mean(),
    )
    hyper = next(spec for spec in captured.inputs if spec.kind == "hyper")
    assert hyper.dtype == "float32"
    states = [spec for spec in captured.inputs if spec.kind == "parameter"]
    assert {spec.dtype for spec in states} == {"bfloat16"}
