"""Written files are readable by their user alone, unless the operator's directory allows more."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save

from deployments.activations.__main__ import main as stored
from deployments.activations.actors.store import ActivationStore
from deployments.exposure import make_private
from deployments.options import Options
from deployments.permissions import private_directory
from deployments.replica.monitoring import MonitorLog
from evals.gsm8k.__main__ import main as evaluate
from serve_app.lifecycle import check_free

TENSORS = save({"formal": torch.ones(4)})
BYTES = {"content-type": "application/octet-stream"}
OTHERS = stat.S_IRWXG | stat.S_IRWXO
PRESET = {"name": "quiet", "model": "vitrine-demo", "capture": {"points": ["norm.output"]}}


def modes(top: Path) -> dict[str, int]:
    """By path below a directory, the permissions of what is there."""
    return {str(path.relative_to(top)): stat.S_IMODE(path.lstat().st_mode) for path in top.rglob("*")}


def fill(root: str) -> None:
    """Have a server write all that clients can make it write."""
    chat = {"model": "vitrine-demo", "prompt": "Tom has", "max_tokens": 2, "store_activations": True}
    asked = [
        httpx.post(f"{root}/v1/completions", json=chat | {"session_id": "seen"}, timeout=60),
        httpx.post(f"{root}/v1/tensors", content=TENSORS, headers=BYTES, timeout=60),
        httpx.post(f"{root}/v1/interventions", json=PRESET, timeout=60),
        httpx.put(f"{root}/v1/activations/session/seen/pin", timeout=60),
    ]
    assert [answer.status_code for answer in asked] == [200] * 4, [answer.text for answer in asked]


@pytest.fixture(autouse=True)
def usual_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.long  # one more server and an evaluation
def test_nobody_else_reads_what_a_server_an_evaluation_and_the_commands_wrote(another_app, tmp_path):
    home = tmp_path / "home"
    activations = home / "activations"

    def run(main: Callable[[list[str]], int], *arguments: str | Path) -> None:
        os.umask(0o022)  # each command sets its own
        assert main([str(argument) for argument in arguments]) == 0

    with another_app("private", f"activations_dir={activations}", "threads=1") as root:
        fill(root)
        evaluation = ["--base-url", f"{root}/v1", "--samples=2", "--mode=no-tools", "--max-tokens=8"]
        run(evaluate, *evaluation, "--collect-activations", "--results-dir", home / "results" / "one")
        run(stored, "pull", root, "seen", "--dir", home / "pulled")
    for form in ("safetensors", "hf"):
        run(stored, "export", home / form, "--format", form, "--dir", activations)
    written = modes(tmp_path)
    assert len(written) > 30
    assert {path: oct(mode) for path, mode in written.items() if mode & OTHERS} == {}


def test_a_fresh_home_is_private_whoever_makes_a_part_of_it_first(tmp_path, monkeypatch):
    home = tmp_path / "new" / "home"
    monkeypatch.setenv("VITRINE_HOME", str(home))
    check_free("127.0.0.1", 0, Options())  # as `serve run`, before the store's actor begins
    private_directory(home / "models")
    store = ActivationStore(str(home / "activations"))
    asyncio.run(store.client_data("presets", "put", PRESET))
    os.umask(0o022)  # a replica's process
    MonitorLog(str(home / "monitors"), "m").close()
    written = modes(tmp_path)
    assert {".presets", "index", "monitors", ".lock"} <= {Path(path).name for path in written}
    assert {path: oct(mode) for path, mode in written.items() if mode & OTHERS} == {}


def test_a_store_that_every_user_can_read_is_a_warning_with_the_command_that_mends_it(tmp_path, caplog):
    tmp_path.chmod(0o755)
    check_free("127.0.0.1", 0, Options(activations_dir=str(tmp_path)))
    assert f"chmod -R go= {tmp_path}" in caplog.text


def test_a_directory_that_is_open_to_a_group_holds_what_the_group_reads(small_store):
    root, activations = small_store
    fill(root)
    written = modes(activations)
    assert written.pop(".lock") & OTHERS == 0
    for path, mode in written.items():
        assert mode & OTHERS == (0o050 if (activations / path).is_dir() else 0o040), path
    assert any(path.endswith(".arrow") for path in written)
    assert any(path.endswith(".json") for path in written)


def test_rays_token_is_taken_from_everybody_else(tmp_path):
    token = tmp_path / "auth_token"
    make_private(token)  # Ray need not have made one
    token.write_text("secret")
    make_private(token)
    assert stat.S_IMODE(token.stat().st_mode) == 0o600


def test_a_token_elsewhere_or_of_another_user_stays_as_it_is(tmp_path):
    elsewhere, link, others = (tmp_path / name for name in ("elsewhere", "link", "others"))
    elsewhere.write_text("mounted")
    link.symlink_to(elsewhere)
    make_private(link)
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o644
    others.write_text("another's")
    try:
        os.chown(others, os.geteuid() + 1, -1)
    except PermissionError:
        pytest.skip("only root can make another user's file")
    make_private(others)
    assert stat.S_IMODE(others.stat().st_mode) == 0o644
