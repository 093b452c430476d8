"""Downloads in pages, with ranges and preconditions as in RFC 9110."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI, Response
from starlette.testclient import TestClient

from serve_app.http import ranges
from serve_app.http.errors import install
from serve_app.http.ranges import Download, Ranged, page

BODY = bytes(range(100))
TAG = '"v1"'


@pytest.fixture(params=[10, 1000], ids=["longer than a page", "shorter than a page"])
def most(request, monkeypatch):
    monkeypatch.setattr(ranges, "PAGE_BYTES", request.param)
    return request.param


@pytest.fixture
def ask():
    """`ask(method, **headers)` for 100 bytes whose tag is "v1"."""

    async def read(first: int, end: int) -> bytes:
        assert 0 <= first < end <= len(BODY)
        return BODY[first:end]

    api = FastAPI()
    install(api)

    @api.head("/")
    @api.get("/")
    async def download(asked: Ranged) -> Response:
        return await page(asked, Download("v1", len(BODY), read), "application/octet-stream", {"X-Own": "kept"})

    client = TestClient(api)
    return lambda method="GET", **headers: client.request(
        method, "/", headers={name.replace("_", "-"): value for name, value in headers.items()}
    )


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
        ("bytes=-3", 97, 100),
        ("BYTES= 1-2", 1, 3),
        ("bytes=0-", 0, 100),
        ("bytes=20-50", 20, 51),
        ("bytes=-70", 30, 100),
        ("bytes=-1000", 0, 100),
    ],
)
def test_a_range_is_answered_with_its_first_page(ask, most, range, first, end):
    end = min(end, first + most)
    answer = ask(range=range)
    assert answer.status_code == 206
    assert answer.content == BODY[first:end]
    assert answer.headers["content-range"] == f"bytes {first}-{end - 1}/100"
    assert answer.headers["content-length"] == str(end - first)
    assert (answer.headers["etag"], answer.headers["x-own"]) == (TAG, "kept")


@pytest.mark.parametrize("range", ["bytes=100-", "bytes=100-200", "bytes=-0", f"bytes={'9' * 18}-"])
def test_a_range_behind_the_end_is_416_with_the_length(ask, most, range):
    answer = ask(range=range)
    assert error(answer) == (416, "Range", "range_not_satisfiable")
    assert answer.headers["content-range"] == "bytes */100"


@pytest.mark.parametrize(
    "range", [None, "bytes=", "bytes=-", "bytes=5-4", "bytes=a-b", "bytes=0-1,5-6", "rows=0-1", "0-1", "bytes=²-3"]
)
def test_what_asks_for_no_one_range_asks_for_all_which_is_413_where_it_is_more_than_a_page(ask, most, range):
    answer = ask(**({"range": range.encode()} if range else {}))
    if most > len(BODY):
        assert (answer.status_code, answer.content) == (200, BODY)
    else:
        assert error(answer) == (413, "Range", "range_required")
        assert "`Range: bytes=0-9`" in answer.json()["error"]["message"]
        assert "100 bytes" in answer.json()["error"]["message"]
    assert (answer.headers["accept-ranges"], answer.headers["etag"]) == ("bytes", TAG)


def test_head_says_the_length_and_the_tag_whatever_the_range(ask, most):
    for headers in ({}, {"range": "bytes=0-4"}):
        answer = ask("HEAD", **headers)
        assert (answer.status_code, answer.content) == (200, b"")
        assert (answer.headers["content-length"], answer.headers["etag"]) == ("100", TAG)
        assert answer.headers["accept-ranges"] == "bytes"


@pytest.mark.parametrize("tags", [TAG, f'"v0", {TAG}', "*"])
def test_a_page_of_the_same_is_sent(ask, most, tags):
    assert ask(range="bytes=5-9", if_match=tags).content == BODY[5:10]


@pytest.mark.parametrize("tags", ['"v0"', f"W/{TAG}", "v1", ""])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_page_of_something_else_is_412(ask, most, tags, method):
    answer = ask(method, range="bytes=5-9", if_match=tags)
    assert answer.status_code == 412
    if method == "GET":
        assert error(answer) == (412, "If-Match", "download_changed")
        assert "begin again" in answer.json()["error"]["message"]


def test_if_range_of_something_else_asks_for_all(ask, most):
    assert ask(range="bytes=5-9", if_range=TAG).content == BODY[5:10]
    for other in ('"v0"', f"W/{TAG}", "Wed, 21 Oct 2015 07:28:00 GMT"):
        answer = ask(range="bytes=5-9", if_range=other)
        assert answer.status_code == (200 if most > len(BODY) else 413)


@pytest.mark.parametrize("tags", [TAG, f"W/{TAG}", f'"v0", {TAG}', "*"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_what_the_client_has_is_304(ask, most, tags, method):
    answer = ask(method, range="bytes=5-9", if_none_match=tags)
    assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", TAG)
    assert ask(range="bytes=5-9", if_none_match='"v0"').status_code == 206
