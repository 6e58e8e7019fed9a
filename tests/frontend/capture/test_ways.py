"""Branches on a size that go two ways within its range, where both are one program."""

import pytest
import torch
import transformers
from torch import nn
from torch.export import Dim
from torch.nn import functional

import relax_disc
from relax_disc.errors import RelaxDiscError, ShapeRangeError
from relax_disc.frontend import capture_step
from tests.frontend.capture.test_size_branches import ByChunks
from tests.frontend.running import check_gradients
from tests.tiers import every


class Layered(nn.Module):
    """Cuts its input ``[rows, length, 4]`` into blocks of four positions."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.mixing = nn.Linear(16, 16)

    def forward(self, x):
        return self.ways(self.layer(x)).square().mean()

    def blocks(self, x):
        return self.mixing(x.reshape(x.shape[0], -1, 16)).reshape(x.shape[0], -1, 4).tanh()


class CutsWhatItPadded(Layered):
    """As the state space models of Hugging Face do."""

    def ways(self, x):
        length = x.shape[1]
        pad = (4 - length % 4) % 4
        x = self.blocks(functional.pad(x, (0, 0, 0, pad)))
        if pad > 0:
            x = x[:, :length]
        return x


class PadsWhereItMust(Layered):
    def ways(self, x):
        length = x.shape[1]
        if length % 4 != 0:
            x = functional.pad(x, (0, 0, 0, -length % 4))
        return self.blocks(x)[:, :length]


class AsksForTheNumber(Layered):
    def ways(self, x):
        pad = -x.shape[1] % 4
        if pad:
            x = functional.pad(x, (0, 0, 0, pad))
        return self.blocks(x)


class Appends(Layered):
    """Zeros behind the sequence, and a tensor that only one way makes and nobody reads."""

    def ways(self, x):
        rows, length, width = x.shape
        if length % 4:
            unread = x.new_ones(length)
            unread[0] = 2
            x = torch.cat([x, x.new_zeros(rows, -length % 4, width)], 1)
        return self.blocks(x)[:, :length]


class AsksAgainInside(Layered):
    """A question that only one way comes to."""

    def ways(self, x):
        length = x.shape[1]
        pad = -length % 4
        if pad > 0:
            x = functional.pad(x, (0, 0, 0, pad))
            if pad == 2:
                x = x[:, : length + 2]
        return self.blocks(x)[:, :length]


class FewPad(Layered):
    """The program of few sizes is right for all, that of most is not; SEW pads its odd lengths."""

    def ways(self, x):
        missing = x.shape[1] % 4 // 3
        x = self.mixing.bias[:4] * x[:, : x.shape[1] - missing]
        if missing:
            x = functional.pad(x, (0, 0, 0, missing))
        return x + 1


class DrawsBehind(Layered):
    def ways(self, x):
        length = x.shape[1]
        if length % 4:
            x = functional.pad(x, (0, 0, 0, -length % 4))
        return self.blocks(x)[:, :length] + 0.0 * torch.rand_like(x).sum()


class PadsByWhatIsLeft(Layered):
    """Right where the length is no multiple: elsewhere it would pad by four."""

    def ways(self, x):
        length = x.shape[1]
        if length % 4 != 0:
            x = functional.pad(x, (0, 0, 0, 4 - length % 4))
        return self.blocks(x)[:, :length]


class PadsToTheNext(Layered):
    def ways(self, x):
        length = x.shape[1]
        if (length / 4).is_integer():
            return self.blocks(x)
        return self.blocks(functional.pad(x, (0, 0, 0, (length // 4 + 1) * 4 - length)))[:, :length]


class PadsToASum(Layered):
    def ways(self, x):
        length = whole = x.shape[1]
        if length % 4 > 0:
            whole = length + 4 - length % 4
        return self.blocks(functional.pad(x, (0, 0, 0, whole - length)))[:, :length]


class CountsBlocks(Layered):
    def ways(self, x):
        blocks, left = divmod(x.shape[1], 4)
        if left:
            blocks = blocks + 1
        x = functional.pad(x, (0, 0, 0, 4 * blocks - x.shape[1]))
        return self.blocks(x)


class PadsAtMultiples(Layered):
    """By four at multiples, which the other way's number is there, too."""

    def ways(self, x):
        length = x.shape[1]
        if length % 4 == 0:
            x = functional.pad(x, (0, 0, 0, 4 - length % 4))
        else:
            x = functional.pad(x, (0, 0, 0, -length % 4))
        return self.blocks(x)


class ReadsATable(Layered):
    """Positions of a table, which PyTorch cuts as ``[0:1]`` for one and as ``[:n]`` for more."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(20, 4))

    def ways(self, x):
        length = x.shape[1]
        x = x + self.table[:length]
        assert length == 1 or length <= len(self.table)
        return x


ONE_PROGRAM = (
    CutsWhatItPadded, PadsWhereItMust, AsksForTheNumber, Appends, AsksAgainInside, FewPad,
    PadsByWhatIsLeft, PadsToTheNext, PadsToASum, CountsBlocks, PadsAtMultiples, ReadsATable,
)  # fmt: skip


def batch(rows, length):
    generator = torch.Generator().manual_seed(rows * 100 + length)
    return (torch.randn(rows, length, 4, generator=generator),)


def shapes(least=1, most=17):
    return ({0: Dim("n", min=1, max=7), 1: Dim("t", min=least, max=most)},)


@pytest.mark.parametrize("example", every(2, [6, 8]))
@pytest.mark.parametrize("kind", [*ONE_PROGRAM, DrawsBehind])
def test_both_ways_are_one_program(kind, example):
    torch.manual_seed(0)
    model = kind()
    captured = capture_step(model, None, batch(3, example), dynamic_shapes=shapes())
    sizes = [(3, 6), (1, 1), (7, 17), *((2, length) for length in range(1, 18))]
    check_gradients(captured, model, [batch(*size) for size in sizes], least=5e-6)


class Windows(nn.Module):
    """Windows of an image, padded along either side where it must be: four ways."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(2, 6, 1)
        self.inside = nn.Linear(6 * 9, 6 * 9)

    def forward(self, x):
        x = self.embed(x)
        rows, width, h, w = x.shape
        below, right = (3 - h % 3) % 3, (3 - w % 3) % 3
        if below > 0 or right > 0:
            x = functional.pad(x, (0, right, 0, below))
        x = x.unfold(2, 3, 3).unfold(3, 3, 3)
        n, m = x.shape[2:4]
        x = self.inside(x.permute(0, 2, 3, 1, 4, 5).reshape(rows, n, m, -1))
        x = x.reshape(rows, n, m, width, 3, 3).permute(0, 3, 1, 4, 2, 5)
        x = x.reshape(rows, width, 3 * n, 3 * m)
        if below > 0 or right > 0:
            x = x[:, :, :h, :w].contiguous()
        return x.square().mean()


def test_windows_of_images_of_every_size():
    torch.manual_seed(0)
    model = Windows()
    sides = {0: Dim("n", min=1, max=3), 2: Dim("h", min=2, max=9), 3: Dim("w", min=2, max=9)}
    captured = capture_step(model, None, (torch.randn(2, 2, 5, 6),), dynamic_shapes=(sides,))
    sizes = [(1, 2, 2, 2), (3, 2, 9, 9), (2, 2, 6, 6), (2, 2, 5, 6), (2, 2, 6, 4), (2, 2, 7, 8)]
    check_gradients(captured, model, [(torch.randn(size),) for size in sizes], least=5e-6)


class Doubles(Layered):
    def ways(self, x):
        return 2 * x if x.shape[1] % 4 == 0 else x


class AddsAnotherNumber(Layered):
    def ways(self, x):
        return x + (1.0 if x.shape[1] % 4 == 0 else 2.0)


class CutsTooMuch(Layered):
    """One position less than all where the length is a multiple of four."""

    def ways(self, x):
        return x[:, : x.shape[1] - 1] if x.shape[1] % 4 == 0 else x


class WritesIntoTheCopy(Layered):
    """What is padded by nothing is a copy: what is written into it is not in ``x``."""

    def ways(self, x):
        padded = x
        if x.shape[1] % 4:
            padded = functional.pad(x, (0, 0, 0, -x.shape[1] % 4))
        padded.mul_(2)
        return x


class DrawsOneWay(Layered):
    def ways(self, x):
        return functional.dropout(x, 0.5, True) if x.shape[1] % 4 == 0 else x


class Reorders(Layered):
    """The same operators with other operands."""

    def ways(self, x):
        y = x.tanh()
        return x - y if x.shape[1] % 4 == 0 else y - x


class RoundsUpOrOneMore(Layered):
    def ways(self, x):
        count = x.shape[1] // 4 + 1 if x.shape[1] % 4 else x.shape[1] // 4 + 2
        return x[:, :count]


class LeavesOutABias(Layered):
    """An operand that is there on one way and None on the other."""

    def ways(self, x):
        bias = self.mixing.bias[:4] if x.shape[1] % 4 else None
        return functional.linear(x, self.mixing.weight[:4, :4], bias)


class LeavesOutAParameter(Layered):
    """As above, a parameter itself."""

    def ways(self, x):
        return functional.layer_norm(x, (4,), None, self.layer.bias if x.shape[1] % 4 else None)


class ReadsAnother(Layered):
    def ways(self, x):
        return x * (self.layer.bias if x.shape[1] % 4 else self.mixing.bias[:4])


class PicksOthers(Layered):
    def ways(self, x):
        return x + x[(x[..., 0] > 0) if x.shape[1] % 4 else (x[..., 1] > 0)].sum()


class CountsOthers(Layered):
    """The number alone of what is picked."""

    def ways(self, x):
        first, second = x[x[..., 0] > 0].shape[0], x[x[..., 1] > 0].shape[0]
        return x * (first if x.shape[1] % 4 else second)


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class GivesAFunctionAnother(Layered):
    """A number that the graph does not show."""

    def ways(self, x):
        return Times.apply(x, 2.0 if x.shape[1] % 4 else 3.0)


class ReturnsByOtherNames(Layered):
    def forward(self, x):
        name = "odd" if x.shape[1] % 4 else "even"
        return super().forward(x), {name: x.sum()}

    def ways(self, x):
        return x


class ReadsMemory(Layered):
    """A copy holds the same numbers, in another order in memory."""

    def ways(self, x):
        rows, length, width = x.shape
        turned = x.transpose(1, 2)
        if length % 4:
            turned = turned.contiguous()
        return turned.as_strided((rows, length, width), (length * width, width, 1))


OTHER_PROGRAMS = (
    ReadsMemory,
    GivesAFunctionAnother,
    ReturnsByOtherNames,
    PicksOthers,
    CountsOthers,
    RoundsUpOrOneMore,
    LeavesOutABias,
    LeavesOutAParameter,
    ReadsAnother,
    Doubles,
    AddsAnotherNumber,
    CutsTooMuch,
    WritesIntoTheCopy,
    DrawsOneWay,
    Reorders,
)


@pytest.mark.parametrize("kind", OTHER_PROGRAMS)
def test_ways_that_are_other_programs_are_refused(kind):
    with pytest.raises(ShapeRangeError, match=r"At t=\d+ the model's code is another program"):
        capture_step(kind(), None, batch(3, 6), dynamic_shapes=shapes())


class RefusesShortOnes(Layered):
    def ways(self, x):
        if x.shape[1] < 4:
            raise ValueError("too short")
        return self.blocks(functional.pad(x, (0, 0, 0, -x.shape[1] % 4)))


def test_a_model_that_raises_at_some_sizes_is_refused_with_the_range():
    with pytest.raises(ShapeRangeError, match=r"give Dim\('t', min=4"):
        capture_step(RefusesShortOnes(), None, batch(3, 6), dynamic_shapes=shapes())
    assert capture_step(RefusesShortOnes(), None, batch(3, 6), dynamic_shapes=shapes(4)) is not None


def test_the_refusal_names_the_line_where_the_ways_part():
    with pytest.raises(ShapeRangeError, match=r"test_ways.py:\d+.*another program") as caught:
        capture_step(Doubles(), None, batch(3, 6), dynamic_shapes=shapes())
    line = Doubles.ways.__code__.co_firstlineno + 1
    assert f"another program from {__file__}:{line} on" in str(caught.value)


class AsksOfTwoSizes(Layered):
    """That of the rows makes no difference, and that of the length does."""

    def ways(self, x):
        if x.shape[0] != 1:
            x = x.expand(x.shape[0], -1, -1)
        return self.mixing.bias[:4] * x if x.shape[1] == 1 else x


def test_the_refusal_names_the_dim_whose_ways_part():
    with pytest.raises(ShapeRangeError, match=r"give Dim\('t', min=2"):
        capture_step(AsksOfTwoSizes(), None, batch(3, 6), dynamic_shapes=shapes())
    model = AsksOfTwoSizes()
    assert capture_step(model, None, batch(3, 6), dynamic_shapes=shapes(2)) is not None


class ReadsOnOneWay(Layered):
    """One way alone looks at a setting of the model."""

    def __init__(self):
        super().__init__()
        self.keeps_all = False

    def ways(self, x):
        length = x.shape[1]
        pad = -length % 4
        x = self.blocks(functional.pad(x, (0, 0, 0, pad)))
        if pad == 0 and self.keeps_all:
            return x * 3
        return x[:, :length]


def test_what_another_way_reads_is_watched():
    model = ReadsOnOneWay()
    (dims,) = shapes()
    options = {"dynamic_shapes": (dims,), "loss_fn": lambda model, x: model(x)}
    step = relax_disc.compile(model, torch.optim.SGD(model.parameters()), batch(3, 6), **options)
    step(*batch(2, 8))
    step(*batch(2, 7))
    model.keeps_all = True
    with pytest.raises(RelaxDiscError, match="keeps_all"):
        step(*batch(2, 8))


class One(Layered):
    """What PyTorch's tracing takes for settled: its symbols are 2 or more."""

    asks = staticmethod(lambda size: size == 1)

    def ways(self, x):
        return 2 * x if self.asks(x.shape[1]) else x


QUESTIONS = (
    lambda size: size == 1,
    lambda size: not size != 1,
    lambda size: size < 2,
    lambda size: not size - 1,
    lambda size: size in (0, 1),
    lambda size: max(size, 2) > size,
)


@pytest.mark.parametrize("most", [17, None])
@pytest.mark.parametrize("asks", QUESTIONS)
def test_a_length_of_one_that_goes_another_way_is_refused(asks, most):
    """It went the way of all others, and nothing told."""
    model = One()
    model.asks = asks
    with pytest.raises(ShapeRangeError, match=r"give Dim\('t', min=2.*another program from"):
        capture_step(model, None, batch(3, 6), dynamic_shapes=shapes(most=most))
    assert capture_step(model, None, batch(3, 6), dynamic_shapes=shapes(2, most)) is not None


def test_a_size_that_is_declared_by_another_is_seen_too():
    class Shifted(Layered):
        def forward(self, x, y):
            factor = 2.0 if y.shape[1] == 4 else 1.0
            return (factor * self.layer(x)[:, 1:] * y).square().mean()

    length = Dim("t", min=2, max=17)
    example = (*batch(3, 6), batch(3, 5)[0])
    with pytest.raises(ShapeRangeError, match="t=5"):
        capture_step(Shifted(), None, example, dynamic_shapes=({1: length}, {1: length - 1}))


class Extended(Layered):
    """As Hugging Face's masks: positions of one row are given to all rows, if there are more."""

    def ways(self, x):
        positions = torch.arange(x.shape[1])[None]
        if positions.shape[0] != x.shape[0]:
            positions = positions.expand(x.shape[0], -1)
        return x * positions[..., None]


class Causal(Layered):
    """Attention that is causal where there is more than one position."""

    def ways(self, x):
        x = x[:, None]
        return functional.scaled_dot_product_attention(x, x, x, is_causal=bool(x.shape[2] > 1))[
            :, 0
        ]


@pytest.mark.parametrize("kind", [Extended, Causal])
def test_sizes_of_one_that_need_no_way_of_their_own(kind):
    torch.manual_seed(0)
    model = kind()
    captured = capture_step(model, None, batch(3, 6), dynamic_shapes=shapes())
    sizes = [(3, 6), (1, 1), (7, 17), (1, 9), (2, 1)]
    check_gradients(captured, model, [batch(*size) for size in sizes], least=5e-6)


def test_attention_that_is_causal_otherwise_is_refused():
    class Switched(Layered):
        def ways(self, x):
            x = x[:, None]
            causal = bool(x.shape[2] > 2)
            return functional.scaled_dot_product_attention(x, x, x, is_causal=causal)[:, 0]

    with pytest.raises(ShapeRangeError, match="another program"):
        capture_step(Switched(), None, batch(3, 6), dynamic_shapes=shapes())


def state_space():
    """One layer of Bamba, in chunks of 16."""
    bamba = pytest.importorskip("transformers.models.bamba.modeling_bamba")
    sizes = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1}
    config = transformers.BambaConfig(hidden_size=4, mamba_chunk_size=16, mamba_expand=8, **sizes)
    return bamba.BambaMixer(config, 0)


@pytest.mark.slow
def test_lengths_of_several_chunks_of_a_state_space_model():
    torch.manual_seed(0)
    model = ByChunks(state_space())
    captured = capture_step(model, None, batch(3, 5), dynamic_shapes=shapes(2, 70))
    sizes = [(3, 5), (1, 2), (7, 70), (2, 16), (1, 32), (2, 33), (2, 64)]
    check_gradients(captured, model, [batch(*size) for size in sizes], least=5e-6)
