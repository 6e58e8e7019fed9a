"""float16 autocast with a `torch.amp.GradScaler`: step by step as the eager loop does it."""

import copy

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

import relax_disc
from relax_disc.errors import ArtefactError, InputMismatchError, UnsupportedOperatorError

SIZES = (8, 3, 64, 2, 1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(F.gelu(self.norm(self.conv(x))).mean(-1))


def loss_fn(model, x, y):
    with torch.autocast("cpu", torch.float16):
        return F.cross_entropy(model(x), y)


def batch(n, overflow=False):
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, 4, 6, generator=generator)
    if overflow:
        x[0, 0, 0] = float("inf")
    return x, torch.randint(0, 4, (n,), generator=generator)


def scaler(**options):
    return torch.amp.GradScaler("cpu", **{"init_scale": 2.0**10, "growth_interval": 3, **options})


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def both(**options):
    torch.manual_seed(0)
    mine = Net()
    return mine, copy.deepcopy(mine), scaler(**options), scaler(**options)


def compiled(model, optimizer, scaler, **options):
    dim = Dim("batch", min=1, max=64)
    shapes = ({0: dim}, {0: dim})
    return relax_disc.compile(
        *(model, optimizer, batch(8)),
        dynamic_shapes=shapes,
        loss_fn=loss_fn,
        scaler=scaler,
        **options,
    )


def eager_step(model, optimizers, scaler, *batches, norm=None):
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    for x, y in batches:
        loss = loss_fn(model, x, y)
        scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    total = None if norm is None else nn.utils.clip_grad_norm_(model.parameters(), norm)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    return loss.detach(), total, gradients


def state(model, optimizer):
    held = [
        (f"{name} {key}", value)
        for name, p in model.named_parameters()
        for key, value in optimizer.state.get(p, {}).items()
        if isinstance(value, torch.Tensor)
    ]
    return {**dict(model.named_parameters()), **dict(held)}


def assert_close(mine, theirs):
    """Compare to what float16 rounds; a bias before batch norm has no gradient but rounding."""
    for name, value in theirs.items():
        if "conv.bias" not in name:
            torch.testing.assert_close(mine[name], value, rtol=2e-2, atol=2e-3, msg=name)


def clear(model):
    """Forget the statistics of a batch that was not finite."""
    model.norm.reset_running_stats()


@pytest.mark.parametrize(("kind", "norm"), [("sgd", None), ("adamw", 0.05), ("sgd", float("inf"))])
def test_each_step_is_the_eager_loops(kind, norm):
    make = sgd if kind == "sgd" else lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3)
    mine, theirs, my_scaler, their_scaler = both()
    my_optimizer, their_optimizer = make(mine), make(theirs)
    step = compiled(mine, my_optimizer, my_scaler, max_grad_norm=norm)
    skipped = 0
    for k in range(14):
        overflow = k in (0, 6, 7)
        x, y = batch(SIZES[k % len(SIZES)], overflow)
        before = copy.deepcopy(state(mine, my_optimizer))
        loss = step(x, y)
        expected, total, _ = eager_step(theirs, their_optimizer, their_scaler, (x, y), norm=norm)
        skipped += overflow
        assert step.skipped_updates == skipped
        assert my_scaler.state_dict() == their_scaler.state_dict()
        torch.testing.assert_close(loss, expected, rtol=1e-2, atol=1e-3, equal_nan=True)
        torch.testing.assert_close(
            mine.norm.running_var, theirs.norm.running_var, rtol=1e-2, atol=1e-3, equal_nan=True
        )
        assert mine.norm.num_batches_tracked == theirs.norm.num_batches_tracked
        assert_close(state(mine, my_optimizer), state(theirs, their_optimizer))
        if norm is not None:
            torch.testing.assert_close(
                step.gradient_norm, total, rtol=2e-2, atol=1e-4, equal_nan=True
            )
        if overflow:
            after = state(mine, my_optimizer)
            assert after.keys() == before.keys()
            assert all(torch.equal(after[name], value) for name, value in before.items())
            clear(mine)
            clear(theirs)
    report = step.memory_report()
    assert report.peak_bytes == report.planned_peak_bytes


def test_one_infinite_or_nan_gradient_is_enough():
    for value, wanted in ((float("inf"), 1), (float("nan"), 1), (1.0, 0)):
        weight = torch.ones(40, 40)
        weight[17, 23] = value
        model = nn.Linear(40, 40, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        dim = Dim("batch", min=1, max=8)
        step = relax_disc.compile(
            *(model, optimizer, (torch.ones(4, 40),)),
            dynamic_shapes=({0: dim},),
            loss_fn=lambda m, x, w=weight: (m.weight * w).sum() + 0 * m(x).sum(),
            scaler=scaler(),
        )
        before = model.weight.detach().clone()
        step(torch.ones(2, 40))
        assert step.skipped_updates == wanted
        assert torch.equal(model.weight, before) is bool(wanted)


def test_gradients_that_overflow_by_the_scale_alone_are_skipped_until_it_fits():
    mine, theirs, my_scaler, their_scaler = both(init_scale=2.0**24)
    my_optimizer, their_optimizer = sgd(mine), sgd(theirs)
    step = compiled(mine, my_optimizer, my_scaler)
    for _ in range(14):
        step(*batch(8))
        eager_step(theirs, their_optimizer, their_scaler, batch(8))
        assert my_scaler.get_scale() == their_scaler.get_scale()
    assert 2 < step.skipped_updates < 14
    assert_close(state(mine, my_optimizer), state(theirs, their_optimizer))


@pytest.mark.parametrize("overflow", [False, True])
def test_accumulated_gradients_are_scaled_and_skipped_together(overflow):
    mine, theirs, my_scaler, their_scaler = both()
    my_optimizer, their_optimizer = sgd(mine), sgd(theirs)
    step = compiled(mine, my_optimizer, my_scaler, max_grad_norm=0.1)
    for k in range(4):
        batches = [batch(8), batch(3, overflow and k == 1), batch(64)]
        step(*batches[0], update=False)
        step(*batches[1], update=False)
        step(*batches[2])
        _, total, _ = eager_step(theirs, their_optimizer, their_scaler, *batches, norm=0.1)
        assert my_scaler.state_dict() == their_scaler.state_dict()
        torch.testing.assert_close(step.gradient_norm, total, rtol=2e-2, atol=0, equal_nan=True)
        assert all(p.grad is None for p in mine.parameters())
        assert_close(state(mine, my_optimizer), state(theirs, their_optimizer))
        clear(mine)
        clear(theirs)
    assert step.skipped_updates == int(overflow)


def test_kept_gradients_are_unscaled_and_not_clipped():
    mine, theirs, my_scaler, their_scaler = both()
    optimizer, theirs_optimizer = sgd(mine), sgd(theirs)
    step = compiled(mine, optimizer, my_scaler, max_grad_norm=1e-3)
    step(*batch(8), keep_gradients=True)
    _, _, gradients = eager_step(theirs, theirs_optimizer, their_scaler, batch(8))
    for (name, p), wanted in zip(mine.named_parameters(), gradients, strict=True):
        if name != "conv.bias":
            torch.testing.assert_close(p.grad, wanted, rtol=2e-2, atol=2e-4, msg=name)
    with pytest.raises(InputMismatchError, match="second time"):
        my_scaler.step(optimizer)


def test_without_an_optimizer_the_scaler_is_driven_by_the_user():
    mine, theirs, my_scaler, their_scaler = both()
    my_optimizer, their_optimizer = sgd(mine), sgd(theirs)
    step = compiled(mine, None, my_scaler)
    for k in range(5):
        x, y = batch(8, overflow=k == 1)
        step(x, y, update=False)
        my_scaler.step(my_optimizer)
        my_scaler.update()
        my_optimizer.zero_grad()
        eager_step(theirs, their_optimizer, their_scaler, (x, y))
        assert my_scaler.state_dict() == their_scaler.state_dict()
        clear(mine)
        clear(theirs)
    assert_close(state(mine, my_optimizer), state(theirs, their_optimizer))


def test_an_update_that_is_no_single_kernel_is_skipped_too():
    mine, theirs, my_scaler, their_scaler = both()
    my_optimizer = torch.optim.Adafactor(mine.parameters(), lr=1e-3)
    their_optimizer = torch.optim.Adafactor(theirs.parameters(), lr=1e-3)
    step = compiled(mine, my_optimizer, my_scaler)
    for k in range(4):
        x, y = batch(8, overflow=k in (0, 2))
        before = copy.deepcopy(state(mine, my_optimizer))
        step(x, y)
        eager_step(theirs, their_optimizer, their_scaler, (x, y))
        if k in (0, 2):
            after = state(mine, my_optimizer)
            assert after.keys() == before.keys()
            assert all(torch.equal(after[name], value) for name, value in before.items())
        clear(mine)
        clear(theirs)
        assert_close(dict(mine.named_parameters()), dict(theirs.named_parameters()))
    assert step.skipped_updates == 2


def test_of_two_optimizers_the_one_with_finite_gradients_updates():
    def two_losses(model, x, y):
        return F.cross_entropy(model[0](x), y) + (model[1].weight * x.sum()).sum()

    def make():
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4, bias=False)])
        return model, [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in model]

    (mine, my_optimizers), (theirs, their_optimizers) = make(), make()
    my_scaler, their_scaler = scaler(), scaler()
    dim = Dim("batch", min=1, max=8)
    x, y = torch.randn(4, 4), torch.randint(0, 4, (4,))
    step = relax_disc.compile(
        *(mine, my_optimizers, (x, y)),
        dynamic_shapes=({0: dim}, {0: dim}),
        loss_fn=two_losses,
        scaler=my_scaler,
    )
    for factor in (1.0, 1e38, 1.0):  # the second overflows once it is multiplied by the scale
        step(x * factor, y)
        model = theirs
        loss = two_losses(model, x * factor, y)
        their_scaler.scale(loss).backward()
        for optimizer in their_optimizers:
            their_scaler.step(optimizer)
        their_scaler.update()
        model.zero_grad()
        assert my_scaler.state_dict() == their_scaler.state_dict()
        for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6, equal_nan=True)
        for mine_one, theirs_one in zip(my_optimizers, their_optimizers, strict=True):
            assert len(mine_one.state) == len(theirs_one.state)


def test_saved_and_loaded_with_the_scale(tmp_path):
    mine, theirs, my_scaler, _ = both()
    optimizer = sgd(mine)
    step = compiled(mine, optimizer, my_scaler)
    for k in range(4):
        step(*batch(8, overflow=k == 1))
        clear(mine)
    step.save(tmp_path / "step")
    theirs.load_state_dict(mine.state_dict())
    their_optimizer = sgd(theirs)
    their_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    fresh = scaler(init_scale=2.0)
    fresh.load_state_dict(my_scaler.state_dict())
    with pytest.raises(ArtefactError, match="with an enabled scaler"):
        relax_disc.TrainingStep.load(tmp_path / "step", theirs, their_optimizer, loss_fn)
    loaded = relax_disc.TrainingStep.load(
        *(tmp_path / "step", theirs, their_optimizer, loss_fn), scaler=fresh
    )
    for _ in range(4):
        assert torch.equal(step(*batch(3)), loaded(*batch(3)))
        assert my_scaler.state_dict() == fresh.state_dict()
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q)


def test_verify_and_calibrate_leave_the_scale_as_it_was():
    mine, _, my_scaler, _ = both(growth_interval=1)
    step = compiled(mine, sgd(mine), my_scaler)
    step(*batch(8))
    before = my_scaler.state_dict()
    report = relax_disc.verify(step, [batch(8), batch(3)])
    assert report.ok, report
    step.calibrate(*batch(8))
    assert my_scaler.state_dict() == before and step.skipped_updates == 0
    assert step.scaler is my_scaler


def test_the_eager_way_says_what_to_do_instead():
    mine, _, my_scaler, _ = both()
    optimizer = sgd(mine)
    step = compiled(mine, optimizer, my_scaler)
    loss = step(*batch(8))
    for wrong in (
        lambda: my_scaler.scale(loss),
        lambda: my_scaler.scale(loss / 2),
        lambda: my_scaler.step(optimizer),
        my_scaler.update,
        lambda: scaler().scale(loss),
    ):
        with pytest.raises(InputMismatchError, match=r"compile\(\.\.\., scaler=scaler\)"):
            wrong()
    step(*batch(8))


def test_refused_without_a_scaler_that_scales():
    mine, _, _, _ = both()
    for given in (None, scaler(enabled=False)):
        with pytest.raises(UnsupportedOperatorError, match=r"scaler=torch\.amp\.GradScaler"):
            compiled(mine, sgd(mine), given)
    with pytest.raises(InputMismatchError, match=r"torch\.amp\.GradScaler or None, not float"):
        compiled(mine, sgd(mine), 2.0)
    with pytest.raises(UnsupportedOperatorError, match="Attempting to unscale FP16 gradients"):
        compiled(mine.half(), sgd(mine), scaler())


def test_torch_compile_with_float16_and_the_users_own_scaler():
    mine, theirs, my_scaler, their_scaler = both()
    my_optimizer, their_optimizer = sgd(mine), sgd(theirs)
    fast = torch.compile(lambda x, y: loss_fn(mine, x, y), backend="relax_disc", dynamic=True)
    for k in range(4):
        x, y = batch(SIZES[k], overflow=k == 1)
        my_scaler.scale(fast(x, y)).backward()
        my_scaler.step(my_optimizer)
        my_scaler.update()
        my_optimizer.zero_grad()
        eager_step(theirs, their_optimizer, their_scaler, (x, y))
        assert my_scaler.state_dict() == their_scaler.state_dict()
        assert_close(dict(mine.named_parameters()), dict(theirs.named_parameters()))
        clear(mine)
        clear(theirs)
