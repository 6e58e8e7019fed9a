"""The command relax-disc: figures, exit codes, and what a user is told."""

import contextlib
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

import relax_disc
from relax_disc import cli, progress
from relax_disc.cli import doctor, user_step

USER = """
import torch
from torch import nn
from torch.export import Dim

class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(6)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x, kinds):
        return self.layers(x).gather(1, kinds[:, None]).pow(2).mean()

def wide():
    return step(128)

def step(width=32):
    torch.manual_seed(0)
    model = Net(width)
    rows = {0: Dim("rows", min=1, max=512)}
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "example_inputs": (torch.randn(8, width), torch.arange(8)),
        "dynamic_shapes": (rows, rows),
    }

def raises():
    return step()["no such key"]

def lacks():
    return {"model": Net(), "lerning_rate": 1}

def wrong_batch():
    found = step()
    (x, kinds), (rows, _) = found["example_inputs"], found["dynamic_shapes"]
    return {**found, "example_inputs": ({"x": x}, kinds), "dynamic_shapes": ({"x": rows}, rows)}

def number():
    return 7

def leaves():
    raise SystemExit(5)

def compiles():
    import relax_disc
    found = step()
    model, optimizer = found.pop("model"), found.pop("optimizer")
    return relax_disc.compile(model, optimizer, **found)

from relax_disc import compile as made

def compiles_by_another_name():
    found = step()
    return made(found.pop("model"), found.pop("optimizer"), **found)

def talks():
    print("what a user's code prints")
    return step()

def deep():
    return step(512)

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 4096)

    def forward(self, x):
        return self.head(x).square().mean()

def large():
    model = Head()
    rows = {0: Dim("rows", min=1, max=512)}
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "example_inputs": (torch.randn(8, 64),),
        "dynamic_shapes": (rows,),
    }
"""


@pytest.fixture(scope="module")
def user_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("user") / "my_step.py"
    path.write_text(USER)
    return path


@pytest.fixture
def command(user_file, monkeypatch, capsys):
    """Runs `main` in this process; gives exit code, stdout and stderr, without line breaks."""

    def run(*words):
        words = [word.replace("FILE", str(user_file)) for word in words]
        monkeypatch.setattr(sys, "argv", ["relax-disc", *words])
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.setenv("COLUMNS", "500")
        code = 0
        try:
            cli.main()
        except SystemExit as exit_:
            code = exit_.code or 0
        out, err = capsys.readouterr()
        return code, out, " ".join(err.split())

    return run


def test_report_tells_the_plan(command, user_file):
    arguments = user_step.load(f"{user_file}:step")()
    step = relax_disc.compile(**arguments)
    free = step.plan(rows=512)
    code, out, err = command("report", "FILE:step", "--dim", "rows=512", "--json")
    facts = json.loads(out)
    assert (code, err) == (0, "")
    assert facts["peak_bytes"] == free.peak_bytes == sum(facts["at_peak_bytes"].values())
    assert facts["least_bytes"] == free.least_bytes and facts["largest"] == {}
    line = facts["lines_at_peak"][0]
    assert line["line"].startswith(f"{user_file}:") and "self.layers(x)" in line["code"]
    budget = str(free.least_bytes)
    code, out, _ = command("report", "FILE:step", "--dim", "rows=512", "--budget", budget, "--json")
    facts = json.loads(out)
    assert code == 0 and facts["fits"] and facts["kernels_run_again"] > 0
    assert facts["peak_bytes"] <= free.least_bytes < facts["peak_without_budget_bytes"]
    assert facts["largest"] == {"rows": step.largest("rows", memory_budget=free.least_bytes)}


COMPILING = ("compiles", "compiles_by_another_name")


def test_a_function_that_compiles_gives_the_same_as_its_arguments(command):
    words = ("--dim", "rows=300", "--budget", "64MiB", "--json")
    reports = [command("report", f"FILE:{name}", *words) for name in ("step", *COMPILING)]
    assert reports[0] == reports[1] == reports[2] and reports[0][0] == 0
    assert relax_disc.compile.__name__ == "compile"


def test_a_file_of_a_package_with_arguments_of_its_own(command, tmp_path, monkeypatch):
    """Imports from beside it, from above it and from where the command is called."""
    package = tmp_path / "project" / "inner"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (tmp_path / "project" / "__init__.py").touch()
    (tmp_path / "project" / "model.py").write_text(USER)
    (tmp_path / "elsewhere.py").write_text("WIDTH = 8\n")
    (package / "sizes.py").write_text("from elsewhere import WIDTH\n")
    (package / "train.py").write_text(
        "import argparse\n"
        "from project.inner.sizes import WIDTH\n"
        "from ..model import step as made\n"
        "options = argparse.ArgumentParser()\n"
        "options.add_argument('--width', type=int, default=WIDTH)\n"
        "def step():\n"
        "    return made(options.parse_args().width)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    code, out, _ = command("report", f"{package}/train.py:step", "--dim", "rows=4", "--json")
    assert code == 0 and json.loads(out)


def test_report_tells_which_large_gradients_stay_whole(command):
    told = (
        "the gradient of head.weight (1.00 MiB) is not made by rows: relax_disc.cpu.matmul "
        "makes all of it, as float32."
    )
    code, out, _ = command("report", "FILE:large", "--dim", "rows=8")
    assert code == 0
    assert told in " ".join(out.split())
    _, out, _ = command("report", "FILE:large", "--dim", "rows=8", "--json")
    assert [each["parameter"] for each in json.loads(out)["whole_gradients"]] == ["head.weight"]
    _, out, _ = command("report", "FILE:deep", "--dim", "rows=8", "--json")
    assert json.loads(out)["whole_gradients"] == []  # of six alike none decides


def test_report_offloads_what_it_is_told_to(command, user_file, tmp_path):
    free = relax_disc.compile(**user_step.load(f"{user_file}:wide")()).plan(rows=512)
    words = ("report", "FILE:wide", "--dim", "rows=512", "--offload-to", str(tmp_path))
    both = ("--offload", "activations", "--offload", "optimizer")
    code, out, _ = command(*words, *both, "--json")
    facts = json.loads(out)
    moments = 6 * 2 * 4 * 128 * 128  # of six layers; those of biases are too small to gain
    assert code == 0 and facts["offloaded_state_bytes"] == moments
    assert facts["offloaded_bytes"] == 0 and facts["peak_bytes"] < free.peak_bytes
    least = ("--budget", str(facts["least_bytes"]))
    code, out, _ = command(*words, *both, *least)
    assert code == 0 and "offloaded state" in out


def test_bench_runs_with_the_state_offloaded(command, tmp_path):
    words = ("bench", "FILE:wide", "--dim", "rows=8", "--steps", "1", "--json")
    code, out, _ = command(*words)
    resident = json.loads(out)["peak_bytes"]
    code, out, _ = command(*words, "--offload-to", str(tmp_path), "--offload", "optimizer")
    assert code == 0 and json.loads(out)["peak_bytes"] < resident


def test_report_of_a_shape_that_does_not_fit(command, tmp_path):
    page, trace, snapshot = (tmp_path / name for name in ("page.html", "trace.json", "seen.pickle"))
    files = ("--html", str(page), "--trace", str(trace), "--snapshot", str(snapshot))
    code, out, _ = command("report", "FILE:step", "--dim", "rows=512", "--budget", "300KB", *files)
    assert code == 1
    assert "fits" in out and "NO" in out and "largest rows in the budget" in out
    assert "Alive at the peak without a budget" in out and "self.layers(x)" in out
    assert "time, modelled" not in out
    assert page.stat().st_size > 1000 and json.loads(trace.read_text())["traceEvents"]
    assert snapshot.stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("FILE:step",), "add --dim rows=... (the step has: rows in 1 .. 512)"),
        (("FILE:step", "--dim", "rows=8", "--dim", "seq=3"), "there is no dim seq"),
        (("FILE:step", "--dim", "rows"), "'rows' is not NAME=SIZE"),
        (("FILE:step", "--dim", "rows=-8"), "'rows=-8' is not NAME=SIZE"),
        (("FILE:step", "--dim", "rows=8", "--dim", "rows=9"), "rows is given twice"),
        (("FILE:step", "--dim", "rows=513"), "rows=513; allowed is rows in 1 .. 512"),
        (("FILE:step", "--dim", "rows=0"), "rows=0; allowed is rows in 1 .. 512"),
        (("FILE:step", "--budget", "much"), "'much'"),
        (("FILE:step", "--html", "no_folder/page.html"), "no_folder/page.html cannot be written"),
        (("FILE:step", "--trace", "."), ". cannot be written"),
        (("FILE:step", "--plot", "memory.jpg"), "memory.jpg does not end in .png, .svg or .pdf"),
        (("FILE:step", "--lines", "-1"), "greater than or equal to 0"),
        (("FILE:stp",), "has no function 'stp'; it has step"),
        (("FILE:Dim2",), "has no function 'Dim2'; it has wide, step, raises"),
        (("FILE:step", "--offload-to", "no_folder"), "no_folder, which is no folder"),
        (("FILE:step", "--offload", "all"), "offload names what goes to the folder"),
        (("FILE:step", "--offload", "optimizer"), "needs offload_to"),
        (("nowhere.py:step",), "there is no file nowhere.py"),
        (("FILE",), "is not FILE.py:FUNCTION"),
    ],
)
def test_wrong_usage(command, words, told):
    code, out, err = command("report", *words)
    assert code == 2 and out == ""
    assert told in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("raises", ("KeyError: 'no such key'", 'my_step.py:30: return step()["no such key"]')),
        ("lacks", ("lacks optimizer, example_inputs, dynamic_shapes and holds lerning_rate",)),
        ("leaves", ("SystemExit: 5", "my_step.py:44: raise SystemExit(5)")),
        ("number", ("returned a int", "returns a dict of its arguments")),
        ("wrong_batch", ("must be Tensor, not dict", "my_step.py:13", "example_inputs is a tuple")),
    ],
)
def test_what_the_users_code_does_wrong_names_its_line(command, function, told):
    code, out, err = command("report", f"FILE:{function}", "--dim", "rows=8")
    assert code == 3 and out == ""
    assert all(words in err for words in told), err
    assert "Traceback" not in err


def test_what_can_be_told_at_once_is_told_before_the_users_code_runs(command, monkeypatch):
    monkeypatch.setattr("relax_disc.cli.report.find_spec", lambda package: None)
    code, _, err = command("report", "FILE:raises", "--dim", "rows=8", "--plot", "memory.png")
    assert code == 2 and 'pip install "relax-disc[plot]"' in err
    for wrong in (
        ("--html", "no_folder/page.html"),
        ("--dim", "rows=x"),
        ("--budget", "much"),
        ("--offload", "all"),
    ):
        code, _, err = command("report", "FILE:raises", *wrong)
        assert code == 2 and "KeyError" not in err


def test_a_benchmark_that_does_not_fit_has_the_exit_code_of_that(command):
    words = ("bench", "FILE:step", "--dim", "rows=300", "--budget", "1KB")
    code, out, err = command(*words)
    assert code == 1 and out == "" and "MemoryBudgetError: main at rows=300" in err


def test_bench_times_both(command):
    words = ("bench", "FILE:talks", "--dim", "rows=300", "--steps", "3", "--json")
    code, out, err = command(*words)
    assert "what a user's code prints" in err
    facts = json.loads(out)
    assert code == 0 and facts["shape"] == {"rows": 300}
    assert facts["relax_disc_seconds"] > 0 and facts["eager_seconds"] > 0
    low, high = facts["ratio_quartiles"]
    assert 0 < low <= facts["ratio"] <= high


def test_resized_batch_repeats_values_and_keeps_fixed_axes():
    rows = torch.export.Dim("rows")
    example = {"x": torch.arange(6).reshape(3, 2), "n": 5}
    found = user_step.resized(example, {"x": {0: rows}, "n": None}, {"rows": 4})
    assert found["x"].tolist() == [[0, 1], [2, 3], [4, 5], [0, 1]] and found["n"] == 5


def test_train_takes_the_tutorials_options(command):
    code, out, _ = command("train", "--help")
    assert code == 0 and "--learning-rate" in out and "relax-disc train" in out
    code, out, _ = command("train", "--smoke", "--engine", "eager", "--steps", "2")
    assert code == 0 and "2 steps with eager" in out
    code, _, err = command("train", "--stepps", "2")
    assert code == 2 and "--stepps" in err


def test_doctor_is_content_here(command):
    code, out, _ = command("doctor", "--json")
    found = {entry["name"]: entry for entry in json.loads(out)}
    assert found["torch"]["value"] == torch.__version__
    assert code == int(any(entry["ok"] is False for entry in found.values()))


def test_tune_keeps_the_rules_of_tiny_kernels_and_remembers(command, tmp_path, monkeypatch):
    """Without a search: these take less than a call costs."""
    for package in ("cloudpickle", "psutil"):
        pytest.importorskip(package)
    tune = pytest.importorskip("relax_disc.tir_kernels.tuning.tune")
    monkeypatch.setattr(tune, "_QUICK_US", 1e9)  # however busy the machine is
    monkeypatch.setenv("RELAX_DISC_CACHE", str(tmp_path / "cache"))
    lengths = tmp_path / "lengths.jsonl"
    lengths.write_text('{"rows": 4}\n{"rows": 2}\n{"rows": 3}\n')
    words = ("tune", "FILE:step", "--cost-model", "random", "--kernels", "2", "--json")
    code, out, err = command(*words, "--lengths", str(lengths))
    facts = json.loads(out)
    assert (code, err) == (0, "")
    assert facts["shape"] == {"rows": 3} and facts["known_before"] == 0
    assert [each["trace"] for each in facts["kernels"]] == [None, None]
    assert all("it takes" in each["reason"] for each in facts["kernels"])
    kept = json.loads(Path(facts["database"]).read_text())["kernels"]
    assert kept.keys() == {each["key"] for each in facts["kernels"]}
    _, out, _ = command(*words, "--dim", "rows=3")
    assert json.loads(out)["known_before"] == 2 and json.loads(out)["kernels"] == []
    _, out, _ = command(*words[:-1], "--dim", "rows=3")
    assert "2 kernels were known" in out and facts["database"] in out
    _, out, _ = command("doctor", "--json")
    (found,) = (entry for entry in json.loads(out) if entry["name"] == "tuned kernels")
    assert found["value"].startswith("0 of 2 kernels, in ")


@pytest.mark.parametrize(
    ("line", "words", "told"),
    [
        ('{"rows": 4}', ("--dim", "seq=3"), "there is no dim seq"),
        ('{"row": 4}', (), "lengths.jsonl:1: there is no dim row"),
        ("[4]", (), "lengths.jsonl:1: "),
        ('{"rows": 4}', ("--lengths", "nowhere.jsonl"), "'nowhere.jsonl' does not exist"),
        ('{"rows": 4}', ("--database", "/proc/no/tuned.json"), "/proc/no"),
        ('{"rows": 4}', ("--target", "no_such"), "target='no_such' is no target"),
    ],
)
def test_tune_tells_what_is_wrong_with_shapes(command, tmp_path, line, words, told):
    for package in ("cloudpickle", "psutil"):
        pytest.importorskip(package)
    lengths = tmp_path / "lengths.jsonl"
    lengths.write_text(f"{line}\n")
    options = ("--cost-model", "random", "--lengths", str(lengths), *words)
    code, _, err = command("tune", "FILE:step", *options)
    assert code == 2 and told in err


def test_doctor_names_what_is_missing(command, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10_000)
    monkeypatch.setattr(doctor, "find_spec", lambda package: None)
    code, out, _ = command("doctor")
    assert code == 1
    assert "MISSING" in out and "set OMP_NUM_THREADS=" in out
    assert 'pip install "relax-disc[plot]"' in out


def test_another_pytorch_is_told_without_a_traceback():
    program = """
        import sys
        from importlib import metadata
        metadata.version = lambda name: "9.9"
        sys.argv = ["/usr/bin/relax-disc", "doctor"]
        import relax_disc.cli
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr and "pip install 'apache-tvm==" in done.stderr


def test_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "relax_disc", "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, f"{relax_disc.__version__}\n"), done.stderr


@pytest.mark.parametrize("name", ["report", "bench", "tune", "doctor"])
def test_help_has_an_example_that_works_or_needs_none(name):
    done = CliRunner().invoke(cli.app, [name, "--help"], env={"COLUMNS": "400"})
    assert done.exit_code == 0
    found = re.search(
        rf"Example: relax-disc {name} (my\.py:step --dim [^.]*(?:\.\w[^.]*)*)", done.output
    )
    assert (found is None) == (name == "doctor")
    if found:
        command = get_command(cli.app).commands[name]
        context = command.make_context(name, found[1].split())
        assert context.params["source"] == "my.py:step" and len(context.params["dim"]) == 2


def test_phases_are_told_to_who_watches_and_to_nobody_else(user_file, monkeypatch, capfd):
    monkeypatch.setenv("RELAX_DISC_COMPILE_CACHE", "0")
    seen = []
    with progress.watching(lambda name, seconds: seen.append((name, seconds))):
        step = relax_disc.compile(**user_step.load(f"{user_file}:step")())
        step.calibrate(torch.randn(8, 32), torch.arange(8), repeats=1)
    begun = [name for name, seconds in seen if seconds is None]
    ended = [name for name, seconds in seen if seconds is not None]
    phases = ["export the model", "trace gradients and update", "compile the kernels"]
    assert begun == ended == [*phases, "measure the kernels of main"]
    assert capfd.readouterr() == ("", "")
    count = len(seen)
    with progress.phase("alone"):
        pass
    assert len(seen) == count


def test_a_phase_that_raises_has_ended():
    seen = []
    with progress.watching(lambda *told: seen.append(told)), pytest.raises(KeyError):
        with progress.phase("p"):
            raise KeyError
    assert [name for name, _ in seen] == ["p", "p"]


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("told", [True, False])
def test_phases_are_shown_on_terminals_only(monkeypatch, capsys, terminal, told):
    monkeypatch.setenv("TTY_COMPATIBLE", str(int(terminal)))
    monkeypatch.setenv("NO_COLOR", "1")
    times = iter([0.0, 3.5])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(times, 4.0))
    with progress.shown() if told else contextlib.nullcontext(), progress.phase("knit"):
        pass
    told = re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    assert told.count("knit: 3.5 s") == int(terminal)
    assert terminal or told == ""


def test_installed_command_is_this_one(repository):
    text = (repository / "pyproject.toml").read_text()
    assert 'relax-disc = "relax_disc.cli:main"' in text
