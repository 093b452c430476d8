"""`--serve` on a Ray of its own: what is started is stopped, what is there is used or left alone."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from fake_openai import FakeServer

from deployments import __version__
from evals.gsm8k.__main__ import main
from vitrine.own_server import free_port

ROOT = Path(__file__).parents[3]


pytestmark = pytest.mark.server


class Site(NamedTuple):
    """Where a server of its own stands, and the environment of commands that start or use it."""

    base_url: str
    env: dict[str, str]
    results: Path

    def arguments(self, name: str) -> list[str]:
        where = ["--base-url", self.base_url, "--results-dir", str(self.results / name)]
        return ["--serve", "vitrine-demo", "--server-option", "threads=1", *where]

    def command(self, name: str, *options: str) -> list[str]:
        return [sys.executable, "-m", "evals.gsm8k", *self.arguments(name), *options]

    def run(self, name: str, *options: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self.command(name, *options), env=self.env, cwd=ROOT, capture_output=True, text=True, timeout=300
        )

    @property
    def answers(self) -> bool:
        try:
            return httpx.get(self.base_url.replace("/v1", "/health"), timeout=60).is_success
        except httpx.ConnectError:
            return False

    @property
    def process(self) -> psutil.Process:
        (record,) = (self.results / "home" / "servers").glob("*.json")
        return psutil.Process(json.loads(record.read_text())["pid"])


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`refusal(place, name, *options)`: why a run that asks for `--serve` has no server; in this process."""

    def refused(where: Site, name: str, *options: str) -> str:
        for variable in ("VITRINE_HOME", "RAY_ADDRESS", "PYTHONPATH", "HF_HUB_OFFLINE"):
            monkeypatch.setenv(variable, where.env[variable])
        assert main([*where.arguments(name), *SHORT, *options]) == 2
        return capsys.readouterr().err

    return refused


def place(directory: Path) -> Site:
    inherited = ("RAY_ADDRESS", "OPENAI_API_KEY")
    env = {name: value for name, value in os.environ.items() if name not in inherited}
    env |= {
        "RAY_ADDRESS": "local",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VITRINE_HOME": str(directory / "home"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }
    return Site(f"http://127.0.0.1:{free_port()}/v1", env, directory)


SHORT = ["--samples", "2", "--max-tokens", "16", "--mode", "no-tools"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server that `--keep-running` left."""
    where = place(tmp_path_factory.mktemp("kept"))
    done = where.run("first", "--keep-running", *SHORT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"vitrine-demo still runs at {where.base_url}; stop it with: kill {where.process.pid}" in done.stdout
    written = list(where.results.rglob("*"))
    assert {"home", "activations", "first"} <= {path.name for path in written}
    assert [path for path in written if path.lstat().st_mode & 0o077] == []
    yield where
    if where.answers:
        process = where.process
        process.terminate()
        process.wait(60)
    assert not list((where.results / "home" / "servers").glob("*.json"))


@pytest.mark.long
def test_a_run_uses_the_server_that_is_there_and_leaves_it(kept: Site) -> None:
    before = kept.process
    done = kept.run("second", *SHORT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"using the server at {kept.base_url}: Vitrine {__version__} with vitrine-demo" in done.stdout
    assert kept.process == before
    assert kept.answers


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "given"),
    [
        (["--server-option", "max_running=3"], "max_running is 64"),
        (["--serve", "another/model"], "model is 'vitrine-demo'"),
    ],
)
def test_a_server_with_other_options_is_not_used(
    kept: Site, refusal: Callable[..., str], options: list[str], given: str
) -> None:
    told = refusal(kept, "third", *options)
    assert f"was started with other options: {given}; stop it: kill {kept.process.pid}" in told


@pytest.mark.long
def test_a_server_of_another_version_is_not_used(
    kept: Site, refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evals.server.server_process.__version__", "9.9")
    assert f"other options: version is '{__version__}'; stop it" in refusal(kept, "fourth")


@pytest.mark.long
def test_sigterm_in_the_middle_stops_the_server(tmp_path: Path) -> None:
    where = place(tmp_path)
    process = subprocess.Popen(
        where.command("run", "--mode", "no-tools"),
        env=where.env,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout
    output = b""
    while b"no-tools:" not in output:  # the bar of the run
        piece = os.read(process.stdout.fileno(), 4096)
        assert piece, output.decode()
        output += piece
    process.send_signal(signal.SIGTERM)
    output += process.communicate(timeout=180)[0]
    assert process.returncode != 0
    assert b"stopping the server" in output
    assert not where.answers
    assert (where.results / "run" / "server.log").is_file()


@pytest.mark.long
def test_a_server_goes_with_an_evaluator_that_is_killed(tmp_path: Path, eventually: Callable[..., Any]) -> None:
    where = place(tmp_path)
    process = subprocess.Popen(
        where.command("run", "--dataset", "demo"),
        env=where.env,
        cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # as of a script's background job
    )
    servers = tmp_path / "home" / "servers"
    eventually(lambda: list(servers.glob("*.json")), limit_s=180)
    server = where.process
    process.kill()
    process.wait()
    eventually(lambda: not server.is_running() and not list(servers.glob("*.json")), limit_s=120)
    assert not where.answers


def test_a_server_that_cannot_start_ends_with_the_reason_of_its_log(
    cluster: Any, served: Any, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    where = place(tmp_path)
    where.env["RAY_ADDRESS"] = cluster.address  # where Serve listens at another port
    log = refusal(where, "run").partition("the end of its log:")[2]
    assert f"listens at port {urlsplit(served.root).port}" in log
    assert not where.answers


@pytest.mark.long
def test_a_model_that_is_none_ends_with_the_reason_of_the_log(tmp_path: Path) -> None:
    where = place(tmp_path)
    done = where.run("run", "--serve", "/no/such/directory", *SHORT)
    assert done.returncode == 2
    assert "/no/such/directory" in done.stderr.partition("the end of its log:")[2]
    assert not where.answers


def test_a_server_that_serve_did_not_start_is_neither_used_nor_stopped_and_gets_no_key(
    server: FakeServer, tmp_path: Path, refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    where = place(tmp_path)._replace(base_url=server.base_url)
    records = tmp_path / "home" / "servers"
    records.mkdir(parents=True)
    file = records / f"127.0.0.1-{server.port}.json"
    for record in ('{"pid": 12', json.dumps({"pid": os.getpid(), "created": 1.0}), json.dumps({"pid": 1 << 22})):
        file.write_text(record)  # of no server that runs
        assert f"{server.base_url} answers (HTTP 200" in refusal(where, "run")
    assert server.keys == {None}
    assert not (tmp_path / "run").exists()
