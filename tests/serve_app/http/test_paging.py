"""Pages of lists and the memory of answers in transit are bounded; files come by ranges as in RFC 9110."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from fastapi import FastAPI, Response
from starlette.testclient import TestClient

from deployments.activations.filters import FilePart
from serve_app.http import paging
from serve_app.http.errors import install
from serve_app.http.paging import MOST_NAMED, Budget, Ranged, first_page, page

BODY = bytes(range(100))


@pytest.fixture(params=[10, 1000], ids=["longer than a page", "shorter than a page"])
def most(request, monkeypatch):
    monkeypatch.setattr(paging, "PAGE_BYTES", request.param)
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


def test_items_that_name_much_make_smaller_pages_which_together_are_all():
    items = [{"id": i, "points": dict.fromkeys(range(9000), {})} for i in range(5)]
    seen, more = [], True
    while more:
        page, more = first_page(items[len(seen) : len(seen) + 4], 3)
        assert sum(len(item["points"]) for item in page) <= MOST_NAMED
        seen += page
    assert seen == items


def test_an_item_that_names_more_than_a_page_holds_is_a_page():
    large = {"id": 0, "tensors": dict.fromkeys(range(MOST_NAMED + 1), {})}
    assert first_page([large, large], 1) == ([large], True)
    assert first_page([large], 1) == ([large], False)
    assert first_page([], 10) == ([], False)


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_who_would_hold_too_much_waits_until_others_are_done_or_cancelled():
    async def steps() -> None:
        budget, inside = Budget(100), list[str]()

        async def hold(name: str, size: int) -> None:
            async with budget.hold(size):
                inside.append(name)
                try:
                    await asyncio.Event().wait()
                finally:
                    inside.remove(name)

        tasks = {name: asyncio.ensure_future(hold(name, size)) for name, size in (("a", 60), ("b", 40), ("c", 300))}
        await settled()
        assert inside == ["a", "b"]
        small = asyncio.ensure_future(hold("none", 0))
        await settled()
        assert inside == ["a", "b", "none"]
        tasks["a"].cancel()
        await settled()
        assert inside == ["b", "none"]
        tasks["b"].cancel()
        await settled()
        assert inside == ["none", "c"]  # alone also one that is larger
        for task in (small, tasks["c"]):
            task.cancel()
        await settled()
        assert not inside
        async with asyncio.timeout(10), budget.hold(100):
            pass

    asyncio.run(steps())


def test_a_failure_gives_back_what_it_held():
    async def steps() -> None:
        budget = Budget(1)
        with pytest.raises(OSError, match="broken"):
            async with budget.hold(1):
                raise OSError("broken")
        async with asyncio.timeout(10), budget.hold(1):
            pass

    asyncio.run(steps())
