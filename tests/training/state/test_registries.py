"""Tables whose classes make what they give, classes that PyTorch's tracing itself changes."""

from collections import OrderedDict

import pytest
from torch import nn
from tqdm import tqdm

from relax_disc.errors import InputMismatchError
from tests.training.state.outer_batch import X, agree, compiled, distance


class Makes(dict):
    """As transformers' ACT2FN: each read makes another object."""

    def __getitem__(self, key):
        return super().__getitem__(key)()


class Leads(OrderedDict):
    """As transformers' CONFIG_MAPPING: it keeps its entries elsewhere."""

    def __init__(self, entries):
        self._entries = entries

    def __getitem__(self, key):
        return self._entries[key]

    def __iter__(self):
        return iter(self._entries)

    def keys(self):
        return self._entries.keys()


MADE = Makes(gelu=nn.GELU, tanh=nn.Tanh)
LED = Leads({"scale": 2.0})


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.activation = nn.Linear(4, 4), MADE["gelu"]

    def forward(self, x):
        return MADE["tanh"](self.activation(self.linear(x)))


def test_a_table_that_makes_what_it_gives(monkeypatch):
    model = Layer()
    step = compiled(model, X, loss_fn=distance)
    agree(step, distance, model)
    monkeypatch.setitem(MADE, "tanh", nn.Sigmoid)
    with pytest.raises(InputMismatchError, match="MADE"):
        step(X)


def test_a_table_that_keeps_its_entries_elsewhere():
    def loss_fn(model, x):
        return distance(model, x) * LED["scale"]

    model = nn.Linear(4, 3)
    agree(compiled(model, X, loss_fn=loss_fn), loss_fn, model)


class Outputs(OrderedDict):
    """As transformers' ModelOutput: it takes numbers for places too."""

    def __getitem__(self, key):
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]


OUTPUTS = Outputs(scale=2.0)


def test_a_number_in_a_table_with_its_own_reading():
    def loss_fn(model, x):
        return distance(model, x) * OUTPUTS["scale"]

    model = nn.Linear(4, 3)
    step = compiled(model, X, loss_fn=loss_fn)
    agree(step, loss_fn, model)
    OUTPUTS["scale"] = 3.0
    try:
        with pytest.raises(InputMismatchError, match=r"OUTPUTS\['scale'\] was 2.0"):
            step(X)
    finally:
        OUTPUTS["scale"] = 2.0


class Inspector:
    """As PyTorch Geometric's: it has an attribute that a module has too."""

    _modules = property(lambda self: ["a", "b"])


class Inspected(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.inspector = Inspector()

    def forward(self, x):
        return super().forward(x) * len(self.inspector._modules)


def test_an_object_with_the_attributes_of_a_module():
    model = Inspected()
    agree(compiled(model, X, loss_fn=distance), distance, model)


class Bar(tqdm):
    """PyTorch's interpreter of graphs makes such a bar, whose class then keeps a thread."""


def test_a_bar_of_progress_that_the_loss_names(monkeypatch):
    monkeypatch.setattr(tqdm, "monitor", None)

    def loss_fn(model, x):
        return distance(model, x) if Bar is not None and tqdm is not None else x.sum()

    model = nn.Linear(4, 4)
    agree(compiled(model, X, loss_fn=loss_fn), loss_fn, model)
    assert tqdm.monitor is None
