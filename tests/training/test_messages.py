"""What users do who are new here: it works, or a message names the cause and the remedy."""

import copy
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

import relax_disc
from relax_disc.errors import (
    InputMismatchError,
    ModelCheckError,
    RelaxDiscWarning,
    ShapeRangeError,
    UnsupportedOperatorError,
)

X, Y = torch.linspace(-1, 1, 16).reshape(4, 4), torch.tensor([0, 2, 1, 2])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x)


def compiled(model, batch, loss_fn=None, shapes=None):
    shapes = shapes or ({0: Dim("batch", min=1, max=64)},) * len(batch)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return relax_disc.compile(model, optimizer, batch, dynamic_shapes=shapes, loss_fn=loss_fn)


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), F.cross_entropy])
def test_a_criterion_is_a_loss_function_over_inputs_and_target(criterion):
    model = Net()
    expected = [criterion(model(X[:n]), Y[:n]).detach() for n in (4, 1)]
    step = compiled(model, (X, Y), criterion)
    torch.testing.assert_close(step(X, Y), expected[0])
    other = Net()
    torch.testing.assert_close(compiled(other, (X, Y), criterion)(X[:1], Y[:1]), expected[1])


@pytest.mark.parametrize(
    "loss_fn",
    [lambda model, x: model(x).mean(), lambda x, y: x.mean()],
    ids=["too few", "no model"],
)
def test_a_loss_function_of_another_signature_is_told_the_contract(loss_fn):
    with pytest.raises(InputMismatchError, match=r"loss_fn\(model, \*batch\)"):
        compiled(Net(), (X, Y), loss_fn)


def test_distributions_may_check_their_arguments(monkeypatch):
    # TorchDynamo, if a test before this one used it, has switched the checks off.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)

    def loss(model, x, y):
        return -torch.distributions.Categorical(logits=model(x)).log_prob(y).mean()

    if sys.version_info < (3, 11):
        with pytest.raises(UnsupportedOperatorError, match="set_default_validate_args"):
            compiled(Net(), (X, Y), loss)
        return
    model = Net()
    expected, step = F.cross_entropy(model(X), Y).detach(), compiled(model, (X, Y), loss)
    torch.testing.assert_close(step(X, Y), expected)
    with pytest.raises(ModelCheckError, match=f"{__file__}.*own fails"):
        step(X * float("nan"), Y)


def test_a_refused_model_prints_nothing():
    program = f"""
import torch, relax_disc
from torch.export import Dim
import importlib.util
spec = importlib.util.spec_from_file_location("messages", {__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
def loss(model, x, y):
    return model(x).mean() * int(x.sum())
try:
    module.compiled(module.Net(), (module.X, module.Y), loss)
except relax_disc.errors.UnsupportedOperatorError:
    print("refused")
module.compiled(module.Net(), (module.X, module.Y), torch.nn.CrossEntropyLoss())
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.stdout == "refused\n", done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize(
    "text", [lambda loss: f"{loss:.3f}", lambda loss: f"{loss.item():8.2e}"], ids=["tensor", "item"]
)
def test_a_formatted_loss_warns(text):
    def loss(model, x, y):
        found = F.cross_entropy(model(x), y)
        text(found)
        return found

    model = Net()
    with pytest.warns(RelaxDiscWarning, match=r"test_messages.*\(loss, extras\)"):
        step = compiled(model, (X, Y), loss)
    torch.testing.assert_close(step(X, Y), F.cross_entropy(Net()(X), Y).detach())


@pytest.mark.parametrize("look", [torch.Tensor.numpy, float], ids=["numpy", "float"])
def test_a_value_that_cannot_be_had_is_refused_with_what_to_do(look):
    def loss(model, x, y):
        found = F.cross_entropy(model(x), y)
        look(found.detach())
        return found

    with pytest.raises(UnsupportedOperatorError, match=r"test_messages.*\(loss, extras\)"):
        compiled(Net(), (X, Y), loss)


def test_arguments_of_another_kind_are_refused_by_name(monkeypatch, tmp_path):
    step = compiled(Net(), (X,), lambda m, x: m(x).square().mean())
    for size in ("3", None, 2.0, True):
        with pytest.raises(ShapeRangeError, match=f"batch={size!r} is no whole number"):
            step.plan(batch=size)
    with pytest.raises(InputMismatchError, match="one run, not 'a'"):
        step.calibrate(X, repeats="a")
    with pytest.raises(InputMismatchError, match="check_finite is True or False, not 'yes'"):
        step.check_finite = "yes"
    with pytest.raises(InputMismatchError, match="remove_padding is True or False, not 'no'"):
        relax_disc.PipelineOptions(remove_padding="no")
    again = {
        "dynamic_shapes": ({0: Dim("batch", min=1, max=64)},),
        "loss_fn": lambda m, x: m(x).sum(),
    }
    with pytest.raises(InputMismatchError, match=r"type dict: give relax_disc\.PipelineOptions"):
        relax_disc.compile(Net(), None, (X,), options={"fuse": False}, **again)
    (tmp_path / "file").write_text("")
    options = relax_disc.PipelineOptions(dump_to=tmp_path / "file")
    with pytest.raises(InputMismatchError, match=r"dump_to=.*file"):
        relax_disc.compile(Net(), None, (X,), options=options, **again)
    monkeypatch.setenv("RELAX_DISC_COMPILE_CACHE", "1")
    monkeypatch.setenv("RELAX_DISC_CACHE_BYTES", "much")
    with pytest.raises(InputMismatchError, match="RELAX_DISC_CACHE_BYTES='much' is no number"):
        relax_disc.compile(Net(), None, (X,), **again)
    monkeypatch.setenv("RELAX_DISC_CACHE_BYTES", "1 GiB")
    relax_disc.compile(Net(), None, (X,), **again)
    with torch.device("meta"):  # of tensors that the user makes, not of ours
        assert step(X).device == torch.device("cpu")


def test_numbers_that_pytorch_negates_when_they_are_read():
    model = Net()
    step = compiled(model, (X,), lambda m, x: m(x).sum())
    negative = torch._neg_view(X)
    torch.testing.assert_close(step(negative, update=False), model(-X).sum().detach())
    model.layer.weight.data = torch._neg_view(model.layer.weight.detach().clone())
    torch.testing.assert_close(step(X, update=False), model(X).sum().detach())


def test_a_parameter_that_is_thawed_is_told_of_without_an_optimizer():
    model = Net()
    model.layer.bias.requires_grad_(False)
    step = relax_disc.compile(
        model, None, (X,), dynamic_shapes=None, loss_fn=lambda m, x: m(x).mean()
    )
    step(X, update=False)
    model.layer.bias.requires_grad_()
    with pytest.raises(InputMismatchError, match=r"layer\.bias was frozen"):
        step(X, update=False)


def test_a_step_without_an_arena_is_refused():
    with pytest.raises(InputMismatchError, match="without plan_arena"):
        relax_disc.compile(
            Net(),
            None,
            (X,),
            dynamic_shapes=None,
            loss_fn=lambda m, x: m(x).mean(),
            options=relax_disc.PipelineOptions(plan_arena=False),
        )


@pytest.mark.parametrize("change", [lambda m: m.to(torch.float32), lambda m: m.cpu().float()])
def test_a_module_that_is_converted_to_what_it_is(change):
    def loss_fn(model, x):
        model.layer = change(model.layer)
        return model(x).square().mean()

    step = compiled(model := Net(), (X,), loss_fn)
    torch.testing.assert_close(step(X, update=False), loss_fn(model, X).detach())


def test_a_module_that_is_converted_while_it_runs_is_refused_by_line():
    def loss_fn(model, x):
        return model.double()(x.double()).mean()

    with pytest.raises(UnsupportedOperatorError, match=r"test_messages.py:\d+: Net is converted"):
        compiled(model := Net(), (X,), loss_fn)
    assert model.layer.weight.dtype == torch.float32


def test_copies_of_tensors_are_copies():
    def loss_fn(model, x):
        again = copy.deepcopy(x)
        again.mul_(2)
        held = copy.deepcopy({"one": x, "same": [x]})
        held["one"].add_(1)
        return (model(x) * again[:, :3] + held["same"][0][:, :3]).square().mean()

    step = compiled(model := Net(), (X,), loss_fn)
    for rows in (4, 1):
        torch.testing.assert_close(step(X[:rows], update=False), loss_fn(model, X[:rows]).detach())


def test_copies_that_would_share_memory_are_refused():
    def loss_fn(model, x):
        one, other = copy.deepcopy([x, x.t()])
        one.mul_(2)
        return model(x).mean() * other.sum()

    with pytest.raises(UnsupportedOperatorError, match="two tensors share memory"):
        compiled(Net(), (X,), loss_fn)


def test_compiling_in_inference_mode_is_refused():
    model = nn.Linear(4, 4)
    with torch.inference_mode(), pytest.raises(InputMismatchError, match="inference_mode"):
        relax_disc.compile(model, None, (torch.ones(2, 4),), dynamic_shapes=None)


def test_a_backward_pass_after_the_step_is_told_of(tmp_path):
    model = Net()
    loss = compiled(model, (X,), lambda model, x: model(x).mean())(X)
    for call in (loss.backward, lambda: torch.autograd.backward(loss)):
        with pytest.raises(InputMismatchError, match="loss of a compiled step"):
            call()
    model(X).mean().backward()
    assert model.layer.weight.grad is not None
    torch.save({"loss": loss}, tmp_path / "checkpoint.pt")
    assert torch.load(tmp_path / "checkpoint.pt")["loss"] == loss


def test_clipping_by_value_after_the_step_is_told_of():
    model = Net()
    compiled(model, (X,), lambda model, x: model(x).mean())(X)
    # PyTorch's own error comes after it; here the warning is one.
    with pytest.raises(RelaxDiscWarning, match="clip_grad_value_ found no gradients"):
        nn.utils.clip_grad_value_(model.parameters(), 1.0)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused_by_name(kind):
    model = kind(10, 4, sparse=True)
    ids = torch.randint(0, 10, (4, 3))
    with pytest.raises(UnsupportedOperatorError, match="sparse=False"):
        compiled(model, (ids,), lambda model, x: model(x).square().mean())


@pytest.mark.parametrize("copy_of", [copy.deepcopy, copy.copy, pickle.dumps])
def test_copies_of_a_step_are_refused_with_what_to_do(copy_of):
    step = compiled(Net(), (X,), lambda model, x: model(x).mean())
    with pytest.raises(InputMismatchError, match=r"step\.save\(path\)"):
        copy_of(step)
    step(X)


def test_two_threads_may_compile_at_once():
    results = {}

    def run(number):
        model = Net()
        expected = model(X).square().mean().detach() * (number + 1)
        step = compiled(model, (X,), lambda model, x: model(x).square().mean() * (number + 1))
        results[number] = (step(X), expected)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    for found, expected in results.values():
        torch.testing.assert_close(found, expected)


class NextToken(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)

    def forward(self, ids):
        logits = self.head(self.table(ids[:, :-1]))
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].reshape(-1))


def length(least):
    return ({0: Dim("batch", min=1, max=8), 1: Dim("length", min=least, max=64)},)


def test_a_language_model_that_shifts_its_ids_takes_two_tokens():
    model, ids = NextToken(), torch.arange(36).reshape(4, 9)
    step = compiled(model, (ids,), shapes=length(2))
    for rows, tokens in ((4, 9), (3, 2), (1, 2), (1, 9), (2, 3)):
        batch = ids[:rows, :tokens]
        expected = model(batch).detach()
        torch.testing.assert_close(step(batch), expected)


def test_one_token_has_no_next_and_its_mean_is_eagers_nan():
    model = NextToken()
    step = compiled(model, (torch.arange(36).reshape(4, 9),), shapes=length(1))
    for tokens in (1, 2, 30):
        ids = torch.arange(4 * tokens).reshape(4, tokens) % 30
        expected = model(ids).detach()
        assert bool(expected.isnan()) == (tokens == 1)
        torch.testing.assert_close(step(ids, update=False), expected, equal_nan=True)


def test_the_shortest_batch_may_be_the_example():
    """A curriculum begins with it; of two tokens one has a next, which PyTorch takes for a size."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 8), nn.GRU(8, 8, batch_first=True))
    eager = copy.deepcopy(model)

    def loss(model, ids):
        states, _ = model(ids)
        return F.cross_entropy(states[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, eager)]
    shapes = ({0: Dim("batch", min=1, max=8), 1: Dim("length", min=2, max=16)},)
    ids = [torch.arange(rows * n).reshape(rows, n) % 8 for rows, n in ((1, 2), (3, 5), (2, 16))]
    step = relax_disc.compile(model, optimizers[0], (ids[0],), dynamic_shapes=shapes, loss_fn=loss)
    for batch in ids:
        expected = loss(eager, batch)
        torch.testing.assert_close(step(batch), expected.detach())
        expected.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    torch.testing.assert_close(model.state_dict(), eager.state_dict())


def test_a_branch_on_three_tokens_is_still_seen():
    class Branch(NextToken):
        def forward(self, ids):
            short = ids[:, :-1]
            factor = 1.0 if short.shape[1] >= 2 else 5.0
            return super().forward(ids) * factor

    with pytest.raises(ShapeRangeError, match=r"min=3"):
        compiled(Branch(), (torch.arange(36).reshape(4, 9),), shapes=length(2))


def test_a_bias_before_a_batch_norm_is_no_difference():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    layers += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = torch.randn(8, 3, 32, 32), torch.randint(0, 5, (8,))
    rows = {0: Dim("batch", min=2, max=64)}
    step = relax_disc.compile(
        model, optimizer, batch, dynamic_shapes=(rows, rows), loss_fn=nn.CrossEntropyLoss()
    )
    step(*batch)
    report = relax_disc.verify(step, [batch])
    assert report.ok, str(report)


def test_a_size_that_depends_on_data_names_the_line_in_a_helper_and_a_way_out():
    def picked(logits, y):
        return F.cross_entropy(logits, y) + logits[: y.max().item()].sum()  # the line

    def loss(model, x, y):
        return picked(model(x), y)

    line = picked.__code__.co_firstlineno + 1
    with pytest.raises(UnsupportedOperatorError, match=f"{__file__}:{line}\\b") as caught:
        compiled(Net(), (X, Y), loss)
    assert "ignore_index" in str(caught.value)


def test_a_batch_that_was_a_mapping_may_be_given_whole():
    batch = {"x": X}
    step = compiled(Net(), batch, lambda model, x: model(x).sum(), {"x": {0: Dim("batch")}})
    torch.testing.assert_close(step(batch), step(**batch), rtol=1, atol=1)
    with pytest.raises(InputMismatchError, match="lacks x"):
        step({})


def test_scatters_compile_without_words_on_stderr(capfd):
    def loss(model, x, y):
        return torch.zeros_like(x).index_add(0, y, x * model(x).sum()).square().sum()

    compiled(Net(), (X, Y), loss)(X, Y)
    assert capfd.readouterr().err == ""


def test_a_batch_that_requires_gradients_is_refused():
    step = compiled(Net(), (X, Y), nn.CrossEntropyLoss())
    with pytest.raises(InputMismatchError, match="requires a gradient"):
        step(X.clone().requires_grad_(), Y)


def test_a_generator_is_refused_with_its_line():
    def loss(model, x, y):
        noise = torch.rand(x.shape, generator=torch.Generator())
        return model(x + noise).sum()

    with pytest.raises(UnsupportedOperatorError, match=f"{__file__}:\\d+: rand: a torch.Generator"):
        compiled(Net(), (X, Y), loss)


def test_an_axis_that_the_example_does_not_have_is_refused():
    shape = {0: Dim("batch", min=1, max=64), 2: Dim("length", min=1, max=64)}
    with pytest.raises(InputMismatchError, match=r"name axis 2 of .*shape \(4, 4\)"):
        compiled(Net(), (X, X), F.mse_loss, shapes=(shape, shape))


def test_an_empty_example_is_refused():
    with pytest.raises(InputMismatchError, match=r"empty tensor of shape \(0, 4\)"):
        compiled(Net(), (X[:0], Y[:0]), nn.CrossEntropyLoss())


@pytest.mark.parametrize(
    ("rows", "told"), [(65, "65 on axis 0, of which batch allows 3 .. 64"), (2, "allows 3 .. 64")]
)
def test_an_example_outside_the_declared_range_is_not_the_models_fault(rows, told):
    with pytest.raises(ShapeRangeError, match=rf"example_inputs: \['x'\] of shape .*{told}"):
        relax_disc.compile(
            nn.Linear(4, 2),
            None,
            (torch.randn(rows, 4),),
            dynamic_shapes=({0: Dim("batch", min=3, max=64)},),
            loss_fn=lambda model, x: model(x).sum(),
        )


def test_a_loop_over_a_dim_is_told_of_in_our_words():
    def loss(model, x, y):
        return sum(model(x)[row].sum() for row in range(x.shape[0]) if row != 2)

    with pytest.raises(ShapeRangeError, match="batch becomes the number 4, by a Python") as caught:
        compiled(Net(), (X, Y), loss)
    assert __file__ in str(caught.value) and "L[" not in str(caught.value)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_evenly_spaced_numbers_of_every_count(rows):
    model = Net()

    def loss(model, x, y):
        return (model(x) * torch.linspace(0.25, 1, x.shape[0])[:, None]).sum()

    expected = loss(model, X[:rows], Y[:rows]).detach()
    torch.testing.assert_close(compiled(model, (X, Y), loss)(X[:rows], Y[:rows]), expected)


def test_vmap_over_the_batch():
    model, eager = Net(), Net()
    weight = torch.linspace(0, 1, 3)

    def loss(model, x, y):
        return torch.vmap(lambda row: (model(row) * weight).square().sum())(x).mean()

    step = compiled(model, (X, Y), loss)
    for rows in (4, 1):
        expected = loss(eager, X[:rows], Y[:rows])
        torch.testing.assert_close(step(X[:rows], Y[:rows]), expected.detach())
        grads = torch.autograd.grad(expected, list(eager.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(eager.parameters(), grads, strict=True):
                parameter.sub_(grad, alpha=0.1)
    torch.testing.assert_close(dict(model.named_parameters()), dict(eager.named_parameters()))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # PyTorch shows it to nobody
def test_transforms_that_pytorch_cannot_trace_are_refused_with_the_line():
    def loss(model, x, y):
        of_row = torch.func.jacrev(lambda row: model(row)[0])
        return torch.vmap(of_row)(x).square().mean()

    with pytest.raises(UnsupportedOperatorError, match=r"test_messages\.py:\d+"):
        compiled(Net(), (X, Y), loss)


TRANSFORMS = {
    "vjp": lambda m, x: torch.func.vjp(m, x)[1](torch.ones(x.shape[0], 3))[0],
    "jvp": lambda m, x: torch.func.jvp(m, (x,), (torch.ones_like(x),))[1],
    "grad": lambda m, x: torch.func.grad(lambda x: m(x).square().sum())(x),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # PyTorch's own call
@pytest.mark.parametrize("name", TRANSFORMS)
def test_gradients_by_torch_func_are_refused_with_the_line_and_what_to_do(name):
    said = r"test_messages\.py:\d+: a gradient by torch.func .*torch.autograd.grad"
    with pytest.raises(UnsupportedOperatorError, match=said):
        compiled(Net(), (X, Y), lambda model, x, y: TRANSFORMS[name](model, x).square().mean())


def test_values_read_by_numpy_are_refused_with_the_line():
    def loss(model, x, y):
        return model(x).mean() * float(np.asarray(x.detach()).sum())

    with pytest.raises(UnsupportedOperatorError, match=r"test_messages\.py:\d+: .*with NumPy"):
        compiled(Net(), (X, Y), loss)


def test_an_example_outside_the_range_of_a_multiple_is_told_so():
    shapes = ({0: 2 * Dim("half", min=4, max=6)},)
    with pytest.raises(ShapeRangeError, match=r"axis of 4 positions, outside .* 8 to 12"):
        compiled(Net(), (X,), lambda model, x: model(x).mean(), shapes)


class Failing(torch.autograd.Function):
    """Has a gradient that raises."""

    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("of the user's own")


def test_what_a_gradient_of_the_users_raises_is_told_with_its_line():
    def loss(model, x, y):
        return Failing.apply(model(x)).sum()

    with pytest.raises(
        UnsupportedOperatorError, match=r"test_messages\.py:\d+: .*of the user's own"
    ):
        compiled(Net(), (X, Y), loss)


def test_a_loss_function_may_take_more_that_is_not_given():
    def loss(model, x, y, *rest):
        return F.cross_entropy(model(x), y) * (1 + len(rest))

    expected = loss(Net(), X, Y).detach()
    torch.testing.assert_close(compiled(Net(), (X, Y), loss)(X, Y), expected)


def test_gradients_of_each_sample_are_refused_with_a_way_out():
    def loss(model, x, y):
        weights = dict(model.named_parameters())
        of_row = torch.func.grad(
            lambda w, row: torch.func.functional_call(model, w, (row[None],)).square().sum()
        )
        gradients = torch.vmap(of_row, in_dims=(None, 0))(weights, x)
        return sum(gradient.square().mean() for gradient in gradients.values())

    with pytest.raises(UnsupportedOperatorError, match=r"test_messages\.py:\d+.*beside the step"):
        compiled(Net(), (X, Y), loss)


def test_arrays_are_refused_with_what_to_do():
    def loss(model, x, y):
        return model(x).square().mean()

    with pytest.raises(InputMismatchError, match="NumPy array; convert it"):
        compiled(Net(), (X.numpy(), Y.numpy()), loss)
    step = compiled(Net(), (X, Y), loss)
    with pytest.raises(InputMismatchError, match="got ndarray; convert it"):
        step(X.numpy(), Y)


def test_a_size_as_a_key_is_refused_with_the_line():
    masks = {}

    def loss(model, x, y):
        if x.shape[0] not in masks:
            masks[x.shape[0]] = torch.ones(x.shape[0], 1)
        return (model(x) * masks[x.shape[0]]).mean()

    with pytest.raises(UnsupportedOperatorError, match=r"test_messages\.py:\d+: .*key of a dict"):
        compiled(Net(), (X, Y), loss)


class Rotary(nn.Module):
    """Positions as complex numbers, as in Meta's own Llama."""

    def __init__(self, as_pairs):
        super().__init__()
        angles = torch.outer(torch.arange(64.0), torch.tensor([1.0, 0.1]))
        turns = torch.polar(torch.ones_like(angles), angles)
        self.layer = nn.Linear(4, 4)
        self.turns = torch.view_as_real(turns) if as_pairs else turns

    def forward(self, x):
        turns = self.turns if self.turns.is_complex() else torch.view_as_complex(self.turns)
        pairs = torch.view_as_complex(self.layer(x).reshape(-1, 2, 2))
        return torch.view_as_real(pairs * turns[: x.shape[0]]).square().sum(2).cos().mean()


def test_complex_numbers_go_in_as_pairs():
    with pytest.raises(UnsupportedOperatorError, match=r"turns is .*complex64.*view_as_real"):
        compiled(Rotary(as_pairs=False), (X,))
    model = Rotary(as_pairs=True)
    step = compiled(model, (X,))
    for rows in (4, 1):
        expected = model(X[:rows]).detach()
        torch.testing.assert_close(step(X[:rows]), expected)
