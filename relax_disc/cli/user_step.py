"""What the user's ``FILE.py:FUNCTION`` gives to the command: the arguments of `compile`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer

import relax_disc
from relax_disc import progress
from relax_disc.analysis.symbolic.dim import SymbolicDim
from relax_disc.bytes_text import parse_bytes
from relax_disc.errors import InputMismatchError, OffloadError
from relax_disc.training_step import check_offload
from relax_disc.vm_builtins.tier import FileTier

CONTRACT = """FUNCTION takes no arguments, and calls relax_disc.compile or returns a dict of its
arguments:

    def step():
        model = MyModel()
        ids = torch.zeros(2, 16, dtype=torch.int64)
        shape = {0: Dim("batch", min=1, max=64), 1: Dim("seq", min=2, max=1024)}
        return {
            "model": model,
            "optimizer": torch.optim.AdamW(model.parameters()),
            "example_inputs": {"input_ids": ids, "labels": ids},
            "dynamic_shapes": {"input_ids": shape, "labels": shape},
        }"""
_PARAMETERS = inspect.signature(relax_disc.compile).parameters


def _well_formed(given: list[str] | None) -> list[str] | None:
    """Check ``NAME=SIZE`` options before anything long begins."""
    names = [text.partition("=")[0].strip() for text in given or ()]
    for text in given or ():
        if not text.partition("=")[2].strip().isdecimal():
            raise typer.BadParameter(f"{text!r} is not NAME=SIZE, such as batch=14")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise typer.BadParameter(f"{twice[0]} is given twice")
    return given


def writable(path: Path | None) -> Path | None:
    """Check that a file can be written before anything long begins."""
    folder = Path() if path is None else path.resolve().parent
    if path is not None and (path.is_dir() or not os.access(folder, os.W_OK)):
        raise typer.BadParameter(f"{path} cannot be written")
    return path


Source = Annotated[
    str,
    typer.Argument(
        metavar="FILE.py:FUNCTION",
        help="A function without arguments that calls relax_disc.compile, or returns a dict of "
        "its arguments: model, optimizer, example_inputs, dynamic_shapes, ...",
    ),
]
Sizes = Annotated[
    list[str] | None,
    typer.Option(
        "--dim",
        metavar="NAME=SIZE",
        help="Size of a dim; one option for each.",
        callback=_well_formed,
    ),
]
OffloadTo = Annotated[
    str | None,
    typer.Option(help='A folder on a fast disk that tensors may be offloaded to; "host" on a GPU.'),
]
Offload = Annotated[
    list[str] | None,
    typer.Option(help='What goes there: "activations" (default) or "optimizer"; or both, twice.'),
]


def _json_alone(context: typer.Context, value: bool) -> bool:
    """Keep stdout, ``context.obj``, for the JSON: what the user's own code prints is no part."""
    context.obj = sys.stdout
    if value:
        context.with_resource(redirect_stdout(sys.stderr))
    return value


Json = Annotated[
    bool,
    typer.Option("--json", help="Print JSON to stdout, and nothing else.", callback=_json_alone),
]


def print_json(context: typer.Context, facts: Any) -> None:
    """Print to the stdout that `Json` has kept."""
    typer.echo(json.dumps(facts, indent=2), file=context.obj)


class UserCodeError(Exception):
    """The user's function cannot be used; says why, where and what to do."""


def load(source: str) -> Callable[[], dict[str, Any]]:
    """Import the user's file and wrap its function, so that what is wrong is told.

    Raises `typer.BadParameter`: there is no such file or function. Raises `UserCodeError`: the file
    or, when called, the function raises, or returns something else.
    """
    path, colon, name = source.rpartition(":")
    if not colon or not name.isidentifier():
        raise typer.BadParameter(f"{source!r} is not FILE.py:FUNCTION. {CONTRACT}")
    file = Path(path)
    if not file.is_file():
        raise typer.BadParameter(f"there is no file {path}")
    folder, names = file.resolve().parent, [file.stem]
    while (folder / "__init__.py").is_file():  # a module of a package, with relative imports
        names.insert(0, folder.name)
        folder = folder.parent
    sys.path[:0] = [str(file.resolve().parent), str(folder)]
    sys.path.append(str(Path.cwd()))  # from where the user's own imports may begin
    spec = importlib.util.spec_from_file_location(".".join(names), file)
    if spec is None or spec.loader is None:
        raise typer.BadParameter(f"{path} is no Python file: its name ends in .py. {CONTRACT}")
    module = importlib.util.module_from_spec(spec)
    with _told(file):
        if len(names) > 1:
            importlib.import_module(".".join(names[:-1]))
        sys.modules.setdefault(spec.name, module)
        spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        there = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        near = difflib.get_close_matches(name, there, 1) or there
        raise typer.BadParameter(
            f"{path} has no function {name!r}; it has {', '.join(near) or 'none'}"
        )

    def arguments() -> dict[str, Any]:
        try:
            with _told(file), _instead_of_compile(module):
                found = function()
        except _Compiles as call:
            found = call.arguments
        if not isinstance(found, Mapping):
            raise UserCodeError(f"{source} returned a {type(found).__name__}. {CONTRACT}")
        unknown = sorted(set(found) - set(_PARAMETERS))
        missing = [
            key for key, p in _PARAMETERS.items() if p.default is p.empty and key not in found
        ]
        if unknown or missing:
            wrong = [f"lacks {', '.join(missing)}"] * bool(missing)
            wrong += [f"holds {', '.join(unknown)}, which compile() does not take"] * bool(unknown)
            raise UserCodeError(f"{source}: the dict {' and '.join(wrong)}. {CONTRACT}")
        return dict(found)

    return arguments


class _Compiles(BaseException):
    """Leaves the user's function where it compiles a step: the command does that itself."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


@contextmanager
def _instead_of_compile(module: ModuleType) -> Iterator[None]:
    """Have ``relax_disc.compile`` raise its arguments inside the block, by whatever name.

    ``module``: the user's; ``from relax_disc import compile`` is seen in what it imports, too.
    """

    def told(*args: Any, **kwargs: Any) -> None:
        raise _Compiles(inspect.signature(original).bind(*args, **kwargs).arguments)

    original = relax_disc.compile
    package = relax_disc.__name__
    modules = [module, *(m for m in sys.modules.values() if isinstance(m, ModuleType))]
    spaces = [vars(m) for m in modules if not m.__name__.startswith(f"{package}.")]
    places = [
        (space, name)
        for space in {id(space): space for space in spaces}.values()
        for name, value in list(space.items())
        if value is original
    ]
    for space, name in places:
        space[name] = told
    try:
        yield
    finally:
        for space, name in places:
            space[name] = original


@contextmanager
def _told(file: Path) -> Iterator[None]:
    """Turn an exception of the user's code into one that names its line there.

    An `argparse` there sees no arguments, for the command's own are none of its.
    """
    try:
        with patch.object(sys, "argv", [str(file)]):
            yield
    except (Exception, SystemExit) as error:
        own = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if Path(frame.filename).resolve() == file.resolve()
        ]
        where = f"{file}:{own[-1].lineno}: {own[-1].line}" if own else str(file)
        raise UserCodeError(f"{type(error).__name__}: {error}\n  at {where}") from error


def check_options(
    budget: str | None, offload_to: str | None = None, offload: list[str] | None = None
) -> None:
    """Refuse what cannot be honoured before anything long begins."""
    try:
        if budget is not None:
            parse_bytes(budget)
    except InputMismatchError as error:
        raise typer.BadParameter(str(error), param_hint="--budget") from error
    try:
        tier = FileTier(offload_to) if offload_to not in (None, "host") else None
        if offload:
            check_offload(offload, tier, optimizer=True)
    except (InputMismatchError, OffloadError) as error:
        raise typer.BadParameter(str(error), param_hint="--offload") from error


def with_options(
    arguments: dict[str, Any],
    budget: str | None,
    offload_to: str | None = None,
    offload: list[str] | None = None,
) -> dict[str, Any]:
    """Put what the command line says over the arguments that the user's function returned."""
    options = {"memory_budget": budget, "offload_to": offload_to, "offload": offload or None}
    return {**arguments, **{name: value for name, value in options.items() if value is not None}}


def compiled(source: str, arguments: dict[str, Any]) -> Any:
    """Compile the user's step, showing the phases on a terminal."""
    with progress.shown():
        try:
            return relax_disc.compile(**arguments)
        except relax_disc.errors.RelaxDiscError:
            raise
        except Exception as error:  # of the model, mostly: torch.export runs it
            frames = traceback.extract_tb(error.__traceback__)
            own = [
                f
                for f in frames
                if "/torch/" not in f.filename and "/relax_disc/" not in f.filename
            ]
            at = own[-1] if own else frames[-1]
            raise UserCodeError(
                f"{type(error).__name__}: {error}\n  at {at.filename}:{at.lineno}: {at.line}\n"
                f"  while the model of {source} ran with its example_inputs. Run it there without "
                "the compiler first: example_inputs is a tuple of positional arguments, or a dict "
                "of keyword arguments."
            ) from error


def parse_sizes(given: list[str] | None, dims: tuple[SymbolicDim, ...]) -> dict[str, int]:
    """Read ``NAME=SIZE`` options; every dim of the step must have one, inside its range."""
    pairs = (text.partition("=") for text in _well_formed(given) or ())
    sizes = {name.strip(): int(size) for name, _, size in pairs}
    known = {dim.name: dim for dim in dims}
    missing = " ".join(f"--dim {name}=..." for name in known if name not in sizes)
    unknown = ", ".join(sorted(set(sizes) - set(known)))
    if missing or unknown:
        has = "; ".join(map(str, dims)) or "no dims"
        said = [f"there is no dim {unknown}"] * bool(unknown) + [f"add {missing}"] * bool(missing)
        raise typer.BadParameter(f"{' and '.join(said)} (the step has: {has})")
    for name, size in sizes.items():
        dim = known[name]
        if size < dim.first or (dim.last is not None and size > dim.last):
            raise typer.BadParameter(f"{name}={size}; allowed is {dim}")
    return sizes


def resized(example: Any, dynamic_shapes: Any, sizes: Mapping[str, int]) -> Any:
    """Repeat or cut the example's tensors along their dynamic axes, so that all values are valid.

    ``example``, ``dynamic_shapes``: as given to `compile`, of the same nesting. ``sizes``: of every
    dim.
    """
    if isinstance(example, torch.Tensor):
        axes = dynamic_shapes or {}
        pairs = axes.items() if isinstance(axes, Mapping) else enumerate(axes)
        for axis, dim in pairs:
            name = getattr(dim, "__name__", "")
            if name in sizes:
                index = torch.arange(sizes[name]) % example.shape[axis]
                example = example.index_select(axis, index)
        return example
    if isinstance(example, Mapping):
        return {key: resized(example[key], _part(dynamic_shapes, key), sizes) for key in example}
    if isinstance(example, list | tuple):
        parts = dynamic_shapes.values() if isinstance(dynamic_shapes, Mapping) else dynamic_shapes
        shapes = list(parts) if parts is not None else [None] * len(example)
        return tuple(resized(e, s, sizes) for e, s in zip(example, shapes, strict=True))
    return example


def _part(shapes: Any, key: Any) -> Any:
    return shapes.get(key) if isinstance(shapes, Mapping) else None
