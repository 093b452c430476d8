"""Run by test_resume: a run of two workers on a cluster of two nodes, one of which dies in the middle."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

sys.path.append(str(Path(__file__).parents[1]))
from fake_openai import FakeServer

from evals.gsm8k.__main__ import main

SLOTS = 2  # of each worker


def run(folder: Path) -> None:
    cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 1}, connect=True)
    other = cluster.add_node(num_cpus=1)
    # Each worker gets every other problem: first some that are answered at once, then some that wait.
    rows = [
        {"question": f"{'[wait]' if i >= 20 else ''} What is {i} + 1000?", "answer": f"#### {i + 1000}"}
        for i in range(32)
    ]
    problems = folder / "problems.jsonl"
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with FakeServer() as server:

        def lose() -> None:
            """Kill the node once all answers have arrived and both workers wait, and let the server answer."""
            while len(list(folder.glob("results/samples/*"))) < 20 or len(server.attempts) < 20 + 2 * SLOTS:
                time.sleep(0.05)
            (raylet,) = (psutil.Process(one.process.pid) for one in other.all_processes["raylet"])
            for process in [raylet, *raylet.children(recursive=True)]:  # which else live on for seconds
                process.kill()
            server.release()

        threading.Thread(target=lose, daemon=True).start()
        where = ["--base-url", server.base_url, "--dataset", str(problems), "--results-dir", str(folder / "results")]
        status = main([*where, "--mode", "no-tools", "--workers", "2", "--parallel", str(2 * SLOTS)])
        print(json.dumps({"status": status, "attempts": sorted(server.attempts.values())}))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    run(Path(sys.argv[1]))
