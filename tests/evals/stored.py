"""Recorded runs in a store's own files, behind the routes by which an evaluation reaches them."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from deployments.activations.facts import FileInfo, RunInfo
from deployments.activations.filters import FilePart, Filter
from deployments.activations.index.index import Index
from deployments.activations.segments.columns import to_batch
from deployments.activations.writer.writer import Writer
from deployments.points.patterns import Patterns
from serve_app.http.errors import install
from serve_app.http.paging import Ranged, page

SESSION = "evaluated"
Points = dict[str, torch.Tensor] | dict[str, torch.Tensor | Patterns]
SITES = ("input_layernorm.output", "post_attention_layernorm.output")


class Store:
    """A store of `directory`, written to as the server does. A context: it serves on a port of its own."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        self.refuse = 0  # so many requests for bytes get `status`
        self.status = 503
        self.sends: Callable[[bytes], bytes] = lambda data: data  # what a file's bytes are made of
        self.requests: list[str] = []  # the ranges of those for bytes of files
        self._index = Index.scanned(directory)
        self._writer = Writer(directory, self._index)
        app = FastAPI()
        install(app)
        app.get("/v1/activations/session/{session}/files/{name}")(self._file)
        app.get("/v1/activations/runs")(self._runs)
        self._uvicorn = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", ws="none"))
        self._thread = threading.Thread(target=self._uvicorn.run)

    def record(self, run_id: str, points: Points, session: str = SESSION) -> dict[str, Any]:
        """Stores a run, its last row generated; gives the answer's `activations_meta`."""
        rows = len(next(iter(points.values())))
        segment = FileInfo(session, "fake/model", None, "Qwen3ForCausalLM", {"torch": "2"}, {n: n for n in points})
        batch = to_batch(
            segment,
            run_id=run_id,
            sample_id=None,
            positions=list(range(rows)),
            token_ids=list(range(rows)),
            prompt_tokens=rows - 1,
            points=points,
        )
        facts = RunInfo(run_id, session, "fake/model", created=1.0, prompt_tokens=rows - 1, tokens=rows)
        stored = self._writer.submit(facts, [batch]).result()
        places = {name: at._asdict() for name, at in stored.points.items()}
        run = {"index": 0, "run_id": run_id, "tokens": rows, "prompt_tokens": rows - 1, "points": places}
        meta = {"session_id": session, "status": "stored", "runs": [run]}
        said: dict[str, Any] = json.loads(json.dumps(meta))
        return said

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._uvicorn.servers[0].sockets[0].getsockname()[1]}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._uvicorn.started:
            self._thread.join(0.01)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._uvicorn.should_exit = True
        self._thread.join()
        self._writer.close()

    def _runs(self, limit: int, run: str | None = None, session: str | None = None) -> Response:
        found = self._index.runs(Filter(session=session, runs=tuple(run.split(",")) if run else None), limit)
        return JSONResponse({"data": [_plain(one) for one in found], "has_more": False})

    async def _file(self, session: str, name: str, ranged: Ranged) -> Response:
        self.requests.append(ranged.range or "")
        if self.refuse:
            self.refuse -= 1
            return _error(self.status, "the store does not answer")
        path = self.directory / "_" / session / name
        if not path.exists():
            return _error(404, f"there is no file {name!r}", "file_not_found")

        async def read(first: int, end: int) -> FilePart:
            return FilePart(self.sends(path.read_bytes())[first:end], first, path.stat().st_size)

        return await page(ranged, read, "application/vnd.apache.arrow.file")


def _plain(run: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in run.items() if name != "owner"}


def points(run: int, rows: int, *, layers: tuple[int, ...] = (0, 2, 4), width: int = 8) -> dict[str, torch.Tensor]:
    """Normal activations of a run that follow from its number, larger in later layers."""
    draw = torch.Generator().manual_seed(run)
    return {
        f"layers.{layer}.{site}": (torch.randn(rows, width, generator=draw) * (1 + layer)).bfloat16()
        for layer in layers
        for site in SITES
    }


def _error(status: int, message: str, code: str | None = None) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": "run", "code": code}
    return JSONResponse({"error": error}, status_code=status, headers={"Retry-After": "0"})
