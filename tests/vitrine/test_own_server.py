"""Servers that the client starts, and nnsight's own client against one."""

from __future__ import annotations

import importlib.util

import httpx
import pytest

import vitrine
from tests.vitrine.examples import run

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """The server that the docstring of `serve` starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("VITRINE_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        server = run("serve", vitrine.serve, {"vitrine": vitrine})["server"]
    yield server
    server.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url)


@pytest.mark.long  # one more server
def test_nnsight_runs_at_a_server_that_the_client_started(started, monkeypatch):
    import nnsight

    monkeypatch.setattr(nnsight.CONFIG.APP, "REMOTE_LOGGING", False)
    run("nnsight_model", vitrine.nnsight_model, {"vitrine": vitrine, "server": started})


def test_a_server_without_clients_code_says_which_option_allows_it(server):
    with pytest.raises(vitrine.ServerError, match="allow_client_code=true"):
        vitrine.nnsight_model(server)


def test_a_server_that_does_not_start_says_why():
    with pytest.raises(RuntimeError, match="max_runing"):
        vitrine.serve("vitrine-demo", max_runing=2)


def test_without_the_servers_packages_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(
        "vitrine.own_server.find_spec", lambda name: None if name == "ray" else importlib.util.find_spec(name)
    )
    with pytest.raises(ImportError, match=r"\.\[serve\]"):
        vitrine.serve()
