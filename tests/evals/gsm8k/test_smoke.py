"""`--smoke` follows one captured request to its deletion, or says where it ends."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fake_openai import FakeServer
from stored import Store, points

from deployments.points.patterns import Patterns
from evals.gsm8k.__main__ import main


def sessions(served: Any) -> list[str]:
    answer = httpx.get(f"{served.base_url}/activations/sessions", params={"limit": 1000}, timeout=60)
    return [session["id"] for session in answer.json()["data"] if session["id"].startswith("smoke-")]


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
    assert "smoke: completion: HTTP 400" in capsys.readouterr().err


def test_a_server_that_stores_nothing_fails_with_the_step_and_the_reason(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["--base-url", server.base_url, "--results-dir", str(tmp_path / "results"), "--smoke"])
    assert code == 2
    assert "evals.gsm8k: smoke: " in capsys.readouterr().err


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store") as running:
        yield running


def smoke(store: Store, tmp_path: Path) -> int:
    options = ["--base-url", store.base_url, "--model", "fake/model", "--results-dir", str(tmp_path / "results")]
    return main([*options, "--smoke"])


def test_a_pattern_is_as_wide_as_the_run_and_passes(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    patterns = {"layers.0.attention.weights": Patterns(torch.ones(20), 2, range(4))}
    store.chats = lambda: points(1, 4) | patterns
    assert smoke(store, tmp_path) == 0
    assert " 7 points" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (None, "read back: ValueError: the server says that its shape is None"),
        ([], "read back: ValueError: the server says that its shape is []"),
        ([None, 8], "read back: ValueError: the server says that its shape is [None, 8]"),
        ([4, 9], "layers.0.input_layernorm.output is [4, 8] over HTTP, and the answer said [4, 9]"),
        ([4, None], "layers.0.input_layernorm.output is [4, 8] over HTTP, and the answer said [4, None]"),
    ],
)
def test_another_shape_than_the_stored_one_ends_it_with_both(
    store: Store, tmp_path: Path, shape: Any, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def says(meta: dict[str, Any]) -> dict[str, Any]:
        next(iter(meta["runs"][0]["points"].values()))["shape"] = shape
        return meta

    store.says = says
    assert smoke(store, tmp_path) == 2
    assert reason in capsys.readouterr().err
    assert httpx.get(f"{store.base_url}/activations/session/{store.last_session}", timeout=60).status_code == 404


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (None, "the answer has no activations_meta"),
        ({"status": "failed", "reason": "the disk is full"}, "the activations are not stored: the disk is full"),
        ({"status": "pending"}, "the activations are not stored: the answer says 'pending'"),
        (["stored"], "completion: AttributeError"),
    ],
)
def test_what_is_not_stored_ends_it_with_the_servers_reason(
    store: Store, tmp_path: Path, said: Any, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store.says = lambda meta: said
    assert smoke(store, tmp_path) == 2
    assert reason in capsys.readouterr().err


def test_an_answer_that_is_no_file_ends_it_with_the_reason(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.sends = lambda data: bytes(len(data))
    assert smoke(store, tmp_path) == 2
    assert "smoke: read back: ValueError: /activations/session/" in capsys.readouterr().err
