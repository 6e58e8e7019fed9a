"""What eager PyTorch does otherwise at sizes of 1: squeezed axes, and sizes less two."""

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional

import relax_disc
from relax_disc.errors import ShapeRangeError

SHAPES = {0: Dim("n", min=1, max=7), 1: Dim("t", min=1, max=9)}
SIZES = ((3, 4), (1, 5), (2, 1), (1, 1), (7, 9))


class Model(nn.Module):
    """``[n, t, 4]`` to a loss, through a function that squeezes."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self.layer(x))


def compiled(function):
    torch.manual_seed(0)
    model = Model(function)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options = {"dynamic_shapes": (SHAPES,), "loss_fn": lambda model, x: model(x)}
    return model, relax_disc.compile(model, optimizer, (torch.randn(3, 6, 4),), **options)


def gradients(model, loss):
    for parameter in model.parameters():
        parameter.grad = None
    loss().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def times_axes(x):
    return x.ndim * x.square().mean()


def batch_mean(x):
    return functional.kl_div(x.log_softmax(-1), x.softmax(-1), reduction="batchmean")


SEEN = {  # the axes whose size must not be 1
    "a sum over the axis that follows": (lambda x: x.squeeze(1).sum(1).square().mean(), {1}),
    "no axis named": (lambda x: x.squeeze().mean(0).square().sum(), {0, 1}),
    "a mean over the rows": (lambda x: x[:, 0].squeeze(0).mean(0).square().sum(), {0}),
    "the last one": (lambda x: x[..., 0].squeeze(-1).mean(-1).square().sum(), {1}),
    "both by number": (lambda x: x.squeeze((0, 1)).mean(0).square().sum(), {0, 1}),
    "a question": (lambda x: x.mean() if x.squeeze(0).dim() == 3 else x.square().mean(), {0}),
    "a question later": (lambda x: times_axes(x.squeeze(0).tanh()), {0}),
    "a question for the shape": (lambda x: len(x.squeeze(0).shape) * x.square().mean(), {0}),
    "in place": (lambda x: x[:, 0].clone().squeeze_(0).mean(0).square().sum(), {0}),
    "a mean over a batch": (lambda x: batch_mean(x[:, 0].squeeze(0)), {0}),
    "transposed": (lambda x: x[:, 0].squeeze(0).T.softmax(0)[0].square().mean(), {0}),
}


@pytest.mark.parametrize("what", SEEN)
def test_sizes_of_one_are_refused_where_a_value_depends_on_them(what):
    function, axes = SEEN[what]
    model, step = compiled(function)
    for rows, length in SIZES:
        x = torch.randn(rows, length, 4)
        if any((rows, length)[axis] == 1 for axis in axes):
            with pytest.raises(
                ShapeRangeError, match=r"squeezes an axis at .*test_sizes_of_one.py:\d+"
            ):
                step(x)
        else:
            torch.testing.assert_close(step(x), model(x).detach())


def scores(x):
    return functional.mse_loss(x[:, 0, :1].squeeze(), x[:, 0, 1])


def signs(x):
    """Twice ``[n, 1]`` without the axis that is 1, the second 1 or -1."""
    return x[:, 0, :1].squeeze(), x[:, 0, 1:2].squeeze().detach().sign()


def binary(x, loss, **options):
    scores, wanted = signs(x)
    return loss(scores, wanted * 0.5 + 0.5, **options)


LOSSES = {
    "binary": lambda x: binary(x.sigmoid(), functional.binary_cross_entropy, reduction="sum"),
    "binary of logits": lambda x: binary(
        x, functional.binary_cross_entropy_with_logits, pos_weight=x.new_full((), 3.0)
    ),
    "soft margin": lambda x: functional.soft_margin_loss(*signs(x)),
    "Poisson": lambda x: binary(x, functional.poisson_nll_loss),
    "ranking": lambda x: functional.margin_ranking_loss(
        signs(x)[0], signs(x)[0] * 2, signs(x)[1], margin=0.5
    ),
    "hinge": lambda x: functional.hinge_embedding_loss(*signs(x)),
}


def written(x):
    """As mBART makes its decoder's first token."""
    shifted = x.clone()
    shifted[:, 0, 0] = x.mean((1, 2), keepdim=True).squeeze() * 2
    return shifted.square().mean()


def written_whole(x):
    shifted = 2 * x
    shifted[:, -1] = x.sum(1).squeeze(0)
    return shifted.square().mean()


UNSEEN = {
    **LOSSES,
    "written": written,
    "written whole": written_whole,
    "scores of rows": scores,
    "elementwise": lambda x: (x[:, 0].squeeze(0).tanh() * 2 + x[:, 0]).square().mean(),
    "layers": lambda x: functional.linear(x.mean(1).squeeze(0), x.new_ones(2, 4)).sum(),
    "sums by negative axes": lambda x: x[:, :1].squeeze(0).softmax(-1).square().sum((-1, -2)).sum(),
    "an axis of a number": lambda x: x.square().mean().squeeze(0),
    "an axis that is no dim": lambda x: x[:, :, :1].squeeze(-1).mean(1).square().sum(),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("what", UNSEEN)
def test_sizes_of_one_train_where_no_value_depends_on_them(what):
    model, step = compiled(UNSEEN[what])
    for rows, length in SIZES:
        x = torch.randn(rows, length, 4)
        expected = gradients(model, lambda x=x: model(x))
        torch.testing.assert_close(step(x, update=False), model(x).detach())
        for parameter in model.parameters():
            parameter.grad = None
        step(x, update=False)
        found = [parameter.grad for parameter in model.parameters()]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_sizes_that_would_be_negative_are_refused():
    """Two positions less than one: the kernels wrote beside their tensors."""
    model, step = compiled(lambda x: x.diff(n=2, dim=1).square().sum())
    for rows, length in SIZES:
        x = torch.randn(rows, length, 4)
        if length == 1:
            with pytest.raises(
                ShapeRangeError, match=r"a tensor of -1 elements.*test_sizes_of_one.py"
            ):
                step(x)
        else:
            torch.testing.assert_close(step(x), model(x).detach())
