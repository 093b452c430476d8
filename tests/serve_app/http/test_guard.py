"""Which requests are accepted, by Host, Origin, forwarding headers, keys and the type of the body."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from deployments.options import Options
from serve_app.http.guard import Guard
from serve_app.http.keys import Caller, Keys, Role
from serve_app.http.middleware import Limits

NO_KEYS = Keys()
KEYS = Keys({b"digest": Caller(Role.USE, "alice")})
HOME = {"host": "127.0.0.1:8000"}
EVIL = "evil.example:8000"


async def answers(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that says yes."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b'{"error": {"code": null, "message": ""}}'})


def asked(headers: dict[str, str], keys: Keys = NO_KEYS, path: str = "/v1/models", **options: Any) -> tuple[int, Any]:
    """The status and error code of a request with these headers; nobody may read its body."""
    said: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("the body was read")

    async def send(message: Any) -> None:
        said.append(message)

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": path, "root_path": "", "headers": raw}
    limited = Options(max_client_store_bytes=32_000, **options)
    asyncio.run(Limits(Guard(answers, limited, keys), limited)(scope, receive, send))
    return said[0]["status"], json.loads(said[1]["body"])["error"]["code"]


PASSED, HOST, ORIGIN = (200, None), (403, "host_not_allowed"), (403, "origin_not_allowed")


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "LOCALHOST:8000", "[::1]:8000", "127.8.9.1"])
def test_without_keys_this_machines_own_names_are_answered(host):
    assert asked({"host": host}) == PASSED


@pytest.mark.parametrize(
    "host", [EVIL, "10.0.0.7", "localhost.evil.example", "127.0.0.1.evil.example", "", "[::", "a:b"]
)
def test_without_keys_no_other_name_is_answered(host):
    assert asked({"host": host}) == HOST
    assert asked({}) == HOST


def test_a_name_that_the_operator_allows_is_answered():
    assert asked({"host": "lab.example:8000"}, allowed_hosts="gpu.example, Lab.Example") == PASSED
    assert asked({"host": EVIL}, allowed_hosts="lab.example") == HOST
    assert asked({"host": EVIL}, allowed_hosts="*") == PASSED
    assert asked({"host": "lab.example"}, public_url="https://lab.example/vitrine") == PASSED


def test_an_open_server_answers_by_any_address_but_by_no_name_that_a_website_could_own():
    assert asked({"host": "10.0.0.7:8000"}, open=True) == PASSED
    assert asked({"host": "[fd00::7]:8000"}, open=True) == PASSED
    assert asked({"host": EVIL}, open=True) == HOST


@pytest.mark.parametrize(
    "forwarded",
    [
        {"x-forwarded-host": "lab.example"},
        {"x-forwarded-for": "203.0.113.5"},
        {"x-real-ip": "203.0.113.5"},
        {"forwarded": "by=unknown"},
        {"via": "1.1 proxy"},
        {"x-forwarded-host": "localhost:3000", "x-forwarded-for": "127.0.0.1"},  # the client may have chosen both
        {"x-forwarded-port": ""},
    ],
    ids=str,
)
def test_without_keys_what_a_proxy_passes_on_is_refused(forwarded):
    assert asked(HOME | forwarded) == HOST
    assert asked(HOME | forwarded, allowed_hosts="lab.example") == HOST  # the proxy must send the name as Host
    assert asked({"host": "10.0.0.7"} | forwarded, open=True) == HOST
    assert asked(HOME | forwarded, KEYS)[0] == 401
    assert asked(HOME | forwarded, path="/health") == PASSED


@pytest.mark.parametrize(
    "options", [{"allowed_hosts": "lab.example"}, {"public_url": "https://lab.example/v"}], ids=str
)
def test_without_keys_a_proxy_may_pass_on_what_is_for_a_name_that_the_operator_allows(options):
    proxied = {"host": "lab.example", "x-forwarded-for": "203.0.113.5", "via": "1.1 proxy"}
    assert asked(proxied, **options) == PASSED
    assert asked(proxied | {"host": "other.example"}, **options) == HOST


@pytest.mark.parametrize("options", [{"allowed_hosts": "localhost"}, {"public_url": "http://127.0.0.1:8000"}], ids=str)
def test_to_allow_this_machines_own_names_allows_no_proxy(options):
    assert asked({"host": "localhost:8000", "x-forwarded-for": "203.0.113.5"}, **options) == HOST


@pytest.mark.parametrize("keys", [NO_KEYS, KEYS], ids=["open", "keyed"])
@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1:9000", "http://[", ""])
def test_no_page_of_another_origin_is_answered(keys, origin):
    assert asked(HOME | {"origin": origin}, keys) == ORIGIN
    assert asked({"host": EVIL, "origin": f"http://{EVIL}"}) == HOST  # a name of the website's that leads here


def test_pages_of_the_server_itself_and_of_allowed_origins_are_answered():
    assert asked(HOME | {"origin": "http://127.0.0.1:8000"}) == PASSED
    assert asked(HOME | {"origin": "http://app.example"}, cors_origins="http://app.example") == PASSED
    assert asked(HOME | {"origin": "https://lab.example"}, public_url="https://lab.example/vitrine") == PASSED


@pytest.mark.parametrize("given", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_what_a_page_may_send_unasked_is_refused_before_it_is_read(given):
    sent = HOME | {"content-type": given}
    for length in ({"content-length": "10"}, {"transfer-encoding": "chunked"}):
        for path in ("/v1/chat/completions", "/v1/tensors", "/models/unload"):
            assert asked(sent | length, path=path) == (400, "invalid_value")


@pytest.mark.parametrize("given", ["application/json; charset=utf-8", "Application/JSON", "application/problem+json"])
def test_json_by_other_names_is_json(given):
    assert asked(HOME | {"content-type": given, "content-length": "10"}) == PASSED


def test_headers_without_end_are_refused_before_anything_is_made_of_them(served):
    answer = httpx.get(f"{served.root}/health", headers={"X-Forwarded-For": "127.0.0.1," * 10_000}, timeout=60)
    assert answer.status_code in (400, 431)  # the proxy may have a limit of its own


def test_a_body_that_says_it_is_too_large_is_refused_before_it_is_read():
    sent = HOME | {"content-type": "application/json", "content-length": str((2 << 20) + 1)}
    assert asked(sent, path="/v1/chat/completions") == (413, "body_too_large")
    sent = HOME | {"content-type": "application/octet-stream", "content-length": "2001"}
    assert asked(sent, path="/v1/tensors") == (413, "tensor_too_large")


@pytest.mark.parametrize("options", [{"allowed_hosts": "http://a.example"}, {"allowed_hosts": "a.example:80"}])
def test_an_allowed_host_is_a_name_without_a_port(options):
    with pytest.raises(ValueError, match="host"):
        Options(**options)


# ---- the attack itself, on a server


REBOUND = {"Host": EVIL, "Origin": f"http://{EVIL}"}
PASSED_ON = {"Host": "127.0.0.1", "X-Forwarded-For": "203.0.113.5", "X-Forwarded-Host": "lab.example"}


@pytest.mark.parametrize("headers", [REBOUND, PASSED_ON], ids=["a name that leads here", "a proxy here"])
def test_a_server_without_keys_opens_to_no_website_and_to_nobody_behind_a_proxy(served, headers):
    for method, path in (("POST", "/models/load"), ("GET", "/openapi.json"), ("GET", "/metrics")):
        answer = httpx.request(method, served.root + path, headers=headers, json={"model_id": "a/b"}, timeout=60)
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "host_not_allowed"
        assert "allowed_hosts" in answer.json()["error"]["message"]
