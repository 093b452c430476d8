from __future__ import annotations

import pytest

from deployments.activations.catalogue import Catalogue
from deployments.activations.writer import Writer


@pytest.fixture
def filled(make, tmp_path):
    """A catalogue that a writer kept, of three sessions with a run each and one more in the first."""
    catalogue = Catalogue()
    writer = Writer(tmp_path, catalogue)
    for run_id, session in [("r0", "c"), ("r1", "a"), ("r2", "b"), ("r3", "a")]:
        made = make(run_id, session_id=session, created=float(run_id[1]), tags={"k": "v"}, sample_id=run_id)
        writer.submit(made.facts, made.batches).result()
    yield catalogue
    writer.close()


def test_sessions_come_in_stable_pages(filled):
    assert [item["id"] for item in filled.sessions()] == ["a", "b", "c"]
    assert [item["id"] for item in filled.sessions(limit=1, after="a")] == ["b"]
    assert filled.sessions(after="c") == []


def test_a_session_sums_up_its_runs_and_files(filled, tmp_path):
    assert filled.sessions(limit=1) == [
        {
            "id": "a",
            "runs": 2,
            "tokens": 6,
            "bytes": sum(file.stat().st_size for file in (tmp_path / "a").iterdir()),
            "models": ["model"],
            "created": 1.0,
            "updated": 3.0,
        }
    ]


def test_a_session_lists_where_each_point_of_each_run_lies(filled, tmp_path):
    session = filled.session("a")
    [file] = (tmp_path / "a").iterdir()
    assert session["files"] == [{"uri": file.as_uri(), "bytes": file.stat().st_size, "sealed": False}]
    assert session["runs"][1] == {
        "run_id": "r3",
        "model": "model",
        "created": 3.0,
        "prompt_tokens": 2,
        "tokens": 3,
        "sample_id": "r3",
        "tags": {"k": "v"},
        "finish_reason": None,
        "points": {"layers.0.output": {"uri": file.as_uri(), "first_row": 3, "shape": [3, 4], "dtype": "float32"}},
    }
    assert filled.session("unknown") is None


def test_the_files_alone_give_the_same_catalogue(filled, tmp_path):
    rebuilt = Catalogue.rebuild(tmp_path)
    assert rebuilt.sessions() == filled.sessions()
    assert [rebuilt.session(name) for name in "abc"] == [filled.session(name) for name in "abc"]


def test_links_and_foreign_files_are_passed_over(filled, tmp_path_factory, tmp_path):
    (tmp_path / "linked").symlink_to(tmp_path / "a")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "a file").write_text("x")
    (tmp_path / "b" / "link.arrow").symlink_to(next((tmp_path / "a").iterdir()))
    (tmp_path / "b" / "empty.arrow").touch()
    (tmp_path / "b" / "notes.txt").write_text("x")
    assert Catalogue.rebuild(tmp_path).sessions() == filled.sessions()
