"""Attention and its gradients against the matrices themselves in float64."""

import math

import numpy as np
import pytest
import torch
import tvm_ffi
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_disc.ops.philox import MANTISSA_BITS
from tests.philox import philox
from tests.thread_count import threads
from tests.vm_builtins.library_calls import LIBRARIES, call

RNG, STREAM = (3 << 40 | 5, 7), 11


def drop_factors(p, *shape):
    """What dropout multiplies weights of a shape by, drawn by the reference of random operators."""
    words = philox(*RNG, STREAM, math.prod(shape)) >> (32 - MANTISSA_BITS)
    kept = words.to(torch.float32) * 2.0**-MANTISSA_BITS >= p
    return kept.reshape(shape).numpy() / (1 - p)


def exact_attention(q, k, v, grad, mask, scale, is_causal, p=0.0, trained=False):
    """Out, lse, dq, dk, dv of arrays [B, H, T, D] in float64; the mask's gradient, if trained."""
    q, k, v, grad = (x.astype("float64") for x in (q, k, v, grad))
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat(group, 1) for x in (k, v))
    scores = scale * q @ keys.swapaxes(2, 3)
    factors = drop_factors(p, *scores.shape) if p else 1.0
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    if is_causal:
        scores = np.where(np.tri(*scores.shape[2:]) > 0, scores, -np.inf)
    top = scores.max(-1, keepdims=True, initial=-1e300)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = np.where(total > 0, top + np.log(total), -np.inf)
        shares = np.where(total > 0, weights / total, 0)
    out = (shares * factors) @ values
    dp = grad @ values.swapaxes(2, 3) * factors
    dmask = shares * (dp - (grad * out).sum(-1, keepdims=True))
    ds = dmask * scale
    dk, dv = (
        x.reshape(*k.shape[:2], group, k.shape[2], -1).sum(2)
        for x in (ds.swapaxes(2, 3) @ q, (shares * factors).swapaxes(2, 3) @ grad)
    )
    return [out, lse[..., 0], ds @ keys, dk, dv, *([dmask] if trained else [])]


LENGTH_FIRST = 1 << 8  # what a layout says of the first tensor


def stored(array, bit):
    axes = {0: (0, 1, 2, 3), 1: (0, 2, 1, 3), LENGTH_FIRST: (2, 0, 1, 3)}[bit]
    return np.ascontiguousarray(array.transpose(axes))


def restored(array, bit):
    axes = {0: (0, 1, 2, 3), 1: (0, 2, 1, 3), LENGTH_FIRST: (1, 2, 0, 3)}[bit]
    return array.transpose(axes)


def dropped(p, *length):
    """Suffix, tensors and numbers of a form with dropout; `length` is that of a padded batch."""
    return ("_dropout", [np.array(RNG)], [p, STREAM, *length]) if p else ("", [], [])


def attend(kind, q, k, v, grad, mask, scale, is_causal, bits, p=0.0, trained=False):
    """Run both kernels; `bits` say in which order tensors are stored."""
    drop, states, numbers = dropped(p)
    masks = [*([] if mask is None else [mask]), *states]
    suffix = ("" if mask is None else "_masked") + drop
    dtype = q.dtype
    out = stored(np.full((*q.shape[:3], v.shape[3]), np.nan, dtype), bits[3])
    lse = np.full(q.shape[:3], np.nan, dtype)
    operands = [stored(x, bit) for x, bit in zip((q, k, v), bits[:3], strict=True)]
    layout = sum(bit << i for i, bit in enumerate(bits[:4]))
    options = (scale, int(is_causal))
    call(kind, f"attention{suffix}", *operands, *masks, *options, layout, *numbers, out, lse)
    grads = [
        stored(np.full(x.shape, np.nan, dtype), bit)
        for x, bit in zip((q, k, v), bits[5:8], strict=True)
    ]
    if trained:
        suffix = suffix.replace("_masked", "_trained")
        grads.append(np.full_like(mask, np.nan))
    order = [bits[4], *bits[:4], *bits[5:8]]
    layout = sum(bit << i for i, bit in enumerate(order))
    call(
        kind,
        f"attention_backward{suffix}",
        *(stored(grad, bits[4]), *operands, out, lse, *masks, *options, layout, *numbers, *grads),
    )
    return [
        restored(out, bits[3]),
        lse,
        *(restored(x, bit) for x, bit in zip(grads, [*bits[5:8], 0], strict=False)),
    ]


def assert_attention(results, exact, dtype, factor=1.0):
    tolerance = factor * (4e-6 if dtype == "float32" else 1e-13)
    for ours, truth in zip(results, exact, strict=True):
        finite = np.isfinite(truth)
        np.testing.assert_array_equal(np.isfinite(ours), finite)
        size = np.abs(truth[finite]).max(initial=1)
        np.testing.assert_allclose(
            ours[finite], truth[finite], rtol=0, atol=tolerance * max(size, 1)
        )


lengths = st.one_of(st.integers(1, 40), st.sampled_from([56, 57, 129, 193, 385]))


@pytest.mark.parametrize("kind", LIBRARIES)
@given(data=st.data())
@settings(max_examples=80)
def test_attention_and_gradients(kind, data):
    draw = data.draw
    batch, key_heads, group = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 2)),
        draw(st.sampled_from([1, 1, 3])),
    )
    rows, columns = draw(lengths), draw(lengths)
    dim, value_dim = (draw(st.sampled_from([1, 8, 16, 20, 64])) for _ in range(2))
    heads, dtype = key_heads * group, draw(st.sampled_from(["float32", "float64"]))
    generator = np.random.default_rng(draw(st.integers(0, 99)))

    def normal(*shape):
        return generator.standard_normal(shape).astype(dtype)

    mask_kind = draw(st.sampled_from(["none", "none", "bool", "added"]))
    mask = None
    if mask_kind != "none":
        shape = [draw(st.sampled_from([1, n])) for n in (batch, heads, rows, columns)]
        mask = normal(*shape)
        mask = mask > -0.5 if mask_kind == "bool" else mask
    arguments = (
        normal(batch, heads, rows, dim),
        normal(batch, key_heads, columns, dim),
        normal(batch, key_heads, columns, value_dim),
        normal(batch, heads, rows, value_dim),
        mask,
        1 / np.sqrt(dim),
        draw(st.booleans()),
    )
    bits = draw(st.lists(st.sampled_from([0, 1, LENGTH_FIRST]), min_size=8, max_size=8))
    p = draw(st.sampled_from([0.0, 0.0, 0.1, 0.75])) if kind == "native" else 0.0
    trained = (
        kind == "native" and mask_kind == "added" and mask.size == batch * heads * rows * columns
    )
    rest = (p, trained)
    exact = exact_attention(*arguments, *rest)
    assert_attention(attend(kind, *arguments, bits, *rest), exact, dtype)


@pytest.mark.parametrize("kind", LIBRARIES)
@pytest.mark.parametrize(("rows", "columns"), [(900, 900), (500, 900), (900, 100)])
def test_long_sequences(kind, rows, columns):
    generator = np.random.default_rng(0)
    q, grad = (generator.standard_normal((1, 2, rows, 16)).astype("float32") for _ in range(2))
    k, v = (generator.standard_normal((1, 1, columns, 16)).astype("float32") for _ in range(2))
    arguments = (q, k, v, grad, None, 0.25, True)
    results = attend(kind, *arguments, [0] * 8)
    assert_attention(results, exact_attention(*arguments), "float32", factor=4)


@pytest.mark.parametrize("kind", LIBRARIES)
def test_large_scores_do_not_overflow(kind):
    generator = np.random.default_rng(0)
    q, k, v, grad = (generator.standard_normal((1, 1, 50, 8)).astype("float32") for _ in range(4))
    arguments = (q * 30, k * 30, v, grad, None, 1.0, False)
    results, exact = attend(kind, *arguments, [0] * 8), exact_attention(*arguments)
    np.testing.assert_allclose(results[0], exact[0], atol=2e-3)
    assert all(np.isfinite(x).all() for x in results)


@pytest.mark.parametrize("kind", LIBRARIES)
def test_rows_that_see_nothing_are_zero(kind):
    generator = np.random.default_rng(0)
    q, k, v, grad = (generator.standard_normal((1, 1, 20, 8)).astype("float32") for _ in range(4))
    mask = np.ones((1, 1, 20, 20), bool)
    mask[0, 0, 3] = False
    out, lse, dq, dk, dv = attend(kind, q, k, v, grad, mask, 0.5, True, [0] * 8)
    assert (out[0, 0, 3] == 0).all() and lse[0, 0, 3] == -np.inf and (dq[0, 0, 3] == 0).all()
    assert all(np.isfinite(x).all() for x in (out, dq, dk, dv))


@pytest.mark.parametrize(
    ("kind", "trained"), [*((kind, False) for kind in LIBRARIES), ("native", True)]
)
def test_rows_that_numbers_hide_take_the_mean_of_what_they_hide_least(kind, trained):
    """As where one mask hides the future, another padding, and both are added: -inf in places."""
    generator = np.random.default_rng(0)
    q, k, v, grad = (generator.standard_normal((2, 3, 70, 8)).astype("float32") for _ in range(4))
    mask = generator.choice([0.0, -1.5], (2, 3, 70, 70)).astype("float32")
    mask[:, :, 3] = mask[0, :, 60] = np.finfo("float32").min
    mask[:, :, 3, 5:65:2] = -np.inf
    mask[:, 0, 60, :50] = np.finfo("float32").min / 8
    options = mask, 0.5, False
    exact = exact_attention(*(x.astype("float64") for x in (q, k, v, grad)), *options, 0.0, trained)
    results = attend(kind, q, k, v, grad, *options, [0] * 8, trained=trained)
    del exact[1], results[1]  # the log of what vanishes
    assert_attention(results, exact, "float32")


def test_not_a_number_is_not_hidden():
    ones = np.ones((1, 1, 20, 8), "float32")
    q = ones.copy()
    q[0, 0, 5, 0] = np.nan
    out, lse, *_ = attend("native", q, ones, ones, ones, None, 1.0, True, [0] * 8)
    assert np.isnan(out[0, 0, 5]).all() and np.isnan(lse[0, 0, 5])
    assert np.isfinite(np.delete(out, 5, axis=2)).all()


def test_results_do_not_depend_on_threads():
    generator = np.random.default_rng(0)
    q, grad = (generator.standard_normal((2, 4, 150, 32)).astype("float32") for _ in range(2))
    k, v = (generator.standard_normal((2, 2, 150, 32)).astype("float32") for _ in range(2))
    runs = []
    for count in (1, 5, 2, 2):
        with threads(count):
            runs.append(attend("native", q, k, v, grad, None, 0.2, True, [1] * 8))
    for run in runs[1:]:
        for one, other in zip(runs[0], run, strict=True):
            np.testing.assert_array_equal(one, other)


def test_scratch_is_bounded_whatever_the_length():
    held = tvm_ffi.get_global_func("relax_disc.cpu.own_workspace_bytes")
    generator = np.random.default_rng(0)
    sizes = []
    for length in (600, 2000):
        q, k, v, grad = (
            generator.standard_normal((1, 2, length, 32)).astype("float32") for _ in range(4)
        )
        attend("native", q, k, v, grad, None, 0.2, True, [0] * 8)
        sizes.append(held())
    assert sizes[0] == sizes[1] <= 32 << 20


def packed_rows(kept, filling):
    """Sequence and position of the rows kept `[B, T]` and of `filling` more; their tables."""
    sequence, position = (np.append(x, np.zeros(filling, "int64")) for x in kept.nonzero())
    places = np.stack([sequence * kept.shape[1] + position, sequence, position])
    return sequence, position, [np.append(0, kept.sum(1).cumsum()), places]


def attend_packed(kept, seen, filling, q, k, v, grad, mask, scale, is_causal, bits, p, trained):
    """Run both kernels on the queries kept `[B, Tq]` and the keys seen `[B, Tk]`."""
    *queries, where = packed_rows(kept, filling)
    *keys, where_keys = packed_rows(seen, filling)
    q, grad, k, v = (
        np.ascontiguousarray(x[rows[0], :, rows[1]].transpose(1, 0, 2)[None])
        for x, rows in ((q, queries), (grad, queries), (k, keys), (v, keys))
    )
    drop, states, numbers = dropped(p, kept.shape[1], seen.shape[1])
    rest = [*where, *where_keys, *([] if mask is None else [mask]), *states]
    suffix = ("" if mask is None else "_masked") + drop
    out = stored(np.full((*q.shape[:3], v.shape[3]), np.nan, q.dtype), bits[3])
    lse = np.full(q.shape[:3], np.nan, q.dtype)
    operands = [stored(x, bit) for x, bit in zip((q, k, v), bits[:3], strict=True)]
    options = (scale, int(is_causal))
    layout = sum(bit << i for i, bit in enumerate(bits[:4]))
    numbers = [layout, *numbers]
    call("native", f"packed_attention{suffix}", *operands, *rest, *options, *numbers, out, lse)
    grads = [
        stored(np.full(x.shape, np.nan, q.dtype), bit)
        for x, bit in zip((q, k, v), bits[5:8], strict=True)
    ]
    if trained:
        suffix = suffix.replace("_masked", "_trained")
        grads.append(np.full_like(mask, np.nan))
    numbers[0] = sum(bit << i for i, bit in enumerate([bits[4], *bits[:4], *bits[5:8]]))
    call(
        "native",
        f"packed_attention_backward{suffix}",
        *(stored(grad, bits[4]), *operands, out, lse, *rest, *options, *numbers, *grads),
    )
    found = [restored(out, bits[3]), lse]
    return found + [restored(x, bit) for x, bit in zip(grads, [*bits[5:8], 0], strict=False)]


@given(data=st.data())
@settings(max_examples=settings().max_examples // 3)
def test_packed_rows_see_each_other_as_padded_ones_do(data):
    draw = data.draw
    batch, key_heads, group, length = (
        draw(st.integers(1, 4)),
        draw(st.integers(1, 2)),
        draw(st.sampled_from([1, 1, 3])),
        draw(lengths),
    )
    is_cross = draw(st.booleans())  # keys are of other sequences than queries
    columns = draw(lengths) if is_cross else length
    dim, value_dim = (draw(st.sampled_from([1, 8, 20, 64])) for _ in range(2))
    heads, dtype = key_heads * group, draw(st.sampled_from(["float32", "float64"]))
    generator = np.random.default_rng(draw(st.integers(0, 99)))

    def normal(*shape):
        return generator.standard_normal(shape).astype(dtype)

    def some(width):
        chosen = generator.random((batch, width)) < draw(st.sampled_from([0.0, 0.3, 0.8, 1.0]))
        chosen[generator.integers(batch)] = draw(st.booleans())
        return chosen

    kept = some(length)
    shown = some(columns) if is_cross else kept
    mask_kind = draw(st.sampled_from(["none", "bool", "added", "trained"]))
    mask, trained = None, mask_kind == "trained"
    if mask_kind != "none":
        full = batch, heads, length, columns
        mask = normal(*(full if trained else (draw(st.sampled_from([1, n])) for n in full)))
        mask = mask > -0.5 if mask_kind == "bool" else mask
    q, grad = normal(batch, heads, length, dim), normal(batch, heads, length, value_dim)
    k, v = normal(batch, key_heads, columns, dim), normal(batch, key_heads, columns, value_dim)
    options = (1 / np.sqrt(dim), not is_cross and draw(st.booleans()))
    seen = shown[:, None, None, :]
    if mask is not None:
        seen = seen & mask if mask.dtype == bool else np.where(seen, mask, -np.inf)
    rest = (draw(st.sampled_from([0.0, 0.1, 0.75])), trained)
    exact = exact_attention(q, k, v, grad * kept[:, None, :, None], seen, *options, *rest)
    filling = draw(st.integers(0, 3))
    bits = draw(st.lists(st.sampled_from([0, 1, LENGTH_FIRST]), min_size=8, max_size=8))
    results = attend_packed(kept, shown, filling, q, k, v, grad, mask, *options, bits, *rest)
    rows = [kept, kept, kept, shown, shown]
    packed = [
        x[each.nonzero()[0], :, each.nonzero()[1]].swapaxes(0, 1)[None]
        for x, each in zip(exact, rows, strict=False)
    ]
    computed = [x[:, :, : int(each.sum())] for x, each in zip(results, rows, strict=False)]
    assert_attention([*computed, *results[5:]], [*packed, *exact[5:]], dtype)
    for k, (x, each) in enumerate(zip(results, rows, strict=False)):
        assert (x[:, :, int(each.sum()) :] == (-np.inf if k == 1 else 0)).all()


def test_a_trained_mask_has_all_axes_of_the_scores():
    ones, mask = np.ones((2, 1, 4, 8), "float32"), np.ones((1, 1, 4, 4), "float32")
    arguments = ones, ones, ones, ones, mask, 1.0, False, [0] * 8
    with pytest.raises(ValueError, match="have a batch of 2 and 1 heads"):
        attend("native", *arguments, trained=True)


def test_packed_rows_must_be_inside():
    ones, starts = np.ones((1, 1, 4, 8), "float32"), np.array([0, 5])
    out, lse = np.ones_like(ones), np.ones((1, 1, 4), "float32")
    with pytest.raises(ValueError, match="sequence 0 is rows 0 to 5 of 4"):
        places = np.zeros((3, 4), "int64")
        where = (starts, places, starts, places)
        call("native", "packed_attention", ones, ones, ones, *where, 1.0, 0, 0, out, lse)
