"""Comparisons of sizes: the model's own must hold over the range, PyTorch's own need not."""

import math
import operator

import numpy as np
import pytest
import sympy
import torch
import transformers
from torch import nn
from torch.export import Dim
from torch.nn import functional

import relax_disc
from relax_disc.errors import ShapeRangeError, UnsupportedOperatorError
from relax_disc.frontend import capture_step
from relax_disc.frontend.capture.sizes.branches import SizeBranches
from relax_disc.frontend.capture.sizes.evaluation import evaluate
from relax_disc.frontend.capture.sizes.ways import Ways
from tests.frontend.running import check_gradients

LONGEST = 12


class Masked(nn.Module):
    """Attention by hand whose mask is cut out of a table as wide as the longest sequence."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, LONGEST, 4))
        self.score = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(LONGEST, LONGEST).tril()[None])

    def forward(self, x):
        length = x.shape[1]
        x = x + self.positions[:, :length]
        weights = self.score(x) @ x.transpose(1, 2)
        hidden = self.mask[:, :length, :length] == 0
        return (torch.softmax(weights.masked_fill(hidden, float("-inf")), -1) @ x).square().mean()


class Branching(nn.Module):
    def __init__(self, is_special):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.is_special = is_special

    def forward(self, x):
        if self.is_special(x):
            x = 2 * x
        return self.layer(x).square().mean()


def batch(rows, length):
    generator = torch.Generator().manual_seed(rows * 100 + length)
    return (torch.randn(rows, length, 4, generator=generator),)


SHAPES = ({0: Dim("n", min=1, max=7), 1: Dim("t", min=1, max=LONGEST)},)


def test_a_table_as_long_as_the_longest_sequence():
    torch.manual_seed(0)
    model = Masked()
    captured = capture_step(model, None, batch(3, 6), dynamic_shapes=SHAPES)
    sizes = [(3, 6), (1, 1), (7, LONGEST), (2, LONGEST - 1)]
    check_gradients(captured, model, [batch(*size) for size in sizes], least=5e-6)


@pytest.mark.parametrize(
    "is_special",
    [
        lambda x: x.shape[1] == LONGEST,
        lambda x: not x.shape[1] != LONGEST,
        lambda x: 2 * x.shape[1] == 2 * LONGEST,
        lambda x: x.shape[1:] == (LONGEST, 4),
        lambda x: x.shape[1] in (LONGEST, LONGEST + 1),
        lambda x: x.shape[1] > LONGEST - 1,
        lambda x: (x.shape[1] / 4).is_integer(),
        lambda x: (x.shape[1] ** 0.5).is_integer(),
        lambda x: not x.shape[1] / 4 - x.shape[1] // 4,
        lambda x: (x.shape[1] > LONGEST - 1).__int__(),
        lambda x: divmod(x.shape[1], 4)[1] == 3,
        lambda x: (x.shape[1] == LONGEST) ^ (x.shape[0] > 7),
        lambda x: True ^ (x.shape[1] < LONGEST),
    ],
)
def test_a_branch_of_the_model_is_refused(is_special):
    with pytest.raises(ShapeRangeError, match="t"):
        capture_step(Branching(is_special), None, batch(3, 6), dynamic_shapes=SHAPES)


@pytest.mark.parametrize("factor", [lambda n: int(n > 6), lambda n: float(n > 6), lambda n: n > 6])
def test_a_condition_as_a_number_is_a_branch(factor):
    model, shapes = nn.Linear(4, 4), SHAPES
    with pytest.raises(ShapeRangeError, match=r"needs t (<=|>) 6.*test_size_branches\.py:\d+"):
        capture_step(
            model, None, batch(3, 6), dynamic_shapes=shapes,
            loss_fn=lambda m, x: (m(x) * factor(x.shape[1])).sum(),
        )  # fmt: skip


def test_a_condition_that_cannot_be_checked_is_refused():
    model = Branching(lambda x: x.shape[1] & 1 == 0)
    with pytest.raises(UnsupportedOperatorError, match=r"branches\.py:\d+: .*bitwise_and"):
        capture_step(model, None, batch(3, 6), dynamic_shapes=SHAPES)


def test_a_condition_where_only_a_plain_one_can_be_is_refused():
    with pytest.raises(UnsupportedOperatorError, match=r"branches\.py:\d+: .*plain ones"):
        capture_step(
            nn.Linear(4, 4), None, batch(3, 6), dynamic_shapes=SHAPES,
            loss_fn=lambda m, x: m(x).sum(1, keepdim=x.shape[1] > 6).sum(),
        )  # fmt: skip


def test_either_of_two_conditions_that_no_size_changes():
    model = Branching(lambda x: (x.shape[1] > 0) ^ (x.shape[0] > 7) ^ (x.shape[1] > LONGEST))
    captured = capture_step(model, None, batch(3, 6), dynamic_shapes=SHAPES)
    check_gradients(captured, model, [batch(1, 1), batch(7, LONGEST)], least=5e-6)


def of_two_dims(x):
    return (x.shape[1] % 8 == 0) | (x.shape[0] > 3)


def test_the_conditions_of_a_way_are_each_checked_by_calls():
    model = Branching(of_two_dims)
    step = relax_disc.compile(model, None, batch(3, 6), dynamic_shapes=SHAPES)
    for rows, length in [(1, 1), (3, 7), (2, LONGEST)]:
        loss = step(*batch(rows, length), update=False)
        torch.testing.assert_close(loss, model(*batch(rows, length)).detach())
    for rows, length in [(2, 8), (4, 6)]:
        with pytest.raises(ShapeRangeError, match="the model branches at"):
            step(*batch(rows, length), update=False)


def test_one_of_several_conditions_of_a_way_is_refused():
    with pytest.raises(ShapeRangeError, match=r"needs .*\|"):
        capture_step(Branching(of_two_dims), None, batch(4, 6), dynamic_shapes=SHAPES)


class Asserting(nn.Module):
    def forward(self, x):
        assert x.shape[2] == 5, "four is not five"
        return x.sum()


class ByChunks(nn.Module):
    """A layer of Hugging Face that pads its sequence to whole chunks."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x).square().mean()


def state_space():
    """One layer of Bamba, with chunks of 256."""
    bamba = pytest.importorskip("transformers.models.bamba.modeling_bamba")
    sizes = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1}
    return ByChunks(bamba.BambaMixer(transformers.BambaConfig(hidden_size=16, **sizes), 0))


def delta_rule():
    """One layer of Qwen 3.5, with chunks of 64."""
    qwen3_5 = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    heads = {f"linear_num_{kind}_heads": 2 for kind in ("key", "value")}
    widths = {f"linear_{kind}_head_dim": 4 for kind in ("key", "value")}
    config = transformers.Qwen3_5TextConfig(hidden_size=16, **heads, **widths)
    return ByChunks(qwen3_5.Qwen3_5GatedDeltaNet(config, 0))


def hidden_states(rows, length):
    generator = torch.Generator().manual_seed(rows * 100 + length)
    return (torch.randn(rows, length, 16, generator=generator),)


@pytest.mark.parametrize("make", [state_space, pytest.param(delta_rule, marks=pytest.mark.slow)])
def test_lengths_that_all_fit_into_one_chunk(make):
    """The number of chunks is 1 at all of them, which makes no number of the length."""
    torch.manual_seed(0)
    model = make()
    shapes = ({0: Dim("n", min=1, max=5), 1: Dim("t", min=2, max=48)},)
    captured = capture_step(model, None, hidden_states(3, 12), dynamic_shapes=shapes)
    sizes = [(3, 12), (1, 2), (5, 48), (2, 33), (1, 48)]
    check_gradients(captured, model, [hidden_states(*size) for size in sizes], least=5e-6)


def test_strides_are_in_order_where_sizes_are_one():
    rows, length = sympy.symbols("rows length", integer=True, positive=True)
    found = SizeBranches(Ways({}))
    found.ones_are_general = True
    required = found.required(8 * length < 8 * rows * length)
    at = np.array([1, 1, 2]), np.array([1, 9, 9])
    assert evaluate(required, dict(zip((rows, length), at, strict=True))).all()
    required = found.required(rows < length)
    at = np.array([1, 1, 2, 3, 2]), np.array([1, 9, 9, 3, 1])
    holds = evaluate(required, dict(zip((rows, length), at, strict=True)))
    assert holds.tolist() == [True, True, True, False, False]
    found.ones_are_general = False
    assert found.required(rows < length) == (rows < length)


def test_the_model_s_own_assertion_is_raised_as_it_is():
    with pytest.raises(AssertionError, match="four is not five"):
        capture_step(Asserting(), None, batch(3, 6), dynamic_shapes=SHAPES)


class Halving(nn.Module):
    """Counts windows of two, as often as told, and pads where the number is odd."""

    def __init__(self, times):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.times = times

    def forward(self, x):
        size = x.shape[1]
        for _ in range(self.times):
            size = (size - 1) // 2 + 1
        return (x * self.weight).square().mean() * (2.0 if size % 2 == 0 else 3.0)


class Fixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return (x * self.weight).square().mean() * operator.index(x.shape[1])


@pytest.mark.parametrize("times", [3, 4])
@pytest.mark.parametrize("example", [8, 10])
def test_branches_on_a_multiple_must_hold_over_the_range(times, example):
    axes = {1: 8 * Dim("wide", min=8, max=12)}
    with pytest.raises(ShapeRangeError, match=r"wide.*test_size_branches\.py:\d+"):
        capture_step(Halving(times), None, (torch.randn(3, 8 * example),), dynamic_shapes=(axes,))


def test_branches_on_a_multiple_that_hold_are_no_obstacle():
    torch.manual_seed(0)
    axes = {1: 16 * Dim("wide", min=4, max=6)}
    model = Halving(3)
    captured = capture_step(model, None, (torch.randn(3, 80),), dynamic_shapes=(axes,))
    check_gradients(captured, model, [(torch.randn(3, 16 * wide),) for wide in (4, 5, 6)])


def test_a_multiple_that_becomes_a_number_is_refused():
    axes = {1: 8 * Dim("wide", min=8, max=12)}
    with pytest.raises(ShapeRangeError, match=r"test_size_branches\.py:\d+.*wide=10 alone"):
        capture_step(Fixing(), None, (torch.randn(3, 80),), dynamic_shapes=(axes,))


class Positions(nn.Module):
    """Positions as BERT keeps them: a table of ids, cut to the length."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(20, 4), nn.Embedding(8, 4)
        self.head = nn.Linear(4, 20)
        self.register_buffer("ids", torch.arange(8)[None])

    def forward(self, ids):
        at = self.ids[:, : ids.shape[1]]
        kinds = torch.zeros(1, 8, dtype=torch.int64)[:, : ids.shape[1]].expand(ids.shape[0], -1)
        scores = self.head(self.words(ids) + self.places(at) + self.places(kinds))
        return nn.functional.cross_entropy(scores.view(-1, 20), ids.view(-1))


def test_more_positions_than_a_table_has():
    ids = torch.zeros(2, 6, dtype=torch.int64)
    shapes = ({0: Dim("batch", min=1, max=8), 1: Dim("length", min=2, max=30)},)
    with pytest.raises(ShapeRangeError, match=r"Dim\('length', min=2, max=8\)"):
        capture_step(Positions(), None, (ids,), dynamic_shapes=shapes)


def test_one_condition_or_another():
    branches, size = SizeBranches(Ways({})), sympy.Symbol("s", integer=True)
    branches.ones_are_general = True  # PyTorch's 2 means 1 then
    either = sympy.Or(size >= 2, sympy.Eq(sympy.Min(32, size), size))
    expected = sympy.Or(size >= 1, sympy.Eq(sympy.Min(32, size), size))
    assert branches.required(either) == expected
    assert branches.required(sympy.true) == sympy.true


class Picking(nn.Module):
    """Keeps a part of the positions, as masked autoencoders and mining of hard examples do."""

    def __init__(self, count):
        super().__init__()
        self.layer, self.count = nn.Linear(4, 1), count

    def forward(self, x):
        return self.layer(x)[..., 0].topk(self.count(x.shape[1]), dim=1).values.mean()


class Weighed(Picking):
    def forward(self, x):
        return self.layer(x).mean() * self.count(x.shape[1])


def test_a_number_made_of_sizes_is_the_examples_own():
    model = Weighed(lambda n: max(1, int(n * 0.3333)))
    with pytest.raises(ShapeRangeError, match=r"test_size_branches.*int\(\).*torch.sym_int"):
        capture_step(model, None, batch(3, 6), dynamic_shapes=SHAPES)
    model = Weighed(lambda n: math.atan(n / 2))
    with pytest.raises(UnsupportedOperatorError, match="a Python number is made of sizes"):
        capture_step(model, None, batch(3, 6), dynamic_shapes=SHAPES)


def test_a_share_that_a_division_tells_is_no_number_of_the_example():
    model = Weighed(lambda n: max(1, int(n * 0.4)))
    captured = capture_step(model, None, batch(3, 6), dynamic_shapes=SHAPES)
    check_gradients(captured, model, [batch(*size) for size in ((3, 6), (1, 1), (2, 9), (2, 5))])


def test_a_number_that_is_the_same_at_all_sizes_may_be_made_of_them():
    model = Picking(lambda n: 1 + int(n / 100))
    captured = capture_step(model, None, batch(3, 6), dynamic_shapes=SHAPES)
    check_gradients(captured, model, [batch(*size) for size in ((3, 6), (1, 1), (2, 9))])


def test_a_part_of_a_size_computed_with_sizes():
    model = Picking(lambda n: torch.sym_max(1, torch.sym_int(0.5 * n)))
    captured = capture_step(model, None, batch(3, 6), dynamic_shapes=SHAPES)
    check_gradients(captured, model, [batch(*size) for size in ((3, 6), (1, 1), (2, 9))])


class Given(nn.Module):
    """Gives an operator a number that is made of the number of rows and the length."""

    def __init__(self, use):
        super().__init__()
        self.layer, self.use = nn.Linear(4, 4), use

    def forward(self, x):
        return self.use(self.layer(x), *x.shape[:2]).square().mean()


@pytest.mark.parametrize(
    "use",
    [
        lambda y, b, n: functional.layer_norm(y, (4,), eps=1.0 / n),
        lambda y, b, n: functional.pad(y, (1, 0), value=1.0 / n),
        lambda y, b, n: functional.smooth_l1_loss(y, y.detach() + 1, beta=1.0 / n),
    ],
    ids=["norm", "padding", "loss"],
)
def test_a_number_that_an_operator_takes_is_the_examples_own(use):
    with pytest.raises(ShapeRangeError, match=r"test_size_branches.*a plain number is made of"):
        capture_step(Given(use), None, batch(3, 6), dynamic_shapes=SHAPES)


@pytest.mark.parametrize(
    "use",
    [
        lambda y, b, n: y * n**-0.5 + functional.hardshrink(y, 1.0 / n),
        lambda y, b, n: functional.pad(y, (1, 0), value=1.0 * (n // 100)),
        lambda y, b, n: torch.full_like(y, 1.0 / (b * n)) * y,
        lambda y, b, n: functional.elu(y, 1.0 / n),
        lambda y, b, n: y * y.new_tensor([0.1 * n]),
        lambda y, b, n: functional.conv1d(  # as StyleGAN's, a group for each example
            y.transpose(1, 2).reshape(1, -1, n),
            y[:, :1, :, None].exp().flatten(0, 1),
            padding=n // 2,
            groups=b,
        ),
    ],
    ids=["arithmetic", "the same", "full", "slope", "new_tensor", "groups"],
)
def test_an_operator_that_takes_sizes_has_them(use):
    model = Given(use)
    captured = capture_step(model, None, batch(3, 6), dynamic_shapes=SHAPES)
    check_gradients(captured, model, [batch(*size) for size in ((3, 6), (1, 1), (2, 9))])


class Flattened(nn.Module):
    """Takes rows out of all positions, by a number of them that may be more than there are."""

    def __init__(self, count):
        super().__init__()
        self.layer, self.count = nn.Linear(4, 4), count

    def forward(self, x):
        rows = self.layer(x).reshape(-1, 4)
        return rows[: self.count(rows.shape[0])].square().mean()


@pytest.mark.parametrize("example", [(3, 6), (3, 7)])
@pytest.mark.parametrize(
    "count",
    [
        lambda n: 2 * math.ceil(n / 2),
        lambda n: 2 * ((n + 1) // 2),
        lambda n: n - n % 2,
        lambda n: n // 5 * 5 + 3,
    ],
)
def test_a_slice_of_flattened_positions_ends_with_them(count, example):
    torch.manual_seed(0)
    model = Flattened(count)
    captured = capture_step(model, None, batch(*example), dynamic_shapes=SHAPES)
    sizes = [(1, 2), (1, 3), (3, 5), (7, LONGEST), (7, LONGEST - 1), (2, 8)]
    check_gradients(captured, model, [batch(*size) for size in sizes], least=5e-6)
