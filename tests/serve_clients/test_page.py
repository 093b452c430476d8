"""The examples of docs/clients.md, interventions.md and lens.md work as they are, except for the server's address."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ADDRESS = "http://127.0.0.1:8000"
PAGES = [(ROOT / "docs" / name).read_text() for name in ("interventions.md", "lens.md", "clients.md")]
EXAMPLES = [
    pytest.param(language, code, id=f"{section.splitlines()[0].lstrip('# ')} {number}")
    for page in PAGES
    for section in page.split("\n## ")
    for number, (language, code) in enumerate(
        re.findall(r"^```(sh|python)\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    )
]
RUN_BY = {"sh": ["bash", "-euc"], "python": ["python", "-c"]}


@pytest.mark.parametrize(("language", "code"), EXAMPLES)
def test_an_example_works(clients, served, tmp_path, language, code):
    done = subprocess.run(
        [*RUN_BY[language], code.replace(ADDRESS, served.root)],
        cwd=ROOT,
        env=clients | {"INSPECT_LOG_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()
    assert '"error"' not in done.stdout
