"""The pages name files that exist."""

import re

import pytest

_FILES = re.compile(r"`([a-z_0-9/]+/[a-z_0-9]+\.(?:py|cc|h))`")


@pytest.mark.parametrize(
    "page", ["architecture.md", "api.md", "memory.md", "optimizers.md", "cuda.md"]
)
def test_every_file_that_a_page_names_is_there(repository, page):
    named = set(_FILES.findall((repository / "docs" / page).read_text()))
    roots = [repository, repository / "relax_disc"]
    missing = sorted(name for name in named if not any((root / name).exists() for root in roots))
    assert missing == []
    if page == "architecture.md":
        assert len(named) >= 20


def test_every_claim_of_the_page_on_cuda_has_a_command_that_exists(repository):
    page = (repository / "docs" / "cuda.md").read_text()
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 8
    for claim, how, command in rows:
        assert claim.strip()
        assert how.strip()
        named = re.findall(r"(?:tests|scripts)/[\w/]+\.(?:py|sh)", command)
        assert named, claim
        assert all((repository / name).exists() for name in named), command
