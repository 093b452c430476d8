"""Makers of runs and stores that the tests of this folder share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
import torch

from deployments.activations import objects, runs
from deployments.activations.catalogue import Catalogue
from deployments.activations.facts import RunFacts, ShardFacts, StoredRun
from deployments.activations.marks import counted
from deployments.activations.objects import Place
from deployments.activations.recovering import recover
from deployments.activations.schema import to_batch
from deployments.activations.writer import Writer

sys.path.append(str(Path(__file__).parent))  # importlib mode adds no folder; helpers stand beside this file
from object_server import Proxy, object_server


class Made(NamedTuple):
    facts: RunFacts
    batches: list[pa.RecordBatch]
    points: dict[str, torch.Tensor]


def _make(
    run_id: str,
    points: dict[str, torch.Tensor] | None = None,
    *,
    session_id: str = "session",
    parts: int = 1,
    **facts: Any,
) -> Made:
    """A run whose last row is generated, of small float32 activations unless `points` says otherwise."""
    points = points or {"layers.0.output": torch.randn(3, 4)}
    rows = len(next(iter(points.values())))
    shard = ShardFacts(session_id, "model", None, "Qwen3ForCausalLM", {"torch": "2"}, {n: n for n in points})
    batches = [
        to_batch(
            shard,
            run_id=run_id,
            sample_id=facts.get("sample_id"),
            positions=index.tolist(),
            token_ids=(index + 100).tolist(),
            prompt_tokens=rows - 1,
            points={name: tensor[index[0] : index[-1] + 1] for name, tensor in points.items()},
        )
        for index in torch.arange(rows).tensor_split(parts)
    ]
    given = {"created": 1.0, "prompt_tokens": rows - 1, "tokens": rows, **facts}
    return Made(RunFacts(run_id, session_id, "model", **given), batches, points)


@pytest.fixture(scope="session")
def make() -> Callable[..., Made]:
    return _make


@pytest.fixture
def open_writer(tmp_path: Path) -> Iterator[Callable[..., Writer]]:
    """Opens writers on `tmp_path` as the store does when it starts; closes them at the end."""
    writers: list[Writer] = []

    def opened(kept: bool = True, **options: int) -> Writer:
        recover(tmp_path)
        writers.append(Writer(tmp_path, Catalogue.rebuild(tmp_path) if kept else Catalogue(), **options))
        return writers[-1]

    yield opened
    for writer in writers:
        writer.close()


class Sender(NamedTuple):
    """Sends runs of the session `session` in chunks of one batch, and waits for each answer."""

    writer: Writer
    folder: Path

    def append(self, made: Made, part: int) -> None:
        self.writer.append(made.facts.session_id, made.facts.run_id, part, [made.batches[part]]).result()

    def finish(self, made: Made, part: int = 0) -> StoredRun:
        return self.writer.submit(made.facts, made.batches[part:], part).result()

    def abandon(self, made: Made) -> None:
        self.writer.abandon(made.facts.session_id, made.facts.run_id).result()

    def settled(self) -> None:
        """Return behind a round of the writer."""
        self.writer.abandon("nothing", "nothing").result()

    def files(self) -> list[Path]:
        return sorted(self.folder.iterdir())

    def listed(self) -> list[str]:
        return sorted(run.run_id for run in runs(self.folder))


@pytest.fixture
def open_sender(open_writer: Callable[..., Writer], tmp_path: Path) -> Callable[..., Sender]:
    """Opens writers as `open_writer` does, to be sent chunks."""
    return lambda **options: Sender(open_writer(**options), tmp_path / "session")


@pytest.fixture
def long() -> Made:
    """A run of three batches of two rows."""
    return _make("long", {"layers.0.output": torch.randn(6, 4)}, parts=3)


@pytest.fixture(scope="module")
def server() -> Iterator[Proxy]:
    with object_server() as port:
        proxy = Proxy(port)
        yield proxy
        proxy.close()


class Bucket(NamedTuple):
    place: Place
    uri: Callable[[str], str]  # of what lies below it, with what is needed to read it
    server: Proxy

    def objects(self, session: str = "session") -> list[str]:
        return [file.name for file in counted(self.place.below(session))]

    def marks(self) -> list[str]:
        """What stands beside the sessions."""
        return [info.base_name for info in self.place.infos()]


@pytest.fixture
def bucket(server, request, monkeypatch) -> Iterator[Bucket]:
    """A directory in a new bucket."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(objects, "ATTEMPTS", 3)  # pauses grow
    name = f"bucket-{abs(hash(request.node.name))}"
    settings = f"endpoint_override=127.0.0.1:{server.port}&scheme=http&region=us-east-1&allow_bucket_creation=true"

    def uri(path: str) -> str:
        return f"s3://key:secret@{name}/a%20store/{path}?{settings}"

    place = objects.place_of(uri(""))
    place.fs.create_dir(name)
    server.requests.clear()
    yield Bucket(place, uri, server)
    server.fails = lambda method, path: False
