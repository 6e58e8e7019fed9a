"""Losses that pick by data, the model and batches that they are of, and PyTorch's own step."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from relax_disc import compile

WORDS = 11
DIMS = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", max=128)}
SHAPES = [(3, 5), (1, 1), (6, 33), (5, 1), (2, 9)]


class Model(nn.Module):
    def __init__(self, width=8, layers=0):
        super().__init__()
        self.table = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids):
        return self.head(self.table(ids))


def batch_of(batch, length, selected="some", seed=0):
    """Make ids and labels; of the labels none, one, some or all are 0 or more."""
    made = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(0, WORDS, (batch, length), generator=made) for _ in range(2))
    chosen = torch.rand(batch, length, generator=made) < 0.6
    if selected == "one":
        chosen = torch.arange(batch * length).reshape(batch, length) == batch * length - 1
    elif selected != "some":
        chosen = torch.full_like(chosen, selected == "all")
    return ids, labels.masked_fill(~chosen, -1)


def compiled(loss_fn, model=None, **options):
    torch.manual_seed(0)
    model = Model().double() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    shapes = (DIMS, DIMS)
    return compile(
        model, optimizer, batch_of(3, 5), dynamic_shapes=shapes, loss_fn=loss_fn, **options
    )


def eager_step(step, loss_fn, batch):
    """Take PyTorch's step on copies; return the loss and the parameters."""
    model, optimizer = copy.deepcopy((step.model, step.optimizer))
    optimizer.zero_grad()
    loss = loss_fn(model, *batch)
    loss.backward()
    optimizer.step()
    return loss.detach(), [p.detach() for p in model.parameters()]


def check_step(step, loss_fn, batch):
    expected, parameters = eager_step(step, loss_fn, batch)
    loss = step(*batch)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-12, equal_nan=True)
    for mine, theirs in zip(step.model.parameters(), parameters, strict=True):
        torch.testing.assert_close(mine.detach(), theirs, rtol=1e-9, atol=1e-12, equal_nan=True)


def cross_entropy(model, ids, labels):
    mask = labels >= 0
    return F.cross_entropy(model(ids)[mask], labels[mask])


def equal_masks(model, ids, labels):
    return F.cross_entropy(model(ids)[labels >= 0], labels[labels >= 0])


def rows_before_the_head(model, ids, labels):
    mask = labels >= 0
    return F.cross_entropy(model.head(model.table(ids)[mask]), labels[mask], reduction="sum")


def rows_before_a_regression(model, ids, labels):
    mask = labels >= 0
    return F.mse_loss(model.head(model.table(ids)[mask])[:, 0], labels[mask].float())


def positive(model, ids, labels):
    x = model(ids)
    return (x[x > 0] ** 2).mean() + torch.masked_select(x, labels[..., None] >= 0).sum()


def squared_error(model, ids, labels):
    x, mask = model(ids), labels >= 0
    return F.mse_loss(x[mask], (ids * 0.1).unsqueeze(-1).expand_as(x)[mask].double())


def positions(model, ids, labels):
    chosen = (labels.flatten() >= 0).nonzero().squeeze(1)
    b, t = torch.where(labels >= 0)
    pairs = (labels < 0).nonzero()
    x = model(ids)
    return (
        x.flatten(0, 1).index_select(0, chosen).square().sum()
        + x[b, t].cos().sum()
        + x[pairs[:, 0], pairs[:, 1]].sin().sum()
    )


def distinct(model, ids, labels):
    words, where, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    x = model(words)
    return x[where].square().mean() + (x.mean(1) * counts).sum()


def written(model, ids, labels):
    x, mask = model(ids), labels >= 0
    y = torch.zeros_like(x)
    y[mask] = x[mask] * 2
    return (y * x).sum()


def written_and_forgotten(model, ids, labels):
    """As farthest point sampling does in its last step."""
    x, mask = model(ids), labels >= 0
    nearest = torch.full_like(x, 1e10)
    nearest[mask] = x.detach()[mask]
    return x.square().mean()


def of_what_was_picked(model, ids, labels):
    x = model(ids)[labels >= 0]
    y = x[x > 0.1]
    return (y**2).sum() + y.sum() / max(y.shape[0], 1)


def number_alone(model, ids, labels):
    x = model(ids)
    return x.square().sum() * (labels >= 0).nonzero().shape[0]


def shifted(model, ids, labels):
    x = model(ids)[labels >= 0]
    return (
        x[1:].square().sum() + x[:-1].cos().sum() + x.flip(0)[: (x.shape[0] + 1) // 2].sin().sum()
    )


def both_parts(model, ids, labels):
    x = model(ids)
    a, b = x[labels >= 0], x[labels < 0]
    return torch.cat([a, b]).cos().sum() + a.square().sum()


def attention(model, ids, labels):
    x = model.table(ids)[labels >= 0]
    return (torch.softmax(x @ x.T, -1) @ x).square().sum()


def sequences(model, ids, labels):
    x = model.table(ids)[labels[:, 0] >= 0]
    x = F.scaled_dot_product_attention(*(x.unflatten(-1, (2, 4)).transpose(1, 2),) * 3)
    return F.layer_norm(x, (4,)).cos().sum()


def masks_written_twice(model, ids, labels):
    """PyTorch's losses ask whether both sizes are equal."""
    x, y = model(ids), F.one_hot(ids, WORDS).double()
    picked = F.mse_loss(x[labels[:, :] >= 0], y[labels[:, :] >= 0], reduction="sum")
    both = (~(labels < 0) & (ids > 2)).unsqueeze(-1).expand_as(x)
    again = (~(labels < 0) & (ids > 2)).unsqueeze(-1).expand_as(x)
    selected = F.l1_loss(x.masked_select(both), torch.masked_select(y, again), reduction="sum")
    where = F.smooth_l1_loss(x[(ids == 1).nonzero(as_tuple=True)], y[torch.where(ids == 1)])
    return picked + selected + torch.nan_to_num(where)


def masks_without_gradients(model, ids, labels):
    """What is picked from has a gradient the second time alone."""
    x = model(ids)
    with torch.no_grad():
        scale = x.view(-1, WORDS)[labels.view(-1) >= 0].square().sum()
    y = x.view(-1, WORDS)[labels.view(-1) >= 0]
    return y.sin().sum() / (1 + scale) + x.flatten(0, 1)[labels.view(-1) >= 0].cos().sum()


def masks_of_what_changes(model, ids, labels):
    x, ids = model(ids), ids.clone()
    first = ids > 4
    picked = x[first].square().sum()
    again = ids > 4
    again[:, 0] = False
    less = x[again].sum()
    ids[:, -1:] = 10
    return picked + less + x[ids > 4].cos().sum() + x[first].sin().sum()


def sums_along(model, ids, labels):
    """As the bins of a spline are summed up."""
    x = model(ids)[labels >= 0].softmax(-1)
    bins = x.cumsum(-1) * torch.arange(WORDS)
    return bins.cos().sum() + torch.cumsum(x, 0).sin().sum()


def beside_a_question(model, ids, labels):
    """What is picked at one position and at more is one program."""
    assert ids.shape[1] == 1 or ids.shape[1] < 1000
    x = model(ids)[labels >= 0]
    return (x[1:].flip(0).cos().sum() + x.square().sum()) / (1 + x.shape[0])


def variances(model, ids, labels):
    return model(ids)[labels >= 0].exp().var(0).sum()


def last_marked_of_each(model, ids, labels):
    """As BART and T5 classify sequences: by their end, of which each has as many."""
    marks = torch.arange(ids.shape[1]).expand(ids.shape) == ids.shape[1] - 1
    hidden = model.table(ids)
    ends = hidden[marks, :].view(hidden.size(0), -1, hidden.size(-1))[:, -1, :]
    return F.cross_entropy(model.head(ends), labels[:, 0].clamp_min(0))


LOSSES = [
    last_marked_of_each,
    *(cross_entropy, equal_masks, rows_before_the_head, positive, squared_error, positions),
    *(
        distinct,
        written,
        written_and_forgotten,
        of_what_was_picked,
        number_alone,
        shifted,
        both_parts,
        attention,
        sequences,
        rows_before_a_regression,
        variances,
        sums_along,
        beside_a_question,
        masks_written_twice,
        masks_of_what_changes,
        masks_without_gradients,
    ),
]
