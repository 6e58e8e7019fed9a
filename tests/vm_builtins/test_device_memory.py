"""What library calls for CUDA allocate beside the arena is bounded, and counted in plans.

PyTorch's composites run on a CPU as on a GPU, so what they allocate is counted here.  Of kernels
that only a GPU has the bounds follow the sources that they name.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.export import Dim

from relax_disc.compiler import build
from relax_disc.devices import PRODUCT_WORKSPACE_BYTES
from relax_disc.frontend import capture_step
from relax_disc.memory_analysis import analyze_memory
from relax_disc.ops.attention.device_memory import Sizes
from relax_disc.ops.recurrence_steps import KINDS
from relax_disc.ops.registry import LIBRARY, SMALL_BYTES
from relax_disc.tir_kernels.target import cuda_target
from relax_disc.vm_builtins.libraries import cuda_library
from relax_disc.vm_builtins.plan_metadata import PlanMetadata
from relax_disc.vm_builtins.session import Session
from tests.placement import check_plan

_UNITS = 132


def allocated(name, arguments):
    """Most bytes that a library function has from PyTorch's allocator at once."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.no_grad(), torch.profiler.profile(activities=activities, profile_memory=True) as run:
        cuda_library.FUNCTIONS[name](*arguments)
    events = [e for e in run.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events or "matmul" in name  # which may write in place
    total = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        total += event.nbytes()
        most = max(most, total)
    return most


def bounded(name, arguments):
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    views = [
        SimpleNamespace(shape=tuple(x.shape), dtype=str(x.dtype).removeprefix("torch."))
        for x in tensors
    ]
    numbers = [x for x in arguments if isinstance(x, int)]
    return LIBRARY[name].device_bytes(views, numbers, _UNITS)


def recurrence(kind, is_backward):
    batch, steps, width, of = 16, 5, 64, KINDS[kind]
    place, flags = list(KINDS).index(kind), (0, 0)
    weight, state = torch.randn(of.gates * width, width), torch.randn(of.states, batch, width)
    out, last = torch.randn(steps, batch, width), torch.randn(of.states, batch, width)
    reserve = torch.rand(steps, batch, of.reserve * width)
    if is_backward:
        gradients = torch.empty(steps, batch, of.gradients * width)
        results = gradients, torch.empty_like(state)
        return out, last, state, weight, out, reserve, place, *flags, *results
    projected = torch.randn(steps, batch, of.gates * width)
    return projected, state, weight, weight[:, 0].clone(), place, *flags, out, last, reserve


def attention(is_backward, *, dim=6, group=1, mask=None, is_causal=0, dtype=torch.float32):
    batch, queries, keys, heads = 2, 40, 48, 6
    query = torch.randn(batch, heads, queries, dim, dtype=dtype)
    key, value = (torch.randn(batch, heads // group, keys, dim, dtype=dtype) for _ in range(2))
    keys_seen = [] if mask is None else [mask(batch, heads, queries, keys)]
    out, lse = torch.zeros_like(query), torch.zeros(batch, heads, queries, dtype=dtype)
    numbers = 0.3, is_causal, 0
    if not is_backward:
        return query, key, value, *keys_seen, *numbers, out, lse
    results = [torch.empty_like(x) for x in (query, key, value)]
    return out, query, key, value, out, lse, *keys_seen, *numbers, *results


def whole(batch, heads, queries, keys):
    return torch.rand(batch, heads, queries, keys) > 0.5


def of_keys(batch, heads, queries, keys):
    return torch.zeros(batch, 1, 1, keys)


def packed_attention(is_backward, mask=None):
    rows, dim, heads, lengths, longest = 50, 6, 4, torch.tensor([20, 1, 25]), 30
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    places = torch.zeros(3, rows, dtype=torch.int64)
    for sequence, (start, length) in enumerate(
        zip(starts.tolist(), lengths.tolist(), strict=False)
    ):
        places[1, start : start + length] = sequence
        places[2, start : start + length] = torch.arange(length)
    where = starts, places, starts, places
    query, key, value, out = (torch.randn(1, heads, rows, dim) for _ in range(4))
    lse, numbers = torch.zeros(1, heads, rows), (0.3, 1, 0, longest, longest)
    kept = [] if mask is None else [mask(len(lengths), heads, longest, longest)]
    if not is_backward:
        return query, key, value, *where, *kept, *numbers, out, lse
    results = [torch.empty_like(x) for x in (query, key, value)]
    return out, query, key, value, out, lse, *where, *kept, *numbers, *results


# Whose kernels on a CPU take less than those on a GPU.
_OTHERWISE_ON_A_GPU = ("embedding_backward", "embedding_backward_add", "batch_matmul")
IDS, TABLE = torch.randint(0, 50, (30, 20)), torch.empty(50, 32)
GRAD = torch.randn(30, 20, 32)
CTC = (
    torch.randn(12, 3, 7).log_softmax(-1),
    torch.randint(1, 7, (3, 4)),
    torch.tensor([12, 11, 9]),
    torch.tensor([4, 3, 2]),
)
LOSS, ALPHA = torch.empty(3), torch.empty(3, 12, 9)
CALLS = {
    "matmul": [(torch.randn(300, 200), torch.randn(200, 400), 1, 1, 0, 0, torch.empty(300, 400))],
    "matmul_add": [
        (torch.randn(300, 200), torch.randn(200, 400), b, 1, 1, 0, 0, torch.empty(300, 400))
        for b in (torch.randn(400), torch.randn(300, 400))
    ],
    "batch_matmul": [
        (torch.randn(3, 4, 50, 60), torch.randn(3, 4, 60, 70), 0x123, 0x123, 0x123,
         torch.empty(3, 4, 50, 70)),
        (torch.randn(3, 50, 4, 60), torch.randn(3, 60, 4, 70), 0x213, 0x213, 0x213,
         torch.empty(3, 50, 4, 70)),
    ],
    "embedding_backward": [(GRAD, IDS, -1, TABLE)],
    "embedding_backward_add": [(GRAD, IDS, TABLE, -1, TABLE)],
    "recurrence": [recurrence(kind, False) for kind in KINDS],
    "recurrence_backward": [recurrence(kind, True) for kind in KINDS],
    "ctc_loss": [(*CTC, 0, LOSS, ALPHA)],
    "ctc_loss_backward": [(torch.ones(3), *CTC, LOSS, ALPHA, 0, torch.empty(12, 3, 7))],
    "attention": [
        attention(False),
        attention(False, dim=8, dtype=torch.float64, is_causal=1),
        attention(False, group=3),
        attention(False, dim=66),
    ],
    "attention_masked": [attention(False, mask=whole), attention(False, mask=of_keys, is_causal=1)],
    "attention_backward": [
        attention(True),
        attention(True, group=3, is_causal=1),
        attention(True, dim=66),
    ],
    "attention_backward_masked": [attention(True, mask=whole), attention(True, mask=of_keys)],
    "packed_attention": [packed_attention(False)],
    "packed_attention_masked": [packed_attention(False, whole)],
    "packed_attention_backward": [packed_attention(True)],
    "packed_attention_backward_masked": [packed_attention(True, whole)],
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call_takes_no_more_than_its_bound(name):
    for arguments in CALLS[name]:
        found, bound = allocated(name, arguments), bounded(name, arguments)
        print(name, found, bound - SMALL_BYTES)
        assert found <= bound - SMALL_BYTES + 4096
        # A bound of a hundred times as much would be no use.
        assert name in _OTHERWISE_ON_A_GPU or bound - SMALL_BYTES <= 4 * found + 4096


def test_every_library_function_has_a_bound():
    missing = [name for name in cuda_library.FUNCTIONS if LIBRARY[name].device_bytes is None]
    assert not missing
    unbounded = {name for name in cuda_library.FUNCTIONS if LIBRARY[name].takes_more}
    assert unbounded == {name for name in cuda_library.FUNCTIONS if name.startswith("convolution")}


def test_the_gradient_of_flash_attention_accumulates_in_parts():
    """One part for each multiprocessor, and one more for each head, at most."""
    few = Sizes(1, 2048, 2048, 8, 8, 128, 128, "bfloat16", True)
    accumulated = 17 * 8 * (2048 + 128) * 128 * 4  # 132 / 8 rounded up
    assert accumulated < few.bytes(True, 132) < 1.2 * accumulated
    assert few.bytes(False, 132) < 0.25 * accumulated


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.mixed, self.head = (
            nn.Embedding(40, 32),
            nn.Linear(32, 96),
            nn.Linear(32, 40),
        )

    def forward(self, ids):
        q, k, v = self.mixed(self.table(ids)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        x = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x.transpose(1, 2).flatten(2)).square().mean()


def test_plans_count_what_libraries_take(monkeypatch):
    rows, length = Dim("rows", min=1, max=64), Dim("length", min=2, max=256)
    captured = capture_step(
        Attending(),
        None,
        (torch.zeros(3, 5, dtype=torch.int64),),
        dynamic_shapes=({0: rows, 1: length},),
        loss_fn=lambda model, ids: model(ids),
    )
    target = cuda_target("sm_90")
    written = []
    to_json = PlanMetadata.to_json
    monkeypatch.setattr(PlanMetadata, "to_json", lambda t: written.append(t) or to_json(t))
    build(captured.module, target)
    (table,) = written
    session = Session.to_plan(table)
    small, large = (check_plan(session, [*shape]) for shape in ((1, 2), (16, 200)))
    assert table.unbounded_calls() == ()
    # The table's gradient, and rows to be added up for each id.
    assert small.library_bytes - PRODUCT_WORKSPACE_BYTES > 40 * 32 * 4
    assert large.library_bytes - PRODUCT_WORKSPACE_BYTES > 16 * 200 * 32 * 4
    for plan in small, large:
        assert plan.workspace_bytes == 0
        assert plan.peak_bytes >= plan.arena_bytes + plan.library_bytes
    analysed = analyze_memory(captured.module, {"rows": 16, "length": 200}, target=target).worst
    assert analysed.peak_bytes == large.peak_bytes
