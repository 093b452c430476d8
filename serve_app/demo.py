"""`make demo`: evaluates the shipped model with a server and a Ray cluster of its own."""

from __future__ import annotations

import os
import sys
import time

from deployments.options import DEMO, home

SAMPLES = 20


def main() -> None:
    """Replace this process by the evaluation, so that signals and the exit status are the evaluation's."""
    command = [sys.executable, "-m", "evals.gsm8k", "--serve", DEMO, "--base-url", "http://127.0.0.1:0/v1"]
    command += ["--samples", str(SAMPLES), "--collect-activations"]
    command += ["--results-dir", str(home() / "results" / time.strftime("demo-%Y%m%dT%H%M%S"))]
    os.execve(sys.executable, command, {**os.environ, "RAY_ADDRESS": "local"})


if __name__ == "__main__":
    main()
