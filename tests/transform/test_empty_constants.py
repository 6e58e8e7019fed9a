"""Programs with tensors without elements are built, saved and loaded."""

import copy

import pytest
import torch
import tvm
from torch.export import Dim
from tvm import relax

import relax_disc
from relax_disc.frontend import capture_step
from relax_disc.pipeline import PipelineOptions, unscheduled
from relax_disc.tir_kernels.target import cpu_target, cuda_target


def _grown(model, x):
    rows = torch.tensor([])
    for scale in range(3):
        rows = torch.cat([rows, model(x).mean(1) * scale])
    return rows.square().sum() + torch.block_diag(model.weight, model.bias[None]).square().sum()


def _step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = {0: Dim("rows", min=1, max=8)}
    return relax_disc.compile(
        model, optimizer, (torch.randn(2, 5),), dynamic_shapes=(rows,), loss_fn=_grown
    )


def test_a_tensor_without_elements_is_grown_by_cat():
    model = torch.nn.Linear(5, 5)
    eager, again = copy.deepcopy(model), copy.deepcopy(model)
    made, found = _step(model), _step(again)  # what was saved is loaded
    for rows in (3, 1, 8):
        x = torch.randn(rows, 5)
        expected = _grown(eager, x).detach()
        torch.testing.assert_close(made(x, update=False), expected)
        assert torch.equal(found(x, update=False), made(x, update=False))


@pytest.mark.parametrize("target", [cpu_target(), cuda_target("sm_90")], ids=["cpu", "cuda"])
def test_no_constant_without_elements_is_left(target):
    rows = {0: Dim("rows", min=1, max=8)}
    example = (torch.randn(2, 5),)
    captured = capture_step(
        torch.nn.Linear(5, 5), None, example, dynamic_shapes=(rows,), loss_fn=_grown
    )
    lowered = unscheduled(captured.module, target, PipelineOptions())
    text = lowered.script()
    assert "nothing" in text  # the kernel in the place of one
    assert not [
        value
        for function in lowered.functions.values()
        for value in _constants(function)
        if 0 in value.shape
    ]


def _constants(function):
    found = []

    def visit(expr):
        if isinstance(expr, tvm.ir.GenericConst) and hasattr(expr.value, "shape"):
            found.append(expr.value)

    if isinstance(function, relax.Function):
        relax.analysis.post_order_visit(function.body, visit)
    return found
