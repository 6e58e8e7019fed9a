"""Programs inside a loop that PyTorch keeps compute what eager PyTorch does."""

from __future__ import annotations

import copy
import dataclasses
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from relax_disc.errors import InputMismatchError, MemoryBudgetError
from relax_disc.integrations import torch_compile
from tests.frontend.models import Llama

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()
    validate = torch.distributions.Distribution._validate_args
    yield
    torch._dynamo.reset()
    # TorchDynamo switches this off for the whole process.
    torch.distributions.Distribution.set_default_validate_args(validate)
    gc.collect()


def compiled(model, **options):
    """The model, compiled, and a copy of it that stays eager."""
    options = {"options": options} if options else {}
    eager = copy.deepcopy(model)
    return torch.compile(model, backend=torch_compile.backend, dynamic=True, **options), eager


def the_program():
    (program,) = torch_compile.programs()
    return program


def assert_same_gradients(model, eager):
    for (name, a), b in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


class Blocks(nn.Module):
    """Several outputs: a hidden one that is used again, an argument, a size, integers, nothing."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 8)
        self.unused = nn.Linear(2, 2)

    def forward(self, x, y):
        hidden = torch.relu(self.first(x))
        return hidden, self.second(hidden) * y, x, hidden.argmax(-1), None, x.shape[0]


def test_outputs_of_all_kinds_and_gradients_of_inputs():
    model = Blocks()
    fast, eager = compiled(model)
    for n in (5, 2, 9, 1):
        data = torch.randn(n, 8), torch.randn(n, 1)
        losses, inputs = [], []
        for function in (fast, eager):
            x, y = (t.clone().requires_grad_(k == 0) for k, t in enumerate(data))
            hidden, out, same, best, nothing, size = function(x, y)
            assert same is x and nothing is None and size == n
            assert best.dtype is torch.int64 and not best.requires_grad
            loss = (hidden.sum(-1) * out.mean(-1)).sum() + (same**2).sum()
            loss.backward()
            losses.append((loss.detach(), out.detach(), best))
            inputs.append(x.grad)
        torch.testing.assert_close(losses[0], losses[1], **CLOSE)
        torch.testing.assert_close(inputs[0], inputs[1], **CLOSE)
    assert_same_gradients(model, eager)  # the sums of all four


def test_only_one_of_several_outputs_is_used():
    model = Blocks()
    fast, eager = compiled(model)
    x, y = torch.randn(4, 8), torch.randn(4, 1)
    for function in (fast, eager):
        function(x, y)[0].pow(2).sum().backward()
    for parameter in eager.second.parameters():  # zeros, as of PyTorch's own backends
        parameter.grad = torch.zeros_like(parameter)
    assert_same_gradients(model, eager)


class Classifier(nn.Module):
    """Convolution, batch norm, pooling, dropout where asked."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),  # one would get rounding errors alone
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Dropout(dropout),
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


def test_training_loop_with_batch_norm_evaluation_and_an_optimizer():
    model = Classifier()
    fast, eager = compiled(model)
    steps = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, eager)]
    for n, size in ((4, 10), (2, 12), (6, 9), (3, 20)):
        images, labels = torch.randn(n, 3, size, size), torch.randint(5, (n,))
        for function, optimizer in zip((fast, eager), steps, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(function(images), labels).backward()
            nn.utils.clip_grad_norm_(function.parameters(), 0.5)
            optimizer.step()
        torch.testing.assert_close(model.state_dict(), eager.state_dict(), **CLOSE)
        for function in (fast, eager):
            function.eval()
        with torch.no_grad():
            torch.testing.assert_close(fast(images), eager(images), **CLOSE)
        for function in (fast, eager):
            function.train()
    assert model.body[1].num_batches_tracked == 4


def test_language_model_at_many_lengths_from_one_program():
    model = Llama(layers=2)
    fast, eager = compiled(model)
    for b, s in ((3, 12), (2, 5), (4, 31), (2, 2)):
        ids = torch.randint(0, 61, (b, s))
        for function in (fast, eager):
            function.zero_grad()
            function(ids, ids).backward()
        assert_same_gradients(model, eager)
    program = the_program()
    report = program.memory_report()
    assert report.peak_bytes == report.planned_peak_bytes == program.plan(**report.shape).peak_bytes


def test_forward_passes_may_wait_for_their_backward_passes_in_any_order():
    model = Classifier(dropout=0.0)
    fast, eager = compiled(model)
    batches = [torch.randn(n, 3, 8, 8) for n in (2, 4, 5)]
    for function in (fast, eager):
        losses = [function(x).pow(2).sum() for x in batches]
        for place in (1, 2, 0):
            losses[place].backward()
    assert_same_gradients(model, eager)


@pytest.mark.parametrize("bias", [False, True])
def test_logits_of_a_loss_never_exist_whole(bias):
    """Gradients are computed with the loss, and multiplied by what backward brings."""

    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = torch.nn.Linear(16, 24), torch.nn.Linear(24, 3000, bias=bias)

        def forward(self, x, labels):
            return torch.nn.functional.cross_entropy(self.head(self.body(x).tanh()), labels)

    model = Head()
    run, eager = compiled(model)
    for rows, factor in ((40, 1.0), (300, -2.5), (2, 0.0)):
        x, labels = torch.randn(rows, 16), torch.randint(0, 3000, (rows,))
        labels[0] = -100
        loss, expected = run(x, labels), eager(x, labels)
        torch.testing.assert_close(loss, expected, **CLOSE)
        (loss * factor).backward()
        (expected * factor).backward()
        for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, **CLOSE)
            mine.grad = theirs.grad = None
    program = the_program()
    assert any("vocabulary_head" in name for name in program.session.kernel_names)
    report = program.memory_report()
    assert report.peak_bytes == report.planned_peak_bytes
    sizes = {dim.name: 300 for dim in program.dims}
    assert program.plan(**sizes).activation_peak_bytes < 300 * 3000 * 4


def test_a_budget_changes_nothing_but_memory(tmp_path):
    model = Llama(layers=3)
    fast, _ = compiled(model)
    ids = torch.randint(0, 61, (4, 40))

    def gradients():
        model.zero_grad()
        loss = fast(ids, ids)
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    free = gradients()
    program = the_program()
    shape = program.memory_report().shape
    least = program.plan(**shape).least_bytes
    program.memory_budget = least
    tight = gradients()
    report = program.memory_report()
    assert report.recomputations > 0 and report.peak_bytes <= least
    assert all(torch.equal(a, b) for a, b in zip(free, tight, strict=True))
    program.memory_budget = program.plan(**shape).resident_bytes
    with pytest.raises(MemoryBudgetError, match=r"Raise the budget or lower the shape\.$"):
        gradients()
    with pytest.raises(InputMismatchError, match="offload nothing"):
        program.offload_to = tmp_path
    program.memory_budget = None
    assert all(torch.equal(a, b) for a, b in zip(free, gradients(), strict=True))


def test_the_option_sets_the_budget():
    model = Frozen()
    fast, _ = compiled(model, memory_budget="1GiB")
    fast(torch.randn(3, 4)).sum().backward()
    assert the_program().memory_budget == 2**30


def test_dropout_follows_the_seed_and_is_the_same_when_computed_again():
    model = Classifier(dropout=0.5)
    fast, _ = compiled(model)
    images = torch.randn(4, 3, 10, 10)

    def gradients(seed):
        torch.manual_seed(seed)
        model.zero_grad()
        first = fast(images)
        second = fast(images)  # draws between the halves of the first
        assert not torch.equal(first, second)
        first.pow(2).sum().backward()
        return [first.detach(), *(p.grad for p in model.parameters())]

    one, two, other = gradients(1), gradients(1), gradients(2)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not torch.equal(one[0], other[0])
    program = the_program()
    program.memory_budget = program.plan(**program.memory_report().shape).least_bytes
    assert all(torch.equal(a, b) for a, b in zip(one, gradients(1), strict=True))


def test_a_forward_pass_without_a_backward_pass_gives_its_memory_back():
    model = Blocks()
    fast, _ = compiled(model)
    x, y = torch.randn(4, 8), torch.randn(4, 1)
    results = fast(x, y)
    counters = the_program().session.counters()
    assert counters.failures == 0
    del results
    gc.collect()
    for _ in range(3):
        fast(x, y)[1].sum().backward()
    assert the_program().session.counters().failures == 0
    assert the_program().memory_report().finished


def test_what_was_written_between_the_halves_is_refused_as_in_eager_pytorch():
    model = Blocks()
    fast, eager = compiled(model)
    for function in (fast, eager):
        loss = function(torch.randn(4, 8), torch.randn(4, 1))[1].sum()
        with torch.no_grad():
            function.second.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_second_backward_pass_is_refused():
    model = Blocks()
    fast, _ = compiled(model)
    loss = fast(torch.randn(4, 8), torch.randn(4, 1))[1].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="runs once"):
        loss.backward()


@pytest.mark.parametrize("power", [1, 2])  # what comes into the backward pass: a constant, or not
def test_gradients_of_gradients_are_refused(power):
    model = Blocks()
    fast, _ = compiled(model)
    loss = fast(torch.randn(4, 8), torch.randn(4, 1))[1].pow(power).sum()
    (grad,) = torch.autograd.grad(loss, [model.first.weight], create_graph=True)
    with pytest.raises(RuntimeError, match="Leave the call that is differentiated twice"):
        grad.pow(2).sum().backward()


def test_regions_of_checkpoints_are_inlined():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def inner(self, x):
            return checkpoint(lambda y: y.exp().sin(), x, use_reentrant=False)

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(lambda y, f=layer: self.inner(f(y)).tanh(), x, use_reentrant=False)
            return x

    model = Checkpointed()
    eager = copy.deepcopy(model)
    fast, _ = compiled(model)
    for rows in (4, 7, 2):
        x = torch.randn(rows, 8)
        fast(x).pow(2).sum().backward()
        eager(x).pow(2).sum().backward()
    assert the_program().plan(x_0=9).peak_bytes > 0
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_numbers_that_change_are_compiled_again():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    fast, eager = compiled(model)
    for momentum in (0.1, 0.5, 0.1):
        x = torch.randn(7, 4)
        model[1].momentum = eager[1].momentum = momentum
        for function in (fast, eager):
            function(x).sum().backward()
        torch.testing.assert_close(model.state_dict(), eager.state_dict(), **CLOSE)


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.requires_grad_(False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def test_frozen_parameters_get_no_gradient():
    model = Frozen()
    fast, eager = compiled(model)
    x = torch.randn(3, 4)
    for function in (fast, eager):
        function(x).sum().backward()
    assert_same_gradients(model, eager)
    assert model.first.weight.grad is None


def test_autocast_around_the_call():
    model = Frozen()
    fast, eager = compiled(model)
    x = torch.randn(3, 4)
    results = []
    for function in (fast, eager):
        with torch.autocast("cpu", torch.bfloat16):
            out = function(x)
        out.float().pow(2).sum().backward()
        results.append(out.detach())
    assert results[0].dtype is results[1].dtype is torch.bfloat16
    torch.testing.assert_close(results[0], results[1], rtol=2e-2, atol=2e-2)
    for a, b in zip(model.second.parameters(), eager.second.parameters(), strict=True):
        assert a.grad.dtype is torch.float32
        torch.testing.assert_close(a.grad, b.grad, rtol=5e-2, atol=5e-2)


class View(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x), x.view(-1)[4:], x.T, x[1:].detach()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # TorchDynamo looks at it
def test_views_of_arguments_are_views():
    model = View()
    fast, eager = compiled(model)
    for n in (3, 6):
        data, grads = torch.randn(n + 1, 4), []
        for function in (fast, eager):
            x = data.clone().requires_grad_()
            part = x[1:]  # an offset of its own
            out, flat, turned, last = function(part)
            assert not last.requires_grad and last.data_ptr() == part[1:].data_ptr()
            assert flat.data_ptr() == part[1:].data_ptr() and turned.shape == (4, n)
            (out.sum() + (flat**2).sum() + (turned[1] * turned[2]).sum()).backward()
            grads.append(x.grad)
        torch.testing.assert_close(*grads, **CLOSE)
    assert_same_gradients(model, eager)


class Halved(nn.Module):
    """Works for even lengths, and squares of more than one value."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        h = self.linear(x)
        return h + F.interpolate(F.avg_pool1d(h.mT, 2), scale_factor=2.0).mT


def test_sizes_that_do_not_fit_get_programs_of_their_own():
    model = Halved()
    fast, eager = compiled(model)
    for n, length in ((3, 6), (2, 6), (2, 10)):
        x = torch.randn(n, length, 4)
        for function in (fast, eager):
            function(x).pow(2).sum().backward()
    assert_same_gradients(model, eager)
    assert len(torch_compile.programs()) == 2


def test_unknown_options_are_refused():
    fast, _ = compiled(Blocks(), memory_limit=3)
    with pytest.raises(Exception, match="'memory_limit'; it knows memory_budget") as caught:
        fast(torch.randn(4, 8), torch.randn(4, 1))
    assert isinstance(caught.value.inner_exception, InputMismatchError)


def test_a_mode_of_pytorchs_own_backend_is_refused():
    fast = torch.compile(Frozen(), backend="relax_disc", mode="max-autotune")
    with pytest.raises(Exception, match="no mode 'max-autotune': leave out mode") as caught:
        fast(torch.randn(3, 4))
    assert isinstance(caught.value.inner_exception, InputMismatchError)


def test_torch_finds_the_backend_by_its_name():
    assert "relax_disc" in torch._dynamo.list_backends(exclude_tags=())
    model = Frozen()
    x = torch.randn(3, 4)
    torch.testing.assert_close(torch.compile(model, backend="relax_disc")(x), model(x), **CLOSE)
    assert len(torch_compile.programs()) == 1


def test_a_plan_has_a_timeline():
    model = Frozen()
    fast, _ = compiled(model)
    fast(torch.randn(3, 4)).sum().backward()
    plan = the_program().plan(x_0=9)
    assert plan.timeline.peak_bytes == plan.peak_bytes
    assert plan.state_bytes == sum(p.nbytes for p in model.parameters())


class Scaled(torch.autograd.Function):
    """A gradient that does not follow from what is computed."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x.tanh()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return -gradient * x * ctx.factor, None


class WithFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(Scaled.apply(self.first(x), 3.0))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TorchDynamo makes an instance
def test_functions_with_a_gradient_of_their_own():
    model = WithFunction()
    fast, eager = compiled(model)
    for n in (3, 5):
        x = torch.randn(n, 4)
        for function in (fast, eager):
            function(x).pow(2).sum().backward()
    assert_same_gradients(model, eager)


def test_a_lost_gradient_is_noticed(monkeypatch):
    capture = torch_compile.capture_halves

    def lossy(*args, **named):
        captured = capture(*args, **named)
        return dataclasses.replace(captured, outputs=captured.outputs[:-1])

    monkeypatch.setattr(torch_compile, "capture_halves", lossy)
    fast, _ = compiled(Frozen())
    with pytest.raises(Exception, match=r"loses the gradient of .*second.*bias"):
        fast(torch.randn(3, 4))


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        hidden = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            hidden = torch.tanh(self.linear(x[:, t]) + hidden)
        return hidden


def test_a_loop_over_the_length_is_a_program_for_each_length():
    model = Loop()
    fast, eager = compiled(model)
    for n, length in ((3, 5), (2, 5), (4, 7)):
        x = torch.randn(n, length, 4)
        for function in (fast, eager):
            function(x).pow(2).sum().backward()
    assert_same_gradients(model, eager)
    assert [[dim.name for dim in p.dims] for p in torch_compile.programs()] == [["x_0"]] * 2


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        rows = x.shape[0]
        return self.linear(x), rows, rows * 2 + 1, rows % 2 == 0, rows / 4


def test_numbers_that_follow_from_sizes_are_results():
    fast, eager = compiled(Counted())
    for n in (3, 6, 8):
        x = torch.randn(n, 4)
        (out, *numbers), (expected, *right) = fast(x), eager(x)
        torch.testing.assert_close(out, expected, **CLOSE)
        assert numbers == right and [type(a) for a in numbers] == [type(b) for b in right]


def test_a_function_that_makes_no_tensor_runs_in_pytorch():
    @torch.compile(backend=torch_compile.backend, dynamic=True)
    def function(x):
        torch._dynamo.graph_break()
        x.add_(1)
        torch._dynamo.graph_break()
        return x

    x = torch.zeros(3)
    assert function(x) is x and x.sum() == 3
    assert torch_compile.programs() == ()
