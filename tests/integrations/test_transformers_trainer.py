"""The compiled Trainer does what the library's own does: losses, norms, schedules, checkpoints."""

import pytest
import torch
import transformers
from torch.export import Dim
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    TrainingArguments,
)

from relax_disc.errors import InputMismatchError, MemoryBudgetError
from relax_disc.integrations.transformers import Trainer
from tests.integrations.trainers import ARGUMENTS, weights

pytestmark = [
    # Of other libraries, met in every run.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

WORDS = 60
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": WORDS}
NUMBERS = ("loss", "grad_norm", "learning_rate", "eval_loss", "train_loss")


def rows(classes):
    """26 records of different lengths."""
    random = torch.Generator().manual_seed(0)
    found = []
    for _ in range(26):
        length = int(torch.randint(3, 20, (), generator=random))
        ids = torch.randint(1, WORDS, (length,), generator=random)
        found.append({"input_ids": ids, "labels": ids[0] % 2 if classes else ids})
    return found


def pad(records):
    longest = max(len(record["input_ids"]) for record in records)
    ids = torch.zeros(len(records), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, record in enumerate(records):
        ids[row, : len(record["input_ids"])] = record["input_ids"]
        mask[row, : len(record["input_ids"])] = 1
    labels = [record["labels"] for record in records]
    targets = ids.masked_fill(mask == 0, -100) if labels[0].dim() else torch.stack(labels)
    return {"input_ids": ids, "attention_mask": mask, "labels": targets}


def llama():
    config = LlamaConfig(**SMALL, num_hidden_layers=1, max_position_embeddings=64)
    return LlamaForCausalLM(config)


def bert():
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(**SMALL, **off, num_hidden_layers=1))


@pytest.fixture
def trainer(tmp_path):
    """Makes a Trainer of a class."""

    def make(kind, model=llama, *, folder="run", options=None, **arguments):
        torch.manual_seed(0)
        given = {
            "output_dir": str(tmp_path / kind.__module__ / folder),
            "per_device_train_batch_size": 4,
            "num_train_epochs": 1,
            **ARGUMENTS,
            **arguments,
        }
        data = rows(classes=model is bert)
        return kind(
            model=model(),
            args=TrainingArguments(**given),
            train_dataset=data,
            eval_dataset=data[:6],
            data_collator=pad,
            **(options or {}),
        )

    return make


def trained(trainer):
    """Before another is made: the order of the records comes from PyTorch's default generator."""
    trainer.train()
    return trainer


def assert_alike(ours, theirs):
    logs = [each.state.log_history for each in (ours, theirs)]
    numbers = [[(key, log[key]) for log in each for key in NUMBERS if key in log] for each in logs]
    assert [key for key, _ in numbers[0]] == [key for key, _ in numbers[1]]
    for (key, mine), (_, other) in zip(*numbers, strict=True):
        assert mine == pytest.approx(other, rel=2e-5), key
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-4)


def test_a_whole_run_and_one_resumed_are_those_of_the_library(trainer):
    """Sums of 3 and, last, 1 batch; evaluation, schedule, groups of like lengths, checkpoints."""
    arguments = {
        "gradient_accumulation_steps": 3,
        "num_train_epochs": 2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "train_sampling_strategy": "group_by_length",
    }
    theirs, ours = (trained(trainer(kind, **arguments)) for kind in (transformers.Trainer, Trainer))
    assert len(theirs.state.log_history) >= 6
    assert_alike(ours, theirs)
    assert str(ours.step.dims[1]) == "length in 2 .. 64"
    resumed = trainer(Trainer, folder="resumed", **arguments)
    resumed.train(resume_from_checkpoint=f"{ours.args.output_dir}/checkpoint-2")
    losses = [
        {log["step"]: log["loss"] for log in each.state.log_history if "loss" in log}
        for each in (ours, resumed)
    ]
    assert losses[0] == losses[1]
    saved = LlamaForCausalLM.from_pretrained(f"{ours.args.output_dir}/checkpoint-6")
    for mine, other in zip(ours.model.parameters(), saved.parameters(), strict=True):
        assert torch.equal(mine, other)


def logged(trainer, key):
    return [log[key] for log in trainer.state.log_history if key in log]


@pytest.mark.parametrize("model", [llama, bert])
def test_bf16_is_that_of_the_library(trainer, model):
    """Sums of batches, evaluation, checkpoints and resuming under autocast to bfloat16."""
    arguments = {
        "gradient_accumulation_steps": 3,
        "num_train_epochs": 2,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-3,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    kinds = {"theirs": transformers.Trainer, "ours": Trainer}
    found = {
        name: trained(trainer(kind, model, bf16=True, **arguments)) for name, kind in kinds.items()
    }
    plain = trained(trainer(transformers.Trainer, model, folder="float32", **arguments))
    for key in ("loss", "grad_norm", "learning_rate", "eval_loss", "train_loss"):
        ours, theirs = (logged(found[name], key) for name in ("ours", "theirs"))
        assert ours
        assert ours == pytest.approx(theirs, rel=4e-3), key
    ours, theirs, exact = map(weights, (found["ours"], found["theirs"], plain))
    # As far from float32 as eager PyTorch's bfloat16 is, so autocast was there, and nearer to that.
    rounding = (theirs - exact).norm()
    assert (ours - theirs).norm() < rounding
    assert 0.3 * rounding < (ours - exact).norm() < 2 * rounding
    resumed = trainer(Trainer, model, folder="resumed", bf16=True, **arguments)
    resumed.train(resume_from_checkpoint=f"{found['ours'].args.output_dir}/checkpoint-2")
    assert logged(resumed, "loss")[-4:] == logged(found["ours"], "loss")[-4:]
    assert torch.equal(weights(resumed), ours)


def test_a_loss_that_is_a_mean_of_its_batch_and_gradients_that_are_clipped(trainer):
    arguments = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.05, "optim": "sgd"}
    kinds = (transformers.Trainer, Trainer)
    theirs, ours = (trained(trainer(kind, bert, **arguments)) for kind in kinds)
    assert_alike(ours, theirs)


def test_gradients_that_are_not_clipped_have_a_norm_and_shapes_may_be_given(trainer):
    batch, length = Dim("batch", min=1, max=4), Dim("tokens", min=2, max=32)
    shapes = {"input_ids": {0: batch, 1: length}, "labels": {0: batch, 1: length}}
    options = {"dynamic_shapes": {**shapes, "attention_mask": {0: batch, 1: length}}}
    ours = trained(trainer(Trainer, max_grad_norm=0.0, max_steps=2, options=options))
    theirs = trained(trainer(transformers.Trainer, max_grad_norm=0.0, max_steps=2))
    assert_alike(ours, theirs)
    assert str(ours.step.dims[1]) == "tokens in 2 .. 32"
    # After training the optimizer is the library's again.
    before = weights(ours)
    ours.optimizer.param_groups[0]["lr"] = 0.1  # the schedule's last is 0
    for parameter in ours.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    ours.optimizer.step()
    assert not torch.equal(weights(ours), before)


def test_shapes_are_found_by_what_the_inputs_hold(trainer):
    """Targets of an encoder-decoder have a length of their own; pictures have fixed sizes."""

    def t5():
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
        return T5ForConditionalGeneration(T5Config(**sizes, vocab_size=WORDS))

    ids, pixels = torch.zeros(4, 7, dtype=torch.int64), torch.zeros(4, 3, 8, 8)
    inputs = {"input_ids": ids, "labels": ids[:, :5], "pixel_values": pixels, "scale": ids.sum()}
    dims = trainer(Trainer, t5)._dims(inputs)
    named = {
        name: {axis: dim.__name__ for axis, dim in (axes or {}).items()}
        for name, axes in dims.items()
    }
    assert named == {
        "input_ids": {0: "batch", 1: "length"},
        "labels": {0: "batch", 1: "target_length"},
        "pixel_values": {0: "batch"},
        "scale": {},
    }


def test_each_text_has_a_length_of_its_own(trainer):
    ids = torch.zeros(4, 7, dtype=torch.int64)
    names = ("query_input_ids", "query_attention_mask", "answer_input_ids", "labels", "input_ids_2")
    dims = trainer(Trainer)._dims(dict.fromkeys(names, ids))
    assert {name: axes[1].__name__ for name, axes in dims.items()} == {
        "query_input_ids": "length_of_query",
        "query_attention_mask": "length_of_query",
        "answer_input_ids": "length_of_answer",
        "labels": "length",
        "input_ids_2": "length_of_2",
    }


def test_a_budget_holds(trainer):
    small = trainer(Trainer, options={"memory_budget": "100 kB"})
    with pytest.raises(MemoryBudgetError, match="the least found feasible is"):
        small.train()


def test_a_norm_that_changes_while_training_is_refused(trainer):
    class Clip(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            args.max_grad_norm = 0.5 if state.global_step else 1.0

    ours = trainer(Trainer)
    ours.add_callback(Clip())
    with pytest.raises(InputMismatchError, match=r"max_grad_norm was 1\.0 .* is 0\.5 now"):
        ours.train()
    with pytest.raises(AttributeError, match="max_grad_norm"):
        ours.step.max_grad_norm = 0.5


def test_noise_of_embeddings_is_that_of_the_library_but_for_its_draws(trainer):
    of_none, of_little, of_much = (
        logged(trained(trainer(Trainer, neftune_noise_alpha=alpha, max_steps=2)), "loss")
        for alpha in (None, 1e-6, 100.0)
    )
    assert of_little == pytest.approx(of_none, rel=1e-5)
    assert of_much[0] != pytest.approx(of_none[0], rel=1e-3)


@pytest.mark.parametrize("argument", [{"fp16": True}, {"torch_compile": True}])
def test_what_cannot_be_honoured_is_refused_by_name(trainer, argument):
    arguments = TrainingArguments(report_to=[], use_cpu=True)
    setattr(arguments, *next(iter(argument.items())))
    with pytest.raises(InputMismatchError, match=next(iter(argument))):
        Trainer(model=llama(), args=arguments)
