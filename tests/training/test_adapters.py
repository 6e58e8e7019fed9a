"""Parts that train and parts that do not: low-rank adapters by hand and of PEFT, frozen mixes."""

import copy

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

import relax_disc
from tests.frontend.models import VOCABULARY, hugging_face_llama

SHAPES = ({0: Dim("rows", min=1, max=32)}, {0: Dim("rows", min=1, max=32)})


class LowRank(nn.Module):
    """A frozen linear layer plus a trained product of two thin matrices."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + 0.5 * self.up(self.down(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.query, self.value = nn.Linear(6, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x, y):
        return F.cross_entropy(
            self.head(torch.tanh(self.value(torch.tanh(self.query(self.norm(x)))))), y
        )


def low_rank(model):
    model.query, model.value = LowRank(model.query), LowRank(model.value)


def frozen_front(model):
    model.query.requires_grad_(False)
    model.norm.requires_grad_(False)


def frozen_end(model):
    model.head.requires_grad_(False)
    model.value.weight.requires_grad_(False)


def data(rows):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 6, generator=generator)
    return x, torch.randint(0, 3, (rows,), generator=generator)


@pytest.mark.parametrize("change", [low_rank, frozen_front, frozen_end])
def test_only_what_is_trained_changes(change):
    torch.manual_seed(0)
    model = Net()
    change(model)
    twin = copy.deepcopy(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    others = torch.optim.AdamW([p for p in twin.parameters() if p.requires_grad], lr=1e-2)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    step = relax_disc.compile(model, optimizer, data(4), dynamic_shapes=SHAPES)
    for rows in (2, 32, 7):
        others.zero_grad()
        expected = twin(*data(rows))
        expected.backward()
        others.step()
        torch.testing.assert_close(step(*data(rows)), expected.detach())
    for name, value in before.items():
        assert torch.equal(model.get_parameter(name), value)
        assert model.get_parameter(name).grad is None
    # AdamW divides by the gradient's own size: rounding of a tiny one moves a parameter visibly.
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-3, atol=1e-4)
    assert {id(p) for p in optimizer.state} == {id(p) for p in trained}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_peft():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = hugging_face_llama()
    options = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model = peft.get_peft_model(base, options).train()
    twin = copy.deepcopy(model)
    ids = torch.randint(0, VOCABULARY, (3, 7))
    b, s = Dim("b", min=1, max=4), Dim("s", min=2, max=32)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    step = relax_disc.compile(
        model,
        optimizer,
        {"input_ids": ids, "labels": ids},
        dynamic_shapes={key: {0: b, 1: s} for key in ("input_ids", "labels")},
    )
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    loss = step(input_ids=ids, labels=ids)
    expected = twin(input_ids=ids, labels=ids).loss
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for name, parameter in twin.named_parameters():
        mine = model.get_parameter(name)
        if parameter.requires_grad:
            torch.testing.assert_close(mine, parameter.detach() - 0.1 * parameter.grad)
        else:
            assert torch.equal(mine, frozen[name])
