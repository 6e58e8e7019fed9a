"""Regions of torch.utils.checkpoint are inlined: same gradients, nothing left untrained."""

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from relax_disc.frontend import capture_step
from tests.frontend.models import VOCABULARY, hugging_face_llama
from tests.frontend.running import check_gradients

SHAPES = ({0: Dim("rows", min=1, max=9)},)


class Net(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form = form
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))

    def forward(self, x):
        h = self.first(x)
        if self.form == "sequential":
            h = checkpoint_sequential(self.blocks, 2, h, use_reentrant=True)
        elif self.form == "none":
            h = self.blocks(h)
        else:
            h = checkpoint(self.blocks, h, use_reentrant=self.form == "reentrant")
        return self.last(F.relu(h)).square().mean()


def batch(rows):
    return (torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows)),)


@pytest.mark.parametrize("form", ["reentrant", "not reentrant", "sequential"])
def test_gradients_of_every_parameter(form):
    torch.manual_seed(0)
    model = Net(form)
    inner = torch.utils.checkpoint.CheckpointFunction
    captured = capture_step(model, None, batch(3), dynamic_shapes=SHAPES)
    assert torch.utils.checkpoint.CheckpointFunction is inner
    outputs = {out.name for out in captured.outputs if out.kind == "gradient"}
    assert outputs == {name for name, _ in model.named_parameters()}
    model.form = "none"
    plain = capture_step(model, None, batch(3), dynamic_shapes=SHAPES)
    assert str(plain.module) == str(captured.module)
    if form == "reentrant":
        check_gradients(captured, model, [batch(rows) for rows in (1, 9)])


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(
            {"gradient_checkpointing_kwargs": {"use_reentrant": True}}, marks=pytest.mark.slow
        ),
    ],
    ids=["default", "reentrant"],
)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
def test_gradient_checkpointing_of_hugging_face(options):
    torch.manual_seed(0)
    model = hugging_face_llama().train()
    ids = torch.randint(0, VOCABULARY, (2, 5))
    b, s = Dim("b", min=1, max=4), Dim("s", min=2, max=32)
    example, shapes = {"input_ids": ids, "labels": ids}, dict.fromkeys(("input_ids", "labels"))
    shapes = {key: {0: b, 1: s} for key in shapes}
    plain = capture_step(model, None, example, dynamic_shapes=shapes)
    model.gradient_checkpointing_enable(**options)
    captured = capture_step(model, None, example, dynamic_shapes=shapes)
    assert len(captured.outputs) == len(plain.outputs)
    assert str(captured.module) == str(plain.module)
