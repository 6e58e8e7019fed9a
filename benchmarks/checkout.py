"""Run what a checkout holds: the finder of an editable install comes before PYTHONPATH."""

from __future__ import annotations

import sys
from pathlib import Path

# Starts a module of the checkout in which it runs, of any commit: argv is module and arguments.
LAUNCH = """
import runpy, sys
others = [f for f in sys.meta_path if "relax_disc" not in getattr(f, "known_packages", ())]
sys.meta_path[:] = others
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def use(tree: Path) -> None:
    """Take the package of a checkout, also where another one is installed for editing."""
    sys.meta_path[:] = [
        finder
        for finder in sys.meta_path
        if "relax_disc" not in getattr(finder, "known_packages", ())
        or str(tree) in getattr(finder, "search_paths", ())
    ]
