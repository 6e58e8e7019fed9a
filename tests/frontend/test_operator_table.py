"""The page of operators is what the code says."""

from relax_disc.frontend.converters import TABLE
from relax_disc.frontend.operator_table import page


def test_the_page_is_up_to_date(repository):
    written = page()
    assert (repository / "docs" / "operators.md").read_text() == written, "run `make docs`"
    assert all(f"`{operator}`" in written for operator in TABLE)
