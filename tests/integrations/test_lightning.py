"""The recipe of the tutorial under what else Lightning's Trainer does."""

import runpy

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning")
grad_norm = pytest.importorskip("lightning.pytorch.utilities").grad_norm
pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, met in every run


@pytest.fixture(scope="module")
def kinds(repository):
    """The eager module and the compiled one."""
    names = runpy.run_path(str(repository / "tutorials" / "lightning_loop.py"))
    return names["Eager"], names["Compiled"]


def fitted(kind, *, epochs=3, resumed=None, saved=None, accumulated=None, **settings):
    """Fit, validating after each epoch; the module and the losses of validation."""
    scheduler = lightning.pytorch.callbacks.GradientAccumulationScheduler

    class Validated(kind):
        def on_before_optimizer_step(self, optimizer):
            self.norms.append(float(grad_norm(self.net, 2)["grad_2.0_norm_total"]))

        def validation_step(self, batch, number):
            x, y = batch
            self.log("validated", torch.nn.functional.mse_loss(self.net(x), y))

    torch.manual_seed(1)
    x = torch.randn(70, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    module = Validated()
    module.norms = []
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[scheduler(accumulated)] if accumulated else [],
        **settings,
    )
    loader = DataLoader(data, batch_size=16)
    trainer.fit(module, loader, loader, ckpt_path=resumed, weights_only=False)
    if saved:
        trainer.save_checkpoint(saved)
    return module, float(trainer.callback_metrics["validated"])


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"accumulated": {0: 1, 1: 2, 2: 3}, "gradient_clip_val": 0.1},
        {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    ],
    ids=str,
)
def test_losses_weights_and_validation_are_those_of_eager_pytorch(kinds, settings):
    (theirs, expected), (ours, found) = (fitted(kind, **settings) for kind in kinds)
    mixed = "precision" in settings
    close = {"rtol": 0.01, "atol": 0.003} if mixed else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(torch.tensor(ours.losses), torch.tensor(theirs.losses), **close)
    torch.testing.assert_close(torch.tensor(ours.norms), torch.tensor(theirs.norms), **close)
    assert found == pytest.approx(expected, rel=close["rtol"])
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, **close)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_checkpoint_continues_to_the_bit(kinds, tmp_path, precision):
    _, compiled = kinds
    whole, _ = fitted(compiled, precision=precision)
    begun, _ = fitted(compiled, epochs=1, saved=tmp_path / "state", precision=precision)
    resumed, _ = fitted(compiled, resumed=tmp_path / "state", precision=precision)
    assert begun.losses + resumed.losses == whole.losses
