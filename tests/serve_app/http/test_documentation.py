"""The page `/docs`: everything on it comes from the server, and a policy enforces that."""

from __future__ import annotations

import re

import httpx
import pytest
from starlette.testclient import TestClient

from deployments.options import NO_MODEL, Options
from serve_app.http.documentation import PATHS
from serve_app.http.keys import Caller, Keys, Role
from serve_app.ingress import build_api
from tests.browsers import chromium
from tests.waiting import until

VIOLATIONS = "window.refused = []; addEventListener('securitypolicyviolation', (one) => refused.push(one.blockedURI))"


@pytest.fixture(scope="module")
def keyed():
    """An application with keys, by itself."""
    api = build_api(None, Options(model=NO_MODEL), Keys({b"digest": Caller(Role.USE)}))
    with TestClient(api, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        yield client


def test_the_documentation_loads_nothing_from_another_origin(keyed):
    loaded = re.findall(r'(?:src|href)="([^"]*)"', keyed.get("/docs").text)
    assert {f"/{address}" for address in loaded} == PATHS - {"/docs"}
    for address in loaded:
        assert keyed.get(f"/{address}").status_code == 200


def test_the_documentation_may_run_scripts_of_its_own_server_alone(keyed):
    headers = keyed.get("/docs").headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == "'self'"
    assert headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("name", ["__init__.py", "..%2Fmain.py", "%2e%2e/main.py", "swagger-ui.css%00", "nothing.js"])
def test_no_other_file_comes_with_the_documentation(keyed, name):
    assert keyed.get(f"/docs/{name}", headers={"Authorization": "Bearer none"}).status_code == 401
    api = build_api(None, Options(model=NO_MODEL), Keys())
    with TestClient(api, base_url="http://127.0.0.1") as client:
        assert client.get(f"/docs/{name}").status_code == 404


@pytest.mark.parametrize("path", ["/docs", "/openapi.json", "/v1/models", "/nothing", "/health"])
def test_every_answer_forbids_to_guess_its_type(keyed, path):
    answer = keyed.get(path)  # the last of these is a 500: there are no actors
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_browser_shows_every_route_below_a_prefix_and_refuses_nothing(runs_code):
    with chromium() as browser:
        page = browser.new_page()
        page.add_init_script(VIOLATIONS)
        page.goto(f"{runs_code}/docs")
        page.wait_for_selector(".opblock")
        shown = page.evaluate("[...document.querySelectorAll('.opblock-summary-path')].map((one) => one.dataset.path)")
        assert set(shown) == set(httpx.get(f"{runs_code}/openapi.json", timeout=60).json()["paths"])
        page.click(".opblock-summary-control >> nth=0")  # what it opens is styled, too
        page.wait_for_selector(".opblock-body")
        assert page.evaluate("refused") == []
        page.evaluate("void (document.body.appendChild(document.createElement('script')).textContent = 'var ran = 1')")
        until(lambda: page.evaluate("refused.length") == 1)
        assert page.evaluate("typeof ran") == "undefined"
