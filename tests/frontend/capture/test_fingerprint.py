"""Exports that differ have different fingerprints; what calls read makes no difference."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import nn
from torch.export import Dim

from relax_disc.frontend import export_step
from relax_disc.tir_kernels.target import cpu_target
from relax_disc.training.cache.compile_cache import program_key


def plain(x):
    return torch.tanh(x)


@dataclass(frozen=True)
class Case:
    """A small model with its optimizer and its example."""

    width: int = 4
    rows: int = 64
    function: object = plain
    dropout: float = 0.0
    training: bool = True
    frozen: bool = False
    tied: bool = False
    dtype: torch.dtype = torch.float32
    table: float = 1.0
    groups: int = 1
    max_grad_norm: float | None = None
    optimizer: object = torch.optim.SGD
    options: dict = field(default_factory=dict)
    example: int = 3
    seed: int = 0
    autocast: bool = False

    def build(self):
        torch.manual_seed(self.seed)
        model = Net(self)
        parts = [list(model.parameters())]
        if self.groups == 2:
            parts = [parts[0][:1], parts[0][1:]]
        groups = [{"params": part} for part in parts]
        optimizer = self.optimizer(groups, **{"lr": 0.1, **self.options})
        shapes = ({0: Dim("rows", min=1, max=self.rows)},)
        x = torch.randn(self.example, 4, dtype=self.dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return export_step(
                model,
                optimizer,
                (x,),
                dynamic_shapes=shapes,
                max_grad_norm=self.max_grad_norm,
            )


class Net(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.first = nn.Linear(4, case.width, dtype=case.dtype)
        self.second = nn.Linear(4, case.width, dtype=case.dtype)
        if case.tied:
            self.second.weight = self.first.weight
        self.second.requires_grad_(not case.frozen)
        self.dropout = nn.Dropout(case.dropout)
        self.table = torch.full((case.width,), case.table, dtype=case.dtype)
        self.function = case.function
        self.train(case.training)

    def forward(self, x):
        y = self.function(self.first(x)) + self.second(x) * self.table
        return self.dropout(y).float().square().mean()


class Sine(nn.Module):
    def forward(self, x):
        return torch.sin(x)


class OtherSine(nn.Module):
    def forward(self, x):
        return torch.sin(x)


def branches(x):
    return x * 2 if x.shape[0] <= 1000 else torch.tanh(x)


BASE = Case()
DIFFERENT = {
    "base": BASE,
    "width": Case(width=5),
    "range": Case(rows=65),
    "operator": Case(function=torch.sin),
    "argument": Case(function=lambda x: torch.clamp(x, 0, 1)),
    "another argument": Case(function=lambda x: torch.clamp(x, 0, 2)),
    "a line": Case(function=Sine()),
    "another line": Case(function=OtherSine()),
    "a branch": Case(function=branches),
    "dropout": Case(dropout=0.5),
    "another dropout": Case(dropout=0.25),
    "dropout in eval()": Case(dropout=0.5, training=False),
    "frozen": Case(frozen=True),
    "tied": Case(tied=True),
    "bfloat16": Case(dtype=torch.bfloat16),
    "autocast": Case(autocast=True),
    "a tensor that the code makes": Case(function=lambda x: x * torch.tensor(2.0)),
    "another tensor that the code makes": Case(function=lambda x: x * torch.tensor(3.0)),
    "two groups": Case(groups=2),
    "clipping": Case(max_grad_norm=1.0),
    "another clipping": Case(max_grad_norm=2.0),
    "momentum": Case(options={"momentum": 0.9}),
    "AdamW": Case(optimizer=torch.optim.AdamW),
}
EQUAL = {
    "values": replace(BASE, seed=1),
    "values of an attribute": replace(BASE, table=2.0),
    "sizes of the example": replace(BASE, example=7),
    "an example of one row": replace(BASE, example=1),
    "learning rate": replace(BASE, options={"lr": 0.2, "weight_decay": 0.1}),
}


@pytest.fixture(scope="module")
def prints():
    return {name: case.build().fingerprint() for name, case in DIFFERENT.items()}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_makes_a_difference(prints, name):
    assert prints[name] is not None
    assert [other for other, known in prints.items() if known == prints[name]] == [name]


@pytest.mark.parametrize("name", EQUAL)
def test_what_makes_none(prints, name):
    assert EQUAL[name].build().fingerprint() == prints["base"]


@pytest.mark.parametrize("name", EQUAL)
def test_one_fingerprint_is_one_program(name):
    keys = {
        program_key(case.build().capture().module, cpu_target(), None)
        for case in (BASE, EQUAL[name])
    }
    assert len(keys) == 1


def test_counts_of_steps_split_groups(prints):
    exported = BASE.build()
    weight = exported.model.first.weight
    exported.optimizer.param_groups[0]["momentum"] = 0.9
    before = exported.fingerprint()
    exported.optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    assert before != exported.fingerprint()


def test_operators_from_elsewhere_have_none():
    library = torch.library.Library("relax_disc_elsewhere", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")
    try:
        case = Case(function=lambda x: torch.ops.relax_disc_elsewhere.twice(x))
        exported = case.build()
        assert "relax_disc_elsewhere.twice" in str(exported.exported.program.graph)
        assert exported.fingerprint() is None
    finally:
        library._destroy()
