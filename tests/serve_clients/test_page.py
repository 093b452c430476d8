"""The examples of docs/quickstart.md work as they are, except for the server's address and its model.

test_lm_eval.py runs those of lm_eval.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ADDRESS = "http://127.0.0.1:8000"
PAGE = (ROOT / "docs" / "quickstart.md").read_text()
EXAMPLES = [
    pytest.param(language, code, id=f"{section.splitlines()[0].lstrip('# ')} {number}")
    for section in re.split(r"\n##+ ", PAGE)
    for number, (language, code) in enumerate(
        re.findall(r"^```(sh|python)\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    )
    if not code.startswith(("git clone", "serve run", "lm_eval"))
]


@pytest.mark.long  # in the environment of the clients; test_openai_sdk.py asks the same in this one
@pytest.mark.parametrize(("language", "code"), EXAMPLES)
def test_an_example_works(clients, interpreter, served, tmp_path, language, code):
    small = {"smollm2": "vitrine-demo", "layers.12.": "layers.3.", "at(10)": "at(3)"}
    for real, here in ({ADDRESS: served.root} | small).items():
        code = code.replace(real, here)
    if language == "python":
        (tmp_path / "example.py").write_text(code)
        stdout, stderr = interpreter.run(tmp_path / "example.py")
        assert "Traceback" not in stderr, stderr
    else:
        done = subprocess.run(
            ["bash", "-euc", code], cwd=ROOT, env=clients, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stdout + done.stderr
        stdout = done.stdout
    assert stdout.strip()
    assert '"error"' not in stdout
