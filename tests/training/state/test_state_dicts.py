"""The optimizer's state is looked up anew when PyTorch or the user has replaced a part of it."""

import torch
from torch import nn

from relax_disc.training.call.state_dicts import state_dicts


def test_replaced_added_and_removed_state_is_seen():
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    one, two, three = map(id, parameters)
    assert state_dicts(optimizer) == {}
    optimizer.state[parameters[0]] = {"a": 1}
    optimizer.state[parameters[1]] = {"a": 2}
    assert state_dicts(optimizer) == {one: {"a": 1}, two: {"a": 2}}
    optimizer.state[parameters[1]] = {"a": 3}
    assert state_dicts(optimizer)[two] is optimizer.state[parameters[1]]
    optimizer.state[parameters[2]] = optimizer.state.pop(parameters[0])
    assert state_dicts(optimizer) == {two: {"a": 3}, three: {"a": 1}}
    optimizer.state.clear()
    assert state_dicts(optimizer) == {}
