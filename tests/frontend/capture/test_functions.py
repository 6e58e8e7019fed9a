"""Functions of files that a model's own file imports see sizes as its own do."""

from __future__ import annotations

import functools
import importlib
import types
from typing import Any

import torch
from torch import Tensor, nn

from relax_disc.frontend.capture.functions import functions_of
from tests.frontend.capture import helpers
from tests.frontend.capture.squares import assert_trains_as_eager


class Called(nn.Module):
    """Calls them by the module, by a decorator, by an object and by a partial function."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), helpers.Scale(0.5)
        self.weigh = functools.partial(helpers.weighed)

    def forward(self, x: Tensor) -> Tensor:
        x = helpers.weighed(self.layer(x).reshape(-1, 4)) + self.weigh(x.flatten(0, 1))
        return x[: helpers.half_of(len(x))] * self.scale.of(len(x))


def test_files_that_a_model_imports() -> None:
    torch.manual_seed(0)
    shapes = [(1, 1), (4, 20), (3, 12), (2, 7)]
    assert_trains_as_eager(Called(), 4, shapes, min=1, max=20)


def names_of(*roots: object) -> set[str]:
    return {each.__module__ for each in functions_of(nn.Identity(), *roots)}  # type: ignore


def by_a_name(x: Tensor) -> Tensor:
    return helpers.weighed(x)


def test_files_are_found_by_the_names_in_code() -> None:
    here, other = __name__, helpers.__name__
    assert names_of(by_a_name) == {here, other}
    assert names_of(functools.partial(by_a_name)) == {here, other}
    assert names_of(Called().forward) == {here, other}
    assert names_of(lambda x: x) == {here}
    assert names_of(torch.sin, nn.Linear(2, 2)) == set()
    assert names_of(helpers.half_of) == {other}


def test_functions_in_lists_and_dicts() -> None:
    other = {helpers.__name__}
    assert names_of([1, helpers.half_of]) == other
    assert names_of({"half": functools.partial(helpers.half_of, 1)}, (2,)) == other
    assert names_of([helpers.Scale, "half_of"]) == set()
    model = nn.Identity()
    model.functions = (helpers.half_of,)
    assert names_of(model) == other


class Lazy(types.ModuleType):
    """A module that imports what it holds when it is asked, as speechbrain's do."""

    def __getattr__(self, name: str) -> object:
        return getattr(importlib.import_module("tests.frontend.capture.helpers"), name)


LAZY: Any = Lazy("lazy")


class ByOtherWays(nn.Module):
    """Calls them through a lazy module, by a text, and by an attribute of an object."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.held = types.SimpleNamespace(function=helpers.weighed)

    def forward(self, x: Tensor) -> Tensor:
        x = LAZY.weighed(self.layer(x).reshape(-1, 4)) + helpers.weighed(x.flatten(0, 1))
        return x + self.held.function(x)


def test_functions_of_lazy_modules_by_texts_and_in_objects() -> None:
    torch.manual_seed(0)
    shapes = [(1, 1), (4, 20), (3, 12), (2, 7)]
    assert_trains_as_eager(ByOtherWays(), 4, shapes, min=1, max=20)
    other = {helpers.__name__}
    assert names_of(types.SimpleNamespace(function=helpers.half_of)) == other
    assert other < names_of(lambda x: LAZY.half_of(x))
    assert other < names_of(lambda x: LAZY.nothing(helpers.half_of(x)))


def test_an_object_that_leads_to_itself() -> None:
    scale = helpers.Scale(1.0)
    scale.factor = scale
    assert names_of(scale.of) == {helpers.__name__}


class Absent:
    """What a library puts in the place of an import that is not there."""

    def __getattr__(self, name: str) -> object:
        raise ImportError(f"needs a library that is not installed ({name})")

    def __deepcopy__(self, memo: object) -> Absent:
        return self


ABSENT = Absent()


class WithAbsent(nn.Module):
    """Has it as a global variable, in its class, in a list and as a default."""

    library = Absent()

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.libraries = nn.Linear(4, 4), [Absent()]

    def forward(self, x: Tensor, other: Absent = ABSENT) -> Tensor:
        if ABSENT is None or other is None or self.library is None or self.libraries[0] is None:
            return x
        return self.layer(x)


def test_objects_whose_attributes_raise() -> None:
    torch.manual_seed(0)
    assert_trains_as_eager(WithAbsent(), 4, [(2, 3), (1, 1), (4, 20)], min=1, max=20)
