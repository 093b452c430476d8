"""The files of the page `/`: open to every browser, from the server alone, which a policy enforces."""

from __future__ import annotations

import re

import pytest
from starlette.testclient import TestClient

from deployments.options import NO_MODEL, Options
from serve_app.http.keys import Caller, Keys, Role
from serve_app.http.page_files import FOLDER, PATHS, VERSION
from serve_app.ingress import build_api

FILES = f"/page/{VERSION}"


def client() -> TestClient:
    """An application with keys, by itself."""
    api = build_api(None, Options(model=NO_MODEL), Keys({b"digest": Caller(Role.USE)}))
    return TestClient(api, base_url="http://127.0.0.1", raise_server_exceptions=False)


def test_every_file_comes_without_a_key_and_under_the_policy():
    with client() as http:
        for path in PATHS - {""}:
            answer = http.get(path)
            assert answer.status_code == 200, path
            policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
            assert policy["default-src"] == policy["frame-ancestors"] == policy["trusted-types"] == "'none'"
            assert policy["script-src"] == policy["connect-src"] == policy["style-src"] == "'self'"
            assert answer.headers["x-frame-options"] == "DENY"
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert ("immutable" in answer.headers["cache-control"]) == (path != "/")
        answer = http.get("/")
        assert http.get("/", headers={"If-None-Match": answer.headers["etag"]}).status_code == 304


def test_each_version_of_the_files_has_addresses_of_its_own():
    with client() as http:
        named = re.findall(r'(?:src|href)="(page/[^"]+)"', http.get("/").text)
        assert named
        assert all(f"/{one}" in PATHS for one in named)
        assert http.get("/page/main.js").status_code == http.get("/page/0/main.js").status_code == 401


def test_the_page_names_no_other_origin_and_makes_no_markup():
    for path in FOLDER.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text), path.name
        assert not re.search(r"<script>|<style|\son\w+=\"|style=\"", text), path.name


def test_the_page_loads_what_it_names():
    for path in FOLDER.glob("*.js"):
        for name in re.findall(r'from "\./([^"]+)"|import\("?\./([^")]+)"', path.read_text()):
            assert (FOLDER / "".join(name)).is_file(), path.name
    for name in re.findall(r'(?:src|href)="page/([^"]+)"', (FOLDER / "index.html").read_text()):
        assert (FOLDER / name).is_file()


@pytest.mark.parametrize("name", ["index.html", "..%2Fguard.py", "%2e%2e/guard.py", "style.css%00", "nothing.js"])
def test_no_other_file_comes_with_it(name):
    with client() as http:
        assert http.get(f"{FILES}/{name}").status_code == 401
    api = build_api(None, Options(model=NO_MODEL), Keys())
    with TestClient(api, base_url="http://127.0.0.1") as http:
        assert http.get(f"{FILES}/{name}").status_code == 404


def test_below_a_prefix_an_address_without_its_slash_leads_to_the_one_with_it():
    with client() as http:
        http.app.root_path = "/prefix"
        answer = http.get("/prefix", follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (307, "http://127.0.0.1/prefix/")


@pytest.mark.parametrize("headers", [{"host": "evil.example"}, {"origin": "http://evil.example"}], ids=str)
def test_the_page_is_guarded_like_every_route(headers):
    api = build_api(None, Options(model=NO_MODEL), Keys())
    with TestClient(api, base_url="http://127.0.0.1") as http:
        assert http.get("/", headers=headers).status_code == 403
        assert http.get(f"{FILES}/main.js", headers=headers).status_code == 403
