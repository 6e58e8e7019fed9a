"""The chunked head computes what the plain one does, and takes only what it can compute."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import tvm_ffi
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim
from tvm import tirx

import relax_disc
from relax_disc.errors import MemoryBudgetError
from relax_disc.frontend import capture_step
from relax_disc.ops.vocabulary_head import workspace_columns
from relax_disc.transform.libraries.chunk_vocabulary_head import ChunkVocabularyHead, chunk_rows
from relax_disc.transform.simplify.simplify import Simplify
from relax_disc.vm_builtins.libraries.install import install
from tests.thread_count import threads


def run(function, x, weight, target, grad, options, chunk, frozen=False, bias=None):
    rows, width = x.shape
    classes = weight.shape[0]
    outputs = [np.full((), 7, "float32"), np.full((rows, width), 7, "float32")]
    if bias is not None:
        outputs.append(np.full(classes, 7, "float32"))
    if not frozen:
        outputs.append(np.full((classes, width), 7, "float32"))
    columns = workspace_columns(classes, width)
    outputs.append(np.full((-(-chunk // 16) * 16, columns), np.nan, "float32"))
    operands = [x, weight, target, grad] if bias is None else [x, weight, target, grad, bias]
    tensors = [tvm_ffi.from_dlpack(array) for array in operands]
    results = [tvm_ffi.from_dlpack(array) for array in outputs]
    function(*tensors, *options, *results)
    return outputs[:-1]


def reference(x, weight, target, grad, ignore, smoothing, mean, bias=None):
    x = torch.from_numpy(x).double().requires_grad_()
    weight = torch.from_numpy(weight).double().requires_grad_()
    logits, wanted = x @ weight.T, [x, weight]
    if bias is not None:
        wanted.insert(1, torch.from_numpy(bias).double().requires_grad_())
        logits = logits + wanted[1]
    loss = nn.functional.cross_entropy(
        logits,
        torch.from_numpy(target),
        ignore_index=ignore,
        label_smoothing=smoothing,
        reduction="mean" if mean else "sum",
    )
    (loss * float(grad)).backward()
    return loss.item(), *(tensor.grad.numpy() for tensor in wanted)


@given(
    rows=st.integers(1, 90),
    width=st.one_of(st.integers(1, 70), st.sampled_from([400, 1024])),
    classes=st.one_of(st.integers(2, 70), st.integers(330, 700)),
    chunk=st.integers(1, 100),
    ignored=st.floats(0, 0.9),
    smoothing=st.sampled_from([0.0, 0.1]),
    mean=st.booleans(),
    biased=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_agrees_with_float64(rows, width, classes, chunk, ignored, smoothing, mean, biased, seed):
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, width), "float32")
    weight = random.standard_normal((classes, width), "float32")
    weight *= np.float32(min(1.0, 4 * width**-0.5))  # logits of a usual size
    target = random.integers(0, classes, rows)
    target[random.random(rows) < ignored] = -100
    target[0] = 0
    grad = np.array(0.5, "float32")
    install("llvm")
    bias = random.standard_normal(classes, "float32") if biased else None
    name = "vocabulary_head_bias" if biased else "vocabulary_head"
    function = tvm_ffi.get_global_func(f"relax_disc.cpu.{name}")
    options = (-100, smoothing, int(mean))
    found = run(function, x, weight, target, grad, options, chunk, bias=bias)
    expected = reference(x, weight, target, grad, *options, bias=bias)
    for mine, theirs in zip(found, expected, strict=True):
        scale = max(1.0, float(np.abs(theirs).max()))
        np.testing.assert_allclose(mine / scale, theirs / scale, rtol=2e-5, atol=2e-6)
    frozen = tvm_ffi.get_global_func(f"relax_disc.cpu.{name}_frozen")
    alone = run(frozen, x, weight, target, grad, options, chunk, frozen=True, bias=bias)
    for mine, theirs in zip(alone, found[:-1], strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("kind", ["", "_frozen", "_bias", "_bias_frozen"])
def test_no_counted_row_gives_zero_gradients(kind):
    install("llvm")
    x, weight = np.ones((3, 2), "float32"), np.ones((5, 2), "float32")
    target, grad = np.full(3, -100), np.array(1, "float32")
    function = tvm_ffi.get_global_func(f"relax_disc.cpu.vocabulary_head{kind}")
    bias = np.ones(5, "float32") if "bias" in kind else None
    options = (-100, 0.0, 1)
    loss, *grads = run(function, x, weight, target, grad, options, 2, "frozen" in kind, bias)
    assert np.isnan(loss)
    assert all(not g.any() for g in grads)


def test_refuses_labels_outside_the_vocabulary():
    install("llvm")
    x, weight = np.ones((3, 2), "float32"), np.ones((5, 2), "float32")
    target, grad = np.array([0, 5, 1]), np.array(1, "float32")
    function = tvm_ffi.get_global_func("relax_disc.cpu.vocabulary_head")
    with pytest.raises(ValueError, match="label 5 of row 1"):
        run(function, x, weight, target, grad, (-100, 0.0, 1), 2)


def test_threads_do_not_change_a_bit():
    install("llvm")
    random = np.random.default_rng(1)
    x = random.standard_normal((70, 48), "float32")
    weight = random.standard_normal((1000, 48), "float32")
    bias = random.standard_normal(1000, "float32")
    target, grad = random.integers(0, 1000, 70), np.array(1, "float32")
    function = tvm_ffi.get_global_func("relax_disc.cpu.vocabulary_head_bias")
    found = []
    for count in (1, 5):
        with threads(count):
            found.append(run(function, x, weight, target, grad, (-100, 0.1, 1), 32, bias=bias))
    for one, all_of_them in zip(*found, strict=True):
        np.testing.assert_array_equal(one, all_of_them)


def test_chunks_are_whole_vectors_within_bounds():
    sizes = {rows: int(chunk_rows(tirx.const(rows, "int64"))) for rows in (1, 50, 100, 800, 9000)}
    assert sizes == {1: 16, 50: 64, 100: 64, 800: 112, 9000: 128}


class Head(nn.Module):
    """A language model reduced to its ends."""

    def __init__(self, *, tied=False, bias=False, frozen=False) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=bool(bias))
        if tied:
            self.head.weight = self.table.weight
        if frozen:
            self.head.weight.requires_grad_(False)
        if bias == "frozen":
            self.head.bias.requires_grad_(False)

    def forward(self, ids, labels):
        logits = self.head(torch.tanh(self.table(ids))).float()
        return nn.functional.cross_entropy(logits.view(-1, 11), labels.view(-1))


class UsedLogits(Head):
    """The logits are needed for something else too."""

    def forward(self, ids, labels):
        logits = self.head(torch.tanh(self.table(ids)))
        loss = nn.functional.cross_entropy(logits.view(-1, 11), labels.view(-1))
        return loss, logits.argmax(-1).float().sum()


def chunked(model):
    ids = torch.zeros((2, 3), dtype=torch.int64)
    batch, seq = Dim("batch", min=1, max=8), Dim("seq", min=1, max=64)
    captured = capture_step(
        model,
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        (ids, ids),
        dynamic_shapes=({0: batch, 1: seq}, {0: batch, 1: seq}),
    )
    text = ChunkVocabularyHead()(Simplify()(captured.module)).script()
    return "cpu.vocabulary_head" in text, "relax_disc.cross_entropy" in text


@pytest.mark.parametrize(
    "options",
    [{}, {"tied": True}, {"frozen": True}]
    + [{"bias": bias, "frozen": frozen} for bias in (True, "frozen") for frozen in (False, True)],
)
def test_replaces_the_plain_head(options):
    assert chunked(Head(**options)) == (True, False)


@pytest.mark.parametrize("model", [UsedLogits(), UsedLogits(bias=True)])
def test_leaves_other_heads_alone(model):
    assert chunked(model) == (False, True)


@pytest.mark.parametrize(
    "model",
    [Head(bias=True), Head(bias=True, tied=True), Head(bias="frozen")],
    ids=["bias", "bias, tied", "frozen bias"],
)
def test_heads_have_exact_gradients(model):
    """Chunked or left alone, they train as float64 says, ignored labels included."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(0, 11, (3, 7), generator=generator) for _ in range(2))
    labels[1, 3:] = -100
    exact = copy.deepcopy(model).double()
    loss = exact(ids, labels)
    loss.backward()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    trained = [value for value in model.parameters() if value.requires_grad]
    step = compiled(model, torch.optim.SGD(trained, lr=1.0), ids, labels)
    torch.testing.assert_close(step(ids, labels), loss.detach().float(), rtol=1e-6, atol=1e-6)
    for name, value in model.named_parameters():
        gradient = (before[name].double() - value.double()).detach()
        expected = exact.get_parameter(name).grad
        expected = torch.zeros_like(gradient) if expected is None else expected
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6, msg=name)


def compiled(model, optimizer, ids, labels):
    dims = {0: Dim("batch", min=1, max=8), 1: Dim("seq", min=1, max=64)}
    example = (ids[:2, :3].contiguous(), labels[:2, :3].contiguous())
    return relax_disc.compile(model, optimizer, example, dynamic_shapes=(dims, dims))


class DeepHead(Head):
    """Enough before the head for a budget to have something to give up."""

    def forward(self, ids, labels):
        hidden = self.table(ids)
        for _ in range(6):
            hidden = hidden + torch.tanh(hidden).sin()
        logits = self.head(hidden)
        return nn.functional.cross_entropy(logits.view(-1, 11), labels.view(-1))


def test_budgets_do_not_change_a_bit():
    torch.manual_seed(1)
    model = DeepHead(bias=True)
    ids, labels = torch.randint(0, 11, (2, 8, 64))
    labels[1, 3:] = -100
    start = copy.deepcopy(model.state_dict())
    step = compiled(model, torch.optim.SGD(model.parameters(), lr=0.1), ids, labels)
    plain = step.plan(batch=8, seq=64)
    step.memory_budget = 1
    with pytest.raises(MemoryBudgetError) as refused:
        step(ids, labels)
    assert refused.value.least_bytes < plain.peak_bytes
    results = []
    for budget in (None, refused.value.least_bytes):
        model.load_state_dict(start)
        step.memory_budget = budget
        losses = [step(ids, labels) for _ in range(2)]
        results.append([*losses, *(p.detach().clone() for p in model.parameters())])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
