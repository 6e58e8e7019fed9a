"""Attention for CUDA: each of PyTorch's kernels, by stand-ins, against the native library."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import tvm_ffi
from hypothesis import given, settings
from hypothesis import strategies as st

import relax_disc
from relax_disc.ops.attention import device_memory
from relax_disc.tir_kernels.target import cuda_target
from relax_disc.training.call.packing import rounded
from relax_disc.vm_builtins.libraries import cuda_library
from relax_disc.vm_builtins.libraries.cuda_attention_kernels import Problem
from relax_disc.vm_builtins.libraries.install import install
from tests.cuda import attention_kernels
from tests.cuda.emulator import Emulator
from tests.cuda.stand_in import cuda_stand_in
from tests.frontend.capture.test_written_attention import LEAST, Written, added, example, shapes

install("llvm")
LAYOUTS = {0: (0, 1, 2, 3), 1: (0, 2, 1, 3), 256: (2, 0, 1, 3)}
"""How `[batch, heads, length, dim]` is stored, by the bits of the first operand."""


def run_native(name, *arguments):
    function = tvm_ffi.get_global_func(f"relax_disc.cpu.{name}")
    function(*(_runtime(x) for x in arguments))


def run_cuda(name, *arguments, major=9):
    attention_kernels.calls.clear()
    with torch.no_grad(), attention_kernels.attention_kernels(major):
        cuda_library.FUNCTIONS[name](*(_runtime(x) for x in arguments))
    return list(attention_kernels.calls)


def _runtime(value):
    return tvm_ffi.from_dlpack(value) if isinstance(value, torch.Tensor) else value


def stored(x, bits):
    return x.permute(LAYOUTS[bits]).contiguous()


def restored(x, bits):
    order = LAYOUTS[bits]
    return x.permute([order.index(axis) for axis in range(4)])


@st.composite
def problems(draw):
    """Sizes, a mask, the order of operands and results."""
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=3))
    return {
        "dtype": draw(st.sampled_from(["float32", "float64", "bfloat16", "float16"])),
        "group": draw(st.sampled_from([1, 1, 3])),
        "dim": draw(st.sampled_from([8, 8, 24, 20])),
        "lengths": lengths,
        "longest": max(1, max(lengths) + draw(st.integers(0, 5))),
        "is_causal": draw(st.booleans()),
        "mask": draw(st.sampled_from([None, "bool", "keys", "added", "sighted", "hides all"])),
        "dropout": draw(st.sampled_from([0.0, 0.0, 0.3])),
        "layout": draw(st.lists(st.sampled_from(list(LAYOUTS)), min_size=8, max_size=8)),
        "major": draw(st.sampled_from([7, 9])),
        "seed": draw(st.integers(0, 1000)),
    }


def expected_kernel(problem, is_packed=False):
    dtype, dim, major = problem["dtype"], problem["dim"], problem["major"]
    is_half = dtype in ("float16", "bfloat16")
    if is_half and problem["mask"] is None and dim % 8 == 0 and major >= 8:
        return "flash"
    known = dtype == "float32" or dtype == "float16" or (dtype == "bfloat16" and major >= 8)
    size = {"float32": 4}.get(dtype, 2)
    return "efficient" if known and dim * size % 16 == 0 else None


def make_mask(problem, batch, rows, columns, dtype, generator):
    kind = problem["mask"]
    if kind is None:
        return None
    if kind == "keys":
        return torch.rand(batch, 1, 1, columns, generator=generator) > 0.3
    seen = torch.rand(batch, 1, rows, columns, generator=generator) > 0.3
    if kind == "bool":
        return seen
    if kind == "hides all":
        seen[:, :, ::2] = False
        return seen
    values = torch.randn(1, 2 * problem["group"], rows, columns, generator=generator)
    if kind == "sighted":
        least = max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)
        seen[:, :, :, 0] = True
        return values.masked_fill(~seen[:1], least).to(dtype)
    if problem["seed"] % 2 == 0:  # numbers hide, of some rows all
        seen[:, :, ::3] = False
        least = torch.finfo(torch.float32).min
        values = values.masked_fill(~seen[:1], least)
        seen = torch.rand(batch, 1, rows, columns, generator=generator) > 0.3
    return values.masked_fill(~seen[:1], -math.inf).to(dtype)


def tolerance(dtype):
    return {"float32": 2e-5, "float64": 1e-12, "float16": 4e-3, "bfloat16": 3e-2}[dtype]


def close(found, wanted, dtype):
    bound = tolerance(dtype)
    torch.testing.assert_close(found.to(wanted.dtype), wanted, rtol=bound, atol=bound)


def check(problem, is_packed):
    """Run forward and backward by both libraries; return the kernels that ran for CUDA."""
    generator = torch.Generator().manual_seed(problem["seed"])
    dtype = getattr(torch, problem["dtype"])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    group, dim, longest = problem["group"], problem["dim"], problem["longest"]
    batch, heads = len(problem["lengths"]), 2 * group
    where, count = [], longest
    if is_packed:
        kept = torch.zeros(batch, longest, dtype=torch.bool)
        for row, length in zip(kept, problem["lengths"], strict=True):
            row[torch.randperm(longest, generator=generator)[:length]] = True
        sequence, position = kept.nonzero(as_tuple=True)
        count = rounded(len(sequence), batch * longest)
        places = torch.zeros(3, count, dtype=torch.int64)
        places[:, : len(sequence)] = torch.stack(
            [sequence * longest + position, sequence, position]
        )
        if len(sequence):
            places[:, len(sequence) :] = places[:, :1]
        starts = torch.zeros(batch + 1, dtype=torch.int64)
        starts[1:] = kept.sum(1).cumsum(0)
        where = [starts, places, starts, places]
    outer = 1 if is_packed else batch

    def tensor(n):
        return torch.randn(outer, n, count, dim, generator=generator).to(dtype)

    q, k, v, grad = tensor(heads), tensor(2), tensor(2), tensor(heads)
    mask = make_mask(problem, batch, longest, longest, dtype, generator)
    bits = problem["layout"]
    name = ("packed_" if is_packed else "") + "attention"
    suffix = "" if mask is None else "_masked"
    sight = device_memory.SIGHTED if problem["mask"] == "sighted" else 0
    scale, lengths = 1 / math.sqrt(dim), [longest, longest] if is_packed else []
    states = []
    if problem["dropout"] and not is_packed and expected_kernel(problem):
        suffix, states = suffix + "_dropout", [torch.tensor([problem["seed"] << 40 | 7, 3])]
        lengths = [problem["dropout"], 5]  # and the number of the operator

    # The native library: float32 of what was rounded, stored plainly.
    plain = [x.to(wide) for x in (q, k, v, grad)]
    masks = [] if mask is None else [mask if mask.dtype == torch.bool else mask.to(wide)]
    masks += states
    drawn = lengths if states else []
    out, lse = torch.empty_like(plain[0]), torch.empty(outer, heads, count, dtype=wide)
    numbers = [scale, int(problem["is_causal"])]
    run_native(name + suffix, *plain[:3], *where, *masks, *numbers, 0, *drawn, out, lse)
    wanted = [torch.empty_like(x) for x in plain[:3]]
    run_native(
        name + "_backward" + suffix,
        *(plain[3], *plain[:3], out, lse, *where, *masks),
        *(*numbers, 0, *drawn, *wanted),
    )

    # The library for CUDA, stored in any order; what is not written stays NaN.
    masks = [*([] if mask is None else [mask]), *states]
    layout = sum(b << i for i, b in enumerate(bits[:4])) | sight
    target = stored(torch.full_like(q, math.nan), bits[3])
    sums = torch.full((outer, heads, count), math.nan, dtype=wide)
    operands = [stored(x, b) for x, b in zip((q, k, v), bits, strict=False)]
    major = problem["major"]
    ran = run_cuda(
        name + suffix, *operands, *where, *masks, *numbers, layout, *lengths, target, sums,
        major=major,
    )  # fmt: skip
    close(restored(target, bits[3]), out, problem["dtype"])
    # Of rows that numbers hide the log has no digits beside these, or is that of what they add up.
    blind = (lse < -1e30) & ~lse.isneginf()
    close(sums.masked_fill(blind, 0), lse.masked_fill(blind, 0), problem["dtype"])
    layout = sum(b << i for i, b in enumerate(bits)) | sight
    given = [stored(x, b) for x, b in zip((grad, q, k, v, out.to(dtype)), bits, strict=False)]
    found = [
        stored(torch.full_like(x, math.nan), b) for x, b in zip((q, k, v), bits[5:], strict=True)
    ]
    ran += run_cuda(
        name + "_backward" + suffix, *given, sums, *where, *masks, *numbers, layout, *lengths,
        *found, major=major,
    )  # fmt: skip
    for gradient, b, right in zip(found, bits[5:], wanted, strict=True):
        close(restored(gradient, b), right, problem["dtype"])
    return ran


@settings(max_examples=60, deadline=None)
@given(problems())
def test_a_batch(problem):
    kernel = expected_kernel(problem)
    assert check(problem, is_packed=False) == ([kernel, f"{kernel} backward"] if kernel else [])


@settings(max_examples=80, deadline=None)
@given(problems())
def test_packed_rows(problem):
    """With a mask the padded batch is computed, without one the kernels for packed rows."""
    kernel = expected_kernel(problem)
    if kernel is not None and problem["mask"] is None:
        kernel += " packed"
    assert check(problem, is_packed=True) == ([kernel, f"{kernel} backward"] if kernel else [])


@pytest.mark.parametrize("mask", [None, "bool"])
def test_dropout_of_the_composite_keeps_the_same_in_the_gradient(mask):
    """What is kept is drawn by PyTorch; the result is linear in the values."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, 3, 4, 8, generator=generator).double() for _ in range(4))
    masks = [] if mask is None else [torch.rand(2, 1, 4, 4, generator=generator) > 0.3]
    state, numbers = torch.tensor([11, 0]), [0.4, 0, 0, 0.5]
    suffix = ("_masked" if masks else "") + "_dropout"
    user = torch.default_generator.get_state()

    def attend(values, stream):
        out, lse = torch.empty_like(q), torch.empty(2, 3, 4).double()
        run_cuda("attention" + suffix, q, k, values, *masks, state, *numbers, stream, out, lse)
        return out, lse

    out, lse = attend(v, 1)
    assert torch.equal(out, attend(v, 1)[0])
    assert not torch.equal(out, attend(v, 2)[0])
    found = [torch.full_like(x, math.nan) for x in (q, k, v)]
    given = grad, q, k, v, out, lse
    run_cuda("attention_backward" + suffix, *given, *masks, state, *numbers, 1, *found)
    other = torch.randn(v.shape, generator=generator).double()
    for values in (v, other):
        wanted = (grad * attend(values, 1)[0]).sum()
        torch.testing.assert_close((found[2] * values).sum(), wanted)
    assert torch.equal(torch.default_generator.get_state(), user)


def test_switches_of_pytorch_are_obeyed():
    problem = {
        "dtype": "bfloat16", "group": 1, "dim": 8, "lengths": [5, 9], "longest": 9, "seed": 0,
        "is_causal": True, "mask": None, "dropout": 0.0, "layout": [0] * 8, "major": 9,
    }  # fmt: skip
    assert check(problem, False)[0] == "flash"
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        assert check(problem, False)[0] == "efficient"
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert check(problem, False) == []


@pytest.mark.parametrize("is_set", [False, True])
def test_the_deterministic_setting_of_the_user_stays(is_set):
    problem = {
        "dtype": "float32", "group": 3, "dim": 8, "lengths": [4], "longest": 4, "seed": 1,
        "is_causal": False, "mask": None, "dropout": 0.0, "layout": [0] * 8, "major": 9,
    }  # fmt: skip
    torch.use_deterministic_algorithms(is_set, warn_only=True)
    try:
        assert check(problem, True) == ["efficient packed", "efficient packed backward"]
        assert torch.are_deterministic_algorithms_enabled() == is_set
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)


def least_of_the_future(scores, seen):
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores + torch.zeros(()).masked_fill(later, LEAST).to(scores.dtype)


# How keys are hidden, whose sequences wholly, and how wide the heads of the gradient are
HIDING = {
    "padding": (added, [], 16),
    "padding, of some all": (added, [1], 16),
    "the future": (least_of_the_future, [], 8),
}


@pytest.mark.parametrize("name", HIDING)
def test_a_step_gives_rows_that_numbers_hide_the_mean(name, monkeypatch):
    hide, blind, width = HIDING[name]
    torch.manual_seed(0)
    model, batch = Written(hide), example(blind)
    exact, twin = copy.deepcopy(model).double(), copy.deepcopy(model)
    exact(batch[0].double(), batch[1]).backward()
    widths, backward = [], Problem._efficient_backward

    def noted(problem, grad, query, *rest):
        widths.append(query.shape[3])
        return backward(problem, grad, query, *rest)

    monkeypatch.setattr(Problem, "_efficient_backward", noted)
    monkeypatch.setenv("RELAX_DISC_COMPILE_CACHE", "0")
    with cuda_stand_in(Emulator.load()):
        step = relax_disc.compile(
            twin, None, batch, dynamic_shapes=shapes(), target=cuda_target("sm_90")
        )
        attention_kernels.calls.clear()
        step(*batch, update=False)
        assert attention_kernels.calls == ["efficient", "efficient backward"]
    assert widths == [width]
    for p, q in zip(twin.parameters(), exact.parameters(), strict=True):
        assert float((p.grad.double() - q.grad).abs().max()) < 5e-6 * float(q.grad.abs().max())
