"""Run by test_two_nodes on a machine next to the cluster: attacks every port that it finds.

Prints one JSON object: the ports, HTTP's answers, and the results of a pickled call with and without Ray's token.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import grpc
import httpx
from ray.serve.generated import serve_pb2

PORTS = range(1024, 65536)
AT_ONCE = 2000  # connections that are tried
METHOD = "/ray.serve.ASGIService/HandleRequest"
CALL_S = 5


class Payload:
    """Runs a command where it is unpickled."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> Any:
        return os.system, (self._command,)


async def open_ports(host: str) -> list[int]:
    """The ports at which a machine listens."""
    places = asyncio.Semaphore(AT_ONCE)

    async def is_open(port: int) -> bool:
        async with places:
            try:
                _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), CALL_S)
            except (OSError, TimeoutError):
                return False
            writer.close()
            return True

    found = await asyncio.gather(*map(is_open, PORTS))
    return [port for port, listens in zip(PORTS, found, strict=True) if listens]


async def call(host: str, port: int, marker: Path, token: str | None) -> str:
    """Send a port a pickled call that leaves a marker; what came back."""
    body = pickle.dumps(Payload(f"touch {marker}"))
    request = serve_pb2.ASGIRequest(pickled_request_metadata=body, request_args=body, request_kwargs=body)
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    async with grpc.aio.insecure_channel(f"{host}:{port}") as channel:
        method = channel.unary_unary(METHOD, serve_pb2.ASGIRequest.SerializeToString, serve_pb2.ASGIResponse.FromString)
        try:
            await method(request, metadata=metadata, timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"


async def main(hosts: list[str], root: str, folder: Path, token: str) -> dict[str, Any]:
    listening = {host: await open_ports(host) for host in hosts}
    places = [(host, port) for host, ports in listening.items() for port in ports]
    said: dict[str, Any] = {"ports": listening}
    for name, with_token in (("without", None), ("with", token)):
        calls = [call(host, port, folder / f"{name}-{host}-{port}", with_token) for host, port in places]
        said[name] = dict(zip((f"{host}:{port}" for host, port in places), await asyncio.gather(*calls), strict=True))
    with httpx.Client(timeout=60) as client:
        asked = {"model": "vitrine-demo", "prompt": "Ann", "max_tokens": 2}
        said["http"] = [
            client.get(f"{root}/health").status_code,
            client.get(f"{root}/v1/models").status_code,
            client.post(f"{root}/v1/completions", json=asked).status_code,
            client.delete(f"{root}/v1/activations/session/x").status_code,
        ]
    return said


if __name__ == "__main__":
    *hosts, root, folder, token = sys.argv[1:]
    print(json.dumps(asyncio.run(main(hosts, root, Path(folder), token))))
