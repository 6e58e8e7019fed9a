"""The head's variants with z-loss against float64.

`tests/transform/test_chunk_vocabulary_head.py` has the variants without.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import tvm_ffi
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from relax_disc.ops.vocabulary_head import workspace_columns
from relax_disc.vm_builtins.libraries.install import install
from tests.thread_count import threads

install("llvm")
SUFFIXES = ["", "_frozen", "_bias", "_bias_frozen"]


@dataclass(frozen=True, slots=True)
class Case:
    """Operands of a head; `factor` is taken by the variants with z-loss alone."""

    x: np.ndarray
    weight: np.ndarray
    target: np.ndarray
    grad: np.ndarray
    bias: np.ndarray
    factor: np.ndarray
    options: tuple[int, float, int]
    chunk: int


def case(rows, width, classes, chunk, *, ignored, ignore_index, smoothing, mean, seed):
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, width), "float32")
    weight = random.standard_normal((classes, width), "float32")
    weight *= np.float32(min(1.0, 2 * width**-0.5))  # logits of a usual size
    target = random.integers(0, classes, rows)
    target[random.random(rows) < ignored] = ignore_index
    factor = random.standard_normal(rows, "float32") / 10  # to the scale of the loss
    factor[random.random(rows) < 0.4] = 0
    bias, grad = random.standard_normal(classes, "float32"), np.array(0.5, "float32")
    options = (ignore_index, smoothing, int(mean))
    return Case(x, weight, target, grad, bias, factor, options, chunk)


def run(name, c):
    """Results of a variant by name."""
    rows, width = c.x.shape
    classes = c.weight.shape[0]
    columns = workspace_columns(classes, width)
    shapes = {"loss": (), "grad_x": (rows, width)}
    inputs = [c.x, c.weight, c.target, c.grad]
    if "_bias" in name:
        inputs.append(c.bias)
        shapes["grad_bias"] = (classes,)
    if "_z" in name:
        inputs.append(c.factor)
        shapes["lse"] = (rows,)
    if name.endswith("_lse"):
        shapes["row_lse"] = (rows,)
    elif "_frozen" not in name:
        shapes["grad_weight"] = (classes, width)
    shapes["workspace"] = (-(-c.chunk // 16) * 16, columns)
    kinds = {"row_lse": "float64"}
    results = {k: np.full(shape, np.nan, kinds.get(k, "float32")) for k, shape in shapes.items()}
    function = tvm_ffi.get_global_func(f"relax_disc.cpu.{name}")
    tensors = map(tvm_ffi.from_dlpack, (*inputs, *results.values()))
    first = [next(tensors) for _ in inputs]
    function(*first, *c.options, *tensors)
    del results["workspace"]
    return results


def reference(name, c):
    """The same by automatic differentiation in float64."""
    ignore_index, smoothing, mean = c.options
    x, weight, bias = (torch.tensor(a, dtype=torch.float64) for a in (c.x, c.weight, c.bias))
    wanted = {"grad_x": x, "grad_bias": bias, "grad_weight": weight}
    for tensor in wanted.values():
        tensor.requires_grad_()
    logits = x @ weight.T + (bias if "_bias" in name else 0)
    loss = nn.functional.cross_entropy(
        logits,
        torch.from_numpy(c.target),
        ignore_index=ignore_index,
        label_smoothing=smoothing,
        reduction="mean" if mean else "sum",
    )
    lse, factor = logits.logsumexp(1), torch.from_numpy(c.factor)
    total = (factor * lse.square()).sum() / 2
    if (c.target != ignore_index).any():  # else the loss may be 0 / 0, with no gradient
        total = total + loss * float(c.grad)
    total.backward()
    computed = (c.target != ignore_index) | (c.factor != 0)
    found = {"loss": loss.detach().numpy(), "lse": np.where(computed, lse.detach(), 0)}
    return found | {key: np.asarray(tensor.grad) for key, tensor in wanted.items()}


def assert_near(found, expected, tolerance):
    for key, mine in found.items():
        theirs = expected[key]
        scale = np.abs(theirs).max(initial=1.0, where=np.isfinite(theirs))
        np.testing.assert_allclose(
            mine / scale, theirs / scale, rtol=10 * tolerance, atol=tolerance, err_msg=key
        )


@given(
    rows=st.one_of(st.just(1), st.integers(1, 90)),
    width=st.one_of(st.integers(1, 70), st.sampled_from([400, 1024])),
    classes=st.one_of(st.integers(2, 70), st.integers(330, 700)),
    chunk=st.integers(1, 100),
    ignored=st.sampled_from([0.0, 0.5, 1.0]),
    is_class=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.1]),
    mean=st.booleans(),
    suffix=st.sampled_from(SUFFIXES),
    seed=st.integers(0, 1000),
)
def test_agrees_with_float64(
    rows, width, classes, chunk, ignored, is_class, smoothing, mean, suffix, seed
):
    """Ignored rows have z-loss alone, whether or not the index ignored is a class."""
    c = case(
        rows,
        width,
        classes,
        chunk,
        ignored=ignored,
        ignore_index=classes // 2 if is_class else -100,
        smoothing=smoothing,
        mean=mean,
        seed=seed,
    )
    name = "vocabulary_head" + suffix.replace("_frozen", "") + "_z"
    name += "_frozen" * suffix.endswith("_frozen")
    expected = reference(name, c)
    assert_near(run(name, c), expected, 2e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignore_index", [-100, 3])
def test_a_mean_over_no_row_leaves_the_z_loss(smoothing, ignore_index):
    options = {"ignored": 1, "ignore_index": ignore_index, "smoothing": smoothing, "mean": True}
    c = case(40, 30, 400, 16, **options, seed=2)
    found = run("vocabulary_head_bias_z", c)
    assert np.isnan(found["loss"])
    assert_near(found, reference("vocabulary_head_bias_z", c), 2e-6)
    untouched = c.factor == 0
    assert untouched.any() and not found["grad_x"][untouched].any()
    assert not found["lse"][untouched].any() and found["lse"][~untouched].all()


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_factors_of_zero_do_not_change_a_bit(suffix, smoothing):
    for ignored, ignore_index in ((0.0, -100), (0.4, -100), (0.4, 7), (1.0, -100)):
        options = {"ignored": ignored, "ignore_index": ignore_index, "smoothing": smoothing}
        c = case(70, 50, 700, 32, **options, mean=True, seed=3)
        c.factor[:] = 0
        plain = run(f"vocabulary_head{suffix}", c)
        bias, frozen = "_bias" * ("bias" in suffix), "_frozen" * ("frozen" in suffix)
        with_lse = run(f"vocabulary_head{bias}_z{frozen}", c)
        assert with_lse.keys() - plain.keys() == {"lse"}
        for key, value in plain.items():
            assert value.tobytes() == with_lse[key].tobytes(), key


@pytest.mark.parametrize("form", ["", "_bias", "_z", "_bias_z"])
@pytest.mark.parametrize(("smoothing", "ignored", "ignore_index"), [(0.0, 0.4, 5), (0.1, 0, -100)])
def test_rows_of_the_weight_made_later_are_the_same_bits(form, smoothing, ignored, ignore_index):
    options = {"ignored": ignored, "ignore_index": ignore_index, "smoothing": smoothing}
    c = case(70, 50, 1000, 32, **options, mean=True, seed=6)
    whole, kept = run(f"vocabulary_head{form}", c), run(f"vocabulary_head{form}_lse", c)
    lse = kept.pop("row_lse")
    gradient = whole.pop("grad_weight")
    for key, value in whole.items():
        assert value.tobytes() == kept[key].tobytes(), key
    extra = [*([c.bias] if "_bias" in form else []), *([c.factor] if "_z" in form else [])]
    function = tvm_ffi.get_global_func(f"relax_disc.cpu.vocabulary_head_weight{form}")
    for begin, end in ((0, 336), (336, 1000)):
        weight = np.ascontiguousarray(c.weight[begin:end])
        inputs = [c.x, weight, c.target, c.grad, *extra, lse]
        rows = np.full(weight.shape, np.nan, "float32")
        scratch = np.full((32, workspace_columns(end - begin, 50)), np.nan, "float32")
        tensors = [tvm_ffi.from_dlpack(each) for each in (*inputs, rows, scratch)]
        function(*tensors[:-2], *c.options, begin, 1000, *tensors[-2:])
        assert rows.tobytes() == gradient[begin:end].tobytes()
    with pytest.raises(ValueError, match="begins no block"):
        function(*tensors[:-2], *c.options, 335, 1000, *tensors[-2:])


def test_threads_do_not_change_a_bit():
    options = {"ignored": 0.4, "ignore_index": 5, "smoothing": 0.1, "mean": True}
    c = case(70, 48, 1000, 32, **options, seed=4)
    found = []
    for count in (1, 2, 5):
        with threads(count):
            found.append(run("vocabulary_head_bias_z", c))
    for others in found[1:]:
        for key, value in found[0].items():
            np.testing.assert_array_equal(value, others[key], err_msg=key)


def test_refuses_operands_that_do_not_fit():
    c = case(9, 4, 6, 16, ignored=0, ignore_index=-100, smoothing=0.0, mean=True, seed=5)
    c.target[2] = 6
    with pytest.raises(ValueError, match=r"label 6 of row 2 is outside 0 .. 5"):
        run("vocabulary_head_z", c)
    c.target[2] = 0
    short = Case(c.x, c.weight, c.target, c.grad, c.bias, c.factor[:8], c.options, c.chunk)
    with pytest.raises(ValueError, match="argument 4 has 8 elements, expected 9"):
        run("vocabulary_head_z", short)
    function = tvm_ffi.get_global_func("relax_disc.cpu.vocabulary_head_z")
    with pytest.raises(TypeError, match="takes 13 arguments, got 1"):
        function(tvm_ffi.from_dlpack(c.x))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="others multiply them at full speed")
def test_subnormal_gradients_are_not_multiplied():
    """They come from classes that the model rules out, and take a hundred times as long."""
    c = case(40, 16, 700, 48, ignored=0.0, ignore_index=-100, smoothing=0.0, mean=True, seed=0)
    c.x[:, 0], c.weight[:, 0] = 1.0, -86.5  # exp(-86.5) / 40 has no exponent of its own
    c.target[:], c.weight[3, 0], c.factor[:] = 3, 0.0, 0.0
    found = run("vocabulary_head", c)
    assert_near(found, reference("vocabulary_head", c), 1e-6)
    for name in ("grad_x", "grad_weight"):
        sizes = np.abs(found[name])
        assert ((sizes == 0) | (sizes >= np.finfo("float32").tiny)).all()
