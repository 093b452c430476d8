"""Runs and stores that the tests of this folder share."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
import torch

from deployments.activations import runs
from deployments.activations.actors.reader import ActivationReader
from deployments.activations.actors.store import ActivationStore
from deployments.activations.archive import archive, uploads
from deployments.activations.archive.archive import Archive
from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.facts import RunFacts, SegmentFacts, StoredRun
from deployments.activations.files import places as uris
from deployments.activations.files.places import Place
from deployments.activations.segments.columns import to_batch
from deployments.activations.state.owners import Owners
from deployments.activations.writer.recovery import make_root, mark, recover
from deployments.activations.writer.writer import Writer
from tests.waiting import until

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
    segment = SegmentFacts(session_id, "model", None, "Qwen3ForCausalLM", {"torch": "2"}, {n: n for n in points})
    batches = [
        to_batch(
            segment,
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


def _reader_of(store: ActivationStore) -> ActivationReader:
    """The reader of a store that is in this process."""
    archive = store._archive
    restore = archive and partial(asyncio.to_thread, archive.cache.restore)
    reader = ActivationReader(store._asked, wait=lambda: None, restore=restore)
    reader._places[1:] = [archive.place] if archive else []  # whose URI, with its settings, is not kept
    reader._places[0]._bucket = archive and archive.place
    reader._catalogue.archives = archive is not None
    return reader


@pytest.fixture(scope="session")
def reader_of() -> Callable[[ActivationStore], ActivationReader]:
    return _reader_of


@pytest.fixture(scope="session")
def make() -> Callable[..., Made]:
    return _make


@pytest.fixture
def open_writer(tmp_path: Path) -> Iterator[Callable[..., Writer]]:
    """Opens writers on `tmp_path` as the store does when it starts; closes them at the end."""
    writers: list[Writer] = []
    catalogues: list[Catalogue] = []

    def opened(kept: bool = True, **options: int) -> Writer:
        recover(tmp_path)
        for catalogue in catalogues:
            catalogue.close()
        catalogues.append(Catalogue.rebuild(tmp_path) if kept else Catalogue())
        writers.append(Writer(tmp_path, catalogues[-1], **options))
        return writers[-1]

    yield opened
    for writer in writers:
        writer.close()


def _settle(writer: Writer) -> None:
    """Return behind a round of the writer, and once what it closes is closed and told."""
    writer.abandon("nothing", "nothing").result()
    wait([*writer._pool._closing.values()])
    writer.abandon("nothing", "nothing").result()


@pytest.fixture(scope="session")
def settle() -> Callable[[Writer], None]:
    return _settle


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

    def withdraw(self, *run_ids: str) -> bool:
        return self.writer.withdraw("session", run_ids).result()

    def settled(self) -> None:
        """Return behind a round of the writer, and once what it closes is closed."""
        _settle(self.writer)

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


class Head(NamedTuple):
    """What the store has of an archive, put together as it does when it starts."""

    root: Path
    archive: Archive
    catalogue: Catalogue
    owners: Owners
    writer: Writer

    def store(self, *made: Made) -> list[StoredRun]:
        """Store runs, durable when this returns, and seal their segments."""
        futures = [self.writer.submit(one.facts, one.batches) for one in made]
        stored = [future.result() for future in futures]
        for session_id in {one.facts.session_id for one in made}:
            self.writer.seal(session_id).result()
        return stored

    def archived(self, *made: Made) -> list[StoredRun]:
        """The same, and wait until they are in the bucket."""
        stored = self.store(*made)
        for one in made:
            until(partial(self.is_archived, one.facts.run_id))
        return stored

    def is_archived(self, run_id: str) -> bool:
        """Whether a run is in the bucket; if not, the archive looks at once for what it can upload."""
        if (run := self.run(run_id)) and run["archived"]:
            return True
        self.archive._wake.set()
        return False

    def close(self) -> None:
        self.writer.close()
        self.archive.close()
        self.catalogue.close()

    def run(self, run_id: str) -> dict[str, Any] | None:
        """What listings say of a run."""
        return next((run for run in self.catalogue.runs(limit=None) if run["run_id"] == run_id), None)


def open_head(root: Path, archive: str, cache_bytes: int = 1 << 30, name: str | None = None) -> Head:
    make_root(root)
    bucket = Archive(root, uris.place_of(archive), name or mark(root), cache_bytes)
    try:
        recover(root)
        catalogue, owners = Catalogue.rebuild(root, bucket.manifest), Owners(root)
        bucket.begin(catalogue, owners)
    except BaseException:
        bucket._claim.close()
        raise
    return Head(root, bucket, catalogue, owners, Writer(root, catalogue, owners=owners, archive=bucket))


@pytest.fixture
def head(tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Head]]:
    """Opens heads that archive to the bucket, each by its name below `tmp_path`; closes them at the end."""
    monkeypatch.setattr(archive, "LOOK_S", 0.02)
    monkeypatch.setattr(uploads, "PAUSES_S", (0.02, 0.1))
    monkeypatch.setenv("VITRINE_HOME", str(tmp_path / "home"))
    heads = list[Head]()

    def opened(name: str = "head", **options: Any) -> Head:
        heads.append(open_head(tmp_path / name, bucket.uri(""), **options))
        return heads[-1]

    yield opened
    bucket.server.fails = bucket.server.cuts = bucket.server.drops = lambda method, path: False
    for one in heads:
        if not one.archive._ending:
            one.close()


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
        return self.names(session, ".arrow")

    def names(self, folder: str, end: str = "") -> list[str]:
        """The objects in a folder by their names."""
        return sorted(info.base_name for info in self.place.below(folder).infos() if info.base_name.endswith(end))


@pytest.fixture
def bucket(server, request, monkeypatch) -> Iterator[Bucket]:
    """A directory in a new bucket."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr(uris, "ATTEMPTS", 2)  # pauses grow
    name = f"bucket-{abs(hash(request.node.name))}"
    settings = f"endpoint_override=127.0.0.1:{server.port}&scheme=http&region=us-east-1&allow_bucket_creation=true"

    def uri(path: str) -> str:
        return f"s3://{name}/a%20store/{path}?{settings}"

    place = uris.place_of(uri(""))
    place.fs.create_dir(name)
    server.requests.clear()
    yield Bucket(place, uri, server)
    server.fails = server.cuts = server.drops = lambda method, path: False
