"""Download links work once, for a minute, for one download and one user."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from deployments.accounts import Account
from deployments.activations.filters import Choice
from deployments.options import NO_MODEL, Options
from serve_app.api import build_api
from serve_app.http.errors import ApiError
from serve_app.http.keys import Keys
from serve_app.http.links import LASTS_S, MOST_LINKS, SENT_BYTES, Link, Links
from serve_app.http.ranges import PAGE_BYTES, Download

ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789ab"
DATA = "/v1/activations/session/mine/data"
LENGTH = PAGE_BYTES + 3


class Stored:
    """A store in which alice has a session."""

    def __init__(self) -> None:
        self.length = LENGTH
        self.asked: list[Choice] = []

    async def data(self, account: Account, choice: Choice, tag: str | None = None) -> Download:
        if not account.may_read("alice") or choice.session_id != "mine":
            raise ApiError(404, "there is no such session", "session_id", "session_not_found")
        self.asked.append(choice)

        async def read(first: int, end: int) -> bytes:
            assert end - first <= PAGE_BYTES
            return bytes(at % 251 for at in range(first, end))

        return Download("tag", self.length, read)


@pytest.fixture
def stored() -> Stored:
    return Stored()


@pytest.fixture(params=["keys", "no keys"])
def http(request, stored: Stored, tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"use@alice:{ALICE} use@bob:{BOB}")
    keys = Keys.read(str(path)) if request.param == "keys" else Keys()
    backend: Any = stored
    with TestClient(build_api(backend, Options(model=NO_MODEL), keys), base_url="http://127.0.0.1") as client:
        client.headers["Authorization"] = f"Bearer {ALICE}"
        yield client


def has_keys(http: TestClient) -> bool:
    return http.get("/v1/none", headers={"Authorization": ""}).status_code == 401


def linked(http: TestClient, **query: str) -> str:
    answer = http.post(DATA, params=query)
    assert answer.status_code == 200, answer.text
    assert (answer.json()["bytes"], answer.json()["expires_in"]) == (LENGTH, LASTS_S)
    path: str = answer.json()["path"]
    return path


def test_a_link_downloads_once_as_a_whole_and_without_a_key(http, stored, monkeypatch):
    monkeypatch.setattr("serve_app.http.ranges.LONGEST_S", -LENGTH / (1 << 20))  # nobody waits for the client here
    path = linked(http, run="r1", points="norm.output", format="npz")
    del http.headers["Authorization"]
    answer = http.get(path)
    assert answer.status_code == 200
    assert answer.content == bytes(at % 251 for at in range(LENGTH))
    assert answer.headers["content-disposition"] == 'attachment; filename="r1.npz"'
    assert answer.headers["content-length"] == str(LENGTH)
    assert stored.asked[-1] == Choice("mine", ("r1",), ("norm.output",), "npz")
    again = http.get(path)
    assert (again.status_code, again.json()["error"]["code"]) == (404, "link_not_found")


def test_a_link_opens_nothing_else(http):
    path = linked(http)
    token = path.rpartition("/")[2]
    assert http.get(f"{path[:-1]}{'A' if path[-1] != 'A' else 'B'}").status_code == 404
    if has_keys(http):
        for other in (DATA, "/v1/activations/sessions", f"{path}/more", path[:-1]):
            assert http.get(other, headers={"Authorization": f"Bearer {token}"}).status_code == 401
            assert http.get(other, params={"token": token}, headers={"Authorization": ""}).status_code == 401
    assert http.post(path).status_code in (404, 405)


def test_nobody_makes_a_link_to_what_they_may_not_read(http):
    answer = http.post(DATA, headers={"Authorization": f"Bearer {BOB}"})
    if has_keys(http):
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_not_found")
    else:
        assert answer.status_code == 200  # nothing has an owner


def test_what_is_too_large_for_a_link_is_refused_before_it_begins(http, stored):
    stored.length = SENT_BYTES + 1
    answer = http.post(DATA)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "link_too_large")
    assert "in pages" in answer.json()["error"]["message"]


@pytest.fixture
def clock():
    """Seconds, which a test sets as `clock[0]`."""
    return [0.0]


@pytest.fixture
def links(clock) -> Links:
    return Links(clock=lambda: clock[0])


def of(owner: str) -> Link:
    return Link(Account(owner, is_admin=False), Choice("mine"), "tag")


def code(act, *args: Any) -> tuple[int, str | None]:
    with pytest.raises(ApiError) as refused:
        act(*args)
    return refused.value.status, refused.value.code


def test_a_link_ends_after_a_minute(links, clock):
    first, second = links.make(of("alice")), links.make(of("alice"))
    clock[0] = LASTS_S - 1
    assert links.take(first) == of("alice")
    clock[0] = LASTS_S
    assert code(links.take, second) == (404, "link_not_found")


def test_an_owner_has_so_many_links_and_no_owner_takes_anothers_place(links, clock):
    tokens = [links.make(of("alice")) for _ in range(MOST_LINKS)]
    assert len(set(tokens)) == MOST_LINKS
    assert code(links.make, of("alice")) == (429, "server_busy")
    links.make(of("bob"))
    links.take(tokens[3])
    links.make(of("alice"))
    assert code(links.make, of("alice")) == (429, "server_busy")
    clock[0] = LASTS_S
    links.make(of("alice"))
