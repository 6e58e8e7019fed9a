"""Random encoders and decoders: rows that are left out of either side change nothing.

As `test_padding`, of whose layers these are made; a decoder's layers may read what the encoder has
made, by attention with and without its mask.
"""

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
from relax_disc.transform.padding.remove_padding import MISFIT
from tests.analysis.test_padding import (
    CLASSES,
    IGNORED,
    LAYERS,
    LONGEST,
    MIXING,
    PLAIN,
    WIDTH,
    Attention,
    gradients,
)


class Cross(nn.Module):
    """Attention of the target to the source, with the mask of that or without."""

    def __init__(self, masked):
        super().__init__()
        self.masked = masked
        self.queries, self.keys = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x, source, mask):
        b, t, _ = x.shape

        def heads(y):
            return y.view(b, y.shape[1], 2, WIDTH // 2).transpose(1, 2)

        k, v = (heads(part) for part in self.keys(source).chunk(2, -1))
        seen = mask[:, None, None, :].bool() if self.masked else None
        out = F.scaled_dot_product_attention(heads(self.queries(x)), k, v, attn_mask=seen)
        return x + out.transpose(1, 2).reshape(b, t, WIDTH)


class Biased(Attention):
    """Causal attention with a trained bias for each head and distance, as T5 has."""

    def __init__(self):
        super().__init__(True, False)
        self.bias = nn.Embedding(LONGEST, 2)

    def forward(self, x, mask):
        b, t, _ = x.shape
        parts = self.inner(x).chunk(3, -1)
        q, k, v = (part.view(b, t, 2, WIDTH // 2).transpose(1, 2) for part in parts)
        places = torch.arange(t)
        distance = places[:, None] - places[None, :]
        bias = self.bias(distance.abs()).permute(2, 0, 1)[None]
        seen = (places[None, :] <= places[:, None])[None, None]
        bias = torch.where(seen, bias, torch.finfo(torch.float32).min)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return x + out.transpose(1, 2).reshape(b, t, WIDTH)


CROSS = {"masked cross": lambda: Cross(True), "cross to all": lambda: Cross(False)}
MAKE = {**LAYERS, **CROSS, "biased": Biased}


class Translator(nn.Module):
    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder = nn.ModuleList(MAKE[name]() for name in encoder)
        self.decoder = nn.ModuleList(MAKE[name]() for name in decoder)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, source, mask, x, labels):
        for layer in self.encoder:
            source = layer(source, mask)
        for layer in self.decoder:
            # The target has no mask of its own.
            x = layer(x, source, mask) if isinstance(layer, Cross) else layer(x, labels)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


@st.composite
def translators(draw):
    inner = st.sampled_from([*PLAIN] * 3 + ["masked"] * 12 + [*MIXING])
    outer = st.sampled_from([*PLAIN] * 3 + ["causal", "biased"] * 6 + [*MIXING][:-1])
    crossing = draw(st.sampled_from(["masked cross"] * 4 + ["cross to all"]))
    encoder = draw(st.lists(inner, min_size=1, max_size=3))
    before, after = (draw(st.lists(outer, max_size=2)) for _ in range(2))
    return encoder, [*before, crossing, *after]


def a_batch(generator):
    b, s, t = (int(torch.randint(1, n, (), generator=generator)) for n in (5, *[LONGEST + 1] * 2))
    mask = (torch.rand(b, s, generator=generator) < 0.6).long()
    hidden = torch.rand(b, t, generator=generator) < 0.6
    labels = torch.randint(0, CLASSES, (b, t), generator=generator).masked_fill(hidden, IGNORED)
    source, x = (torch.randn(b, n, WIDTH, generator=generator, dtype=torch.float64) for n in (s, t))
    return source, mask, x, labels


def capture(encoder, decoder):
    """Capture a translator and leave its padding out."""
    torch.manual_seed(len(encoder) + 5 * len(decoder))
    model = Translator(encoder, decoder)
    batch, source, target = (
        Dim(name, min=1, max=most)
        for name, most in (("batch", 16), ("source", LONGEST), ("target", LONGEST))
    )
    example = [torch.zeros(3, 4, WIDTH), torch.ones(3, 4, dtype=torch.long)]
    example += [torch.zeros(3, 6, WIDTH), torch.zeros(3, 6, dtype=torch.long)]
    shapes = ({0: batch, 1: source},) * 2 + ({0: batch, 1: target},) * 2
    captured = capture_step(model, None, tuple(example), dynamic_shapes=shapes)
    (captured,) = without_padding([captured], resolve_target("llvm"))
    return model.double(), captured


def kept(packing, batch, sizes):
    """Say of each position of a side whether it is needed."""
    places, starts = place_rows(packing, dict(enumerate(batch)), sizes)
    needed = torch.zeros(sizes[packing.batch], sizes[packing.length], dtype=torch.bool)
    needed[places[1, : int(starts[-1])], places[2, : int(starts[-1])]] = True
    return needed


def check(encoder, decoder):
    """Change what the positions hold that are left out, and compare loss and gradients."""
    model, captured = capture(encoder, decoder)
    causal = any(name in ("causal", "biased") for name in decoder)
    mixes = set(encoder) & {*MIXING} or set(decoder) & {*MIXING}
    if not mixes and causal and "masked cross" in decoder:
        assert len(captured.packings) == 2, captured.padding
        assert not any(packing.counted is True for packing in captured.packings)
    if not captured.packings:
        assert captured.padding
        assert not any(each.reason.startswith(MISFIT) for each in captured.padding)
        return
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        batch = a_batch(generator)
        source, mask, x, labels = batch
        if not (labels != IGNORED).any():
            continue  # the loss is not a number
        sizes = {"batch": x.shape[0], "source": source.shape[1], "target": x.shape[1]}
        needed = {p.length: kept(p, batch, sizes) for p in captured.packings}
        wanted = gradients(model, batch)
        other = [
            torch.where(needed[side][..., None], states, 30 * torch.randn_like(states))
            for side, states in (("source", source), ("target", x))
        ]
        found = gradients(model, (other[0], mask, other[1], labels))
        for a, b in zip(wanted, found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@seed(0)
@settings(max_examples=6, deadline=None)
@given(translators())
def test_rows_that_are_left_out_change_nothing(drawn):
    check(*drawn)


@pytest.mark.slow
@seed(1)
@settings(max_examples=300, deadline=None)
@given(translators())
def test_three_hundred_times(drawn):
    check(*drawn)


def test_a_mask_and_labels_leave_rows_of_both_sides_out():
    encoder, decoder = ["masked", "gelu"], ["biased", "masked cross", "position"]
    check(encoder, decoder)
    _, captured = capture(encoder, decoder)
    assert [packing.tokens for packing in captured.packings] == ["source_tokens", "target_tokens"]
    assert [packing.is_prefix for packing in captured.packings] == [False, True]


def test_attention_to_all_of_the_source_keeps_it():
    _, captured = capture(["masked"], ["causal", "cross to all"])
    batch = a_batch(torch.Generator().manual_seed(0))
    sizes = {"batch": batch[0].shape[0], "source": batch[0].shape[1], "target": batch[2].shape[1]}
    assert kept(captured.packings[0], batch, sizes).all()
    assert any(each.reason.startswith("source: ") for each in captured.padding)
