"""Types are PyTorch's: float64, bfloat16 parameters, autocast."""

import pytest
import torch
from torch import nn

from relax_disc.frontend import capture_step
from tests.frontend.models import MLP, Llama, dims, mlp_batch, token_batch
from tests.frontend.running import Runner, eager, relative


def shapes():
    b, s = dims()
    return ({0: b, 1: s}, {0: b, 1: s})


def test_float64():
    torch.manual_seed(0)
    model = Llama(layers=1).double()
    captured = capture_step(model, None, token_batch(3, 12), dynamic_shapes=shapes())
    found = Runner(captured)(model, None, token_batch(2, 7))
    _, grads = eager(model, token_batch(2, 7), torch.float64)
    assert relative(dict(found["gradient"]), grads) < 1e-14


def test_bfloat16_parameters():
    torch.manual_seed(0)
    model = MLP().bfloat16()
    x, y = mlp_batch(3, 12)
    args = (x.bfloat16(), y)
    captured = capture_step(model, None, args, dynamic_shapes=shapes())
    found = Runner(captured)(model, None, args)
    loss, grads = eager(model, args, torch.bfloat16)
    assert found["loss"][0][1].dtype == torch.bfloat16
    assert found["loss"][0][1].item() == pytest.approx(loss, rel=1e-2)
    assert all(g.dtype == torch.bfloat16 for _, g in found["gradient"])
    # Each operator rounds to 8 bits: two orders of summation differ by a few roundings.
    assert relative(dict(found["gradient"]), grads) < 2e-2


class Autocast(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(x, y)


@pytest.mark.parametrize("name", ["mlp", pytest.param("llama", marks=pytest.mark.slow)])
def test_autocast(name):
    torch.manual_seed(0)
    inner = MLP() if name == "mlp" else Llama(layers=1, key_heads=4)
    batch = mlp_batch if name == "mlp" else token_batch
    model = Autocast(inner)
    captured = capture_step(model, None, batch(3, 12), dynamic_shapes=shapes())
    attention = [
        b.var.ty.fields[0].dtype.dtype
        for block in captured.module["main"].body.blocks
        for b in block.bindings
        if getattr(getattr(b.value, "op", None), "name", "") == "relax_disc.attention"
    ]
    assert all(str(dtype) == "bfloat16" for dtype in attention)
    found = Runner(captured)(model, None, batch(2, 7))
    loss, grads = eager(model, batch(2, 7), torch.float32)
    assert found["loss"][0][1].dtype == torch.float32
    assert found["loss"][0][1].item() == pytest.approx(loss, rel=1e-2)
    assert relative(dict(found["gradient"]), grads) < 2e-2
