"""List the operators that can be captured, from the tables that the code itself uses."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from relax_disc.frontend.capture.replaced.export_mode import REPLACED
from relax_disc.frontend.capture.traced.decompositions import RULES, decomposition_table
from relax_disc.frontend.converters import TABLE
from relax_disc.frontend.random_ops import Randomness

_INTRODUCTION = """\
# Operators

Made from the code by `make docs`; a test holds it up to date. An operator that a model uses is
translated by a converter, or broken by PyTorch's own decompositions into operators that are. What
has no converter, and a use that its converter does not fit, runs PyTorch's own kernel. Anything
else is refused at compile, by name and with the line of the model, all of them in one message.
In-place and `out=` forms are made functional first."""

_OWN_KERNELS = """\
## Operators that run PyTorch's own kernel

An operator of PyTorch that is in none of the tables below becomes one call of PyTorch's kernel for
the device, through its dispatcher, on planned memory: linear algebra, Fourier transforms, special
functions, samplers and resizing of every kind, complex numbers. A call costs a microsecond or two
beside its kernel. Its results are tensors of the plan like all others: they are placed, given up
and computed again under a budget. Gradients are PyTorch's formulas, whose operators are translated
or called in the same way.

* The operator writes its results itself where PyTorch has an `out=` form of it; else they are
  copied, views too, so that strides never matter.
* What it allocates meanwhile, on the CPU, comes from the step's workspace and is inside the planned
  peak: the figure was measured when the step was compiled, at a few small sizes, and grows with the
  operands and results. It is a bound for operators that work alike at all sizes. One that takes
  more gets it from PyTorch's allocator, and the peak that `memory_report` counts is then above the
  planned one by so much.
* A complex tensor is memory of pairs of real numbers; one made of two parts stays
  two tensors until an operator needs it whole. Complex parameters and batches are refused.
* What the operator checks on data it checks in the call: `torch.linalg.inv` of a singular matrix
  raises PyTorch's error. Nothing has changed then, unless a parameter had been written already,
  which `StepTornError` says.
* Refused by name: operators that draw random numbers by PyTorch's generator (a value computed again
  would be another one), whose results have a shape or value that depends on data
  (`unique_consecutive`, `item`), that write into their operands, or that make sparse or quantised
  tensors; `as_strided` of a tensor whose strides are not kept."""

_BY_NAME = "The function of that name, element by element."


def page() -> str:
    """Write all tables as Markdown."""
    parts = [_INTRODUCTION, _OWN_KERNELS]
    count = sum(len(operators) for _, operators in _families())
    parts.append(f"## Translated one by one: {count}")
    for family, operators in _families():
        parts.append(f"### {family}\n\n{_table(operators)}")
    parts.append(
        "## Kept whole or rewritten before they are traced\n\n"
        "Attention, cross-entropy and recurrent layers stay single operators with gradients of "
        "their own; the others are written in operators that keep sizes symbolic. Where one does "
        f"not fit, PyTorch's own form is taken.\n\n{_table(_named(RULES))}"
    )
    parts.append(
        "## Replaced while a model is exported\n\nCalls that PyTorch's own tracing would fix to "
        "one size, or in which it looks at data. Where a replacement does not fit, the call is "
        f"PyTorch's own.\n\n{_table(_calls())}"
    )
    parts.append(
        "## Random\n\nA pure function of seed, call and index, so that what is computed again is "
        "the same.\n\n" + ", ".join(f"`{name}`" for name in sorted(_random()))
    )
    broken = sorted({str(operator) for operator in decomposition_table()} - set(TABLE))
    parts.append(
        f"## Broken into others by PyTorch: {len(broken)}\n\nWhether a model's use of one can be "
        "compiled depends on what it is broken into.\n\n<details><summary>All of them</summary>\n\n"
        + ", ".join(f"`{name}`" for name in broken)
        + "\n\n</details>"
    )
    return "\n\n".join(parts) + "\n"


def _families() -> list[tuple[str, dict[str, Callable[..., Any]]]]:
    """Group the converters by the file that holds them, named by its first line."""
    found: dict[str, dict[str, Callable[..., Any]]] = {}
    for operator in sorted(TABLE):
        converter = TABLE[operator]
        family = _first_line(sys.modules[converter.__module__])
        found.setdefault(family, {})[operator] = converter
    return sorted(found.items())


def _named(rules: Mapping[Any, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    return {str(operator): rule for operator, rule in sorted(rules.items(), key=_operator_name)}


def _calls() -> dict[str, Callable[..., Any]]:
    return dict(sorted((_call_name(call), made) for call, made in REPLACED.items()))


def _call_name(call: Callable[..., Any]) -> str:
    if isinstance(owner := getattr(call, "__self__", None), types.GetSetDescriptorType):
        return f"torch.Tensor.{owner.__name__} ({call.__name__.strip('_')})"
    of_tensors = getattr(torch.Tensor, call.__name__, None) is call
    return f"torch.{'Tensor.' * of_tensors}{call.__name__.lstrip('_')}"


def _operator_name(item: tuple[Any, Any]) -> str:
    return str(item[0])


def _random() -> Iterable[str]:
    return (str(operator) for operator in Randomness(torch.empty(0)).rules())


def _table(operators: Mapping[str, Callable[..., Any]]) -> str:
    """One row for each description, with all operators that share it."""
    rows: dict[str, list[str]] = {}
    for operator, function in operators.items():
        rows.setdefault(_first_line(function), []).append(f"`{operator}`")
    lines = [f"| {', '.join(names)} | {text} |" for text, names in rows.items()]
    return "\n".join(["| operators | what is translated |", "|---|---|", *lines])


def _first_line(described: Any) -> str:
    """First line of a docstring without its full stop; table signs are escaped."""
    text = (inspect.getdoc(described) or _BY_NAME).split("\n")[0].rstrip(".")
    return text.replace("``", "`").replace("|", "\\|")
