"""What a training loop does between its steps: a habit changes a program, or its next batch.

A habit takes the program, what chooses, and the batch, which it may change; it returns what undoes
it after the step, or None.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable

import torch
from torch import nn
from torch.utils import _pytree as pytree

from relax_disc.errors import RelaxDiscError
from tests.training.fuzz.pieces import CLASSES, LARGEST, LONGEST, WIDTH, Knob, linear

HABITS: dict[str, Callable] = {}


def habit(function: Callable) -> Callable:
    HABITS[function.__name__] = function
    return function


@habit
def nothing(program, choose, batch):
    pass


@habit
def another_rate(program, choose, batch):
    for group in program.groups():
        group["lr"] *= choose.choice([0.5, 0.9, 1.1])


@habit
def another_decay(program, choose, batch):
    program.groups()[0]["weight_decay"] = choose.choice([0.0, 0.02])


@habit
def scheduler(program, choose, batch):
    for optimizer in program.optimizers:
        torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)


@habit
def other_mode(program, choose, batch):
    was = program.model.training
    program.model.train(not was)
    return lambda: program.model.train(was)


@habit
def mode_of_a_part(program, choose, batch):
    part = choose.choice(list(program.model.modules()))
    was = part.training
    part.training = not was

    def undo():
        part.training = was

    return undo


@habit
def freeze(program, choose, batch):
    parameter = choose.choice(list(program.model.parameters()))
    was = parameter.requires_grad
    parameter.requires_grad_(not was)
    return lambda: parameter.requires_grad_(was)


@habit
def write_parameter(program, choose, batch):
    with torch.no_grad():
        choose.choice(list(program.model.parameters())).mul_(0.9)


@habit
def replace_data(program, choose, batch):
    parameter = choose.choice(list(program.model.parameters()))
    parameter.data = parameter.data.clone() * 0.95


@habit
def write_buffer(program, choose, batch):
    floats = [b for b in program.model.buffers() if b.is_floating_point()]
    if floats:
        choose.choice(floats).mul_(0.9)


@habit
def load_model(program, choose, batch):
    state = {k: v.clone() for k, v in program.model.state_dict().items()}
    program.model.load_state_dict(state)


@habit
def load_optimizer(program, choose, batch):
    for optimizer in program.optimizers:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@habit
def clear_gradients(program, choose, batch):
    program.model.zero_grad(set_to_none=choose.random() < 0.5)


@habit
def index_out_of_range(program, choose, batch):
    row, column = choose.randrange(len(batch[1])), choose.randrange(3)
    batch[1][row, column] = choose.choice([7, -1, -7, 10**8, -(10**15), CLASSES])


def odd_value(program, choose, batch, place):
    program.step.check_finite = choose.random() < 0.5
    values = batch[place].view(-1)
    for _ in range(choose.choice([1, 1, 5])):
        values[choose.randrange(len(values))] = choose.choice([torch.nan, torch.inf, -torch.inf])
    return None if program.step.check_finite else program.saved()


@habit
def not_a_number(program, choose, batch):
    return odd_value(program, choose, batch, 0)


@habit
def odd_target(program, choose, batch):
    return odd_value(program, choose, batch, 2)


@habit
def odd_parameter(program, choose, batch):
    program.step.check_finite = choose.random() < 0.5
    put_back = program.saved()
    with torch.no_grad():
        program.model.first.bias[choose.randrange(WIDTH)] = choose.choice([torch.nan, torch.inf])
    return put_back


@habit
def large_values(program, choose, batch):
    put_back = program.saved()
    batch[0].mul_(choose.choice([0.0, 1e-6, 30.0, 1e30]))
    return put_back


@habit
def strided_batch(program, choose, batch):
    batch[0] = torch.cat([batch[0], batch[0]], 1)[:, ::2]


@habit
def batch_wants_gradient(program, choose, batch):
    batch[0].requires_grad_()


@habit
def too_large(program, choose, batch):
    batch[:] = program.batch(choose, LARGEST + 3)


@habit
def empty(program, choose, batch):
    batch[:] = program.batch(choose, 0)


@habit
def other_type(program, choose, batch):
    place = choose.choice([0, 1])
    batch[place] = batch[place].to([torch.float64, torch.int32][place])


@habit
def sizes_that_differ(program, choose, batch):
    batch[2] = torch.randn(len(batch[0]) % LARGEST + 1, WIDTH)


@habit
def tight_budget(program, choose, batch):
    program.step.memory_budget = choose.choice([1000, 50_000, "1MiB"])

    def undo():
        program.step.memory_budget = None

    return undo


@habit
def report(program, choose, batch):
    program.step.memory_report()
    torch.manual_seed(choose.randrange(100))


@habit
def other_values(program, choose, batch):
    state = {
        k: v + 0.1 if v.is_floating_point() else v for k, v in program.model.state_dict().items()
    }
    program.model.load_state_dict(state)


@habit
def add_param_group(program, choose, batch):
    optimizer = choose.choice(program.optimizers)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    return optimizer.param_groups.pop


@habit
def other_setting(program, choose, batch):
    group = choose.choice(program.groups())
    implementation = {"capturable", "differentiable", "foreach", "fused"}
    name = choose.choice(sorted(set(group) - {"params", "lr", *implementation}))
    was = group[name]
    match was:
        case bool():
            group[name] = not was
        case float():
            group[name] = choose.choice([0.0, 0.5, 0.95, was * 1.1])
        case tuple():
            group[name] = tuple(value * 0.99 if value else value for value in was)
        case _:
            return None

    def undo():
        group[name] = was

    return undo


@habit
def other_attribute(program, choose, batch):
    module = choose.choice(list(program.model.modules()))
    numbers = sorted(
        k
        for k, v in vars(module).items()
        if isinstance(v, int | float) and k not in ("training", "returns") and k[0] != "_"
    )
    if not numbers:
        return None
    name = choose.choice(numbers)
    was = getattr(module, name)
    program.note(f"    {type(module).__name__}.{name}")
    setattr(module, name, not was if isinstance(was, bool) else was + 1)
    return lambda: setattr(module, name, was)


@habit
def knobs(program, choose, batch):
    for module in program.model.modules():
        if isinstance(module, Knob):
            module.scale *= 1.5
            module.shift = module.shift + 0.1
            module.shift.add_(0.1)


@habit
def another_layer(program, choose, batch):
    was, program.model.last = program.model.last, linear()

    def undo():
        program.model.last = was

    return undo


@habit
def hook(program, choose, batch):
    trained = choose.choice(program.groups()[0]["params"])
    module = choose.choice(list(program.model.modules()))
    registered = choose.choice(
        [
            lambda: module.register_forward_hook(lambda *_: None),
            lambda: module.register_full_backward_hook(lambda *_: None),
            lambda: trained.register_hook(lambda g: g * 2),
            lambda: program.optimizers[0].register_step_pre_hook(lambda *_: None),
        ]
    )()
    return registered.remove


@habit
def region(program, choose, batch):
    program.regions.append(
        choose.choice(
            [
                lambda: torch.autocast("cpu", torch.bfloat16),
                torch.no_grad,
                torch.inference_mode,
                torch.enable_grad,
                torch.autograd.detect_anomaly,
            ]
        )
    )


@habit
def default_type(program, choose, batch):
    torch.set_default_dtype(torch.float64)
    return lambda: torch.set_default_dtype(torch.float32)


@habit
def keep_gradients(program, choose, batch):
    program.call["keep_gradients"] = choose.random() < 0.4
    return program.model.zero_grad


@habit
def own_update(program, choose, batch):
    if choose.random() < 0.4:
        program.model.zero_grad()
        program.call["update"], program.has_summed = False, True
    return program.model.zero_grad


@habit
def gradients_before(program, choose, batch):
    if not program.has_summed:  # gradients that follow a sum belong to it
        program.model.first.weight.grad = torch.ones(WIDTH, WIDTH)
    return program.model.zero_grad


@habit
def other_width(program, choose, batch):
    place = choose.choice([0, 2])
    batch[place] = choose.choice([lambda t: t[..., 1:], lambda t: t[None], lambda t: t.tolist()])(
        batch[place]
    )


@habit
def too_few(program, choose, batch):
    batch.pop()


@habit
def too_long(program, choose, batch):
    if program.reader is not None:
        length = choose.choice([0, LONGEST, LONGEST + 2])
        batch[0] = torch.randn(len(batch[0]), length, WIDTH)


@habit
def the_same_twice(program, choose, batch):
    if program.reader is None:
        batch[2] = batch[0]


@habit
def expanded(program, choose, batch):
    batch[0], batch[1] = batch[0][:1].expand_as(batch[0]), batch[1][:1].expand_as(batch[1])


@habit
def shifted(program, choose, batch):
    batch[:] = [torch.cat([tensor[:1], tensor])[1:] for tensor in batch]
    batch[2] = batch[2].T.contiguous().T


@habit
def memory_of_a_parameter(program, choose, batch):
    batch[2] = program.alias = program.model.first.weight.detach()
    batch[:2] = program.batch(choose, len(batch[2]))[:2]


@habit
def double_model(program, choose, batch):
    put_back = program.saved()
    program.model.double()

    def undo():
        program.model.float()
        put_back()

    return undo


@habit
def written_results(program, choose, batch):
    with contextlib.suppress(RelaxDiscError):
        for result in pytree.tree_leaves(program.step(*batch)):
            result.fill_(7.0)


@habit
def another_thread(program, choose, batch):
    thread = threading.Thread(target=program.model.state_dict)
    thread.start()
    thread.join()


@habit
def calibrate(program, choose, batch):
    if choose.random() < 0.1:
        with contextlib.suppress(RelaxDiscError):  # earlier values led to one value in each mean
            program.step.calibrate(*batch, repeats=1)
