"""The server of `--serve`: an existing one is recognized and used, else one is started and stopped."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import ray
from ray._raylet import Config as RayConfig  # type: ignore[attr-defined]

from deployments.options import Options
from evals.config import Config, EvalError
from evals.server.recognition import FoundServer, NotReady, check_asked, look
from evals.server.server_record import place_of, read_record, record_path

HOST = "serve_app.hosting"  # a program: the evaluator itself reaches the server only over HTTP
LOG = "server.log"
START_S = 600.0  # the longest that a server may take to start
STOP_S = 120.0  # the longest that one may take to end what runs
LINES = 20  # of the log, where something failed


@contextmanager
def serving(config: Config) -> Iterator[Config]:
    """The server that a run asks for, while the block runs; gives the run's options with its port and its model.

    A server that is there is used, and left there, if it is what was asked for. Without `serve` this does nothing.

    Raises:
        EvalError: Something else is there, or the server did not start; with the reason and its log's last lines.
    """
    if not config.serve:
        yield config
        return
    config = _with_place(config)
    if _use(config):
        with _joined(config):
            yield config
        return
    process = _start(config)
    is_healthy = stays = False
    try:
        began = time.monotonic()
        wait(config, START_S, config.served.served_name, process)
        _say(f"healthy after {time.monotonic() - began:.0f} s")
        is_healthy = True
        stays = config.keep_running
        with _joined(config):
            yield config
    finally:
        if stays:
            _say(f"{config.serve} still runs at {config.base_url}; stop it with: kill {process.pid}")
        else:
            if is_healthy and process.poll() is not None:  # else that is what is raised
                _say(f"the server had exited with status {process.returncode}{tail_of(config)}")
            _end(psutil.Process(process.pid) if process.poll() is None else None)
            process.wait()
            _say("the server is stopped")
        assert process.stdin
        process.stdin.close()


def _use(config: Config) -> bool:
    """Whether a server is there that is the one asked for; waits until its model is loaded."""
    found = wait(config, START_S)
    if found is None:
        return False
    record = read_record(config.base_url, _say)
    check_asked(found, config.base_url, config.served.served_name)
    if record is None and config.server_options:
        raise EvalError(
            f"{config.base_url} was not started by --serve, so its options are not known; "
            "leave --server-option out to use it as it is, or give another --base-url"
        )
    if record is not None and (differing := _differing(record.options, config.served)):
        raise EvalError(f"{config.base_url} was started with other options: {differing}; stop it: kill {record.pid}")
    wait(config, START_S, config.served.served_name)
    _say(f"using the server at {config.base_url}: Vitrine {found.version} with {config.serve}")
    return True


def _start(config: Config) -> subprocess.Popen[str]:
    host, port = place_of(config.base_url)
    _free_port(host)
    record = record_path(config.base_url)
    try:
        record.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        record.unlink(missing_ok=True)  # of a server that was here before
    except OSError as error:
        raise EvalError(f"the server's record cannot be written: {error}") from error
    config.results_dir.mkdir(parents=True, exist_ok=True)
    log = config.results_dir / LOG
    plan = {
        "host": host,
        "port": port,
        "options": config.served.model_dump(mode="json"),
        "record": str(record),
        "attached": not config.keep_running,
    }
    _say(f"starting {config.serve} at {config.base_url}; its log is {log}")
    with log.open("ab") as out:
        # A session of its own: Ctrl-C is for the evaluator, which then stops the server.
        process = subprocess.Popen(
            [sys.executable, "-m", HOST],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            text=True,
            start_new_session=True,
        )
    assert process.stdin
    process.stdin.write(json.dumps(plan) + "\n")  # not an argument: the store's URI may hold a key
    process.stdin.flush()
    return process


def wait(
    config: Config, limit_s: float, model: str | None = None, process: subprocess.Popen[str] | None = None
) -> FoundServer | None:
    """The Vitrine server of a run, as soon as it can say what it is and the model can answer; None where nothing is.

    Args:
        config: the options, with the server's URL.
        limit_s: seconds for which it is waited for.
        model: the model; an empty name stands for any, None for none.
        process: the server, where it was started here. It has then written its record, too.

    Raises:
        EvalError: something else is there, or it takes longer; with the last lines of its log.
    """
    end, last = time.monotonic() + limit_s, "nothing answers"
    while True:
        if process and process.poll() is not None:
            raise EvalError(
                f"the server exited with status {process.returncode} before it was healthy{tail_of(config)}"
            )
        try:
            # Before its record is there, what is being started cannot say what it is.
            found = look(config.base_url) if process is None or read_record(config.base_url) else None
            if model is None or (found and found.is_ready(model)):
                return found
            last = f"{model or 'no model'} is {'not ' if model else ''}loaded" if found else last
        except EvalError as error:
            if config.serve and not isinstance(error, NotReady):
                raise  # a server is to start there; else a proxy may answer before the server does
            last = str(error)
        if time.monotonic() > end:
            log = tail_of(config) if process else ""
            raise EvalError(f"{config.base_url} was not healthy within {limit_s:g} s: {last}{log}")
        time.sleep(0.5)


@contextmanager
def _joined(config: Config) -> Iterator[None]:
    """In the block, Ray's variables name the cluster of a server that `--serve` started."""
    record = read_record(config.base_url)
    if record is None:
        yield
        return
    is_member = ray.is_initialized()
    before = {name: os.environ.get(name) for name in ("RAY_ADDRESS", "RAY_AUTH_MODE")}
    _set({"RAY_ADDRESS": record.ray_address, "RAY_AUTH_MODE": record.ray_auth_mode})
    try:
        yield
    finally:
        if not is_member:
            ray.shutdown()  # a cluster that ends takes its drivers with it
        _set(before)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    RayConfig.initialize("")  # it read them when Ray was imported


def _end(process: psutil.Process | None) -> None:
    """Ask a server to end; past its time, end it and what it started."""
    if process is None:
        return
    members = [process, *process.children(recursive=True)]
    process.send_signal(signal.SIGTERM)
    _, left = psutil.wait_procs([process], timeout=STOP_S)
    if left:
        _say(f"the server did not stop within {STOP_S:g} s; killing it")
        for member in members:
            if member.is_running():
                member.kill()
        psutil.wait_procs(members, timeout=STOP_S)


def tail_of(config: Config) -> str:
    """The last lines of the log of the server that a run has started, as the end of a message; else nothing."""
    log = config.results_dir / LOG
    if not config.serve or not log.exists():
        return ""
    lines = log.read_text(errors="replace").splitlines()[-LINES:]
    return f"; the last lines of {log}:\n" + "\n".join(lines)


def _differing(there: Options, asked: Options) -> str:
    pairs = asked.model_dump()
    return ", ".join(f"{name} is {value!r}" for name, value in there.model_dump().items() if value != pairs[name])


def _with_place(config: Config) -> Config:
    """The options with the model's id, and a free port in the place of port 0."""
    host, port = place_of(config.base_url)
    model = config.served.served_name
    if config.model not in ("", model):
        raise EvalError(f"--serve serves {model}, but --model is {config.model}")
    base_url = config.base_url if port else f"http://{host}:{_free_port(host)}/v1"
    return config.model_copy(update={"base_url": base_url, "model": model})


def _free_port(host: str) -> int:
    """A port that nothing listens on now.

    Raises:
        EvalError: The host is not this machine.
    """
    try:
        with socket.socket() as probe:
            probe.bind((host, 0))
            return int(probe.getsockname()[1])
    except OSError as error:
        raise EvalError(
            f"--serve: nothing answers at {host}, which is not an address of this machine: {error}"
        ) from error


def _say(text: str) -> None:
    print(f"evals.gsm8k: {text}", flush=True)
