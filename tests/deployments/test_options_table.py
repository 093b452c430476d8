"""docs/options.md lists every option as the server defines it."""

from __future__ import annotations

from pathlib import Path

from deployments.options import Options
from deployments.options_table import HEAD, page

PAGE = Path(__file__).parents[2] / "docs" / "options.md"


def test_the_page_is_what_the_options_say_of_themselves():
    assert PAGE.read_text() == page(), "run: python -m deployments.options_table > docs/options.md"


def test_every_option_has_a_row_with_a_meaning():
    rows = [row.strip("| ").split(" | ") for row in page().removeprefix(HEAD).splitlines()]
    assert [row[0] for row in rows] == [f"`{name}`" for name in Options.model_fields]
    assert all(len(row) == 4 and row[3].endswith(".") for row in rows)
