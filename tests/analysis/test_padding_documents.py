"""Documents that share a sequence: masks made of positions that start again are read as they are.

Random conditions on arrays say whether what is proved of them holds; random models are run by eager
PyTorch with other numbers in every row that is left out.
"""

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from relax_disc.analysis.padding.documents import with_places
from relax_disc.analysis.padding.needed import _hides_later, _shows_own
from relax_disc.analysis.padding.values import BATCH, INNER, KEY, QUERY, replaced
from relax_disc.training.call.packing import _evaluate
from tests.analysis import test_padding as models
from tests.analysis.test_padding import WIDTH, Attention, Capped, Written, capture, check

LENGTH = 7


def joined(position, index, first):
    """Write an element of the positions with one more before them, as ``torch.diff`` has them."""
    rest = replaced(position, KEY, ("sub", index, 1))
    return ("choose", ("lt", index, 1), first, rest)


def starts(position, step=1, kind="ne"):
    first = ("sub", replaced(position, KEY, 0), 1)
    here, there = (joined(position, index, first) for index in (("add", INNER, 1), INNER))
    return (kind, ("sub", here, there), step)


def same_document(number):
    one, other = (("cumsum", number, ("size", "length"), index) for index in (KEY, QUERY))
    return ("eq", other, one)


PLAIN = ("load", 0, BATCH, KEY)
POSITIONS = {
    "given": PLAIN,
    "moved": ("add", PLAIN, 3),
    "by place": ("add", PLAIN, KEY),
    "place": KEY,
    "scaled": ("mul", PLAIN, 2),
}
NUMBERS = {
    "goes on by one": starts,
    "goes on by two": lambda p: starts(p, 2),
    "equal": lambda p: starts(p, 1, "eq"),
    "less": lambda p: starts(p, 1, "lt"),
    "of given": lambda p: starts(PLAIN),
    "zero": lambda p: ("eq", replaced(p, KEY, INNER), 0),
}


def compared(kind, position, shift):
    return (kind, position, ("add", replaced(position, KEY, QUERY), shift))


def holds(found, given):
    """Evaluate conditions for all pairs ``[batch, query, key]`` of each sequence."""
    pairs = torch.arange(LENGTH)
    result = torch.zeros(len(given), LENGTH, LENGTH, dtype=torch.bool)
    for query in pairs:
        known = {BATCH: torch.arange(len(given))[:, None], KEY: pairs[None]}
        known[QUERY] = query.expand(1, LENGTH)
        parts = [_evaluate(each, {0: given}, {"length": LENGTH}, known) for each in found]
        result[:, query] = torch.stack([part.bool().expand(len(given), -1) for part in parts]).all(
            0
        )
    return result


@seed(0)
@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([*POSITIONS]),
    st.sampled_from([*NUMBERS]),
    st.lists(
        st.tuples(st.sampled_from(["le", "lt", "ge", "gt"]), st.integers(-2, 2)),
        min_size=1,
        max_size=2,
    ),
    st.integers(0, 2**20),
)
def test_places_stand_for_positions(position, number, comparisons, drawn):
    position = POSITIONS[position]
    found = [same_document(NUMBERS[number](position))]
    found += [compared(kind, position, shift) for kind, shift in comparisons]
    generator = torch.Generator().manual_seed(drawn)
    steps = torch.randint(-1, 4, (6, LENGTH), generator=generator).clamp(max=1)
    given = steps.cumsum(1)
    wanted, written = holds(found, given), with_places(found, lambda value: True)
    assert torch.equal(wanted, holds(written, given))
    if any(map(_hides_later, written)):
        assert not wanted.triu(1).any()
    if all(map(_shows_own, written)):
        assert wanted.diagonal(dim1=1, dim2=2).all()


@pytest.mark.parametrize("position", [name for name in POSITIONS if name != "scaled"])
def test_documents_hide_later_rows(position):
    position = POSITIONS[position]
    causal = [compared("le", position, 0), same_document(starts(position))]
    window = compared("gt", position, -3)
    written = with_places([*causal, window], lambda value: True)
    assert any(map(_hides_later, written)) and all(map(_shows_own, written))


@pytest.mark.parametrize("number", [name for name in NUMBERS if name != "goes on by one"])
def test_other_numbers_prove_nothing(number):
    position = POSITIONS["by place"]
    found = [compared("le", position, 0), same_document(NUMBERS[number](position))]
    assert with_places(found, lambda value: True) == found


def test_narrow_numbers_may_wrap_around():
    found = [compared("le", PLAIN, 0), same_document(starts(PLAIN))]
    assert with_places(found, lambda value: False) == found


def diff(positions):
    return torch.diff(positions, prepend=positions[:, :1] - 1, dim=1)


def apart(mask, start=lambda p: diff(p) != 1):
    """Make positions of a mask, which start again where it is zero, and a mask of documents."""
    positions = mask * torch.arange(mask.shape[1])
    number = start(positions).cumsum(1)
    key, query = positions[:, None, None, :], positions[:, None, :, None]
    return (key <= query) & (number[:, None, None, :] == number[:, None, :, None]), (key, query)


class Documents(Attention):
    def __init__(self, window=None, start=lambda p: diff(p) != 1):
        super().__init__(True, False)
        self.window, self.start = window, start

    def forward(self, x, mask):
        b, t, _ = x.shape
        seen, (key, query) = apart(mask, self.start)
        if self.window is not None:
            seen = seen & (key > query - self.window)
        out = F.scaled_dot_product_attention(*self.heads(x), attn_mask=seen)
        return x + out.transpose(1, 2).reshape(b, t, WIDTH)


def hiding(kind):
    class Hiding(kind):
        def hidden(self, x, mask):
            least = torch.finfo(torch.float32).min
            return torch.where(apart(mask)[0], torch.zeros((), dtype=x.dtype), least)

    return Hiding


DOCUMENTS = {
    "documents": Documents,
    "documents, window": lambda: Documents(2),
    "documents, written out": lambda: hiding(Written)(True, False),
    "documents, capped": lambda: hiding(Capped)(True, False),
}
UNPROVED = {
    "numbered by gaps": lambda: Documents(start=lambda p: diff(p) > 1),
    "numbered by zeros": lambda: Documents(start=lambda p: p == 0),
    "numbered by steps of two": lambda: Documents(start=lambda p: diff(p) != 2),
}


@pytest.fixture(autouse=True)
def layers(monkeypatch):
    for name, make in {**DOCUMENTS, **UNPROVED}.items():
        monkeypatch.setitem(models.LAYERS, name, make)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_models_of_documents_leave_padding_out(name):
    check([name, "norm", name], "plain")
    assert capture([name, "gelu"], "shifted")[1].packings


@pytest.mark.parametrize("name", UNPROVED)
def test_models_of_which_that_is_not_proved_keep_it(name):
    assert not capture([name], "plain")[1].packings


def drawn_models():
    names = st.sampled_from([*models.PLAIN, *[*DOCUMENTS] * 5, *UNPROVED, "causal", "masked"])
    losses = st.sampled_from(["plain"] * 4 + [*models.OF_STATES, *models.LOSSES])
    return st.tuples(st.lists(names, min_size=1, max_size=3), losses)


@pytest.mark.slow
@seed(2)
@settings(max_examples=60, deadline=None)
@given(drawn_models())
def test_rows_of_documents_that_are_left_out_change_nothing(drawn):
    check(*drawn)
