"""Two batches that are joined to one, as DPO joins its pairs: rows left out change nothing."""

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

from relax_disc.frontend import capture_step
from relax_disc.frontend.padding import without_padding
from relax_disc.tir_kernels.target import resolve_target
from relax_disc.training.call.packing import place_rows
from tests.analysis.test_padding import (
    ATTENTION,
    IGNORED,
    LONGEST,
    LOSSES,
    PLAIN,
    Model,
    a_batch,
    gradients,
    least_length,
    log_probabilities,
)


class Joined(nn.Module):
    """One pass over both batches, and a loss of all sequences or of pairs."""

    def __init__(self, layers, loss):
        super().__init__()
        self.model = Model(layers, "plain" if loss == "pairs" else loss)
        self.loss = loss

    def forward(self, *halves):
        x, ids, mask, labels = (
            torch.cat(pair) for pair in zip(halves[:4], halves[4:], strict=True)
        )
        if self.loss != "pairs":
            return self.model(x, ids, mask, labels)
        x = x + self.model.table(ids)
        for layer in self.model.layers:
            x = layer(x, mask)
        logits, wanted, count = self.model.head(x)[:, :-1], labels[:, 1:], halves[0].shape[0]
        found = (log_probabilities(logits, wanted) * (wanted != IGNORED)).sum(-1)
        return -F.logsigmoid(0.1 * (found[:count] - found[count:])).mean()


@st.composite
def models(draw):
    names = st.sampled_from([*PLAIN, *[name for name in ATTENTION if "mask" in name]])
    attention = draw(st.sampled_from([*ATTENTION]))
    kind = {name for name in ATTENTION if name.split(",")[0] == attention.split(",")[0]}
    layers = draw(st.lists(names, max_size=3))
    layers = [name for name in layers if name in PLAIN or name in kind]
    return [*layers, attention], draw(st.sampled_from(["pairs", "plain", "first", *LOSSES]))


def check(layers, loss):
    torch.manual_seed(len(layers))
    model, generator = Joined(layers, loss), torch.Generator().manual_seed(0)
    least = 2 if loss == "pairs" else least_length(loss)
    shape = {0: Dim("batch", min=1, max=8), 1: Dim("length", min=least, max=LONGEST)}
    x, *rest = (n.new_zeros(3, 4, *n.shape[2:]) for n in a_batch(generator))
    example = (x.float(), *rest) * 2
    captured = capture_step(model, None, example, dynamic_shapes=((shape,) * 8,))
    (captured,) = without_padding([captured], resolve_target("llvm"))
    assert captured.packings, captured.padding
    (packing,) = captured.packings
    assert packing.times == 2
    model = model.double()
    for _ in range(3):
        one = a_batch(generator, least)
        other = [n.roll(1, 0).flip(1) for n in one]
        batch = [*one, *other]
        sizes = {"batch": one[1].shape[0], "length": one[1].shape[1]}
        places, starts = place_rows(packing, dict(enumerate(batch)), sizes)
        count = int(starts[-1])
        assert len(starts) == 2 * sizes["batch"] + 1
        needed = torch.zeros(2 * sizes["batch"], sizes["length"], dtype=torch.bool)
        needed[places[1, :count], places[2, :count]] = True
        wanted = gradients(model, batch)
        if wanted[0].isnan():
            continue  # nothing counts
        for half, rows in ((0, needed[: sizes["batch"]]), (4, needed[sizes["batch"] :])):
            x = batch[half]
            batch[half] = torch.where(rows[..., None], x, 30 * torch.randn_like(x))
            batch[half + 1] = torch.where(rows, batch[half + 1], (batch[half + 1] + 3) % 11)
        for a, b in zip(wanted, gradients(model, batch), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@seed(0)
@settings(max_examples=5, deadline=None)
@given(models())
def test_rows_that_are_left_out_change_nothing(drawn):
    check(*drawn)


@pytest.mark.slow
@seed(1)
@settings(max_examples=100, deadline=None)
@given(models())
def test_a_hundred_times(drawn):
    check(*drawn)
