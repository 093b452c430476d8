"""Whether the promises held: for each request, for what is stored, and for what still runs."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pyarrow as pa

from tests.chaos.cluster import Chaos
from tests.chaos.load import REFUSED, Sent
from vitrine.runs.files import head_length, stream_of

EXPECTED = {"whole", "cut", "broken", *map(str, REFUSED)}
BUSY = re.compile(r"^ray_vitrine_(?:running|waiting)\{.*\} ([0-9.e+]+)$", re.M)
COMING = {"DEPENDENCIES_UNREADY", "PENDING_CREATION", "RESTARTING"}


def wrong_requests(ledger: list[Sent]) -> list[str]:
    """Requests that ended as none may."""
    wrong = (sent for sent in ledger if sent.outcome not in EXPECTED)
    return [f"request {sent.id} after {sent.took_s:.1f} s: {sent.outcome}" for sent in wrong]


def wrong_runs(cluster: Chaos, session: str, ledger: list[Sent]) -> list[str]:
    """Runs that are lost, damaged or too many."""
    listed, more = list[dict[str, Any]](), True
    while more:
        after = f"&after={listed[-1]['run_id']}" if listed else ""
        answer = cluster.get(f"/v1/activations/session/{session}?limit=100{after}")
        if answer.status_code != 200:
            return [f"the session {session}: {answer.text}"]
        listed, more = listed + answer.json()["runs"], answer.json()["has_more"]
    of_requests = Counter(run["sample_id"] for run in listed)
    wrong = [f"request {request} has {count} runs" for request, count in of_requests.items() if count > 1]
    tokens = {run["run_id"]: run["tokens"] for run in listed}
    for sent in ledger:
        if sent.good and sent.records and sent.requires and (sent.run or {}).get("status") != "stored":
            wrong.append(f"answered although it required its run: {sent}")
        if sent.run and sent.run["status"] == "stored" and tokens.get(sent.run["run_id"]) != sent.run["tokens"]:
            wrong.append(f"lost: {sent.run}, listed with {tokens.get(sent.run['run_id'])} tokens")
    for run in listed:
        if (rows := read(cluster, session, run)) != run["tokens"]:
            wrong.append(f"damaged: {run['run_id']} of {run['tokens']} tokens has rows: {rows}")
    return wrong


def read(cluster: Chaos, session: str, run: dict[str, Any]) -> int | str:
    """The number of a run's rows, read from its bytes over HTTP; the error if it cannot be read."""
    head, own = (
        cluster.get(f"/v1/activations/session/{session}/files/{run['file']}", Range=f"bytes={first}-{end - 1}")
        for first, end in ((0, 1 << 16), (run["offset"], run["offset"] + run["bytes"]))
    )
    if not head.is_success or not own.is_success:
        return head.text if head.is_error else own.text
    stream = stream_of(head.content[: head_length(head.content)], own.content)
    return int(pa.ipc.open_stream(stream).read_all().num_rows)


def restless(cluster: Chaos) -> list[str]:
    """What still runs, waits, starts, or lives on a dead node, once no request is on its way."""
    answer = cluster.get("/metrics")
    busy = [line for line in BUSY.finditer(answer.text) if float(line[1])]
    alive = {node["node_id"] for node in cluster.state("nodes") if node["state"] == "ALIVE"}
    strange = [
        f"{actor['class_name']} {actor['name']!r} is {actor['state']} on {actor['node_id']}"
        for actor in cluster.state("actors")
        if actor["state"] in COMING or (actor["state"] == "ALIVE" and actor["node_id"] not in alive)
    ]
    known = [] if BUSY.search(answer.text) else [f"no metrics: {answer.text[:300]}"]
    return known + [line[0] for line in busy] + strange
