"""Run the programs of some seeds and print what they do: see `tests.training.fuzz.program`."""

import sys

from tests.training.fuzz.program import run

for number in sys.argv[1:]:
    print("\n".join(run(int(number))))
