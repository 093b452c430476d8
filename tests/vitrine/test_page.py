"""The examples of docs/client.md run unchanged, except for the server's address."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "client.md"


def test_the_pages_examples_work(served, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for code in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        exec(code.replace("http://127.0.0.1:8000", served.root), names)  # noqa: S102 - the project's own page
    names["server"].close()
    printed = capsys.readouterr().out
    assert "(4, 6, 192) [0, 1, 2, 3, 4, 5] [1 1 0 0]" in printed
    assert "(4, 2, 192)" in printed
