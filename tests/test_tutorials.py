"""The tutorials run; a run of the fine-tuning that is killed continues exactly."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

ENGINES = [pytest.param("eager", marks=pytest.mark.slow), "relax_disc"]
ENVIRONMENT = {**os.environ, "COLUMNS": "100", "MPLBACKEND": "agg"}


def _run(command, folder=None, timeout=600):
    """What a program prints that must end well."""
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=folder,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _arguments(repository, *arguments):
    script = repository / "tutorials" / "finetune_llama.py"
    return [sys.executable, str(script), "--smoke", *map(str, arguments)]


@pytest.fixture(scope="module")
def finetune(repository):
    """Runs the tutorial in a process of its own, which takes seconds to start: few do."""

    def run(*arguments):
        return _run(_arguments(repository, *arguments))

    return run


@pytest.fixture
def corpus(repository, monkeypatch):
    monkeypatch.syspath_prepend(repository / "tutorials")
    import _corpus

    return _corpus


def _losses(history):
    """Loss by step, exactly as printed; a step run twice must give the same."""
    losses = {}
    for line in history.read_text().splitlines():
        entry = json.loads(line)
        assert losses.setdefault(entry["step"], entry["loss"]) == entry["loss"]
    return losses


@pytest.fixture(scope="module")
def whole_run(finetune, tmp_path_factory):
    """What a run prints, and its history."""
    history = tmp_path_factory.mktemp("whole") / "history.jsonl"
    return finetune("--history", history), history


def test_the_whole_run_learns_and_counts(whole_run):
    output, history = whole_run
    losses = _losses(history)
    assert len(losses) == 12
    assert losses[12] < losses[1]
    shapes = {tuple(json.loads(line)["shape"]) for line in history.read_text().splitlines()}
    assert f"distinct shapes                │ {len(shapes)} " in output
    assert "compilations                   │ 1 " in output


@pytest.mark.parametrize("engine", ENGINES)
def test_resumed_run_continues_to_the_bit(finetune, whole_run, tmp_path, engine):
    _, whole = whole_run
    parts, state = (tmp_path / name for name in ("parts", "state"))
    if engine != "relax_disc":
        whole = tmp_path / "whole"
        finetune("--engine", engine, "--history", whole)
    finetune("--engine", engine, "--steps", 3, "--history", parts, "--save", state)
    finetune("--engine", engine, "--history", parts, "--resume", state)
    assert _losses(parts) == _losses(whole)


def test_killed_run_leaves_a_whole_file(repository, finetune, tmp_path):
    """The file is there and good whenever the process dies, also in the midst of saving."""
    history, state = tmp_path / "history", tmp_path / "state"
    run = ("--engine", "eager", "--history", history)
    command = _arguments(repository, *run, "--save", state, "--save-every", 1)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 500
        while not state.exists() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    finetune(*run, "--resume", state)
    assert sorted(_losses(history)) == list(range(1, 13))


@pytest.fixture(scope="module")
def alpaca_run(finetune, tmp_path_factory):
    """What a run over a file of records prints, the file, and the state that it saved."""
    folder = tmp_path_factory.mktemp("alpaca")
    path, state = folder / "alpaca.json", folder / "state"
    entries = [
        {"instruction": f"Add {i} and {i}.", "input": "", "output": f"{i} + {i} = {2 * i}"}
        for i in range(40)
    ]
    path.write_text(json.dumps(entries))
    run = ("--engine", "eager", "--steps", 2, "--data", path)
    return finetune(*run, "--save", state), path, state


def test_alpaca_file(alpaca_run):
    assert "40 records of " in alpaca_run[0]


def test_resuming_with_other_settings_is_refused(repository, alpaca_run):
    _, path, state = alpaca_run
    run = ("--engine", "eager", "--data", path, "--resume", state, "--seed", 7)
    command = _arguments(repository, *run)
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode != 0
    # Rich frames the message and wraps it where the terminal, or the path in it, says.
    words = re.sub(r"[\s\u2500-\u257f]+", " ", done.stdout + done.stderr)
    assert "seed was 0, is 7" in words


def test_alpaca_file_with_a_missing_field_names_the_entry(corpus, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text('[{"instruction": "a", "output": "b"}, {"instruction": "c"}]')
    with pytest.raises(ValueError, match="entry 1 lacks"):
        corpus.alpaca_records(path)


def test_labels_are_the_next_tokens_of_the_answer(corpus):
    batch = corpus.pad([corpus.Example((5, 6, 7, 8), 2), corpus.Example((1, 2), 1)])
    assert batch.ids.tolist() == [[5, 6, 7], [1, 0, 0]]
    assert batch.labels.tolist() == [[-100, 7, 8], [2, -100, -100]]
    assert batch.tokens == 4


def test_batches_are_a_function_of_their_number(corpus):
    examples = [corpus.Example((i, i + 1, i + 2), 1) for i in range(10)]
    forward, backward = corpus.Batches(examples, 3), corpus.Batches(examples, 3)
    numbers = list(range(7))
    seen = [forward[n].ids.tolist() for n in numbers]
    assert [backward[n].ids.tolist() for n in reversed(numbers)] == seen[::-1]
    first_epoch = [row[0] for batch in seen[:3] for row in batch]
    assert len(set(first_epoch)) == 9


def test_records_of_the_library(corpus):
    records = corpus.library_records(modules=20)
    assert len(records) > 20
    assert all('"""' not in record.answer.split("\n")[0] for record in records)
    assert all(record.answer.lstrip().startswith(("def ", "async def ")) for record in records)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("memory_budget", "losses identical to the last bit: True"),
        ("padding", "real tokens per second"),
    ],
)
def test_tutorials_of_the_demo(repository, name, words):
    script = repository / "tutorials" / f"{name}.py"
    assert words in _run([sys.executable, script, "--smoke"])


# tests/integrations/test_lightning.py runs lightning_loop.
WORDS = {
    "accelerate_loop": ("losses and weights are the same within rounding",),
    "evict_and_regenerate": ("R.call_tir", "relax_disc.evict", "recomputable", "regenerate_before"),
    "hugging_face_trainer": ("the losses are the same within rounding",),
    "own_pass_and_rule": ("eager PyTorch is finite: False", "the compiled program is finite: True"),
    "quick_start": ("after 20 steps of 4 shapes", "largest batch of length 512 in 100 MiB: "),
    "scheduling": ("optimal: True", "live bytes are the maximum of:"),
    "shape_graph": (
        "S0 == 12*S1  from main: rows = relax.reshape",
        "11008*S1 < 1024*S0, which is 12288*S1",
        "seq in 2 .. 4096",
        "scores and logits: 4*4*batch*seq**2 <> 4*512*batch*seq",
        "refused: main: gv = relax.reshape",
    ),
}


# What starting Python and importing PyTorch and TVM takes, half of a tutorial's time, is paid once.
_IN_TURN = """
import contextlib, io, json, pathlib, runpy, sys, traceback

told = {}
for script in map(pathlib.Path, sys.argv[1:]):
    sys.argv = [str(script)]
    sys.path[0] = str(script.parent)
    with contextlib.redirect_stdout(io.StringIO()) as text:
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
            error = None
        except BaseException:
            error = traceback.format_exc()
    told[script.stem] = error, text.getvalue()
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(repository, tmp_path_factory):
    """What the tutorials print, and the error that one ended with, from one process for all."""
    scripts = [repository / "tutorials" / f"{name}.py" for name in WORDS]
    command = [sys.executable, "-c", _IN_TURN, *scripts]
    text = _run(command, tmp_path_factory.mktemp("told"), timeout=600 * len(scripts))
    return json.loads(text.splitlines()[-1])


@pytest.mark.parametrize("name", WORDS)
def test_tutorial_runs(told, name):
    error, text = told[name]
    assert error is None, text + error
    for words in WORDS[name]:
        assert words in text


@pytest.mark.slow
@pytest.mark.parametrize("name", WORDS)
def test_tutorial_runs_in_a_process_of_its_own(repository, tmp_path, name):
    text = _run([sys.executable, repository / "tutorials" / f"{name}.py"], tmp_path)
    for words in WORDS[name]:
        assert words in text
