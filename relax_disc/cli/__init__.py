"""The command ``relax-disc``: `report`, `tune`, `train`, `bench` and `doctor`.

Exit codes: 0 done; 1 what was asked for does not hold (a shape does not fit the budget, something
is missing); 2 wrong usage; 3 the model, or the function that makes it, failed.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from pathlib import Path

import typer
from rich.console import Console

import relax_disc
from relax_disc.cli import bench, doctor, report, train, tune
from relax_disc.cli.user_step import UserCodeError
from relax_disc.errors import MemoryBudgetError, RelaxDiscError, UnsupportedEnvironmentError

app = typer.Typer(
    name="relax-disc",
    help="Train PyTorch models at every shape from one compilation, inside a memory budget.",
    epilog="Exit codes: 0 done; 1 does not fit or something is missing; 2 wrong usage; 3 the model "
    "or the function that makes it failed.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
app.command("report", epilog=report.EXAMPLES)(report.report)
app.command("tune", epilog=tune.EXAMPLES)(tune.tune)
app.command("bench", epilog=bench.EXAMPLES)(bench.bench)
app.command("train", context_settings=_SETTINGS, add_help_option=False)(train.train)
app.command("doctor")(doctor.doctor)


@app.callback(invoke_without_command=True)
def _options(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    if version:
        typer.echo(relax_disc.__version__)
        raise typer.Exit


def main() -> None:
    """Run the command; errors say what, where and what next, without a traceback."""
    console = Console(stderr=True, soft_wrap=True)
    try:
        with warnings.catch_warnings():
            # Without the line that called, which is one of the command's own.
            warnings.showwarning = lambda text, *_: console.print(f"warning: {text}", markup=False)
            app()
    except UserCodeError as error:
        console.print(f"error: {error}", markup=False)
    except (MemoryBudgetError, UnsupportedEnvironmentError) as error:
        console.print(f"{type(error).__name__}: {error}", markup=False)
        sys.exit(1)
    except RelaxDiscError as error:
        console.print(f"{type(error).__name__}: {error}", markup=False)
        console.print(
            "`python -m pydoc relax_disc.errors` tells what each error means.", markup=False
        )
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        log = Path("relax-disc-error.txt").resolve()
        log.write_text("".join(traceback.format_exception(error)))
        console.print(
            f"{type(error).__name__}: {error}\n  at {frames[-1].filename}:{frames[-1].lineno}\n"
            f"  the whole traceback is in {log}",
            markup=False,
        )
    else:
        return
    sys.exit(3)
