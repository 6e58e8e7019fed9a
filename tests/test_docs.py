"""The pages name files, links and make targets that exist; the code in them runs."""

import gc
import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim
from typer.main import get_command

import relax_disc
from relax_disc import cli, errors
from relax_disc.frontend.converters.registry import TABLE

_REPOSITORY = Path(__file__).resolve().parents[1]
_PAGES = [
    str(page.relative_to(_REPOSITORY))
    for page in sorted([*_REPOSITORY.glob("*.md"), *_REPOSITORY.glob("docs/*.md")])
]
_CODE = re.compile(r"^ *```python\n(.*?)^ *```", re.S | re.M)
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
    claims = page[page.index("| claim | how | command |") :].partition("\n\n")[0]
    rows = [line.split("|")[1:-1] for line in claims.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 8
    for claim, how, command in rows:
        assert claim.strip()
        assert how.strip()
        named = re.findall(r"(?:benchmarks|tests|scripts)/[\w/]+\.(?:py|sh)", command)
        assert named, claim
        assert all((repository / name).exists() for name in named), command


@pytest.mark.parametrize("page", _PAGES)
def test_every_link_leads_somewhere(repository, page):
    file = repository / page
    words = re.sub(r"```.*?```|`[^`]*`", "", file.read_text(), flags=re.S)
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", words)
    assert [link for link in links if not (file.parent / link).exists()] == []


def test_the_readme_names_targets_that_exist(repository):
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", (repository / "README.md").read_text(), re.M))
    targets = re.findall(r"^([a-z-]+):", (repository / "Makefile").read_text(), re.M)
    assert {"demo", "test"} <= named <= set(targets)


def test_every_error_is_on_its_page(repository):
    page = (repository / "docs" / "errors.md").read_text()
    rows = re.findall(r"^\| `(\w+)`.*\| (.*) \|$", page, re.M)
    names = {n for n, k in vars(errors).items() if isinstance(k, type) and issubclass(k, Exception)}
    met = names - {"RelaxDiscError"} | {"NativeBuildError"}
    assert sorted(name for name, _ in rows) == sorted(met)
    assert all(advice.strip() for _, advice in rows)


@pytest.mark.parametrize("page", _PAGES)
def test_every_command_of_a_page_takes_what_the_page_gives_it(repository, page):
    """Benchmarks and parts of `relax-disc`; no command runs."""
    text = " ".join((repository / page).read_text().split())
    for module, given in re.findall(r"python -m ((?:benchmarks|tests)\.[\w.]+)([^`]*)", text):
        path = repository / module.replace(".", "/")
        source = (path / "__main__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        for option in re.findall(r"--([a-z-]+)", given):
            assert f"--{option}" in source or f"{option.replace('-', '_')}:" in source, option
    parts = get_command(cli.app).commands
    for name, given in re.findall(r"`relax-disc (\w+)([^`]*)", text):
        known = {word for parameter in parts[name].params for word in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", given)) <= known | {"--help"}


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)

    def forward(self, ids, labels):
        logits = self.head(self.embedding(ids))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _names(page):
    """What a page takes as known: the user's model, optimizer and data."""
    torch.manual_seed(0)
    model, ids = Words(), torch.randint(50, (4, 8))
    kind = torch.optim.LBFGS if page == "docs/optimizers.md" else torch.optim.AdamW
    shape = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=1, max=512)}
    return {
        "relax_disc": relax_disc,
        "model": model,
        "optimizer": kind(model.parameters()),
        "ids": ids,
        "labels": ids,
        "shapes": (shape, shape),
        "loader": [(ids, ids), (ids[:3, :5], ids[:3, :5])],
    }


@pytest.fixture
def table_of_converters():
    """What a page enters goes again."""
    before = dict(TABLE)
    yield
    TABLE.clear()
    TABLE.update(before)


_WITH_CODE = [
    page
    for page in _PAGES
    # That page has a test of its own, block by block.
    if _CODE.search((_REPOSITORY / page).read_text()) and "what-stays-live" not in page
]


@pytest.mark.parametrize("page", _WITH_CODE)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("table_of_converters")
def test_the_code_of_a_page_runs(repository, page):
    names, text = _names(page), (repository / page).read_text()
    for match in _CODE.finditer(text):
        code = "\n" * text[: match.start(1)].count("\n") + textwrap.dedent(match[1])
        exec(compile(code, str(repository / page), "exec"), names)
    names.clear()
    torch._dynamo.reset()  # or programs of its backend live on, which other tests count
    gc.collect()


def test_the_site_is_built_and_its_links_lead_somewhere(repository, tmp_path):
    pytest.importorskip("furo")
    pytest.importorskip("myst_parser")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", "docs", str(tmp_path)]
    subprocess.run(command, cwd=repository, check=True)
    pages = sorted(tmp_path.glob("*.html"))
    assert {"index.html", "reference.html", "tutorials.html"} <= {page.name for page in pages}
    parts = [getattr(relax_disc, name) for name in relax_disc.__all__]
    packages = [part for part in parts if hasattr(part, "__all__")]
    names = {name for part in (relax_disc, *packages) for name in part.__all__}
    names -= {part.__name__.rpartition(".")[2] for part in parts if inspect.ismodule(part)}
    page = (tmp_path / "reference.html").read_text()
    entries = re.findall(r'id="relax_disc\.([\w.]+)"', page)
    assert names - {entry.rpartition(".")[2] for entry in entries} == set()
    broken = [
        (page.name, link)
        for page in pages
        for link in re.findall(r'href="([^"#?:]+)[#?]?[^":]*"', page.read_text())
        if not (tmp_path / link).exists()
    ]
    assert broken == []
