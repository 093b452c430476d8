"""Run by test_two_nodes on a machine next to the cluster: a client of its server that prints answers as JSON.

Usage: two_nodes_client.py ROOT KEY record|look|read|delete|health SESSION
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import httpx
import pyarrow as pa

from vitrine.runs.files import head_length, stream_of

CAPTURE = {"layers": "all", "sites": ["output"], "tokens": "all"}
RUNS = 24  # enough that each of two nodes gets some


def record(http: httpx.Client, session: str) -> list[str]:
    """Store runs, and give their ids."""
    runs: list[str] = []
    for number in range(RUNS):
        body = {"model": "vitrine-demo", "prompt": f"{number} apples and", "max_tokens": 200, "temperature": 0.0}
        body |= {"session_id": session, "capture": CAPTURE}
        while (answer := http.post("/v1/completions", json=body)).status_code == 503:  # deployed again meanwhile
            time.sleep(1)
        answer.raise_for_status()
        [run] = answer.json()["activations_meta"]["runs"]
        assert run["status"] == "stored", run
        runs.append(run["run_id"])
    return runs


def look(http: httpx.Client, session: str) -> Any:
    """A session as it is listed; null where there is none."""
    answer = http.get(f"/v1/activations/session/{session}")
    return None if answer.status_code == 404 else answer.raise_for_status().json()


def read(http: httpx.Client, session: str) -> dict[str, int]:
    """The number of rows of each run, read from the run's bytes."""
    found = dict[str, int]()
    for run in look(http, session)["runs"]:
        data = []
        for first, end in ((0, 1 << 16), (run["offset"], run["offset"] + run["bytes"])):
            headers = {"Range": f"bytes={first}-{end - 1}", "Accept-Encoding": "identity"}
            answer = http.get(f"/v1/activations/session/{session}/files/{run['file']}", headers=headers)
            data.append(answer.raise_for_status().content)
        beginning, own = data
        found[run["run_id"]] = (
            pa.ipc.open_stream(stream_of(beginning[: head_length(beginning)], own)).read_all().num_rows
        )
    return found


def delete(http: httpx.Client, session: str) -> int:
    """The status of a deletion."""
    return http.delete(f"/v1/activations/session/{session}").status_code


def health(http: httpx.Client, session: str) -> Any:
    """What the server says of its replicas."""
    return http.get("/health").json()


root, key, what, session = sys.argv[1:]
with httpx.Client(base_url=root, headers={"Authorization": f"Bearer {key}"}, timeout=120) as client:
    calls = {"record": record, "look": look, "read": read, "delete": delete, "health": health}
    print(json.dumps(calls[what](client, session)))
