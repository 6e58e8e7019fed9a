"""Marks and budgets over the kinds of programs there are: several functions, inference, aliases."""

import pytest
import torch
import tvm
from torch import nn
from torch.export import Dim
from tvm import relax

import relax_disc
from relax_disc.transform import InsertRematerialization, LowerRematerialization
from relax_disc.vm_builtins.session import Session
from tests.relax_programs import Program, call, compile_program
from tests.transform.test_rematerialization import ops_of, run_at_budgets, there_and_back


def through_aliases(depth):
    """Activations are made flat, and read again through their other shape."""
    steps, activations, current, count = [], [], 0, 2
    for _ in range(depth):
        steps += [("matmul", [current, 1], 0), ("flat", [count], 0)]
        steps += [("scale", [count + 1], 0.5), ("unflat", [count + 2], 0)]
        activations.append(count + 2)
        current, count = count + 3, count + 4
    for activation in reversed(activations):
        steps += [("unflat", [activation], 0), ("add", [current, count], 0)]
        current, count = count + 1, count + 2
    return Program(1, 1, steps, [current])


def through_tuples(depth):
    """Both results of every kernel with two are read again on the way back."""
    steps, pairs, current, count = [], [], 0, 2
    for _ in range(depth):
        steps += [("matmul", [current, 1], 0), ("split", [count], 0)]
        pairs.append((count + 1, count + 2))
        current, count = count + 1, count + 3
    for low, high in reversed(pairs):
        steps += [("add", [current, low], 0), ("add", [count, high], 0)]
        current, count = count + 1, count + 2
    return Program(1, 1, steps, [current])


@pytest.mark.parametrize("make", [through_aliases, through_tuples])
def test_aliases_and_tuples_at_every_budget(make):
    program = make(6)
    ops = ops_of(InsertRematerialization()(program.module())["main"])
    assert ops.count("relax_disc.evict") == ops.count("relax_disc.regenerate") > 2
    machine = compile_program(program.module())
    run_at_budgets(program, machine, 64, [1.0, 0.8, 0.6, 0.5, 0.3, 0.0])
    session = Session.of(machine)
    free = session.plan([64])
    assert session.plan([64], free.peak_bytes - free.arena_bytes // 3).recomputed


@pytest.mark.parametrize("make", [there_and_back, through_aliases, through_tuples])
def test_tensors_without_elements(make):
    program = make(4)
    machine = compile_program(program.module())
    session = Session.of(machine)
    free = session.plan([0])
    assert (free.arena_bytes, free.live_peak_bytes) == (0, 0)
    session.memory_budget = free.peak_bytes
    (result,) = call(machine, program.arguments(0))
    assert result.shape == (0, 8)
    run_at_budgets(program, machine, 16, [1.0, 0.5])


def test_functions_of_one_module_have_plans_of_their_own():
    first, second = there_and_back(4), through_tuples(5)
    module = tvm.IRModule({"main": first.module()["main"], "other": second.module()["main"]})
    module["other"] = module["other"].with_attr("global_symbol", "other")
    marked = InsertRematerialization()(module)
    for name in ("main", "other"):
        assert "relax_disc.evict" in ops_of(marked[name])
    lowered = LowerRematerialization()(marked)
    assert list(lowered["main"].attrs["relax_disc.recomputable"]) == list(range(5))
    assert lowered["other"].attrs["relax_disc.recomputable"]
    machine = compile_program(module)
    for name, program in (("main", first), ("other", second)):
        session = Session.of(machine, name)
        free = session.plan([32])
        session.memory_budget = free.peak_bytes - free.arena_bytes // 4
        arguments = program.arguments(32)
        (result,) = call(machine, arguments, name)
        assert torch.equal(result, program.expected(arguments)[0])
        report = session.report()
        assert report.recomputations > 0
        assert report.peak_bytes == report.planned_peak_bytes <= session.memory_budget


def test_the_passes_alone_explain_themselves():
    module = there_and_back(3).module()
    alone = tvm.transform.Sequential(
        [relax.transform.ConvertToDataflow(), InsertRematerialization()]
    )
    text = alone(module).script()
    assert text.count("relax_disc.evict(") == text.count("relax_disc.regenerate(") == 2
    assert "_evicted" in text and "_again" in text
    both = tvm.transform.Sequential([InsertRematerialization(), LowerRematerialization()])(module)
    assert "relax_disc.evict(" not in both.script()
    assert "relax_disc.recomputable" in both.script()


class Hourglass(nn.Module):
    """Inference with long skips: what is made early is read late."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.up = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x):
        skips = []
        for layer in self.down:
            x = torch.tanh(layer(x))
            skips.append(torch.exp(x))
        for layer, skip in zip(self.up, reversed(skips), strict=True):
            x = torch.tanh(layer(x)) + skip
        return x


def test_inference_within_budgets():
    torch.manual_seed(0)
    model = Hourglass().eval()
    rows = Dim("rows", min=1, max=512)
    function = relax_disc.compile_forward(model, (torch.randn(4, 16),), dynamic_shapes=({0: rows},))
    x = torch.randn(300, 16)
    expected = function(x).clone()
    torch.testing.assert_close(expected, model(x), rtol=1e-5, atol=1e-5)
    free = function.plan(rows=300)
    function.memory_budget = free.peak_bytes - (free.arena_bytes - free.workspace_bytes) * 2 // 5
    plan = function.plan(rows=300)
    assert plan.fits and plan.evicted
    assert torch.equal(function(x), expected)
    report = function.memory_report()
    assert report.recomputations == len(plan.evicted)
    assert report.peak_bytes == report.planned_peak_bytes <= function.memory_budget
