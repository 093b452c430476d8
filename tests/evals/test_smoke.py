"""`--smoke` follows one captured request to its deletion, or says where it ends."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_openai import FakeServer

from evals.gsm8k import main


def sessions(served: Any) -> list[str]:
    found = httpx.get(f"{served.base_url}/activations/sessions", params={"limit": 1000}).json()["data"]
    return [session["id"] for session in found if session["id"].startswith("smoke-")]


def test_one_request_goes_all_the_way_and_leaves_nothing(
    served: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--base-url", served.base_url, "--results-dir", str(tmp_path / "results")]
    assert main([*options, "--smoke"]) == 0
    said = capsys.readouterr().out
    steps = [line.split()[1] for line in said.splitlines() if line.startswith("smoke: ")]
    assert steps == ["completion", "stored", "read", "deleted", "all"]
    assert sessions(served) == []


def test_the_points_that_are_named_are_the_ones_that_are_checked(
    served: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--base-url", served.base_url, "--results-dir", str(tmp_path / "results"), "--collect-activations"]
    assert main([*options, "--points", "layers.*.output,norm.output", "--smoke"]) == 0
    assert " 7 points" in capsys.readouterr().out
    assert main([*options, "--points", "layers.99.output", "--smoke"]) == 2
    assert "smoke: completion: /v1/chat/completions: HTTP 400" in capsys.readouterr().err


def test_a_server_that_stores_nothing_fails_with_the_step_and_the_reason(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["--base-url", server.base_url, "--results-dir", str(tmp_path / "results"), "--smoke"])
    assert code == 2
    assert "evals.gsm8k: smoke: " in capsys.readouterr().err
