"""The pages name files that exist."""

import re

import pytest

_FILES = re.compile(r"`([a-z_0-9/]+/[a-z_0-9]+\.(?:py|cc|h))`")


@pytest.mark.parametrize("page", ["architecture.md", "api.md", "memory.md", "optimizers.md"])
def test_every_file_that_a_page_names_is_there(repository, page):
    named = set(_FILES.findall((repository / "docs" / page).read_text()))
    roots = [repository, repository / "relax_disc"]
    missing = sorted(name for name in named if not any((root / name).exists() for root in roots))
    assert missing == []
    if page == "architecture.md":
        assert len(named) >= 20
