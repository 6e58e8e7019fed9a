"""Tuned kernels: traces at all sizes, databases that apply themselves, judgement, the search."""

import json
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import tvm
from torch.export import Dim
from tvm import relax, s_tir, tirx
from tvm_ffi import structural_equal

import relax_disc
from relax_disc.analysis.kernels.inplace import inplace_pairs
from relax_disc.errors import ArtefactError, UnsupportedEnvironmentError
from relax_disc.frontend import export_step
from relax_disc.pipeline import PipelineOptions, unscheduled
from relax_disc.tir_kernels import cpu_target, rules_for
from relax_disc.tir_kernels.loops import loop, sequence, with_body
from relax_disc.tir_kernels.tuning import database as databases
from relax_disc.tir_kernels.tuning import judgement, search, tune
from relax_disc.tir_kernels.tuning.database import TuningDatabase, kernel_key
from relax_disc.tir_kernels.tuning.judgement import differences
from relax_disc.tir_kernels.tuning.replay import ANNOTATION, Tuned, plain, settings_of
from relax_disc.tir_kernels.tuning.tasks import Task, tasks
from relax_disc.training.cache.compile_cache import surroundings
from relax_disc.transform.schedule_kernels import schedule_kernel
from tests.tir_kernels.kernel_runs import TARGET, fused_kernel, scheduled, set_threads, tensor


def dims(*names):
    return [tirx.Var(name, "int64") for name in names]


def gelu():
    n, m = dims("n", "m")
    return fused_kernel(
        [tensor("x", (n, m, 48)), tensor("b", (48,))],
        lambda emit, x, b: emit(relax.op.nn.gelu(emit(relax.op.add(x, b)))),
    )


def softmax():
    n, m = dims("n", "m")
    return fused_kernel([tensor("x", (n, m))], lambda emit, x: emit(relax.op.nn.softmax(x)))


def columns():
    n, m = dims("n", "m")
    return fused_kernel(
        [tensor("x", (n, m, 200))], lambda emit, x: emit(relax.op.sum(x, axis=[0, 1]))
    )


def transposed():
    n, m = dims("n", "m")
    return fused_kernel(
        [tensor("x", (n, m, 40))], lambda emit, x: emit(relax.op.permute_dims(x, [2, 0, 1]))
    )


def total():
    n, m = dims("n", "m")
    return fused_kernel([tensor("x", (n, m))], lambda emit, x: emit(relax.op.sum(x)))


KERNELS = {
    "gelu": (gelu, ("lanes",)),
    "softmax": (softmax, ("lanes", "reduction_lanes")),
    "columns": (columns, ("lanes", "tile_columns")),
    "transposed": (transposed, ("lanes", "tile_rows")),
    "total": (total, ("reduction_lanes",)),
}
SHAPES = [(1, 1), (1, 17), (3, 5), (4, 64), (9, 33)]


def sizes_of(kernel, *values):
    """Map a kernel's dims to sizes, by name."""
    named = dict(zip("nm", values, strict=True))
    found = {size for param in kernel.params for size in param.shape if isinstance(size, tirx.Var)}
    return {var: named[var.name] for var in found}


def trace_of(kernel, **settings):
    """Make the trace that a search would find with these decisions."""
    schedule = s_tir.Schedule(kernel)
    root = schedule.get_sblock("root", func_name="main")
    for name, value in settings.items():
        values = list(search.CHOICES[name])
        odds = [1 / len(values)] * len(values)
        chosen = schedule.sample_categorical(values, odds, decision=values.index(value))
        schedule.annotate(root, ANNOTATION + name, chosen)
    return plain(schedule.trace.as_json())


def database_of(kernel, trace, start=None):
    entry = {"name": "k", "trace": trace, "from": start, "reason": "", "measured": []}
    return TuningDatabase(databases.environment(TARGET), {kernel_key(kernel): entry})


def by(database, kernel):
    return schedule_kernel(kernel, TARGET, [Tuned(database), *rules_for(TARGET)])


def task_of(kernel, tunes):
    call = {var: var for var in sizes_of(kernel, 1, 1)}
    return Task("k", kernel_key(kernel), kernel, tunes, (call,))


def differing(kernel, candidate, shapes):
    return differences(kernel, scheduled(kernel), candidate, TARGET, shapes)


def test_a_key_is_of_the_structure():
    again, other = gelu(), softmax()
    assert kernel_key(gelu()) == kernel_key(again) != kernel_key(other)
    x = tensor("y", (tirx.Var("rows", "int64"), tirx.Var("columns", "int64")))
    renamed = fused_kernel([x], lambda emit, x: emit(relax.op.nn.softmax(x)))
    assert kernel_key(renamed) == kernel_key(other)


def test_a_rule_names_what_it_tunes():
    for make, tunes in KERNELS.values():
        rule = next(r for r in rules_for(TARGET) if r.apply(make(), TARGET, False) is not None)
        assert rule.tunes == tunes


@pytest.mark.parametrize("name", KERNELS)
def test_a_trace_of_settings_holds_at_every_size(name):
    make, tunes = KERNELS[name]
    kernel = make()
    largest = {each: search.CHOICES[each][-1] for each in tunes}
    trace = json.loads(json.dumps(trace_of(kernel, **largest)))
    tuned = by(database_of(kernel, trace), kernel)
    assert not structural_equal(tuned, scheduled(kernel))
    assert differing(kernel, tuned, [sizes_of(kernel, *each) for each in SHAPES]) is None


@pytest.mark.parametrize("name", KERNELS)
def test_a_trace_from_a_size_on(name):
    make, tunes = KERNELS[name]
    kernel = make()
    trace = trace_of(kernel, **{each: search.CHOICES[each][-1] for each in tunes})
    tuned = by(database_of(kernel, trace, [0, 100 * 40]), kernel)
    assert "4000" in tuned.script()
    assert differing(kernel, tuned, [sizes_of(kernel, *each) for each in SHAPES]) is None


def test_decided_tiles_become_splits_of_all_sizes():
    kernel = softmax()
    sizes = sizes_of(kernel, 6, 48)
    schedule = s_tir.Schedule(task_of(kernel, ()).at(sizes))
    block = schedule.get_sblock("T_softmax_norm", func_name="main")
    last = schedule.get_loops(block)[-1]
    tiles = schedule.sample_perfect_tile(last, n=2, max_innermost_factor=64, decision=[3, 16])
    schedule.split(last, tiles)
    trace = plain(schedule.trace.as_json())
    assert any(kind == "SamplePerfectTile" for kind, *_ in trace[0])
    tuned = by(database_of(kernel, trace), kernel)
    assert not structural_equal(tuned, scheduled(kernel)) and "T.int64(16)" in tuned.script()
    assert differing(kernel, tuned, [sizes_of(kernel, *each) for each in SHAPES]) is None


def test_a_trace_that_does_not_fit_leaves_the_rule():
    kernel = softmax()
    trace = [[["GetSBlock", [], ["no such block", "main"], ["b0"]]], []]
    assert structural_equal(by(database_of(kernel, trace), kernel), scheduled(kernel))


def test_wrong_values_are_found():
    kernel = gelu()
    n, m = dims("n", "m")
    wrong = fused_kernel(
        [tensor("x", (n, m, 48)), tensor("b", (48,))],
        lambda emit, x, b: emit(relax.op.nn.gelu_tanh(emit(relax.op.add(x, b)))),
    )
    shapes = [sizes_of(kernel, 3, 5)]
    found = differing(kernel, scheduled(wrong), shapes)
    assert found is not None and "rounding explains" in found
    assert differing(kernel, scheduled(kernel), shapes) is None


def test_a_candidate_that_may_not_lie_over_its_operand_is_found():
    """Its second pass reads what the first has written over."""
    n, m = dims("n", "m")
    kernel = fused_kernel([tensor("x", (n, m))], lambda emit, x: emit(relax.op.exp(x)))
    assert inplace_pairs(kernel) == ((0, 1),)
    x, y = kernel.params
    rows, columns = x.shape

    def passes(row):
        def at(column):
            return tirx.BufferStore(y, tirx.exp(tirx.BufferLoad(x, [row, column])), [row, column])

        return loop("column", columns, at)

    twice = sequence([loop("row", rows, passes), loop("row", rows, passes)])
    candidate = with_body(kernel, [twice]).mod["main"]
    shapes = [sizes_of(kernel, 3, 5)]
    found = differing(kernel, candidate, shapes)
    assert found is not None and "over operand 0" in found


class Stopwatch:
    """Time that passes by kernels' calls only: some microseconds each, and what disturbs them."""

    def __init__(self, monkeypatch, microseconds, disturbed):
        self.now = 0.0
        self.microseconds = microseconds
        self.disturbed = disturbed
        self.generator = np.random.default_rng(0)
        monkeypatch.setattr(judgement, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(judgement.workers, "compiled", self.compiled)

    def compiled(self, kernels, target):
        del target
        return {name: self.run(name) for name in kernels}

    def run(self, name):
        def call(*arguments):
            del arguments
            factor = 1 + self.disturbed * self.generator.standard_normal()
            if self.generator.random() < 0.01:
                factor += 50  # another process has the core
            self.now += self.microseconds[name] * 1e-6 * max(factor, 0.1)

        return call


@pytest.mark.parametrize(
    ("rule", "tuned", "disturbed", "verdict"),
    [
        (100, 60, 0.02, "faster"),
        (100, 170, 0.02, "slower"),
        (100, 95, 0.01, "faster"),
        (100, 106, 0.01, "slower"),
        (100, 100, 0.01, None),
        (100, 99, 0.001, None),  # not worth another kernel, however sure
        (100, 101, 0.001, None),
        (100, 95, 0.3, None),  # nobody can tell on such a machine
        (100, 106, 0.3, None),
        (100, 30, 0.3, "faster"),
    ],
)
def test_slower_and_faster_are_told(rule, tuned, disturbed, verdict, monkeypatch):
    kernel = softmax()
    shapes = [({"n": 64, "m": 256}, sizes_of(kernel, 64, 256))]
    Stopwatch(monkeypatch, {"rule": rule, "again": rule, "tuned": tuned}, disturbed)
    (timing,) = judgement.time_kernels(kernel, kernel, kernel, TARGET, shapes)
    assert (timing.faster, timing.slower) == (verdict == "faster", verdict == "slower")
    assert timing.low <= timing.ratio <= timing.high
    assert timing.shape == {"n": 64, "m": 256} and not timing.modelled
    if disturbed <= 0.02:
        assert timing.rule_us == pytest.approx(rule, rel=0.05)
        assert timing.tuned_us == pytest.approx(tuned, rel=0.05)
        assert timing.ratio == pytest.approx(tuned / rule, rel=0.02)


def test_kernels_are_timed():
    """The machine's own stopwatch: on a busy one its figures may be anything."""
    set_threads(1)
    kernel = softmax()
    sizes = sizes_of(kernel, 64, 256)
    rule = scheduled(kernel)
    slow = kernel.with_attr("tirx.is_scheduled", True)
    (timing,) = judgement.time_kernels(kernel, rule, slow, TARGET, [({"n": 64}, sizes)])
    assert 0 < timing.rule_us and 0 < timing.tuned_us
    assert 0 < timing.low <= timing.ratio <= timing.high and timing.noise >= 0


def test_a_database_is_kept_and_refused_elsewhere(tmp_path):
    kernel = softmax()
    path = tmp_path / "folder" / "tuned.json"
    made = database_of(kernel, trace_of(kernel, lanes=64))
    made.write(path)
    found = databases.load(TARGET, path)
    assert found is not None and found.decisions() == made.decisions()
    assert found.digest() == made.digest() != ""
    other = TuningDatabase({**made.environment, "threads": 99}, made.kernels)
    other.write(path)
    with pytest.raises(ArtefactError, match=r"threads was 99, here it is \d+.*relax-disc tune"):
        databases.load(TARGET, path)
    path.write_text("{")
    with pytest.raises(ArtefactError, match="no tuning database"):
        databases.load(TARGET, path)
    with pytest.raises(ArtefactError, match="there is no tuning database"):
        databases.load(TARGET, tmp_path / "none.json")
    with pytest.raises(ArtefactError, match="target was"):
        made.write(path)
        databases.load(tvm.target.Target({"kind": "llvm", "mcpu": "x86-64"}), path)


def test_the_users_own_database(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("RELAX_DISC_CACHE", str(tmp_path))
    assert databases.load(TARGET, databases.USER) is None
    assert databases.load(TARGET, None) is None
    kernel = softmax()
    path = databases.user_path(TARGET)
    database_of(kernel, trace_of(kernel, lanes=64)).write(path)
    found = databases.load(TARGET, databases.USER)
    assert found is not None and list(found.decisions()) == [kernel_key(kernel)]
    keyed = surroundings(TARGET, None)
    path.write_text("{")
    assert databases.load(TARGET, databases.USER) is None
    assert "compiled without tuning" in caplog.text
    assert surroundings(TARGET, None) != keyed


def test_programs_depend_on_what_a_database_says(tmp_path):
    kernel = softmax()
    keys = [surroundings(TARGET, PipelineOptions(tuning_database=None))]
    for name, lanes in (("a", 32), ("b", 64), ("c", 64)):
        path = tmp_path / f"{name}.json"
        database_of(kernel, trace_of(kernel, lanes=lanes)).write(path)
        keys.append(surroundings(TARGET, PipelineOptions(tuning_database=path)))
    assert len(set(keys)) == 3 and keys[2] == keys[3]


ROWS = {0: Dim("rows", min=1, max=64)}


def model_of():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.GELU())
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def mean_square(model, x):
    return model(x).square().mean()


def test_a_step_uses_a_database(tmp_path):
    """The kernels of the step are the tuned ones, and it computes what it did."""

    def losses(options):
        step = relax_disc.compile(
            *model_of(),
            (torch.randn(4, 48),),
            dynamic_shapes=(ROWS,),
            loss_fn=mean_square,
            options=options,
        )
        return [float(step(torch.randn(n, 48))) for n in (1, 7, 64)]

    dumped = tmp_path / "dumps"
    plain_losses = losses(PipelineOptions(tuning_database=None, dump_to=dumped))
    text = (dumped / "04-kernels.py").read_text()
    assert "column_lane in T.vectorized(T.int64(64))" not in text
    target = cpu_target()
    exported = export_step(
        *model_of(), (torch.randn(4, 48),), dynamic_shapes=(ROWS,), loss_fn=mean_square
    )
    found = tasks(unscheduled(exported.capture().module, target), target)
    path = tmp_path / "tuned.json"
    entries = {
        task.key: {"trace": trace_of(task.kernel, lanes=64), "from": None}
        for task in found
        if "lanes" in task.tunes
    }
    assert entries
    TuningDatabase(databases.environment(target), entries).write(path)
    tuned_losses = losses(PipelineOptions(tuning_database=path, dump_to=dumped))
    assert "column_lane in T.vectorized(T.int64(64))" in (dumped / "04-kernels.py").read_text()
    assert tuned_losses == pytest.approx(plain_losses, rel=1e-6)


needs_metaschedule = pytest.mark.skipif(
    any(find_spec(name) is None for name in search.NEEDED["random"]),
    reason="TVM's MetaSchedule needs cloudpickle and psutil",
)


@needs_metaschedule
def test_a_search_goes_on_where_it_stopped(tmp_path, monkeypatch):
    """The whole way with a tiny number of trials; then nothing is searched again."""
    kernel = transposed()
    task = task_of(kernel, ("lanes", "tile_rows"))
    how = search.Search(trials=2, cost_model="random")
    plan = tune.Plan(
        {"n": 16, "m": 32}, [{"n": 1, "m": 1}], {"n": (1, 64), "m": (1, 64)}, search=how
    )
    monkeypatch.setattr(tune, "_QUICK_US", 0.0)
    path = tmp_path / "tuned.json"
    empty = TuningDatabase(databases.environment(TARGET))
    told = []
    found = tune.tune_kernels(
        [task], TARGET, plan, empty, path, lambda task, verdict: told.append(verdict)
    )
    assert databases.read(path).kernels.keys() == found.kernels.keys() == {task.key}
    assert len(told) == 1 and told[0].measured[0].shape == {"n": 16, "m": 32}
    assert (told[0].trace is None) == (told[0].reason != "faster than the rule")

    def refuse(**_):
        raise AssertionError("searched again")

    from tvm.s_tir import meta_schedule

    monkeypatch.setattr(meta_schedule.tune, "tune_tasks", refuse)
    tune.tune_kernels([task], TARGET, plan, found, path)
    folder = path.with_suffix("") / task.key / "rules"
    static = task.at(task.largest(plan.shape))
    records = search.search(static, TARGET, "rules", task.tunes, folder, how, search.Processes())
    assert len(records) == 2 and records[0][0] <= records[1][0]
    settings = [settings_of(by_trace(static, trace)).tile_rows for _, trace in records]
    assert set(settings) <= set(search.CHOICES["tile_rows"])


def by_trace(kernel, trace):
    schedule = s_tir.Schedule(kernel)
    s_tir.Trace.apply_json_to_schedule(trace, schedule)
    return schedule.mod["main"]


@needs_metaschedule
@pytest.mark.slow  # TVM's tensor instructions take a minute to import
@pytest.mark.parametrize("name", ["softmax", "columns", "gelu"])
def test_traces_of_tvms_space_are_replayed_or_refused(name):
    """What TVM's design space draws for a kernel of fixed sizes, at all sizes."""
    from tvm.s_tir import meta_schedule

    kernel = KERNELS[name][0]()
    task = task_of(kernel, ())
    static = task.at(sizes_of(kernel, 6, 48)).with_attr("global_symbol", "main")
    context = meta_schedule.TuneContext(
        static, target=TARGET, space_generator="post-order-apply", rand_state=1, num_threads=1
    )
    replayed = 0
    for schedule in context.generate_design_space():
        trace = plain(schedule.trace.as_json())
        tuned = by(database_of(kernel, trace), kernel)
        if structural_equal(tuned, scheduled(kernel)):
            continue  # it did not fit, and the rule took over
        replayed += 1
        found = differing(kernel, tuned, [sizes_of(kernel, *each) for each in SHAPES])
        assert found is None
    assert replayed > 0


def test_missing_packages_are_told(monkeypatch):
    monkeypatch.setattr(search, "find_spec", lambda name: None if name == "xgboost" else object())
    search.require("random")
    with pytest.raises(UnsupportedEnvironmentError, match=r"xgboost: pip install"):
        search.require("xgb")
