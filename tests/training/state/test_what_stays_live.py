"""The page "what is fixed when you compile, and what stays live": every line of it runs."""

import re
from pathlib import Path

import pytest

_PAGE = Path(__file__).resolve().parents[3] / "docs" / "what-stays-live.md"
_BLOCK = re.compile(
    r"(?P<text>[^\n]+)\n\n```python\n(?P<code>.*?)```|```python\n(?P<more>.*?)```", re.S
)


def _programs():
    """Yield a name and the code of each block; the first is what all others begin with."""
    for number, match in enumerate(_BLOCK.finditer(_PAGE.read_text())):
        code = match["code"] or match["more"]
        words = re.sub(r"\W+", " ", match["text"] or "more").split()[:6]
        yield f"{number} {' '.join(words)}", code, _line(match)


def _line(match):
    return match.string[: match.start("code") if match["code"] else match.start("more")].count("\n")


_PREAMBLE, *_PROGRAMS = _programs()


def test_every_line_has_a_program():
    text = _PAGE.read_text().split("## ", 1)[1]
    outside = re.sub(r"```python\n.*?```", "\0", text, flags=re.S)
    paragraphs = [p.strip() for p in outside.split("\n\n") if p.strip()]
    for before, after in zip(paragraphs, [*paragraphs[1:], ""], strict=True):
        is_heading = before.startswith("#") or (
            "\n" not in before and before.endswith(("live", "written"))
        )
        assert before == "\0" or after == "\0" or is_heading or after.startswith("#"), before


@pytest.mark.parametrize(
    ("code", "line"), [p[1:] for p in _PROGRAMS], ids=[p[0] for p in _PROGRAMS]
)
def test_line(code, line):
    space = {"__name__": "what_stays_live"}
    _run(*_PREAMBLE[1:], space)
    _run(code, line, space)


def _run(code, line, space):
    exec(compile("\n" * line + code, str(_PAGE), "exec"), space)
