"""What a Trainer's loss reads and writes outside the model is followed, told or refused."""

import itertools
import math

import pytest
import torch
import transformers
from torch import nn

from relax_disc.errors import InputMismatchError, RelaxDiscWarning, UnsupportedOperatorError
from relax_disc.integrations.transformers import Trainer
from tests.integrations.trainers import ARGUMENTS

pytestmark = [
    # Of other libraries, met in every run.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

SCALE = [1.0]
KINDS = (transformers.Trainer, Trainer)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.config = nn.Linear(4, 3), transformers.PretrainedConfig()

    def forward(self, x, labels=None):
        logits = self.linear(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.fixture
def trained(tmp_path):
    """Trains with a Trainer's subclass; returns the losses and the Trainer."""

    def train(kind, prepare=lambda trainer: None, *, arguments=None, **options):
        random = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        SCALE[0] = 1.0
        settings = {
            "per_device_train_batch_size": 4,
            "num_train_epochs": 1,
            **ARGUMENTS,
            **(arguments or {}),
        }
        trainer = kind(
            Net(),
            transformers.TrainingArguments(str(tmp_path), **settings),
            train_dataset=[
                {"x": torch.randn(4, generator=random), "labels": i % 3} for i in range(16)
            ],
            **options,
        )
        prepare(trainer)
        trainer.train()
        return [log["loss"] for log in trainer.state.log_history if "loss" in log], trainer

    return train


def losing(base, changed):
    """A subclass whose loss is what ``changed`` makes of the model's own."""

    class Mine(base):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            loss = changed(self, outputs["loss"], outputs["logits"], inputs)
            return (loss, outputs) if return_outputs else loss

        def training_step(self, *args, **settings):
            count = self.state.global_step
            self.alpha, self.args.weight_decay = float(count), 0.1 * count
            SCALE[0] = float(count)
            self.weight = torch.full((3,), float(count))
            with torch.no_grad():
                self.teacher.weight.fill_(float(count))
            return super().training_step(*args, **settings)

    return Mine


def prepare(trainer):
    trainer.alpha, trainer.weight, trainer.teacher = 0.0, torch.ones(3), nn.Linear(4, 3)
    trainer.mean, trainer.seen = torch.tensor(1.0), []
    trainer.weights = itertools.cycle([1.0, 10.0])
    nn.init.zeros_(trainer.teacher.bias)


@pytest.mark.parametrize(
    "changed",
    [
        lambda self, loss, logits, inputs: loss * self.state.global_step * self.alpha,
        lambda self, loss, logits, inputs: loss * self.args.weight_decay + self.state.epoch,
        lambda self, loss, logits, inputs: loss * SCALE[0] * self.weight.mean(),
        lambda self, loss, logits, inputs: (logits - self.teacher(inputs["x"])).pow(2).mean(),
    ],
    ids=["state and attribute", "arguments", "global and tensor", "teacher"],
)
def test_what_the_loss_reads_is_followed(trained, changed):
    theirs, ours = (trained(losing(kind, changed), prepare)[0] for kind in KINDS)
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_a_loss_of_the_library_around_which_a_subclass_adds(trained):
    def of(base):
        class Mine(base):
            def compute_loss(self, model, inputs, *args, **settings):
                return super().compute_loss(model, inputs, *args, **settings) * self.alpha

            def training_step(self, *args, **settings):
                self.alpha = 1.0 + self.state.global_step
                return super().training_step(*args, **settings)

        return Mine

    start = lambda trainer: setattr(trainer, "alpha", 1.0)  # noqa: E731
    smoothed = {"label_smoothing_factor": 0.1}
    theirs, ours = (trained(of(kind), start, arguments=smoothed)[0] for kind in KINDS)
    assert ours == pytest.approx(theirs, rel=1e-4)


class Changing(transformers.TrainerCallback):
    def __init__(self, change):
        self.change = change

    def on_step_begin(self, args, state, control, **settings):
        if state.global_step == 2:
            self.change()


def test_the_loss_of_the_library_itself_reads_its_own_settings(trained):
    """A Trainer of no subclass; nothing else that changes from step to step is an alarm."""
    losses = []
    for kind in KINDS:

        def add(trainer):
            change = lambda: setattr(trainer.label_smoother, "epsilon", 0.5)  # noqa: E731
            trainer.add_callback(Changing(change))

        arguments = {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}
        losses.append(trained(kind, add, arguments=arguments)[0])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_a_function_for_the_loss_reads_what_it_closes_over(trained):
    losses = []
    for kind in KINDS:
        strength = {"value": 1.0}

        def loss_of(outputs, labels, num_items_in_batch=None, strength=strength):
            loss = nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum")
            return loss * strength["value"] / num_items_in_batch

        callback = Changing(lambda strength=strength: strength.update(value=3.0))
        losses.append(trained(kind, compute_loss_func=loss_of, callbacks=[callback])[0])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_a_number_that_decides_is_refused(trained):
    decided = lambda self, loss, logits, inputs: loss * math.exp(self.alpha)  # noqa: E731
    with pytest.raises(InputMismatchError, match=r"self\.alpha was 0\.0 when"):
        trained(losing(Trainer, decided), prepare)


def test_what_moves_is_refused(trained):
    taken = lambda self, loss, logits, inputs: loss * next(self.weights)  # noqa: E731
    with pytest.raises(UnsupportedOperatorError, match=r"the next value of self\.weights"):
        trained(losing(Trainer, taken), prepare)


def test_a_tensor_that_the_loss_assigns_is_state(trained):
    def averaged(self, loss, logits, inputs):
        self.mean = 0.5 * self.mean + 0.5 * loss.detach()
        return loss * self.mean

    (theirs, other), (ours, trainer) = (trained(losing(kind, averaged), prepare) for kind in KINDS)
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert type(trainer.mean) is torch.Tensor
    torch.testing.assert_close(trainer.mean, other.mean, rtol=1e-4, atol=1e-5)


def test_what_the_loss_notes_is_put_back_and_told(trained):
    def noting(self, loss, logits, inputs):
        self.seen.append(logits.detach().mean())
        return loss

    with pytest.warns(RelaxDiscWarning, match=r"self\.seen is changed"):
        _, trainer = trained(losing(Trainer, noting), prepare)
    assert trainer.seen == []
