"""A plan's timeline: exact bytes, evictions, and the picture, trace and page made of it."""

import itertools
import json
import pickle
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
import torch
from torch import nn
from torch.export import Dim

import relax_disc
from relax_disc.report.trace import events
from tests.vm_builtins.test_product_choice import OTHERS, forced, needs_mkl

SHAPES = [3, 64, 200]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6))
        )

    def forward(self, x):
        return self.layers(x).softmax(-1).pow(2).mean()


@pytest.fixture(scope="module")
def step():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    rows = {0: Dim("rows", min=1, max=512)}
    return relax_disc.compile(model, optimizer, (torch.randn(8, 32),), dynamic_shapes=(rows,))


@pytest.fixture
def plans(step):
    """Plans of 512 rows: without a budget, and of the least memory."""
    step.memory_budget = None
    free = step.plan(rows=512)
    step.memory_budget = free.least_bytes
    tight = step.plan(rows=512)
    step.memory_budget = None
    assert tight.evicted
    return free, tight


@pytest.mark.parametrize("rows", SHAPES)
@pytest.mark.parametrize("tight", [False, True])
def test_bytes_are_the_plans_own(step, rows, tight):
    step.memory_budget = step.plan(rows=rows).least_bytes if tight else None
    plan = step.plan(rows=rows)
    timeline = plan.timeline
    live = timeline.live_bytes
    names = ("activations", "gradients", "workspace")
    changing = [sum(row) for row in zip(*(live[name] for name in names), strict=True)]
    assert max(changing) == plan.live_peak_bytes
    around = plan.arena_bytes - plan.live_peak_bytes
    assert timeline.unused_bytes == around
    assert max(timeline.total_bytes) + around == plan.peak_bytes == timeline.peak_bytes
    assert timeline.total_bytes[timeline.peak_step] == max(timeline.total_bytes)
    resting = ("parameters", "optimizer state", "batch", "constants")
    assert sum(timeline.constant_bytes[name] for name in resting) == plan.resident_bytes
    parameters = sum(p.numel() * 4 for p in step.model.parameters())
    assert timeline.constant_bytes["parameters"] == parameters
    assert timeline.constant_bytes["batch"] == rows * 32 * 4


@needs_mkl
def test_buffers_of_a_library_have_a_row(step):
    step.memory_budget = None
    with forced(OTHERS):
        plan = step.plan(rows=77)
    timeline = plan.timeline
    assert timeline.live_bytes["library buffers"][0] == plan.library_bytes > 0
    assert max(timeline.total_bytes) + timeline.unused_bytes == plan.peak_bytes


def test_lives_do_not_overlap_in_the_arena(plans):
    for plan in plans:
        lives = plan.timeline.lives
        for k, one in enumerate(lives):
            for other in lives[k + 1 :]:
                together = one.first <= other.last and other.first <= one.last
                apart = (
                    one.offset + one.bytes <= other.offset
                    or other.offset + other.bytes <= one.offset
                )
                assert apart or not together, (one, other)


def test_what_is_evicted_comes_back_by_a_kernel_that_runs_again(plans):
    free, tight = (plan.timeline for plan in plans)
    assert free.gaps == () and not any(run.again for run in free.runs)
    assert tight.gaps
    assert sum(run.again for run in tight.runs) == len(plans[1].evicted)
    for gap in tight.gaps:
        assert gap.last > gap.first + 1
        assert tight.runs[gap.last].again
    modelled = [line.runs[-1].start_ns + line.runs[-1].time_ns for line in (free, tight)]
    assert modelled[1] / modelled[0] == pytest.approx(plans[1].time_ratio)


def test_lines_of_the_model_name_what_is_alive(plans):
    timeline = plans[0].timeline
    lines = timeline.lines(timeline.peak_step)
    assert sum(size for _, size, _ in lines) == plans[0].live_peak_bytes
    assert any("test_timeline.py:" in line for line, _, _ in lines)
    every = {line for run in range(len(timeline.runs)) for line, _, _ in timeline.lines(run)}
    assert "the settings of the optimizer, once the batch has been checked" in every
    assert not any("relax_disc." in line for line in every)


def test_accumulating_call_has_its_own_timeline(step):
    plan = step.plan(update=False, rows=64)
    assert plan.timeline.constant_bytes["gradient sums"] > 0
    assert plan.timeline.peak_bytes == plan.peak_bytes


def test_picture_tells_both_plans(plans, tmp_path):
    pytest.importorskip("matplotlib")
    free, tight = plans
    tight.plot(tmp_path / "pair.svg", before=free)
    drawn = re.sub(r"<!--(.*?)-->", r"\1", (tmp_path / "pair.svg").read_text())
    for words in (
        "no budget",
        "0 kernels run again",
        "evicted (pale)",
        "optimizer state",
        "budget",
    ):
        assert words in drawn
    assert f"{len(tight.evicted)} kernels run again" in drawn
    free.plot(tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


def test_trace_is_what_the_viewers_read(plans, tmp_path):
    timeline = plans[1].timeline
    plans[1].write_trace(tmp_path / "trace.json")
    found = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert found == json.loads(json.dumps(events(timeline)))
    kernels = [event for event in found if event["ph"] == "X"]
    assert len(kernels) == len(timeline.runs)
    for one, after in itertools.pairwise(kernels):
        assert one["ts"] + one["dur"] == pytest.approx(after["ts"])
    counters = [sum(event["args"].values()) for event in found if event["ph"] == "C"]
    assert max(counters) == max(timeline.total_bytes)
    begun = {event["id"]: event["ts"] for event in found if event["ph"] == "b"}
    ended = {event["id"]: event["ts"] for event in found if event["ph"] == "e"}
    assert begun.keys() == ended.keys() and len(begun) == len(timeline.gaps)
    assert all(begun[key] <= ended[key] for key in begun)


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.opened, self.links = [], []

    def handle_starttag(self, tag, attrs):
        self.opened.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]


def test_page_is_one_file(plans, tmp_path):
    plans[1].write_html(tmp_path / "page.html", before=plans[0])
    text = (tmp_path / "page.html").read_text()
    page = _Page()
    page.feed(text)
    assert page.opened.count("script") == 1 and page.links == []
    data = json.loads(re.search(r"const data = (.*);\n", text)[1])
    assert [entry["peak"] for entry in data["timelines"]] == [plan.peak_bytes for plan in plans]
    assert any("self.layers(x).softmax(-1)" in code for code in data["code"].values())


def test_page_in_a_browser(plans, tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium here: apt-get install chromium")
    page = tmp_path / "page.html"
    plans[1].write_html(page, before=plans[0])
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile")
    done = subprocess.run(
        [browser, *options, "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    assert 'data-ready="yes"' in done.stdout
    assert done.stdout.count("<svg") == 2
    bars = len(plans[1].timeline.gaps)
    assert done.stdout.count("<rect") == 2 * bars
    assert (
        f"kernel {plans[0].timeline.peak_step + 1} of {len(plans[0].timeline.runs)}" in done.stdout
    )


@pytest.mark.parametrize("tight", [False, True])
def test_snapshot_is_one_that_pytorch_reads(plans, tmp_path, tight):
    plan = plans[tight]
    plan.write_snapshot(tmp_path / "plan.pickle")
    with (tmp_path / "plan.pickle").open("rb") as file:
        snapshot = pickle.load(file)
    (trace,) = snapshot["device_traces"]
    # Replayed: no two blocks overlap, what is freed was there, the most is the timeline's most.
    live, most = {}, 0
    for event in trace:
        start, end = event["addr"], event["addr"] + event["size"]
        if event["action"] == "alloc":
            assert all(end <= a or b <= start for a, b in live.values())
            live[start] = start, end
            assert any(
                s["address"] <= start and end <= s["address"] + s["total_size"]
                for s in snapshot["segments"]
            )
        elif event["action"] == "free_completed":
            assert live.pop(start) == (start, end)
        most = max(most, sum(b - a for a, b in live.values()))
    timeline = plan.timeline
    assert most <= max(timeline.total_bytes)
    assert most >= max(timeline.total_bytes) - max(life.bytes for life in timeline.lives)
    assert sum(b - a for a, b in live.values()) == sum(timeline.constant_bytes.values())
    lines = {(frame["filename"], frame["line"]) for e in trace for frame in e["frames"]}
    assert any(file.endswith("test_timeline.py") and line > 0 for file, line in lines)
    assert f"{len(trace)} entries" in torch.cuda._memory_viz.trace(snapshot)
    assert torch.cuda._memory_viz.segsum(snapshot)
