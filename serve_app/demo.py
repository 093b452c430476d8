"""`make demo`: serve the shipped model, evaluate it with activations collected, and shut down again."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time

import ray
from ray import serve

from deployments.options import home
from serve_app import app

SAMPLES = 20


def main() -> int:
    """Run the demo on a Ray of its own and give the evaluation's exit status."""
    # SIGTERM ends it as Ctrl-C does, so that what was started is shut down.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        status = _run()
        print("\nShut down: nothing is left running.")
        return status
    except KeyboardInterrupt:
        print("\nInterrupted: what was started is shut down.")
        return 130


def _run() -> int:
    began = time.monotonic()
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    print("Starting Ray Serve with the model that ships with Vitrine ...", flush=True)
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        namespace="vitrine",
    )
    try:
        port = _free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "WARNING"})
        serve.run(app)
        print(f"Healthy after {time.monotonic() - began:.0f} s at http://127.0.0.1:{port}/v1\n", flush=True)
        return _evaluate(f"http://127.0.0.1:{port}/v1", ray.get_runtime_context().gcs_address)
    finally:
        ray.shutdown()


def _evaluate(base_url: str, ray_address: str) -> int:
    command = [sys.executable, "-m", "evals.gsm8k", "--base-url", base_url]
    command += ["--samples", str(SAMPLES), "--collect-activations"]
    command += ["--results-dir", str(home() / "results" / time.strftime("demo-%Y%m%dT%H%M%S"))]
    return subprocess.run(command, env={**os.environ, "RAY_ADDRESS": ray_address}, check=False).returncode


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
