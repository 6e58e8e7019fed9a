"""The cache of captures: a second start traces no gradients and trains the same."""

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

import relax_disc
from relax_disc import compiler
from relax_disc.errors import MemoryBudgetError, ShapeRangeError
from relax_disc.frontend.capture import step as capture


class Net(nn.Module):
    """Tied weights, a buffer that changes, a constant, dropout and outputs beside the loss."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.25)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight
        self.scale = torch.linspace(0.5, 1.5, 6)

    def forward(self, ids):
        hidden = self.norm(self.table(ids)) * self.scale
        logits = self.head(self.dropout(hidden))
        loss = nn.functional.cross_entropy(logits, ids)
        return loss, {"logits": logits, "rows": ids.shape[0], "kind": "net"}


SHAPES = ({0: Dim("rows", min=2, max=64)},)


def make():
    torch.manual_seed(0)
    model = Net()
    groups = [{"params": model.table.parameters(), "lr": 0.01}, {"params": model.norm.parameters()}]
    return model, torch.optim.AdamW(groups, lr=0.1)


def compile_net(**options):
    model, optimizer = make()
    return relax_disc.compile(
        model,
        optimizer,
        (torch.arange(5) % 11,),
        dynamic_shapes=SHAPES,
        max_grad_norm=1.0,
        **options,
    )


@pytest.fixture
def traces(monkeypatch):
    """How often gradients were traced."""
    count = []
    original = capture.trace_step
    monkeypatch.setattr(capture, "trace_step", lambda *a: count.append(1) or original(*a))
    return count


def train(step):
    """Losses, extra outputs and what is trained, over several shapes."""
    torch.manual_seed(0)  # decides what dropout draws
    results = []
    for rows in (2, 64, 7):
        loss, (extras,) = step(torch.arange(rows) % 11)
        results += [loss.clone(), extras["logits"].clone(), extras["rows"], extras["kind"]]
    state = [*step.model.state_dict().values()]
    for kept in step.optimizer.state.values():
        state += kept.values()
    return results + [tensor.clone() for tensor in state]


def same(one, other):
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def test_second_start_traces_nothing_and_trains_the_same(folder, traces, tmp_path):
    first = compile_net()
    second = compile_net()
    assert len(traces) == 1
    assert same(train(first), train(second))
    second.save(tmp_path / "step")
    loaded = relax_disc.TrainingStep.load(tmp_path / "step", *make())
    assert same(train(compile_net()), train(loaded))


def test_accumulates_after_a_second_start(folder, traces):
    results = []
    for _ in range(2):
        step = compile_net()
        step(torch.arange(4), update=False)
        results.append(train(step))
    assert len(traces) == 2  # the step alone, and the functions of accumulation
    assert len(list(folder.glob("*.capture"))) == 2
    assert same(*results)


def test_constants_are_the_model_s_own(folder):
    results = []
    for _ in range(2):
        step = compile_net()
        step.model.scale.mul_(2)
        results.append(train(step))
    assert same(*results)


def test_refusals_come_as_at_the_first_start(folder, traces):
    step = compile_net(memory_budget=1)
    with pytest.raises(MemoryBudgetError):
        step(torch.arange(5))
    step = compile_net()
    assert len(traces) == 1
    with pytest.raises(ShapeRangeError):
        step(torch.arange(65) % 11)
    with pytest.raises(ShapeRangeError, match="ids"):
        step(torch.arange(12))
    train(step)


def test_a_damaged_record_is_traced_again(folder, traces, caplog):
    first = compile_net()
    (record,) = folder.glob("*.capture")
    content = bytearray(record.read_bytes())
    content[len(content) // 2] ^= 1
    record.write_bytes(content)
    second = compile_net()
    assert len(traces) == 2 and "damaged" in caplog.text
    assert same(train(first), train(second))
    compile_net()
    assert len(traces) == 2


def test_a_record_without_its_program_is_compiled_again(folder, traces, monkeypatch):
    compile_net()
    (program,) = folder.glob("*.program")
    program.unlink()
    builds = []
    original = compiler.build
    monkeypatch.setattr(compiler, "build", lambda *a: builds.append(1) or original(*a))
    train(compile_net())
    assert len(traces) == 2 and len(builds) == 1


def test_records_go_with_their_program(folder, monkeypatch):
    compile_net()
    monkeypatch.setenv("RELAX_DISC_CACHE_BYTES", "1")
    model = nn.Linear(3, 1)
    relax_disc.compile(
        model,
        torch.optim.SGD(model.parameters()),
        (torch.ones(5, 3),),
        dynamic_shapes=({0: Dim("rows", min=1, max=9)},),
        loss_fn=lambda model, x: model(x).mean(),
    )
    assert len(list(folder.glob("*.program"))) == 1
    assert len(list(folder.glob("*.capture"))) == 1


class Bag:
    """A container that PyTorch can take apart but not write down."""

    def __init__(self, items):
        self.items = items


def test_a_batch_that_cannot_be_written_down_leaves_no_record(folder, traces):
    pytree.register_pytree_node(
        Bag,
        lambda bag: (bag.items, None),
        lambda items, _: Bag(items),
        flatten_with_keys_fn=lambda bag: (
            [(pytree.SequenceKey(k), item) for k, item in enumerate(bag.items)],
            None,
        ),
    )
    for _ in range(2):
        model = nn.Linear(3, 1)
        step = relax_disc.compile(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            (Bag([torch.ones(5, 3)]),),
            dynamic_shapes=([{0: Dim("rows", min=1, max=9)}],),
            loss_fn=lambda model, bag: model(bag.items[0]).mean(),
        )
        assert torch.isfinite(step(Bag([torch.ones(2, 3)])))
    assert len(traces) == 2
    assert not list(folder.glob("*.capture"))


def test_is_off_with_the_cache_of_programs(folder, traces, monkeypatch):
    monkeypatch.setenv("RELAX_DISC_COMPILE_CACHE", "0")
    compile_net()
    compile_net()
    assert len(traces) == 2 and not folder.exists()
