"""Files in pages, by ranges as in RFC 9110."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI, Response
from starlette.testclient import TestClient

from deployments.activations.filters import FilePart
from serve_app.http import ranges
from serve_app.http.errors import install
from serve_app.http.paging import Ranged, page

BODY = bytes(range(100))


@pytest.fixture(params=[10, 1000], ids=["longer than a page", "shorter than a page"])
def most(request, monkeypatch):
    monkeypatch.setattr(ranges, "PAGE_BYTES", request.param)
    return request.param


@pytest.fixture
def ask():
    """`ask(method, **headers)` for 100 bytes."""

    async def read(first: int, end: int) -> FilePart:
        assert 0 <= first <= end
        return FilePart(BODY[first:end], first, len(BODY))

    api = FastAPI()
    install(api)

    @api.head("/")
    @api.get("/")
    async def download(asked: Ranged) -> Response:
        return await page(asked, read, "application/octet-stream")

    client = TestClient(api)
    return lambda method="GET", **headers: client.request(method, "/", headers=headers)


def error(answer: httpx.Response) -> tuple[int, str, str]:
    said = answer.json()["error"]
    return answer.status_code, said["param"], said["code"]


@pytest.mark.parametrize(
    ("range", "first", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=0-4", 0, 5),
        ("bytes=95-99", 95, 100),
        ("bytes=95-1000", 95, 100),
        ("bytes=95-", 95, 100),
        ("BYTES= 1-2", 1, 3),
        ("bytes=0-", 0, 100),
        ("bytes=20-50", 20, 51),
    ],
)
def test_a_range_is_answered_with_its_first_page(ask, most, range, first, end):
    end = min(end, first + most)
    answer = ask(range=range)
    assert answer.status_code == 206
    assert answer.content == BODY[first:end]
    assert answer.headers["content-range"] == f"bytes {first}-{end - 1}/100"
    assert answer.headers["content-length"] == str(end - first)
    assert answer.headers["accept-ranges"] == "bytes"


@pytest.mark.parametrize("range", ["bytes=100-", "bytes=100-200", f"bytes={'9' * 18}-"])
def test_a_range_behind_the_end_is_416_with_the_length(ask, most, range):
    answer = ask(range=range)
    assert error(answer) == (416, "Range", "range_not_satisfiable")
    assert answer.headers["content-range"] == "bytes */100"


@pytest.mark.parametrize(
    "range",
    [None, "bytes=", "bytes=-", "bytes=-3", "bytes=5-4", "bytes=a-b", "bytes=0-1,5-6", "rows=0-1", "0-1", "bytes=²-3"],
)
def test_what_asks_for_no_one_range_asks_for_all_which_is_413_where_it_is_more_than_a_page(ask, most, range):
    answer = ask(**({"range": range.encode()} if range else {}))
    if most > len(BODY):
        assert (answer.status_code, answer.content) == (200, BODY)
    else:
        assert error(answer) == (413, "Range", "range_required")
        assert "`Range: bytes=0-9`" in answer.json()["error"]["message"]
        assert "100 bytes" in answer.json()["error"]["message"]
    assert answer.headers["accept-ranges"] == "bytes"


def test_head_says_the_length_whatever_the_range(ask, most):
    for headers in ({}, {"range": "bytes=0-4"}):
        answer = ask("HEAD", **headers)
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["content-length"] == "100"
        assert answer.headers["accept-ranges"] == "bytes"
