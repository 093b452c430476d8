"""Run by test_two_nodes on a machine next to the cluster: a client of its server that prints answers as JSON.

Usage: two_nodes_client.py ROOT KEY record|look|download|read|delete [SESSION [RUN]]
"""

from __future__ import annotations

import io
import json
import sys
import zlib
from typing import Any

import httpx
import numpy as np
import pyarrow as pa

from deployments.paging import Paging

CAPTURE = {"layers": "all", "sites": ["output"], "tokens": "all"}


def record(http: httpx.Client, session: str) -> list[dict[str, Any]]:
    """Store runs until both nodes have some, and as many again."""
    runs: list[dict[str, Any]] = []
    for number in range(64):
        body = {"model": "vitrine-demo", "prompt": f"{number} apples and", "max_tokens": 200, "temperature": 0.0}
        answer = http.post("/v1/completions", json=body | {"session_id": session, "capture": CAPTURE})
        answer.raise_for_status()
        [run] = answer.json()["activations_meta"]["runs"]
        assert run["status"] == "stored", run
        runs.append({"run_id": run["run_id"], "node": run.get("node")})
        if number >= 15 and len({run["node"] for run in runs}) == 2:
            break
    return runs


def look(http: httpx.Client, session: str) -> Any:
    """A session as it is listed; null where there is none."""
    answer = http.get(f"/v1/activations/session/{session}")
    return None if answer.status_code == 404 else answer.raise_for_status().json()


def _data(http: httpx.Client, session: str, *runs: str) -> bytes:
    paging, data = Paging(), b""
    while not paging.is_whole:
        answer = http.get(f"/v1/activations/session/{session}/data", params={"run": list(runs)}, headers=paging.headers)
        if answer.is_error:
            raise ValueError(f"{answer.status_code}: {answer.text}")
        data += paging.take(answer.headers, answer.content)
    return data


def download(http: httpx.Client, session: str, *runs: str) -> dict[str, int]:
    """A checksum of each run's values, as they are downloaded."""
    file, sums = io.BytesIO(_data(http, session, *runs)), dict[str, int]()
    while file.tell() < len(file.getbuffer()):
        for batch in pa.ipc.open_stream(file):
            for name in (name for name in batch.schema.names if name.startswith("layers.")):
                values = np.asarray(getattr(batch.column(name), "storage", batch.column(name)).flatten())
                for run_id in set(batch.column("run_id").to_pylist()):
                    sums[run_id] = zlib.crc32(values.tobytes(), sums.get(run_id, 0))
    return sums


def read(http: httpx.Client, session: str, run: str) -> tuple[int, str]:
    """What a download of one run answers."""
    answer = http.get(f"/v1/activations/session/{session}/data", params={"run": run})
    return answer.status_code, answer.json()["error"]["message"] if answer.is_error else ""


def delete(http: httpx.Client, session: str) -> tuple[int, list[str]]:
    """What a deletion answers, and which nodes it waits for."""
    answer = http.delete(f"/v1/activations/session/{session}")
    return answer.status_code, answer.json().get("waits_for", [])


root, key, what, *args = sys.argv[1:]
with httpx.Client(base_url=root, headers={"Authorization": f"Bearer {key}"}, timeout=120) as client:
    calls = {"record": record, "look": look, "download": download, "read": read, "delete": delete}
    print(json.dumps(calls[what](client, *(args or ["both"]))))
