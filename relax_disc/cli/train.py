"""``relax-disc train``: the fine-tuning of the tutorial, with its options."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import typer
from typer.main import get_command

_PACKAGE = Path(__file__).resolve().parents[1]


def train(context: typer.Context) -> None:
    """Fine-tune a small Llama on Python's own source code, or on a file of records.

    See `relax-disc train --help` for its options.
    """
    # A wheel carries the tutorials inside the package; a source tree has them beside it.
    folders = (_PACKAGE / "tutorials", _PACKAGE.parent / "tutorials")
    folder = next((path for path in folders if (path / "finetune_llama.py").is_file()), None)
    if folder is None:
        raise typer.BadParameter(f"the tutorials are neither in {_PACKAGE} nor beside it")
    sys.path.insert(0, str(folder))
    try:
        script = importlib.import_module("finetune_llama")
    except ImportError as error:
        raise typer.BadParameter(f'{error}; run: pip install "relax-disc[demo]"') from error
    application = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    application.command()(script.main)
    get_command(application).main(context.args, prog_name="relax-disc train")
