"""Numbers that `math`, `int`, `float` and `round` make of sizes follow the sizes."""

import functools
import math
from math import sqrt

import numpy as np
import pytest
import sympy
import torch
from torch import nn
from torch.export import Dim
from torch.utils._sympy.functions import FloorDiv, ToFloat

import relax_disc
from relax_disc.errors import ShapeRangeError, UnsupportedOperatorError
from relax_disc.frontend import capture_step
from relax_disc.frontend.capture.replaced.math_of_sizes import replacements
from relax_disc.frontend.capture.sizes.evaluation import evaluate
from relax_disc.frontend.capture.sizes.exact import rounded_multiple

SHORTEST, LONGEST = 4, 24


def by_float(x, n):
    return x / float(n) + int("3") * 0.5 + int(2.7)


def by_sqrt(x, n):
    return x * sqrt(n) / math.sqrt(n + 3)


def by_numpy(x, n):
    return x / np.sqrt(n)


def by_powers(x, n):
    return x * math.exp(-n / 100) + math.pow(n, 0.5)


def cut(x, n):
    return x[:, : int(n / 4) + 1]


def half(x, n):
    return x[:, : int(n * 0.5) + 1]


def rounded_up(x, n):
    return x[:, : math.ceil(n / 3)]


def rounded_down(x, n):
    return x[:, : math.floor((n - 5) / 2) + 3]


def nearest_half(x, n):
    return x[:, : round(n / 2) + 1]


def nearest_quarter(x, n):
    return x[:, : round(n / 4) + 1]


def nearest_third(x, n):
    return x[:, : round(n / 3) + 1]


def padded(x, n):
    return nn.functional.pad(x, (0, 0, 0, math.ceil(n / 8) * 8 - n))


def seven_tenths(x, n):
    return x[:, : int(0.7 * n)]


def most_of_it(x, n):
    return x[:, : math.ceil(n * 0.85)] + round(n * 0.35)


def quotient_and_rest(x, n):
    quotient, rest = divmod(n, 4)
    return x[:, : quotient + 1] * rest + divmod(7, 2)[0]


def hardest(x, n):
    """The mean of the greatest tenth, at least one of them."""
    return x.flatten(2).sum(2).topk(max(1, int(n * 0.1)), dim=1).values


USES = (
    by_float, by_sqrt, by_numpy, by_powers, cut, half, rounded_up, rounded_down, nearest_half,
    nearest_quarter, nearest_third, padded, seven_tenths, most_of_it, quotient_and_rest,
)  # fmt: skip


class AllUses(nn.Module):
    """Each use in a term of its own."""

    def __init__(self, uses):
        super().__init__()
        self.layer, self.uses = nn.Linear(4, 4), uses

    def forward(self, x):
        hidden = self.layer(x)
        return torch.stack([use(hidden, x.shape[1]).square().mean() for use in self.uses])


def compiled(uses):
    torch.manual_seed(0)
    model = AllUses(uses)
    step = relax_disc.compile(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        (torch.randn(3, 9, 4),),
        dynamic_shapes=(
            {0: Dim("rows", min=1, max=4), 1: Dim("length", min=SHORTEST, max=LONGEST)},
        ),
        loss_fn=lambda model, x: ((terms := model(x)).sum(), terms),
    )
    return model, step


@pytest.mark.parametrize("uses", [USES, [hardest]], ids=["all", "hardest"])
def test_every_use_is_pythons_at_every_length(uses):
    model, step = compiled(uses)
    for length in range(SHORTEST, LONGEST + 1):
        x = torch.randn(2, length, 4)
        _, (terms,) = step(x)
        torch.testing.assert_close(terms, model(x).detach(), rtol=1e-5, atol=1e-6)


def test_what_is_replaced_is_put_back():
    before = dict(globals())
    compiled(USES[:2])
    assert globals() == before
    assert not hasattr(torch.SymInt, "sqrt")


def captured(use):
    model = AllUses([use])
    shapes = ({0: Dim("rows", min=1, max=4), 1: Dim("length", min=2, max=LONGEST)},)
    return capture_step(
        model, None, (torch.randn(3, 9, 4),), dynamic_shapes=shapes,
        loss_fn=lambda model, x: model(x).sum(),
    )  # fmt: skip


@pytest.mark.parametrize("use", [lambda x, n: x * math.log(n), lambda x, n: x * np.log(n)])
def test_logarithms_are_refused_by_name(use):
    with pytest.raises(
        UnsupportedOperatorError, match=r"test_math_of_sizes.*math\.log.*torch\.log"
    ):
        captured(use)


@pytest.mark.parametrize(
    "use",
    [
        lambda x, n: x[:, : int(n * 0.3333) + 1],  # a third, but of 3 and its multiples
        lambda x, n: x[:, : int((n - 5) / 2) + 3],  # towards zero from both sides
    ],
)
def test_what_is_not_exact_is_refused(use):
    with pytest.raises(ShapeRangeError):
        captured(use)


def test_a_number_of_the_example_that_asks_for_long_batches_is_told():
    with pytest.raises(
        ShapeRangeError, match=r"test_math_of_sizes.py:\d+ makes the plain number 2 "
    ):
        captured(lambda x, n: x.topk(1 + int(n * 0.3333), dim=1).values)


WAYS = {
    "int": (math.trunc, lambda above, below: FloorDiv(above, below), np.trunc),
    "ceil": (math.ceil, lambda above, below: FloorDiv(above + below - 1, below), np.ceil),
}


@pytest.mark.parametrize("most", [40, 100, 3000])
@pytest.mark.parametrize("way", WAYS)
def test_decimals_are_rounded_as_python_does_at_all_sizes_or_not_at_all(way, most):
    of_python, rounded, of_floats = WAYS[way]
    size = sympy.Symbol("n", integer=True, positive=True)
    sizes = range(1, most + 1)
    exact = 0
    for factor in [k / 100 for k in range(1, 100)] + [1 / 3, 0.3333, math.sqrt(0.5), 1e-9]:
        expr = sympy.Float(factor) * ToFloat(size)
        found = rounded_multiple(expr, factor * most, rounded, of_floats)
        if found is not None:
            exact += 1
            wanted = [of_python(factor * n) for n in sizes]
            assert evaluate(found, {size: np.array(sizes)}).tolist() == wanted
    assert exact > {40: 95, 100: 85, 3000: 80}[most]


@pytest.mark.parametrize("most", [sympy.oo, 10**9])
def test_decimals_of_sizes_without_a_bound_are_left(most):
    expr = sympy.Float(0.7) * ToFloat(sympy.Symbol("n", integer=True, positive=True))
    assert rounded_multiple(expr, most, *WAYS["int"][1:]) is None


def _decorated(function):
    """Wrap a function in one of this file, as libraries do to the forward of a model."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def test_classes_are_replaced_where_they_are_only_called():
    source = "def f(x):\n    return int(x) + float(x)\n"
    asking = source + (
        "def g(x, k):\n    x = k(x) if isinstance(k, type) else x\n"
        "    if isinstance(x, (list, int)) or issubclass(k, float):\n        return 0\n"
        "    return x if isinstance(x, int) else x[0]\n"
    )
    compared = source + "def g(x):\n    return type(x) is int\n"
    listed = source + "def g(x):\n    return isinstance(x, list) and make(x, int)\n"
    method = source + "def g(x):\n    return x.int().float()\n"
    given = source + (
        "class A:\n    @other\n    def h(self, x):\n        return make(x, dtype=int)\n"
    )
    for text, replaced in (
        (source, {"int", "float", "divmod", "round"}),
        (method, {"int", "float", "divmod", "round"}),
        (asking, {"int", "float", "divmod", "round"}),
        (compared, {"float", "divmod", "round"}),
        (listed, {"float", "divmod", "round"}),
        (given, {"float", "divmod", "round"}),
    ):
        space = {"__name__": "a_file", "other": _decorated}
        exec(text, space)
        assert replacements(space).keys() == replaced


def test_what_is_called_as_int_is_asked_as_int():
    space = {"__name__": "a_file"}
    exec("def f(x):\n    return int(x) if isinstance(x, (int, float)) else float(x)\n", space)
    made = replacements(space)
    whole, real = made["int"], made["float"]
    assert isinstance(True, whole) and not isinstance(1.5, whole) and isinstance(1.5, real)
    assert issubclass(bool, whole) and not issubclass(str, real)
    assert repr(whole(2.7)) == "2" and whole("7") == 7 and whole() == 0 and real("0.5") == 0.5


class HardestQuarter(nn.Module):
    """Losses of the hardest quarter of all positions of a picture: of a product of three sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Conv2d(3, 4, 1)

    def forward(self, x, labels):
        losses = nn.functional.cross_entropy(self.classes(x), labels, reduction="none").view(-1)
        return losses.topk(max(1, int(0.25 * losses.numel()))).values.mean()


def test_a_part_of_all_positions_of_pictures():
    torch.manual_seed(0)
    rows, high, wide = (Dim(name, min=1, max=12) for name in ("rows", "high", "wide"))
    shapes = ({0: rows, 2: high, 3: wide}, {0: rows, 1: high, 2: wide})

    def batch(b, h, w):
        return torch.randn(b, 3, h, w), torch.randint(0, 4, (b, h, w))

    model = HardestQuarter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = relax_disc.compile(model, optimizer, batch(2, 5, 7), dynamic_shapes=shapes)
    for sizes in ((2, 5, 7), (1, 1, 1), (3, 12, 2), (1, 3, 3)):
        pictures = batch(*sizes)
        expected = model(*pictures).detach()
        torch.testing.assert_close(step(*pictures), expected)
