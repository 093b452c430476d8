"""`--serve` on a Ray of its own: what is started is stopped, what is there is used or left alone."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil
import pytest

from deployments import __version__
from evals.gsm8k.__main__ import main
from evals.server.recognition import look
from tests.waiting import EACH_S
from vitrine.own_server import free_port

Write = Callable[..., Path]
ROOT = Path(__file__).parents[3]


pytestmark = pytest.mark.server


class HookSite(NamedTuple):
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
    def process(self) -> psutil.Process:
        (record,) = (self.results / "home" / "servers").glob("*.json")
        return psutil.Process(json.loads(record.read_text())["pid"])


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`refusal(place, name, *options)`: why a run that asks for `--serve` has no server; in this process."""

    def refused(where: HookSite, name: str, *options: str) -> str:
        for variable in ("VITRINE_HOME", "RAY_ADDRESS", "PYTHONPATH", "HF_HUB_OFFLINE"):
            monkeypatch.setenv(variable, where.env[variable])
        assert main([*where.arguments(name), *SHORT, *options]) == 2
        return capsys.readouterr().err

    return refused


def place(directory: Path) -> HookSite:
    inherited = ("RAY_ADDRESS", "OPENAI_API_KEY")
    env = {name: value for name, value in os.environ.items() if name not in inherited}
    env |= {
        "RAY_ADDRESS": "local",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VITRINE_HOME": str(directory / "home"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }
    return HookSite(f"http://127.0.0.1:{free_port()}/v1", env, directory)


SHORT = ["--samples", "2", "--max-tokens", "16", "--mode", "no-tools"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HookSite]:
    """A server that `--keep-running` left."""
    where = place(tmp_path_factory.mktemp("kept"))
    done = where.run("first", "--keep-running", *SHORT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"vitrine-demo still runs at {where.base_url}; stop it with: kill {where.process.pid}" in done.stdout
    yield where
    if look(where.base_url):
        process = where.process
        process.terminate()
        process.wait(60)
    assert not list((where.results / "home" / "servers").glob("*.json"))


@pytest.mark.long
def test_a_run_uses_the_server_that_is_there_and_leaves_it(kept: HookSite) -> None:
    before = kept.process
    done = kept.run("second", *SHORT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"using the server at {kept.base_url}: Vitrine {__version__} with vitrine-demo" in done.stdout
    assert kept.process == before
    found = look(kept.base_url)
    assert found
    assert found.is_ready("vitrine-demo")


@pytest.mark.long
def test_a_server_with_other_options_is_not_used(kept: HookSite, refusal: Callable[..., str]) -> None:
    said = refusal(kept, "third", "--server-option", "max_running=3")
    assert f"was started with other options: max_running is 64; stop it: kill {kept.process.pid}" in said


@pytest.mark.long
def test_a_server_with_another_model_is_not_used(kept: HookSite, refusal: Callable[..., str]) -> None:
    said = refusal(kept, "fourth", "--serve", "another/model")
    assert "serves vitrine-demo, not another/model" in said


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
    said = b""
    while b"no-tools:" not in said:  # the bar of the run
        piece = os.read(process.stdout.fileno(), 4096)
        assert piece, said.decode()
        said += piece
    process.send_signal(signal.SIGTERM)
    said += process.communicate(timeout=180)[0]
    assert process.returncode != 0
    assert b"the server is stopped" in said
    assert look(where.base_url) is None
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
    assert look(where.base_url) is None


def test_a_server_that_cannot_start_ends_with_the_reason_of_its_log(
    cluster: Any, served: Any, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    where = place(tmp_path)
    where.env["RAY_ADDRESS"] = cluster.address  # where Serve listens at another port
    said = refusal(where, "run")
    assert f"the last lines of {tmp_path}/run/server.log" in said
    assert f"listens at port {urlsplit(served.root).port}" in said.partition("the last lines of")[2]
    assert look(where.base_url) is None


@pytest.mark.long
def test_a_model_that_is_none_ends_with_the_reason_of_the_log(tmp_path: Path) -> None:
    where = place(tmp_path)
    done = where.run("run", "--serve", "/no/such/directory", *SHORT)
    assert done.returncode == 2
    assert f"the last lines of {tmp_path}/run/server.log" in done.stderr
    assert "/no/such/directory" in done.stderr.partition("the last lines of")[2]
    assert look(where.base_url) is None


def test_a_stranger_that_answers_200_to_all_is_neither_used_nor_stopped(
    tmp_path: Path, refusal: Callable[..., str]
) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"status": "ok", "loaded_models": ["vitrine-demo"]}')

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(EACH_S,))
        thread.start()
        where = place(tmp_path)._replace(base_url=f"http://127.0.0.1:{server.server_port}/v1")
        assert "answers, but is no Vitrine server" in refusal(where, "run")
        server.shutdown()
        thread.join()


def test_a_server_that_serve_did_not_start_has_no_known_options(
    served: Any, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    where = place(tmp_path)._replace(base_url=served.base_url)
    assert "its options are not known" in refusal(where, "run", "--server-option", "max_running=64")
    assert look(served.base_url)
