"""Sizes that only the data tell: masks, nonzero, unique; one build, many counts, as PyTorch."""

import copy
import itertools
import random

import pytest
import torch
import tvm
from torch.nn import functional as F

from relax_disc import TrainingStep, verify
from relax_disc.errors import (
    IndexRangeError,
    ModelCheckError,
    ShapeRangeError,
    UnsupportedOperatorError,
)
from relax_disc.pipeline import PipelineOptions
from tests.tiers import every
from tests.training.counted_losses import (
    LOSSES,
    SHAPES,
    WORDS,
    Model,
    batch_of,
    check_step,
    compiled,
    rows_before_a_regression,
)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")  # of eager, about variances of one
@pytest.mark.parametrize("loss_fn", every(2, LOSSES), ids=lambda f: f.__name__)
def test_a_step_is_pytorchs_at_every_count(loss_fn):
    step = compiled(loss_fn)
    for seed, shape in enumerate(SHAPES):
        for selected in ("some", "all", "one", "none"):
            check_step(step, loss_fn, batch_of(*shape, selected, seed))


def test_the_plan_tells_the_bound_and_the_report_the_count():
    step = compiled(rows_before_a_regression)
    assert step.plan(batch=4, length=7).shape == {"batch": 4, "length": 7, "selected": 28}
    ids, labels = batch_of(4, 7)
    step(ids, labels)
    report = step.memory_report()
    assert report.shape == {"batch": 4, "length": 7, "selected": int((labels >= 0).sum())}
    assert report.peak_bytes <= report.planned_peak_bytes
    step(*batch_of(4, 7, "all"))
    assert step.memory_report().peak_bytes == step.plan(batch=4, length=7).peak_bytes
    assert step.shape_of(ids, labels) == report.shape


def test_a_call_is_planned_for_what_the_batch_tells():
    step = compiled(_deep, Model(64, 6))
    bound = step.plan(batch=16, length=64)
    peaks = {}
    for count in (0, 1, 16, 160, 544, 1024):
        labels = torch.full((16, 64), -1)
        labels.view(-1)[torch.randperm(1024)[:count]] = 3
        batch = torch.randint(0, WORDS, (16, 64)), labels
        shape = step.shape_of(*batch)
        assert shape == {"batch": 16, "length": 64, "selected": count}
        plan = step.plan(**shape)
        step.memory_budget = plan.least_bytes
        assert step.plan(**shape).fits
        assert step.plan(batch=16, length=64).fits == (count == 1024)
        with step.restored():
            tight = step(*batch).clone()
            assert step.memory_report().peak_bytes <= plan.least_bytes
        step.memory_budget = None
        with step.restored():
            torch.testing.assert_close(step(*batch), tight, rtol=0, atol=0, equal_nan=True)
        report = step.memory_report()
        assert report.planned_peak_bytes == plan.peak_bytes
        assert report.peak_bytes <= plan.peak_bytes
        if count in (16, 160, 544, 1024):  # others are rounded up
            assert report.peak_bytes == plan.peak_bytes
        peaks[count] = plan.peak_bytes
    assert peaks[0] == peaks[1] == peaks[16] < peaks[160] < peaks[544] < peaks[1024]
    assert peaks[1024] == bound.peak_bytes
    with pytest.raises(ShapeRangeError, match=r"selected=1025; allowed is 0 \.\. 1024"):
        step.plan(batch=16, length=64, selected=1025)
    with pytest.raises(ShapeRangeError, match="leave out selected"):
        step.largest("batch", length=64, selected=3)


def test_what_parameters_tell_is_planned_at_its_bound():
    def positive_rows(model, ids, labels):
        x = model(ids)
        return x[(labels >= 0) & (x[..., 0] > 0)].square().sum() + x[labels >= 2].cos().sum()

    step = compiled(positive_rows)
    batch = batch_of(4, 9)
    shape = step.shape_of(*batch)
    counts = {int((batch[1] >= 2).sum())}
    assert {value for name, value in shape.items() if name.startswith("selected")} == counts
    check_step(step, positive_rows, batch)
    with pytest.raises(ShapeRangeError, match="Give one size for each of the dims"):
        step.plan(batch=4, length=9, selected=3, selected_2=3)


def test_sums_of_gradients_are_planned_for_what_the_batch_tells():
    step = compiled(_deep, Model(64, 6))
    batch = batch_of(16, 64, "one")
    step.memory_budget = step.plan(**step.shape_of(*batch), update=False).peak_bytes
    assert not step.plan(batch=16, length=64, update=False).fits
    step(*batch, update=False)
    assert step.memory_report().planned_peak_bytes <= step.memory_budget


def _deep(model, ids, labels, mask=None):
    mask = labels >= 0 if mask is None else mask
    x = model.table(ids)[mask]
    for layer in model.layers:
        x = F.gelu(layer(x)) * x.sigmoid()
    return F.cross_entropy(model.head(x), labels[mask])


def _deep_by_parameters(model, ids, labels):
    """What the same labels select, but a call knows it only when a parameter has been read."""
    return _deep(model, ids, labels, (labels >= 0) & (model.table.weight[0, 0] < 9))


@pytest.mark.parametrize("loss_fn", [_deep, _deep_by_parameters])
def test_budgets_change_no_bit_whatever_is_selected(loss_fn):
    step = compiled(loss_fn, Model(64, 6))
    plan = step.plan(batch=16, length=64)
    assert plan.least_bytes < plan.peak_bytes
    recomputed = 0
    for selected in ("some", "all", "one", "none"):
        batch = batch_of(16, 64, selected)
        results = []
        for budget in (None, (plan.least_bytes + plan.peak_bytes) // 2, plan.least_bytes):
            step.memory_budget = budget
            with step.restored():
                loss = step(*batch)
                results.append(
                    [loss.clone(), *(p.detach().clone() for p in step.model.parameters())]
                )
            report = step.memory_report()
            recomputed += report.recomputations
            assert budget is None or report.peak_bytes <= budget
        for other in results[1:]:
            for a, b in zip(results[0], other, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert recomputed > 0


def test_what_the_bound_asks_to_compute_again_is_kept_where_less_was_selected():
    step = compiled(_deep_by_parameters, Model(64, 6))
    step.memory_budget = step.plan(batch=16, length=64).least_bytes
    plan = step.plan(batch=16, length=64)
    recomputed = {}
    for selected in ("all", "some", "one", "none", "all"):
        with step.restored():
            step(*batch_of(16, 64, selected))
        report = step.memory_report()
        recomputed[selected] = report.recomputations
        assert report.planned_peak_bytes == plan.peak_bytes
        assert report.peak_bytes <= plan.peak_bytes
    assert recomputed["all"] == len(plan.evicted) > recomputed["some"]
    assert recomputed["one"] == recomputed["none"] == 0


def test_sums_of_gradients_a_saved_step_and_verify(tmp_path):
    step = compiled(_deep, Model(32, 1))
    assert verify(step, [batch_of(3, 5), batch_of(4, 4, "none"), batch_of(2, 3, "one")]).ok
    model = copy.deepcopy(step.model)
    _deep(model, *batch_of(3, 5)).backward()
    step(*batch_of(3, 5), update=False)
    for mine, theirs in zip(step.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    step.optimizer.zero_grad()
    step.save(tmp_path / "step")
    loaded = TrainingStep.load(tmp_path / "step", step.model, step.optimizer, loss_fn=_deep)
    loaded(*batch_of(2, 2, "all"))
    assert loaded.memory_report().shape["selected"] == 4


def test_what_is_picked_can_be_returned():
    def with_rows(model, ids, labels):
        x = model(ids)
        picked = x[labels >= 0]
        return picked.square().sum(), picked, picked.shape[0]

    step = compiled(with_rows)
    for selected in ("some", "none", "all"):
        ids, labels = batch_of(3, 5, selected)
        expected = step.model(ids)[labels >= 0].detach()
        _, (picked, count) = step(ids, labels)
        torch.testing.assert_close(picked, expected)
        assert count == len(expected)


def _two_masks(model, ids, labels):
    x = model(ids)
    return (x[labels >= 0] * x[ids > 3]).sum()


def _greatest(model, ids, labels):
    return model(ids)[labels >= 0].max() + model(ids)[labels >= 0].amin(0).sum()


def _state(step):
    tensors = [*step.model.parameters()]
    for values in step.optimizer.state.values():
        tensors += values.values()
    return [torch.as_tensor(tensor).detach().clone() for tensor in tensors]


@pytest.mark.parametrize(
    ("loss_fn", "wrong", "words"),
    [
        (_two_masks, (torch.tensor([[5, 6, 7]]), torch.tensor([[2, 3, -1]])), "is 2 and 3"),
        (_greatest, batch_of(2, 3, "none"), "selected is 0"),
    ],
    ids=["two masks", "greatest"],
)
def test_a_count_that_pytorch_refuses_is_refused_before_anything_is_written(loss_fn, wrong, words):
    step = compiled(loss_fn)
    right = torch.tensor([[5, 1, 7, 0]]), torch.tensor([[-1, 2, -1, 4]])
    check_step(step, loss_fn, right)
    before = _state(step)
    with pytest.raises(ShapeRangeError, match=words):
        step(*wrong)
    with pytest.raises((RuntimeError, IndexError)):
        loss_fn(step.model, *wrong)
    assert all(torch.equal(a, b) for a, b in zip(_state(step), before, strict=True))
    check_step(step, loss_fn, right)


def _one_a_row(model, ids, labels):
    return F.cross_entropy(model(ids)[labels >= 0], ids[:, 0])


def _last_of_each_row(model, ids, labels):
    x = model(ids)
    return x[labels >= 0].view(x.shape[0], -1, x.shape[-1])[:, -1].cos().sum()


def _three_a_row(model, ids, labels):
    x = model(ids)
    return x[labels >= 0].view(x.shape[0], 3, x.shape[-1]).cos().sum()


def _in_fours(model, ids, labels):
    return model(ids)[labels >= 0].reshape(-1, 4, WORDS).mean(1).cos().sum()


def _in_eights(model, ids, labels):
    return model(ids)[labels >= 0].reshape(-1, 8).sum()


def _as_many_distinct(model, ids, labels):
    words, counts = torch.unique(ids, return_counts=True)
    x = model(words)
    return (x * counts[:, None]).cos().sum() + F.cross_entropy(x, labels[:, 0].clamp(min=0))


def _last_of_all(model, ids, labels):
    return model(ids)[labels >= 0][-1].cos().sum()


def _three_at_most(model, ids, labels):
    x = model(ids)[labels >= 0]
    torch._check(x.shape[0] <= 3)
    return x.cos().sum()


def _twice_as_many(model, ids, labels):
    x = model(ids)
    return (torch.cat([x[labels >= 0]] * 2) * x[ids >= 3]).sum()


def _labelled(*counts, length=5):
    """Make ids and labels, of which each row has so many that are 0 or more."""
    ids = torch.arange(len(counts) * length).reshape(-1, length) % WORDS
    return ids, torch.arange(length).flip(0) - length + torch.tensor(counts)[:, None]


@pytest.mark.parametrize(
    ("loss_fn", "right", "wrong", "words"),
    [
        (
            _one_a_row,
            [_labelled(1, 1), _labelled(1), _labelled(1, 1, 1, length=1), _labelled(0, 2)],
            [_labelled(2, 2), _labelled(0, 0), _labelled(1, 0, length=2)],
            r"needs selected == batch at .*; for this batch batch is 2, selected is",
        ),
        (
            _last_of_each_row,
            [_labelled(2, 2), _labelled(1), _labelled(4, 4, 4, 4), _labelled(1, length=1)],
            [_labelled(2, 1), _labelled(0, 0)],
            r"\(selected % batch\) == 0 at .* is 3|0 < \(selected // batch\) at .* is 0",
        ),
        (
            _three_a_row,
            [_labelled(3, 3), _labelled(3), _labelled(3, 3, 3, length=40)],
            [_labelled(2, 2), _labelled(4, 4), _labelled(1, 1, length=1), _labelled(0)],
            r"needs selected == 3\*batch",
        ),
        (
            _in_fours,
            [_labelled(2, 2), _labelled(4), _labelled(0), _labelled(1, 1, 1, 1, length=1)],
            [_labelled(3), _labelled(1, 1)],
            r"needs \(selected % 4\) == 0",
        ),
        (
            _in_eights,
            [_labelled(5, 3), _labelled(0)],
            [_labelled(3), _labelled(1, 1)],
            r"needs \(\(3\*selected\) % 8\) == 0",
        ),
        (
            _as_many_distinct,
            [_labelled(1, length=1), _labelled(1, 0, 1, 1, length=1)],
            [_labelled(1, 2, length=2)],
            "needs distinct == batch",
        ),
        (
            _last_of_all,
            [_labelled(0, 1), _labelled(1, length=1)],
            [_labelled(0, 0), _labelled(0, length=1)],
            "selected is 0",
        ),
        (_three_at_most, [_labelled(3), _labelled(0)], [_labelled(4)], "needs selected <= 3"),
        (
            _twice_as_many,
            [_labelled(1, length=5), _labelled(3, 1, length=6)],
            [_labelled(2), _labelled(0)],
            r"needs 2\*selected == selected_2",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_model_needs_of_a_count_is_checked_when_it_is_counted(loss_fn, right, wrong, words):
    step = compiled(loss_fn)
    for batch in right:
        check_step(step, loss_fn, batch)
    before = _state(step)
    for batch in wrong:
        with pytest.raises(ShapeRangeError, match=words):
            step(*batch)
        with pytest.raises((RuntimeError, IndexError, ValueError)):
            loss_fn(step.model, *batch)
    assert all(torch.equal(a, b) for a, b in zip(_state(step), before, strict=True))
    check_step(step, loss_fn, right[0])


def test_what_a_model_needs_of_a_count_that_parameters_tell():
    def loss_fn(model, ids, labels):
        x = model.table(ids)
        return x[x > 0].view(x.shape[0], -1).cos().sum() + labels.sum() * 0.0

    step = compiled(loss_fn)
    with torch.no_grad():
        step.model.table.weight.fill_(0.5)
        step.model.table.weight[0, 0] = -0.5
    ids, labels = _labelled(1, 1)
    check_step(step, loss_fn, (ids + 1, labels))
    before = _state(step)
    with pytest.raises(
        ShapeRangeError, match=r"The model needs .*% batch\) == 0 .* selected is 79"
    ):
        step(ids, labels)
    assert all(torch.equal(a, b) for a, b in zip(_state(step), before, strict=True))
    check_step(step, loss_fn, (ids[:1] + 1, labels[:1]))


def test_positions_of_what_is_picked_are_checked_when_they_are_counted():
    def loss_fn(model, ids, labels):
        picked = model(ids)[labels >= 0]
        places = torch.arange(picked.shape[0])
        return (picked * model.table(places)[:, :1]).sum()

    step = compiled(loss_fn)
    check_step(step, loss_fn, batch_of(2, 5, "all"))  # 10 of 11 rows
    with pytest.raises(IndexRangeError, match=r"an index is 11; indices must be in 0 \.\. 10"):
        step(*batch_of(2, 6, "all"))
    check_step(step, loss_fn, batch_of(2, 6, "none"))


def _number(model, ids, labels):
    return model(ids)[:, : ids.max().item()].sum()


def _consecutive(model, ids, labels):
    return model(torch.unique_consecutive(ids.flatten())).sum()


def _packed(model, ids, labels):
    """What Longformer does with the words that all others see."""
    mask = labels >= 0
    count = mask.long().sum(1)
    there = torch.arange(count.max()) < count[:, None]
    h = model(ids)
    packed = h.new_zeros(len(ids), count.max(), WORDS)
    packed[there.nonzero(as_tuple=True)] = h[mask.nonzero(as_tuple=True)]
    return packed.softmax(1).pow(2).sum() / len(ids)


def test_a_size_that_is_a_sum_over_a_mask_is_counted():
    step = compiled(_packed)
    for selected, shape in itertools.product(("some", "none", "all"), SHAPES[:3]):
        check_step(step, _packed, batch_of(*shape, selected=selected))


def test_such_a_size_is_no_more_than_the_mask_holds():
    def added_to(model, ids, labels):
        count = (labels >= 0).long()
        count[:, 0] += 3
        return model(ids).mean() * torch.arange(count.sum(1).max()).sum()

    step = compiled(added_to)
    check_step(step, added_to, batch_of(2, 9, selected="none"))
    with pytest.raises(ModelCheckError, match="more than its mask holds"):
        step(*batch_of(2, 2, selected="all"))


def _what_is_left(model, ids, labels):
    x = model(ids).flatten(0, 1)
    return x[x[labels.flatten() >= 0].shape[0] :].cos().sum()


def _written_into(model, ids, labels):
    number = torch.tensor(ids.shape[0])
    number += 1
    return model(ids).mean() * torch.ones(number).sum()


def _normalised(model, ids, labels):
    return F.batch_norm(model(ids)[labels >= 0], None, None, training=True).cos().sum()


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (_number, "aten.item.default"),
        (_consecutive, "aten.unique_consecutive.default"),
        (_what_is_left, "size .* of .* is not largest where selected are"),
        (_written_into, "aten.item.default"),
        (_normalised, "decides from data"),
    ],
)
def test_other_sizes_are_refused_by_name(loss_fn, words):
    with pytest.raises(UnsupportedOperatorError, match=words):
        compiled(loss_fn)


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"options": PipelineOptions(plan_arena=False)}, "without plan_arena"),
        ({"target": tvm.target.Target({"kind": "rocm", "mcpu": "gfx90a"})}, "on rocm"),
    ],
)
def test_nothing_else_takes_counts_from_kernels(options, where):
    with pytest.raises(UnsupportedOperatorError, match=where):
        compiled(rows_before_a_regression, **options)


def _random_loss(seed):
    """Make a loss that picks several times, by masks of labels, values and what was picked."""

    def loss_fn(model, ids, labels):
        choose = random.Random(seed)
        x, total = model.table(ids), 0.0
        rows = x[labels >= 0] if choose.random() < 0.5 else x[(ids + seed) % 3 > 0]
        for _ in range(choose.randint(1, 3)):
            kind = choose.randrange(6)
            if kind == 0:
                rows = rows[rows.sum(1) > 0]
            elif kind == 1:
                rows = torch.cat([rows, torch.tanh(x.flatten(0, 1))[labels.flatten() > 4]])
            elif kind == 2:
                rows = rows.index_select(0, (rows[:, 0] < 0.2).nonzero().flatten())
            elif kind == 3:
                total = total + torch.masked_select(rows, rows.cos() > 0.5).square().sum()
            elif kind == 4:
                rows = model.layers[0](rows).tanh() + rows.mean(0).nan_to_num()
            else:
                rows = rows * torch.softmax(rows @ model.table.weight[:1].T, 0)
        y = torch.zeros_like(x)
        y[labels >= 2] = x[labels >= 2].sin()
        return total + model.head(rows).square().sum() + y.sum()

    return loss_fn


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 40))]
)
def test_random_programs_at_random_counts_and_budgets(seed):
    loss_fn = _random_loss(seed)
    torch.manual_seed(seed)
    step = compiled(loss_fn, Model(8, 1).double())
    for number, shape in enumerate([(3, 7), (1, 1), (8, 16), (2, 30)]):
        for selected in ("some", "all", "none"):
            batch = batch_of(*shape, selected, 10 * seed + number)
            step.memory_budget = None
            plan = step.plan(batch=shape[0], length=shape[1])
            with step.restored():
                free = step(*batch).clone(), _state(step)
            step.memory_budget = plan.least_bytes
            with step.restored():
                tight = step(*batch).clone(), _state(step)
            assert step.memory_report().peak_bytes <= plan.least_bytes
            for a, b in zip((free[0], *free[1]), (tight[0], *tight[1]), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
            with step.restored():
                check_step(step, loss_fn, batch)
