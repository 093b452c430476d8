"""The table of options shows every option as the server defines it."""

from __future__ import annotations

from deployments.options import Options
from deployments.options_table import GROUPS, table


def test_every_option_has_a_row_with_a_type_and_a_text():
    rows = [row.strip("| ").split(" | ") for row in table().splitlines() if row.startswith("| `")]
    assert [row[0] for row in rows] == [f"`{name}`" for name in Options.model_fields]
    assert all(len(row) == 4 and row[1] and row[3].endswith(".") for row in rows)
    assert Options.model_fields.keys() >= GROUPS.keys()
