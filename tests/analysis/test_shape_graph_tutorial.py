"""The tutorial of the shape graph runs and shows what it promises."""

import subprocess
import sys


def test_tutorial(repository):
    done = subprocess.run(
        [sys.executable, str(repository / "tutorials" / "shape_graph.py")],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=repository,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for line in (
        "S0 == 12*S1  from main: rows = relax.reshape",
        "11008*S1 < 1024*S0, which is 12288*S1",
        "seq in 2 .. 4096",
        "scores and logits: 4*4*batch*seq**2 <> 4*512*batch*seq",
        "refused: main: gv = relax.reshape",
    ):
        assert line in done.stdout
