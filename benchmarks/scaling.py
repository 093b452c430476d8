"""Measure how replicas scale behind one ingress, and the cost of the ingress and the proxy.

Replicas of the bundled model wait in each step as if a device computed, so that many fit on few cores. A client sends
its next request after each response. Rates are measured in a window in which all clients are busy. The processor time
of the ingress and of Serve's proxy in that window gives the load that one core of each carries.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import psutil
import ray
from ray import serve
from ray.serve import Application

from benchmarks.common.harness import Findings, Run, parser
from deployments.clusters import ON_HEAD, join
from deployments.options import DEMO, Options
from deployments.replica.replica import ModelReplica
from deployments.serve_actors import environment
from serve_app.backend.served_model import DEPLOYMENT
from serve_app.http.keys import Keys
from serve_app.ingress import Ingress
from vitrine.own_server import free_port

ACTORS = {"ingress": "Ingress", "proxy": "ProxyActor"}  # part of a process's title
KINDS = ("whole", "streamed")
SIZES = ((1, "whole"), (64, "streamed"))  # new tokens of requests whose processor time is measured
WARM_S = 10.0  # until every client has had an answer


class WaitingReplica(ModelReplica.func_or_class):  # type: ignore[name-defined, misc]
    """A replica whose steps take a given time more."""

    def __init__(self, options: Options, step_s: float) -> None:
        super().__init__(options)
        runner = self._engine._runner
        launch: Callable[..., Any] = runner.launch

        def launched(*args: Any) -> Any:
            time.sleep(step_s)
            return launch(*args)

        runner.launch = launched


def application(options: Options, step_s: float) -> Application:
    """The ingress with such replicas."""
    replica = serve.deployment(WaitingReplica).options(  # type: ignore[attr-defined]
        name=DEPLOYMENT,
        num_replicas=options.num_replicas,
        max_ongoing_requests=100_000,
        ray_actor_options={"num_cpus": 0, **environment(options)},
    )
    ingress = Ingress.options(ray_actor_options={"num_cpus": 0, "resources": ON_HEAD, **environment(options)})  # type: ignore[attr-defined]
    return ingress.bind(options, Keys(), replica.bind(options, step_s))  # type: ignore[no-any-return]


@contextlib.contextmanager
def served(replicas: int, rows: int, step_s: float) -> Iterator[str]:
    """The address of a server with so many replicas; Ray and Serve end with the block."""
    with tempfile.TemporaryDirectory(prefix="vt-store-") as store:
        join()
        try:
            port = free_port()
            serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "WARNING"})
            own = Options(
                num_replicas=replicas, max_running=rows, threads=1, kv_fraction="64MiB", activations_dir=store
            )
            serve.run(application(own, step_s))
            yield f"http://127.0.0.1:{port}/v1/completions"
        finally:
            serve.shutdown()  # type: ignore[no-untyped-call]
            ray.shutdown()


def processor_s() -> dict[str, float]:
    """The processor time so far of the ingress and of the proxy, in seconds."""
    used = dict.fromkeys(ACTORS, 0.0)
    for process in psutil.process_iter(["cmdline", "cpu_times"]):
        title = " ".join(process.info["cmdline"] or ())
        for name, part in ACTORS.items():
            if title.startswith("ray::") and part in title:
                used[name] += process.info["cpu_times"].user + process.info["cpu_times"].system
    return used


def measured(url: str, clients: int, new_tokens: int, seconds: float, kind: str) -> dict[str, float]:
    """What the clients got in the window, from a process of their own, and the processor time meanwhile.

    Returns:
        `seconds`, `requests`, `tokens`, and for each of `ACTORS` its processor time in seconds.
    """
    body = {"model": DEMO, "prompt": "Tom has 3 boxes.", "max_tokens": new_tokens, "ignore_eos": True}
    job = json.dumps([url, body | {"stream": kind == "streamed"}, clients, WARM_S, seconds])
    command = [sys.executable, "-m", "benchmarks.scaling", "--load"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as load:
        assert load.stdin
        assert load.stdout
        load.stdin.write(job + "\n")
        load.stdin.close()
        load.stdout.readline()  # the window begins
        before = processor_s()
        found: dict[str, float] = json.loads(load.stdout.readline())  # it has ended
        after = processor_s()
    return found | {name: after[name] - before[name] for name in ACTORS}


async def _load(url: str, body: dict[str, Any], clients: int, warm_s: float, seconds: float) -> None:
    """Send requests until the window has ended; prints a line at its begin and what was answered at its end."""
    requests = tokens = 0

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal requests, tokens
        while True:
            async with session.post(url, json=body) as answer:
                assert answer.status == 200, await answer.text()
                if body["stream"]:
                    async for line in answer.content:
                        tokens += line.startswith(b"data: {")
                else:
                    await answer.read()
                    tokens += body["max_tokens"]
                requests += 1

    unlimited, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=unlimited, connector=connector) as session:
        running = asyncio.gather(*(client(session) for _ in range(clients)))
        await asyncio.wait([running], timeout=warm_s)
        before, began = (requests, tokens), time.perf_counter()
        print(flush=True)
        await asyncio.wait([running], timeout=seconds)
        lasted = time.perf_counter() - began
        print(
            json.dumps({"seconds": lasted, "requests": requests - before[0], "tokens": tokens - before[1]}), flush=True
        )
        if running.done():
            running.result()  # raises
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the results; gives the exit status."""
    parsing = parser(__doc__, "benchmark-scaling", rounds=2)
    parsing.add_argument("--load", action="store_true", help=argparse.SUPPRESS)
    parsing.add_argument("--replicas", type=int, default=8, help="replicas behind the ingress")
    parsing.add_argument("--rows", type=int, default=8, help="sequences that share a step")
    parsing.add_argument("--step-ms", type=float, default=200, help="wait of each step in milliseconds")
    parsing.add_argument("--new-tokens", type=int, default=16, help="tokens of each completion")
    parsing.add_argument("--seconds", type=float, default=40, help="length of the window")
    options = parsing.parse_args(arguments)
    if options.load:
        asyncio.run(_load(*json.loads(sys.stdin.readline())))
        return 0
    rates: dict[str, list[Run]] = {}
    costs: dict[str, list[Run]] = {}
    for _ in range(options.rounds):
        for replicas in (1, options.replicas):
            with served(replicas, options.rows, options.step_ms / 1000) as url:
                for kind in KINDS:
                    # Twice as many clients as rows, so that a replica has others waiting when a sequence ends.
                    found = measured(url, 2 * options.rows * replicas, options.new_tokens, options.seconds, kind)
                    run = Run(int(found["tokens"]), found["seconds"])
                    rates.setdefault(f"{_named(replicas)}, {kind}", []).append(run)
        with served(1, options.rows, 0) as url:
            one, many = (measured(url, options.rows, size, options.seconds, kind) for size, kind in SIZES)
            for actor in ACTORS:
                request_s = one[actor] / one["requests"]
                streaming_s = many[actor] - request_s * many["requests"]
                costs.setdefault(f"{actor}, requests", []).append(Run(1, request_s))
                costs.setdefault(f"{actor}, streamed tokens", []).append(Run(int(many["tokens"]), streaming_s))
    findings = Findings(options)
    pairs = [(f"{_named(options.replicas)}, {kind}", f"{_named(1)}, {kind}") for kind in KINDS]
    findings.add("tokens/s behind one ingress", rates, dict.fromkeys(pairs))
    findings.add("what one core carries in a second", costs, {})
    return findings.close()


def _named(replicas: int) -> str:
    return "one replica" if replicas == 1 else f"{replicas} replicas"


if __name__ == "__main__":
    sys.exit(main())
