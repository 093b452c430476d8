"""Over HTTP: a full quota costs a request its activations, not its answer; pins hold; no path leaves the store."""

from __future__ import annotations

import http.client
import json
from urllib.parse import quote, urlsplit

import httpx
import pytest
import ray
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployments.activations.actors.store import connect
from deployments.activations.facts import names_a_session
from deployments.activations.limits import Retention

BODY = {"model": "vitrine-demo", "prompt": "Tom has 3.", "max_tokens": 4, "temperature": 0}
CAPTURE = {"points": ["norm.output"]}


@pytest.fixture
def limit(served):
    """`limit(**limits)`: the store keeps to them until the test ends; gives the sessions that were too old."""
    store = connect(str(served.home / "activations"))

    def retain(now=None, **limits):
        return ray.get(store.retain.remote(Retention(**limits), now))

    yield retain
    retain()


@pytest.fixture
def ask(served):
    """`ask(session, **fields)`: the answer to a request that records."""

    def sent(session, **fields):
        body = BODY | {"capture": CAPTURE, "session_id": session} | fields
        return httpx.post(f"{served.base_url}/completions", json=body, timeout=120)

    return sent


def url(served, session, rest=""):
    return f"{served.base_url}/activations/session/{session}{rest}"


def shown(served, session):
    return httpx.get(url(served, session), timeout=60)


def test_at_a_quota_answers_come_without_their_activations_and_say_what_to_do(served, ask, limit):
    assert ask("quota").json()["activations_meta"]["status"] == "stored"
    limit(max_session_bytes=shown(served, "quota").json()["bytes"] + 1000)
    answer = ask("quota").json()
    events = [line.removeprefix("data: ") for line in ask("quota", stream=True).text.split("\n\n") if line]
    assert answer["usage"]["completion_tokens"] == 4
    for meta in (answer["activations_meta"], json.loads(events[-2])["activations_meta"]):
        assert meta["status"] == "failed"
        assert "quota of session quota is reached" in meta["reason"]
        assert "max_session_bytes" in meta["reason"]
    required = {"capture": CAPTURE | {"required": True}}
    refused = ask("quota", **required)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
    assert "quota of session quota is reached" in refused.json()["error"]["message"]
    assert httpx.delete(url(served, "quota"), timeout=60).status_code == 200
    assert ask("quota", **required).json()["activations_meta"]["status"] == "stored"


def test_a_pinned_session_says_so_and_is_deleted_neither_by_request_nor_by_age(served, ask, limit):
    ask("kept")
    assert shown(served, "kept").json()["pinned"] is False
    pin = httpx.put(url(served, "kept", "/pin"), timeout=60)
    assert (pin.status_code, pin.json()) == (200, {"id": "kept", "object": "session", "pinned": True})
    assert shown(served, "kept").json()["pinned"] is True
    page = httpx.get(f"{served.base_url}/activations/sessions", params={"after": "kepS", "limit": 1}, timeout=60).json()
    assert [(one["id"], one["pinned"]) for one in page["data"]] == [("kept", True)]
    refused = httpx.delete(url(served, "kept"), timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_pinned")
    assert "unpin it" in refused.json()["error"]["message"]
    for _ in range(2):
        unpin = httpx.delete(url(served, "kept", "/pin"), timeout=60)
        assert (unpin.status_code, unpin.json()["pinned"]) == (200, False)
    assert httpx.delete(url(served, "kept"), timeout=60).status_code == 200
    for method in ("PUT", "DELETE"):
        answer = httpx.request(method, url(served, "kept", "/pin"), timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_not_found")


ROUTES = [("GET", ""), ("DELETE", ""), ("PUT", "/pin"), ("DELETE", "/pin"), ("GET", "/files/precious.arrow")]
NAMES = [
    "..",
    "../..",
    "../outside",
    "/etc/passwd",
    "..\\outside",
    ".limits.json",
    ".presets",
    ".deleted-1",
    "%2e%2e%2foutside",
]


@settings(suppress_health_check=list(HealthCheck))
@given(
    route=st.sampled_from(ROUTES),
    name=st.one_of(
        st.sampled_from(NAMES),
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40).filter(
            lambda name: not names_a_session(name)
        ),
    ),
    as_path=st.booleans(),
)
def test_no_path_leads_out_of_the_store(served, route, name, as_path):
    root = served.home / "activations"
    root.mkdir(parents=True, exist_ok=True)
    outside = served.home / "outside"
    outside.mkdir(exist_ok=True)
    (outside / "precious.arrow").touch()
    (root / "_").mkdir(exist_ok=True)
    if not (root / "_" / "linked").is_symlink():
        (root / "_" / "linked").symlink_to(outside)
    method, rest = route
    asked = quote(name, safe="/.%" if as_path else "").replace(".", "%2e" if len(name) % 2 else ".")
    for session in (asked, "linked"):
        connection = http.client.HTTPConnection(urlsplit(served.root).netloc, timeout=60)
        connection.request(method, f"/v1/activations/session/{session}{rest}")  # as it is: no client tidies the path
        answer = connection.getresponse()
        assert answer.status in (400, 404, 405), (method, session, answer.read())
        connection.close()
    assert [path.name for path in outside.iterdir()] == ["precious.arrow"]
    assert (root / "_" / "linked").is_symlink()


@pytest.mark.parametrize("session", ["..", "../outside", "%2e%2e%2foutside", "/etc", ".presets", ""])
def test_a_request_that_records_and_a_filter_name_no_other_place_either(served, ask, session):
    answer = ask(session)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "session_id")
    answer = httpx.get(f"{served.base_url}/activations/runs", params={"session": session}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "session")
