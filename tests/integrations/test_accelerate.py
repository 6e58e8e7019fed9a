"""A loop of accelerate with a compiled step under what else `Accelerator` does."""

import pytest
import torch
from torch.export import Dim
from torch.utils.data import DataLoader, TensorDataset

import relax_disc

accelerate = pytest.importorskip("accelerate")
AcceleratorState = pytest.importorskip("accelerate.state").AcceleratorState
pytestmark = pytest.mark.filterwarnings("ignore")  # of accelerate, met in every run

SUMMED, MOST = 2, 0.1
"""Batches of an update; the norm that gradients are clipped to."""


def mean_squares(model, x, y):
    return torch.nn.functional.mse_loss(model(x), y)


def trained(compiled, precision, *, epochs=(0, 1, 2), resumed=None, saved=None):
    """Train and evaluate; losses, norms and losses of evaluation, and the weights in the end."""
    AcceleratorState._reset_state(reset_partial_state=True)  # else the first precision stays
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
    x = torch.randn(72, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    accelerator = accelerate.Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=SUMMED
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=8)
    model, optimizer, loader, schedule = accelerator.prepare(
        net, optimizer, DataLoader(data, batch_size=16), schedule
    )
    if resumed:
        accelerator.load_state(resumed)
    step = None
    if compiled:
        rows = {0: Dim("rows", min=1, max=64)}
        step = relax_disc.compile(
            model,
            optimizer,
            (x[:4], x[:4, :1]),
            dynamic_shapes=(rows, rows),
            loss_fn=lambda *given: mean_squares(*given) / SUMMED,
            max_grad_norm=MOST,
        )
    losses, norms, evaluated = [], [], []
    for _ in epochs:
        for x, y in loader:
            with accelerator.accumulate(model):
                update = accelerator.sync_gradients
                if step is not None:
                    losses.append(SUMMED * float(step(x, y, update=update)))
                    norms += [float(step.gradient_norm)] if update else []
                else:
                    loss = mean_squares(model, x, y)
                    accelerator.backward(loss)
                    if update:
                        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), MOST)))
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(float(loss))
                schedule.step()
        with torch.no_grad():
            evaluated.append(float(mean_squares(model.eval(), *data.tensors)))
        model.train()
    if saved:
        accelerator.save_state(saved)
    return losses, norms, evaluated, torch.cat([p.detach().flatten() for p in net.parameters()])


def test_a_loop_is_that_of_eager_pytorch():
    for theirs, ours in zip(trained(False, "no"), trained(True, "no"), strict=True):
        assert list(map(float, ours)) == pytest.approx(list(map(float, theirs)), rel=1e-4, abs=1e-5)


def test_bf16_is_that_of_eager_pytorch():
    *expected, theirs = trained(False, "bf16")
    *found, ours = trained(True, "bf16")
    for mine, other in zip(found, expected, strict=True):
        assert mine == pytest.approx(other, rel=4e-3)
    *_, exact = trained(False, "no")
    rounding = (theirs - exact).norm()
    assert (ours - theirs).norm() < rounding
    assert 0.3 * rounding < (ours - exact).norm() < 2 * rounding


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_saved_state_continues_to_the_bit(tmp_path, precision):
    whole = trained(True, precision)
    begun = trained(True, precision, epochs=[0], saved=tmp_path)
    resumed = trained(True, precision, epochs=[1, 2], resumed=tmp_path)
    assert begun[0] + resumed[0] == whole[0]
    assert torch.equal(resumed[3], whole[3])
