"""Of which masks it is proved that their numbers hide no row wholly."""

from __future__ import annotations

import math

import pytest
import torch
import tvm
from torch import nn
from torch.export import Dim
from tvm import relax

from relax_disc.frontend import capture_step
from relax_disc.ops.attention.device_memory import SIGHTED
from relax_disc.pipeline import PipelineOptions, library_passes, simplify_passes
from relax_disc.tir_kernels.target import cuda_target

LEAST = torch.finfo(torch.float32).min
LEAST_OF_HALF = torch.finfo(torch.bfloat16).min


def seen_before(n, m):
    return torch.arange(m) <= torch.arange(n)[:, None]


def least_where_hidden(seen):
    return torch.where(seen, torch.zeros(()), LEAST)


def distances(n):
    return torch.arange(n) - torch.arange(n)[:, None]


# Mask of a text that others follow, and whether it is proved
MASKS = {
    "the future, by the least number": (lambda x, pad: least_where_hidden(seen_before(*x)), True),
    "the future, by -inf above the diagonal": (
        lambda x, pad: torch.full(x, -math.inf).triu(1),
        True,
    ),
    "the future, by the least number above the diagonal": (
        lambda x, pad: torch.full(x, LEAST).triu(1),
        True,
    ),
    "the past of a window": (
        lambda x, pad: least_where_hidden(seen_before(*x) & (distances(x[0]) > -3)),
        True,
    ),
    "all before oneself": (
        lambda x, pad: least_where_hidden(torch.arange(x[1]) < torch.arange(x[0])[:, None]),
        False,
    ),
    "all but what is near": (lambda x, pad: least_where_hidden(distances(x[0]).abs() > 2), False),
    "the future, by a factor of the least number": (
        lambda x, pad: torch.full(x, LEAST) * (distances(x[0]) > 0),
        True,
    ),
    "the future, by the least number of bfloat16": (
        lambda x, pad: torch.full(x, LEAST_OF_HALF, dtype=torch.bfloat16).triu(1),
        True,
    ),
    "padding, by -inf": (
        lambda x, pad: torch.zeros(pad.shape).masked_fill(~pad, -math.inf)[:, None, None],
        True,
    ),
    "padding, by the least number": (
        lambda x, pad: least_where_hidden(pad)[:, None, None],
        False,
    ),
    "the future by -inf, padding by the least number": (
        lambda x, pad: torch.full(x, -math.inf).triu(1) + least_where_hidden(pad)[:, None, None],
        False,
    ),
    "the future and padding by -inf, and distances": (
        lambda x, pad: (
            torch.full(x, -math.inf).triu(1)
            + torch.zeros(pad.shape).masked_fill(~pad, -math.inf)[:, None, None]
            + distances(x[0]) * 0.25
        ),
        True,
    ),
    "distances, weighed by 1e25": (lambda x, pad: distances(x[0]) * 1e25, False),
    "padding, weighed by -1e9": (lambda x, pad: ((~pad) * -1e9)[:, None, None], True),
    "padding, weighed by -1e35": (lambda x, pad: ((~pad) * -1e35)[:, None, None], False),
}


class Attends(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.mask = mask
        self.qkv = nn.Linear(16, 48)

    def forward(self, x, pad):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mask = self.mask((x.shape[1], x.shape[1]), pad)
        q, k, v = (x.to(mask.dtype) for x in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v, mask).float().square().mean()


def layouts(module, target):
    """What the calls of attention say of their operands."""
    with target:
        passes = [*simplify_passes(), *library_passes(target, PipelineOptions())]
        lowered = tvm.transform.Sequential(passes)(module)
    found = []

    def visit(expr):
        if isinstance(expr, relax.Call) and expr.op.name == "relax.call_dps_packed":
            if "attention" in expr.args[0].global_symbol:
                found.append(int(expr.args[1].fields[-1].value))

    for function in lowered.functions.values():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, visit)
    return found


def padded(lengths, longest):
    return torch.arange(longest) < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("name", MASKS)
def test_what_is_proved_is_true(name):
    mask, is_proved = MASKS[name]
    shape = {0: Dim("batch", min=1, max=8), 1: Dim("length", min=1, max=16)}
    example = torch.randn(2, 7, 16), padded([7, 5], 7)
    captured = capture_step(Attends(mask), None, example, dynamic_shapes=(shape, shape))
    found = layouts(captured.module, cuda_target("sm_90"))
    assert [bool(layout & SIGHTED) for layout in found] == [is_proved] * 2
    rows = [mask((n, n), torch.rand(4, n) < 0.5).amax(-1) for n in (1, 2, 5, 9) for _ in range(4)]
    hidden = any(bool(((top < -1e30) & ~top.isneginf()).any()) for top in rows)
    assert not (hidden and is_proved)


def test_a_shorter_text_of_keys_may_end_before_oneself():
    """The key of a row's own index need not be there; the first is."""

    class Crosses(Attends):
        def forward(self, x, keys):
            q, k = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in (x, keys))
            mask = self.mask(distances_between(x.shape[1], keys.shape[1]))
            return nn.functional.scaled_dot_product_attention(
                self.qkv(x)[..., :8][:, None] + q, k, k, mask
            ).sum()

    def distances_between(n, m):
        return torch.arange(m) - torch.arange(n)[:, None]

    batch = Dim("batch", min=1, max=8)
    shapes = tuple({0: batch, 1: Dim(name, min=1, max=16)} for name in ("length", "keys"))
    example = torch.randn(2, 7, 16), torch.randn(2, 5, 16)
    for seen, is_proved in ((lambda d: d == 0, False), (lambda d: d <= 0, True)):
        model = Crosses(lambda d, seen=seen: least_where_hidden(seen(d)))
        captured = capture_step(model, None, example, dynamic_shapes=shapes)
        found = layouts(captured.module, cuda_target("sm_90"))
        assert {bool(layout & SIGHTED) for layout in found} == {is_proved}
