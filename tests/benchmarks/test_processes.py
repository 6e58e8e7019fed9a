"""Workers of benchmarks: one that ends is an error that says why, whenever it does."""

import pytest

from benchmarks.processes import WorkerEndedError, started

ENDS = """import sys
print("{}", flush=True)
if sys.argv[1] == "later":
    sys.stdin.readline()
sys.exit("it had enough")
"""


@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_worker_that_ends_is_an_error_with_its_last_words(tmp_path, when, capfd):
    (tmp_path / "ends.py").write_text(ENDS)
    with started("one", "ends", [when], 1, tmp_path) as worker:
        assert worker.prepared == {}
        if when == "at once":
            worker._process.wait()
        with pytest.raises(WorkerEndedError, match="of one ended with 1: it had enough"):
            worker.ask(size=3)
    assert "it had enough" in capfd.readouterr().err
