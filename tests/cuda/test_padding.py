"""Padding is left out on CUDA, too: numbers of the step on the CPU, from the kernels for rows."""

from __future__ import annotations

import copy
import functools
import shutil

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

import relax_disc
from relax_disc.tir_kernels.target import cuda_target
from tests.cuda import attention_kernels
from tests.cuda.emulator import Emulator
from tests.cuda.stand_in import ENTRY_WAITS, WaitsRecorded, cuda_stand_in
from tests.frontend.models import VOCABULARY, Llama, dims
from tests.training.test_padding import BATCHES

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


class Encoder(nn.Module):
    """Learned positions, attention under a mask over keys, the mean of what the mask leaves."""

    def __init__(self, p=0.0):
        super().__init__()
        self.table, self.places = nn.Embedding(VOCABULARY, 16), nn.Embedding(64, 16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 3)
        self.p = p

    def forward(self, ids, mask, labels):
        x = self.table(ids) + self.places(torch.arange(ids.shape[1]))
        heads = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        p = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(*heads, mask[:, None, None], dropout_p=p)
        x = F.gelu(x + y.transpose(1, 2).flatten(2))
        kept = mask[..., None].to(x.dtype)
        return F.cross_entropy(self.out((x * kept).sum(1) / kept.sum(1)), labels)


class Parts(nn.Module):
    """Causal; reads the positions but the last, the first, and the last that has a label."""

    def __init__(self):
        super().__init__()
        self.table, self.qkv = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 48)
        self.out = nn.Linear(16, VOCABULARY)

    def forward(self, ids, labels):
        x = self.table(ids)
        heads = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        counts = (labels != -100).to(torch.int32)
        last = (counts * torch.arange(ids.shape[1], dtype=torch.int32)).argmax(-1)
        classes, logits = labels[:, 0].clamp(0, VOCABULARY - 1), self.out(x)
        shifted = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        first = F.cross_entropy(self.out(x[:, 0]), classes)
        rows = torch.arange(ids.shape[0])
        value = logits.sum(-1)[rows, last].tanh().mean()
        return shifted + first + F.cross_entropy(logits[rows, last], classes) + value


def masked_batch(lengths, seed=0):
    """Ids, a mask with padding on the left of every second text, and a label for each text."""
    generator = torch.Generator().manual_seed(seed)
    shape = len(lengths), max(lengths)
    ids = torch.randint(0, VOCABULARY, shape, generator=generator)
    mask = torch.zeros(shape, dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask[row, slice(-length, None) if row % 2 else slice(length)] = True
    return ids, mask, torch.randint(0, 3, shape[:1], generator=generator)


def llama_step(model, target, least=1, **options):
    b, s = dims(least, 48)
    shape = {0: b, 1: s}
    batch = BATCHES["lengths"]
    return relax_disc.compile(
        model, None, batch, dynamic_shapes=(shape, shape), target=target, **options
    )


def encoder_step(model, target, **options):
    b, s = Dim("b", min=1, max=64), Dim("s", min=1, max=64)
    shapes = ({0: b, 1: s}, {0: b, 1: s}, {0: b})
    batch = masked_batch([5, 3])
    return relax_disc.compile(model, None, batch, dynamic_shapes=shapes, target=target, **options)


MODELS = {
    "Llama": (lambda: Llama(whole=True), llama_step, list(BATCHES.values())),
    "parts": (
        Parts,
        functools.partial(llama_step, least=2),
        [BATCHES[name] for name in ("full", "lengths", "one label", "random")],
    ),
    "encoder": (
        Encoder,
        encoder_step,
        [masked_batch(each) for each in ([5, 3], [1], [20, 1, 9], [7, 7], [33, 2, 2, 2])],
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def both(request):
    """Gradients of each batch by the CPU and by the emulated device, and what happened there."""
    make, compile_step, batches = MODELS[request.param]
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model)
    step = compile_step(model, "llvm")
    wanted = [gradients(step, model, batch) for batch in batches]
    emulator = Emulator.load()
    emulator.take_findings()
    with cuda_stand_in(emulator), pytest.MonkeyPatch.context() as environment:
        environment.setenv("RELAX_DISC_COMPILE_CACHE", "0")
        step = compile_step(twin, cuda_target("sm_90"))
        found, events = [], []
        attention_kernels.calls.clear()
        for batch in batches:
            emulator.forget()
            emulator.seed += 1
            with WaitsRecorded(emulator):
                found.append(gradients(step, twin, batch))
            events.append(list(emulator.events))
    kernels = list(attention_kernels.calls)
    return request.param, step, wanted, found, events, kernels, emulator.take_findings()


def gradients(step, model, batch):
    model.zero_grad()
    loss = step(*batch, update=False)
    report = step.memory_report()
    assert report.peak_bytes == report.planned_peak_bytes
    return loss, {name: p.grad.clone() for name, p in model.named_parameters()}, report.shape


def test_numbers_are_those_of_the_cpu(both):
    _, step, wanted, found, _, _, findings = both
    assert not findings, "\n".join(map(str, findings))
    assert step.padding_report().is_left_out
    for (loss, right, shape), (other, gradient, same) in zip(wanted, found, strict=True):
        assert shape == same
        torch.testing.assert_close(other, loss, rtol=1e-5, atol=1e-6, equal_nan=True)
        for name, value in right.items():
            torch.testing.assert_close(gradient[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_attention_is_of_rows_unless_there_is_a_mask(both):
    name, _, _, _, _, kernels, _ = both
    form = "efficient" if name == "encoder" else "efficient packed"
    assert set(kernels) == {form, f"{form} backward"}


def test_the_number_of_rows_is_one_wait(both):
    *_, events, _, _ = both
    for each in events:
        waits = [event for event in each if event.startswith("wait")]
        assert set(waits) <= ENTRY_WAITS
        assert waits.count("wait nonzero in packing.py:place_rows") == 1
        assert "synchronise" not in each


def test_dropout_of_attention_keeps_the_padding_and_says_so():
    """The kernels that stand in draw what the CPU's draw; there padding is left out."""
    torch.manual_seed(0)
    model, batches = Encoder(0.1), [masked_batch([9, 2, 4]), masked_batch([3])]
    twin = copy.deepcopy(model)
    step, wanted = encoder_step(model, "llvm"), []
    for batch in batches:
        torch.manual_seed(7)
        wanted.append(gradients(step, model, batch))
    attention_kernels.calls.clear()
    emulator = Emulator.load()
    with cuda_stand_in(emulator), pytest.MonkeyPatch.context() as environment:
        environment.setenv("RELAX_DISC_COMPILE_CACHE", "0")
        step = encoder_step(twin, cuda_target("sm_90"))
        for batch, (loss, right, _) in zip(batches, wanted, strict=True):
            torch.manual_seed(7)
            with WaitsRecorded(emulator):
                found, gradient, _ = gradients(step, twin, batch)
            torch.testing.assert_close(found, loss, rtol=1e-5, atol=1e-6)
            for name, value in right.items():
                torch.testing.assert_close(gradient[name], value, rtol=1e-4, atol=1e-5, msg=name)
    assert set(attention_kernels.calls) == {"efficient", "efficient backward"}
    waits = {event for event in emulator.events if event.startswith("wait")}
    waits.remove("wait tolist in attention_kernels.py:_seed_of")  # the stand-in's own
    assert waits <= ENTRY_WAITS, "the state of the random operators is not read on the device"
    report = step.padding_report()
    assert not report.is_left_out
    assert "no library kernel for dropout of attention over packed" in str(report)
