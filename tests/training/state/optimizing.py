"""A small model, optimizers for it, and its training step beside eager PyTorch's."""

import copy

import torch
from torch import nn, optim
from torch.export import Dim
from torch.nn import functional as F

import relax_disc

CASES = {
    "sgd": lambda p: optim.SGD(p, lr=0.1, weight_decay=0.01),
    "sgd-dampening": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "sgd-nesterov-maximize": lambda p: optim.SGD(p, 0.01, 0.9, nesterov=True, maximize=True),
    "adam-amsgrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    "adamw-fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "adamw-amsgrad-foreach": lambda p: optim.AdamW(p, lr=0.01, amsgrad=True, foreach=True),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01),
    "rmsprop-centered": lambda p: optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.2),
    "adadelta": lambda p: optim.Adadelta(p, lr=1.0),
    "adamax": lambda p: optim.Adamax(p, lr=0.01, weight_decay=0.1),
    "nadam": lambda p: optim.NAdam(p, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "radam": lambda p: optim.RAdam(p, lr=0.01, betas=(0.8, 0.9)),
    "rprop": lambda p: optim.Rprop(p, lr=0.01),
    "asgd": lambda p: optim.ASGD(p, lr=0.01, t0=3, weight_decay=0.1),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.05, weight_decay=0.1),
    "muon": lambda p: optim.Muon([q for q in p if q.dim() == 2], lr=0.01),
}


class Small(nn.Module):
    """Matrices, vectors and a scalar."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x, y):
        return F.cross_entropy(self.last(torch.tanh(self.first(x))) * self.scale, y)


def batch(n, seed=0):
    g = torch.Generator().manual_seed(seed + n)
    return torch.randn(n, 6, generator=g, dtype=torch.float64), torch.randint(
        0, 3, (n,), generator=g
    )


def shapes():
    n = Dim("n", min=1, max=16)
    return ({0: n}, {0: n})


def pair(make):
    torch.manual_seed(0)
    model = Small().double()
    eager = copy.deepcopy(model)
    return model, make(list(model.parameters())), eager, make(list(eager.parameters()))


def compiled(model, optimizer, **options):
    return relax_disc.compile(model, optimizer, batch(4), dynamic_shapes=shapes(), **options)


def eager_step(model, optimizer, *batches, max_norm=None):
    optimizer.zero_grad()
    for each in batches:
        loss = model(*each)
        loss.backward()
    if max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return loss.detach()


def check_equal(model, optimizer, eager, followed, tolerance=1e-9):
    close = {"rtol": tolerance, "atol": tolerance}
    for (name, mine), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **close, msg=lambda m, n=name: f"{n}: {m}")
    mine, theirs = optimizer.state_dict(), followed.state_dict()
    assert sorted(mine["state"]) == sorted(theirs["state"])
    for key, state in theirs["state"].items():
        assert list(mine["state"][key]) == list(state)
        for name, value in state.items():
            found = mine["state"][key][name]
            assert type(found) is type(value)
            if isinstance(value, torch.Tensor):
                single = 1e-6 if value.dtype is torch.float32 else tolerance
                torch.testing.assert_close(
                    found, value, rtol=single, atol=single, msg=lambda m, n=name: f"{n}: {m}"
                )
            else:
                assert found == value
    assert mine["param_groups"] == theirs["param_groups"]
