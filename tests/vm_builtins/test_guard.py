"""The native guard of a step and check of indices: what they let pass, and what Python refuses."""

import pytest
import torch
import tvm
import tvm_ffi
from hypothesis import given
from hypothesis import strategies as st

from relax_disc.errors import IndexRangeError, NonFiniteLossError
from relax_disc.vm_builtins.guard import GUARD
from relax_disc.vm_builtins.runtime import function, load


def guarded(hyper, flags=(), loss=0.0):
    """Run the guard; return what it passed on."""
    load()
    passed = torch.zeros_like(hyper)
    rest = [part for flag in flags for part in (flag, 0, 9, "model.py:1")]
    tensors = [tvm.runtime.from_dlpack(x.clone()) for x in (hyper, torch.tensor([loss]))]
    rest = [tvm.runtime.from_dlpack(x) if isinstance(x, torch.Tensor) else x for x in rest]
    target = tvm.runtime.from_dlpack(passed)
    tvm_ffi.get_global_func(GUARD)(*tensors, 0, *rest, target)
    return torch.from_dlpack(target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hyper_parameters_pass_unless_a_flag_is_set(dtype):
    hyper = torch.tensor([0.1, 3.0, 0.0], dtype=dtype)
    clear = torch.zeros((), dtype=torch.int64)
    torch.testing.assert_close(guarded(hyper), hyper, rtol=0, atol=0)
    torch.testing.assert_close(guarded(hyper, [clear, clear]), hyper, rtol=0, atol=0)
    with pytest.raises(IndexRangeError, match="an index is 10"):
        guarded(hyper, [clear, torch.tensor(2)])


def test_a_loss_must_be_finite_where_that_is_asked_for():
    asking, indifferent = torch.tensor([0.5, 1.0]), torch.tensor([0.5, 0.0])
    with pytest.raises(NonFiniteLossError):
        guarded(asking, loss=float("nan"))
    assert guarded(asking, loss=1.0)[0] == 0.5
    assert guarded(indifferent, loss=float("nan"))[0] == 0.5


@given(
    values=st.lists(st.integers(-5, 12), max_size=9),
    least=st.integers(-3, 3),
    other=st.integers(-6, 13),
    start=st.integers(0, 3),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_indices_are_found_outside(values, least, other, start, dtype):
    x = torch.tensor(values, dtype=dtype)[start:]  # at any address
    allowed = ((x >= least) & (x <= least + 7)) | (x == other)
    inside = function("relax_disc.indices_are_inside")(x, least, least + 7, other)
    assert inside == bool(allowed.all())


def test_what_is_no_plain_index_is_left_to_pytorch():
    for dtype in (torch.int16, torch.bool, torch.float32):
        assert not function("relax_disc.indices_are_inside")(torch.ones(3, dtype=dtype), 0, 9, 0)
