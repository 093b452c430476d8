"""Who takes a replica's runs: the store on its own node, elsewhere a writer of the node."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments.activations.nodes.cluster import writer_name
from deployments.activations.nodes.receiving import StartingError
from deployments.clusters import HEAD, detached

_READY_S = 60.0  # that a replica waits for its node's writer

logger = logging.getLogger(__name__)


def connect_writer(root: str, store: Any, archive: str | None = None) -> Any:
    """Who takes this node's runs: the store on its own node, elsewhere a writer of the node.

    While the store does not answer, each run fails with the reason. StoreError if the node cannot keep runs.
    """
    own = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == own)  # type: ignore[no-untyped-call]
    if HEAD in node["Resources"]:  # where the store is
        return store
    writer = _open_writer(root, store, archive, own, node["NodeManagerAddress"])
    try:
        ray.get(writer.ready.remote(), timeout=_READY_S)
    except ray.exceptions.RayTaskError as error:
        if not isinstance(error.cause, StartingError):
            raise error.cause from error
        logger.warning("runs of this node fail for now: %s", error.cause)
    except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
        logger.warning("runs of this node fail until its writer answers: %s", error)
    return writer


def open_returned(root: str, store: Any, archive: str | None, away: Mapping[str, str]) -> None:
    """Open the directories of nodes that have come back, given the ids in Ray that they had by their addresses."""
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        address, own = node["NodeManagerAddress"], node["NodeID"]
        if node["Alive"] and address in away and away[address] != own:
            _open_writer(root, store, archive, own, address)


def _open_writer(root: str, store: Any, archive: str | None, node: str, address: str) -> Any:
    from deployments.activations.nodes.writer import NodeWriter  # needs Arrow, which Serve's controller does not

    on_it = NodeAffinitySchedulingStrategy(node, soft=False)
    writer = detached(NodeWriter, f"{writer_name(root)} {node}", max_concurrency=10_000, scheduling_strategy=on_it)
    return writer.remote(root, store, archive, node, address)
