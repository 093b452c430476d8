"""The record that a server started by `--serve` leaves of itself, and what else may stand in its place."""

import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from deployments.options import Options
from evals.server.server_record import read_record

BASE_URL = "http://127.0.0.1:8123/v1"


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VITRINE_HOME", str(tmp_path))
    path = tmp_path / "servers" / "127.0.0.1-8123.json"
    path.parent.mkdir()
    return path


def content(**changed: Any) -> dict[str, Any]:
    this = psutil.Process()
    written = {"pid": this.pid, "created": this.create_time(), "options": Options(threads=2).model_dump(mode="json")}
    return written | {"ray_address": "127.0.0.1:6379", "ray_auth_mode": None} | changed


def read(record: Path, text: bytes) -> tuple[Any, list[str]]:
    record.write_bytes(text)
    said: list[str] = []
    return read_record(BASE_URL, said.append), said


def test_a_record_of_a_running_process_is_read(record: Path) -> None:
    found, said = read(record, json.dumps(content()).encode())
    assert found.pid == os.getpid()
    assert (found.options.threads, found.ray_address, said) == (2, "127.0.0.1:6379", [])


@pytest.mark.parametrize("changed", [{"created": 1.0}, {"pid": 1 << 22}])
def test_a_record_of_another_or_no_process_is_none_and_nothing_to_tell(record: Path, changed: dict[str, Any]) -> None:
    assert read(record, json.dumps(content(**changed)).encode()) == (None, [])
    record.unlink()
    assert read_record(BASE_URL) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "Invalid JSON"),
        (b'{"pid": 12', "Invalid JSON"),
        (b"\xff\xfe\x00", "Invalid JSON"),
        (b"[]", "should be an object"),
        (b"null", "should be an object"),
        (b'{"some": "thing"}', "pid: Field required"),
        (json.dumps(content(pid="12")).encode(), "pid: Input should be a valid integer"),
        (json.dumps(content(pid=True)).encode(), "pid: Input should be a valid integer"),
        (json.dumps(content(pid=-5)).encode(), "pid must be"),
        (json.dumps(content(created="now")).encode(), "created: "),
        (json.dumps(content(options={"of_another_version": 1})).encode(), "options.of_another_version: Extra inputs"),
        (json.dumps(content(options=[])).encode(), "options: "),
        (json.dumps(content(ray_address=None)).encode(), "ray_address: "),
    ],
)
def test_a_file_that_is_no_record_is_said_to_be_none_and_is_not_used(record: Path, text: bytes, reason: str) -> None:
    found, (said,) = read(record, text)
    assert found is None
    assert said.startswith(f"{record} is ignored, because it ")
    assert reason in said


def test_what_cannot_be_read_is_no_record_either(record: Path) -> None:
    record.mkdir()
    said: list[str] = []
    assert read_record(BASE_URL, said.append) is None
    assert "Is a directory" in said[0]


def test_what_is_wrong_is_told_without_the_key_that_may_stand_in_it(record: Path) -> None:
    options = {"archive": "s3://id:s3cret@bucket/p", "nope": "s3cret"}
    _, (said,) = read(record, json.dumps(content(options=options)).encode())
    assert "s3cret" not in said
