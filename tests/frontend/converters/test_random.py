"""Random operators: pure functions of seed and offset, equal to their reference, well spread."""

import math

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

import relax_disc
from relax_disc.frontend import capture_forward, capture_step
from relax_disc.frontend.random_ops import Randomness
from tests.frontend.running import Runner, eager, relative
from tests.philox import philox

N = Dim("n", min=1, max=64)


def test_philox_known_answers():
    # From the Random123 distribution, kat_vectors: philox4x32 10.
    assert int(philox(0, 0, 0, 1)[0]) == 0x6627E8D5
    all_ones = 0xFFFFFFFFFFFFFFFF
    assert int(philox(all_ones, 0, 0, 1)[0]) != int(philox(0, 0, 0, 1)[0])


class Draws(nn.Module):
    def forward(self, x):
        return (
            torch.rand_like(x),
            torch.randn_like(x),
            torch.rand(x.shape[0], 3),
            torch.randint(2, 9, (x.shape[0],)),
            F.dropout(torch.ones_like(x), 0.25),
            F.dropout1d(torch.ones_like(x)[:, :, None].expand(-1, -1, 4), 0.5),
            torch.bernoulli(torch.full_like(x, 0.7)),
            x.new_empty(x.shape).bernoulli_(0.2),
            F.dropout(torch.ones_like(x), 0.25, inplace=True),
        )


@pytest.fixture(scope="module")
def drawing():
    model = Draws()
    captured = capture_forward(model, (torch.randn(4, 16),), dynamic_shapes=({0: N},))
    return model, Runner(captured)


def test_equal_to_the_reference_at_every_shape(drawing):
    model, run = drawing
    for n in (4, 1, 64):
        ours = [t for _, t in run(model, None, (torch.randn(n, 16),), rng=(7, 3))["extra"]]
        reference = Randomness(torch.tensor([7, 3]))
        assert torch.equal(ours[0], reference.uniform((n, 16)))
        torch.testing.assert_close(ours[1], reference.normal((n, 16)), rtol=1e-4, atol=1e-5)
        assert torch.equal(ours[2], reference.uniform((n, 3)))


def test_offset_and_seed_change_the_numbers(drawing):
    model, run = drawing
    x = (torch.randn(64, 16),)
    same = [
        run(model, None, x, rng=state)["extra"][0][1] for state in ((1, 0), (1, 0), (1, 1), (2, 0))
    ]
    assert torch.equal(same[0], same[1])
    assert not torch.equal(same[0], same[2])
    assert not torch.equal(same[0], same[3])


def test_statistics(drawing):
    model, run = drawing
    draws = [run(model, None, (torch.randn(64, 16),), rng=(5, k))["extra"] for k in range(8)]
    rand, normal, _, whole, drop, channels, ones, filled, in_place = (
        torch.stack([d[k][1].float() for d in draws]) for k in range(9)
    )
    assert rand.min() >= 0 and rand.max() < 1
    assert rand.mean().item() == pytest.approx(0.5, abs=0.02)
    assert rand.var().item() == pytest.approx(1 / 12, abs=0.01)
    assert normal.mean().item() == pytest.approx(0, abs=0.05)
    assert normal.std().item() == pytest.approx(1, abs=0.05)
    assert set(whole.unique().tolist()) == set(range(2, 9))
    assert sorted(drop.unique().tolist()) == pytest.approx([0.0, 1 / 0.75])
    assert (drop == 0).float().mean().item() == pytest.approx(0.25, abs=0.03)
    assert sorted(in_place.unique().tolist()) == pytest.approx([0.0, 1 / 0.75])
    assert torch.equal(channels[..., 0], channels[..., 3])
    assert ones.mean().item() == pytest.approx(0.7, abs=0.03)
    assert filled.mean().item() == pytest.approx(0.2, abs=0.03)


class MoreDraws(nn.Module):
    """The rules that the others are made of are tested above; these by their statistics."""

    def forward(self, x):
        weights = torch.tensor([0.1, 0.2, 0.7]).expand(x.shape[0], 3)
        return (
            torch.empty_like(x).exponential_(2.0),
            torch.empty_like(x).normal_(3.0, 0.5),
            torch.empty_like(x).uniform_(-1.0, 3.0),
            torch.normal(torch.full_like(x, 2.0), 0.1),
            torch.randint_like(x, 2, 5),
            F.rrelu(-torch.ones_like(x), 0.2, 0.4, training=True),
            F.rrelu(-torch.ones_like(x), 0.2, 0.4, training=False),
            F.alpha_dropout(torch.zeros_like(x), 0.3, training=True),
            F.feature_alpha_dropout(x[:, :, None].expand(-1, -1, 4) * 0, 0.3, training=True),
            F.gumbel_softmax(torch.log(weights), tau=0.5),
            torch.normal(3.0, 0.5, x.shape),
        )


def test_statistics_of_more_distributions():
    model = MoreDraws()
    captured = capture_forward(model, (torch.randn(4, 16),), dynamic_shapes=({0: N},))
    run = Runner(captured)
    draws = [run(model, None, (torch.randn(64, 16),), rng=(9, k))["extra"] for k in range(8)]
    exponential, filled, uniform, around, whole, slopes, fixed, alpha, channels, soft, drawn = (
        torch.stack([d[k][1].float() for d in draws]) for k in range(11)
    )
    assert exponential.min() > 0
    assert exponential.mean().item() == pytest.approx(0.5, abs=0.03)
    for normal in (filled, drawn):
        assert normal.mean().item() == pytest.approx(3.0, abs=0.03)
        assert normal.std().item() == pytest.approx(0.5, abs=0.02)
    assert uniform.min() >= -1 and uniform.max() < 3
    assert uniform.mean().item() == pytest.approx(1.0, abs=0.06)
    assert around.std().item() == pytest.approx(0.1, abs=0.01)
    assert set(whole.unique().tolist()) == {2.0, 3.0, 4.0}
    assert slopes.min() >= -0.4 and slopes.max() <= -0.2 and slopes.std() > 0.05
    assert torch.allclose(fixed, torch.tensor(-0.3))
    low, high = sorted(alpha.unique().tolist())
    assert (alpha == low).float().mean().item() == pytest.approx(0.3, abs=0.03)
    assert 0.7 * high + 0.3 * low == pytest.approx(0.0, abs=1e-5)  # keeps the mean
    assert torch.equal(channels[..., 0], channels[..., 3])
    assert torch.allclose(soft.sum(-1), torch.tensor(1.0))
    chosen = torch.nn.functional.one_hot(soft.argmax(-1), 3).float().mean((0, 1))
    torch.testing.assert_close(chosen, torch.tensor([0.1, 0.2, 0.7]), atol=0.06, rtol=0)


class Noise(nn.Module):
    """Of an amplitude that a tensor tells, as NEFTune's is for each length."""

    def forward(self, x):
        most = 5.0 / torch.sqrt(torch.tensor(x.shape[0] * x.shape[1]))
        drawn = torch.zeros_like(x).uniform_(-most, most)
        return drawn, torch.empty_like(x).uniform_(**{"from": x.amin(), "to": x.amax() + 1})


def test_bounds_that_tensors_tell():
    forward = relax_disc.compile_forward(Noise(), (torch.randn(4, 16),), dynamic_shapes=({0: N},))
    for rows in (64, 1, 16):
        x, most = torch.randn(rows, 16), 5 / math.sqrt(rows * 16)
        found = [forward(x) for _ in range(8 * 64 // rows)]
        noise, between = (torch.stack(part) for part in zip(*found, strict=True))
        assert 0.98 * most < noise.abs().max() <= most
        assert noise.mean().item() == pytest.approx(0.0, abs=0.05 * most)
        assert between.min() >= x.min() and between.max() < x.max() + 1
        width = x.max() + 1 - x.min()
        assert between.std().item() == pytest.approx(width.item() / math.sqrt(12), rel=0.05)


class Picks(nn.Module):
    def forward(self, x):
        weights = torch.tensor([0.1, 0.2, 0.7, 0.0]).expand(x.shape[0], 4)
        return torch.multinomial(weights, 1), torch.multinomial(weights, 3), torch.randperm(9)


def test_picks():
    forward = relax_disc.compile_forward(Picks(), (torch.randn(4, 2),), dynamic_shapes=({0: N},))
    found = [forward(torch.randn(64, 2)) for _ in range(8)]
    one, three, order = (torch.stack(part) for part in zip(*found, strict=True))
    share = torch.bincount(one.flatten(), minlength=4) / one.numel()
    torch.testing.assert_close(share, torch.tensor([0.1, 0.2, 0.7, 0.0]), atol=0.06, rtol=0)
    assert torch.equal(three.sort(-1)[0], torch.arange(3).expand(8, 64, 3))
    assert torch.equal(order.sort(-1)[0], torch.arange(9).expand(8, 9))
    assert len({tuple(row.tolist()) for row in order}) > 1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x, masks=None):
        z = torch.tanh(self.first(x))
        z = F.dropout(z, 0.4) if masks is None else z * masks / 0.6
        z = z.view(-1, 2, 4, 2)
        z = F.scaled_dot_product_attention(z, z, z, dropout_p=0.0)
        return self.last(z.reshape(-1, 16)).square().mean()


def test_gradients_with_our_mask_fed_to_pytorch():
    torch.manual_seed(0)
    model = Net()
    captured = capture_step(model, None, (torch.randn(4, 16),), dynamic_shapes=({0: N},))
    assert [spec.kind for spec in captured.inputs].count("rng") == 1
    run = Runner(captured)
    for n in (4, 1, 64):
        x = torch.randn(n, 16)
        found = run(model, None, (x,), rng=(11, 2))
        mask = Randomness(torch.tensor([11, 2])).keep((n, 16), 0.4)
        loss, grads = eager(model, (x, mask), torch.float64)
        assert found["loss"][0][1].item() == pytest.approx(loss, rel=1e-5)
        assert relative(dict(found["gradient"]), grads) < 1e-6


class Attention(nn.Module):
    """Grouped heads with dropout of the weights: drawn by the operator, or as a mask given."""

    def __init__(self, **options):
        super().__init__()
        self.inner, self.options = nn.Linear(8, 64), options

    def forward(self, x, kept=None):
        b, t, _ = x.shape
        q, k, v = self.inner(x).view(b, t, 8, 8).transpose(1, 2).split([4, 2, 2], 1)
        if kept is None:
            out = F.scaled_dot_product_attention(
                *(q, k, v), dropout_p=0.3, enable_gqa=True, **self.options
            )
        else:
            k, v = (n.repeat_interleave(2, 1) for n in (k, v))
            scores = q @ k.transpose(2, 3) / math.sqrt(8)
            if self.options:
                scores = scores.masked_fill(~torch.ones(t, t).tril().bool(), float("-inf"))
            out = (scores.softmax(-1) * kept / 0.7) @ v
        return out.square().mean()


@pytest.mark.parametrize("options", [{"is_causal": True}, {}], ids=["causal", "full"])
def test_attention_drops_the_weights_that_the_reference_drops(options):
    torch.manual_seed(0)
    model = Attention(**options)
    shapes = ({0: N, 1: Dim("t", min=1, max=64)},)
    example = (torch.randn(3, 4, 8),)
    captured = capture_step(model, None, example, dynamic_shapes=shapes)
    assert [spec.kind for spec in captured.inputs].count("rng") == 1
    run = Runner(captured)  # by plain operators
    step = relax_disc.compile(model, None, example, dynamic_shapes=shapes)  # by the library
    for b, t in ((3, 4), (1, 1), (2, 33)):
        x = torch.randn(b, t, 8)
        kept = Randomness(torch.tensor([11, 2])).keep((b, 4, t, t), 0.3)
        loss, grads = eager(model, (x, kept), torch.float64)
        found = run(model, None, (x,), rng=(11, 2))
        assert found["loss"][0][1].item() == pytest.approx(loss, rel=1e-5)
        assert relative(dict(found["gradient"]), grads) < 1e-6
        step.rng_state = torch.tensor([11, 2])
        model.zero_grad()
        assert step(x, update=False).item() == pytest.approx(loss, rel=1e-5)
        assert relative({n: p.grad for n, p in model.named_parameters()}, grads) < 1e-6


def test_all_weights_of_attention_may_be_dropped():
    def loss_fn(model, x):
        z = model(x).view(-1, 4, 2, 4)
        return F.scaled_dot_product_attention(z, z, z, dropout_p=1.0).sum()

    step = relax_disc.compile(
        nn.Linear(8, 8), None, (torch.randn(8, 8),), dynamic_shapes=({0: 4 * N},), loss_fn=loss_fn
    )
    assert step(torch.randn(8, 8), update=False).item() == 0


def test_evaluation_mode_needs_no_randomness():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval()
    captured = capture_forward(model, (torch.randn(3, 4),), dynamic_shapes=({0: N},))
    assert "rng" not in [spec.kind for spec in captured.inputs]
