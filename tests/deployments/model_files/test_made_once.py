"""Directories that take long to make are made once, and are complete if they exist."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deployments.model_files.made_once import made_once

KILLED = """
import os, signal
from pathlib import Path
from deployments.model_files.made_once import made_once

def make(into):
    (into / "half").write_text("a")
    os.kill(os.getpid(), signal.SIGKILL)

made_once(Path({directory!r}), make)
"""


def write(into: Path) -> None:
    (into / "a").write_text("a")


def test_many_at_once_make_it_once(tmp_path):
    calls = []

    def make(into):
        calls.append(into)
        write(into)

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: made_once(tmp_path / "models" / "it", make), range(8)))
    assert len(calls) == 1
    assert {(path / "a").read_text() for path in made} == {"a"}


def test_what_fails_leaves_nothing_and_can_be_tried_again(tmp_path):
    def fail(into):
        write(into)
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        made_once(tmp_path / "it", fail)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    assert made_once(tmp_path / "it", write).is_dir()


def test_what_a_killed_process_left_is_not_taken_for_it(tmp_path):
    directory = tmp_path / "it"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED.format(directory=str(directory))], cwd=Path(__file__).parents[3]
    )
    assert killed.returncode < 0
    assert not directory.exists()
    made_once(directory, write)
    assert [path.name for path in directory.iterdir()] == ["a"]
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [directory]


def test_others_may_read_it_where_they_may_read_its_folder(tmp_path):
    given = os.umask(0o077)  # a store's process may have it
    try:
        for mode in (0o700, 0o755):
            folder = tmp_path / oct(mode)
            folder.mkdir()
            folder.chmod(mode)
            assert made_once(folder / "it", write).stat().st_mode & 0o777 == mode
    finally:
        os.umask(given)
