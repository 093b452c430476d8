"""Runs and stores that the tests of this folder share."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
import torch

from deployments.activations import archive as archives
from deployments.activations import runs
from deployments.activations.actors.reader import ActivationReader
from deployments.activations.actors.store import ActivationStore
from deployments.activations.facts import FileInfo, RunInfo, RunLocation, SessionName
from deployments.activations.index.index import Index
from deployments.activations.segments.columns import to_batch
from deployments.activations.writer.recovery import recover
from deployments.activations.writer.writer import Writer
from tests.waiting import until

sys.path.append(str(Path(__file__).parent))  # importlib mode adds no folder; helpers stand beside this file
from object_server import ObjectServer

SESSION = SessionName(None, "session")


@pytest.fixture(scope="module", autouse=True)
def vitrine_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the indexes of this module's stores lie."""
    home, before = tmp_path_factory.mktemp("home"), os.environ.get("VITRINE_HOME")
    os.environ["VITRINE_HOME"] = str(home)
    yield home
    if os.environ["VITRINE_HOME"] == str(home):  # else the shared cluster, which started meanwhile, has set its own
        if before is None:
            del os.environ["VITRINE_HOME"]
        else:
            os.environ["VITRINE_HOME"] = before


class Made(NamedTuple):
    facts: RunInfo
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
    segment = FileInfo(session_id, "model", None, "Qwen3ForCausalLM", {"torch": "2"}, {n: n for n in points})
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
    return Made(RunInfo(run_id, session_id, "model", **given), batches, points)


@pytest.fixture(scope="session")
def make() -> Callable[..., Made]:
    return _make


@pytest.fixture
def long() -> Made:
    """A run of three batches of two rows."""
    return _make("long", {"layers.0.output": torch.randn(6, 4)}, parts=3)


@pytest.fixture
def open_writer(tmp_path: Path) -> Iterator[Callable[..., Writer]]:
    """Opens writers on `tmp_path` as the store does when it starts; closes them at the end."""
    writers: list[Writer] = []
    indexes: list[Index] = []

    def opened(**options: Any) -> Writer:
        recover(tmp_path).join()
        for index in indexes:
            index.close()
        indexes.append(Index.open(tmp_path))
        writers.append(Writer(tmp_path, indexes[-1], **options))
        return writers[-1]

    yield opened
    for writer in writers:
        writer.close()
    for index in indexes:
        index.close()


def _settle(writer: Writer) -> None:
    """Return behind a round of the writer, and once what it closes is closed and told."""
    writer.abandon(SESSION, "nothing").result()
    wait([*writer._pool._closing.values()])
    writer.abandon(SESSION, "nothing").result()


@pytest.fixture(scope="session")
def settle() -> Callable[[Writer], None]:
    return _settle


class Sender(NamedTuple):
    """Sends runs of the session `session` in chunks of one batch, and waits for each answer."""

    writer: Writer
    folder: Path

    def append(self, made: Made, part: int) -> None:
        self.writer.append(made.facts.session, made.facts.run_id, part, [made.batches[part]]).result()

    def finish(self, made: Made, part: int = 0) -> RunLocation:
        return self.writer.submit(made.facts, made.batches[part:], part).result()

    def abandon(self, made: Made) -> None:
        self.writer.abandon(made.facts.session, made.facts.run_id).result()

    def withdraw(self, *run_ids: str) -> bool:
        return self.writer.withdraw(SESSION, run_ids).result()

    def settled(self) -> None:
        """Return behind a round of the writer, and once what it closes is closed."""
        _settle(self.writer)

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*.arrow*"))

    def listed(self) -> list[str]:
        return sorted(run.run_id for run in runs(self.folder))


@pytest.fixture
def open_sender(open_writer: Callable[..., Writer], tmp_path: Path) -> Callable[..., Sender]:
    """Opens writers as `open_writer` does, to be sent chunks."""
    return lambda **options: Sender(open_writer(**options), tmp_path / SESSION.folder)


class Asked:
    """A store and its reader in this process; their methods are called as over Ray, and answer at once."""

    def __init__(self, root: Path, archive: str = "", **options: Any) -> None:
        self.root, self.archive, self.times = root, archive, count(1)
        self.store = ActivationStore(str(root), archive, **options)
        self.reader = ActivationReader(str(root), archive)
        self._closed = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        of = self.reader if hasattr(self.reader, name) else self.store
        return lambda *args, **named: asyncio.run(getattr(of, name)(*args, **named))

    def record(self, run: str, session: str = "session", owner: str | None = None, **facts: Any) -> Made:
        """Store a run of 64 KiB of float32, each a second later than the one before."""
        points = {"layers.0.output": torch.randn(64, 256)}
        made = _make(run, points, session_id=session, owner=owner, **{"created": float(next(self.times))} | facts)
        self.write(made.facts, made.batches)
        return made

    def run(self, run_id: str) -> dict[str, Any]:
        """What lists say of a run."""
        return next(run for run in self.runs() if run["run_id"] == run_id)

    def archived(self, *run_ids: str) -> None:
        """Return once runs are said to be in the bucket."""
        until(lambda: all(self.run(run_id)["archived"] for run_id in run_ids))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.store._writer.close()
            if self.store._uploader:
                self.store._uploader.close()
            self.store._index.close()
            os.close(self.store._lock)


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[..., Asked]]:
    """Opens stores, on `root` below `tmp_path` unless another directory is named; closes them at the end."""
    stores = list[Asked]()

    def opened(name: str = "root", **options: Any) -> Asked:
        stores.append(Asked(tmp_path / name, **options))
        return stores[-1]

    yield opened
    for store in stores:
        store.close()


@pytest.fixture(scope="session")
def server() -> Iterator[ObjectServer]:
    server = ObjectServer()
    yield server
    server.close()


class Bucket(NamedTuple):
    uri: str  # with what is needed to read it
    place: archives.Bucket
    server: ObjectServer

    def objects(self, session: str = "_/session") -> list[str]:
        """The names of a session's files."""
        return sorted(Path(name).name for name in self.place.list(session))


@pytest.fixture
def bucket(server: ObjectServer, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A directory in a new bucket, to which stores upload files at once, and each after its last run."""
    for name, value in {"EC2_METADATA_DISABLED": "true", "ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr(archives, "ATTEMPTS", 2)  # pauses grow
    monkeypatch.setattr(archives, "_LOOK_S", 0.02)
    monkeypatch.setattr(archives, "_PAUSES_S", (0.02, 0.1))
    monkeypatch.setitem(Writer.__init__.__kwdefaults__, "idle_s", 0)
    name = f"bucket-{abs(hash(request.node.name))}"
    settings = f"endpoint_override=127.0.0.1:{server.port}&scheme=http&region=us-east-1&allow_bucket_creation=true"
    uri = f"s3://{name}/a%20store?{settings}"
    place = archives.bucket(uri)
    place.fs.create_dir(name)
    server.requests.clear()
    yield Bucket(uri, place, server)
    server.fails = lambda method, path: False


@pytest.fixture
def open_archived(open_store: Callable[..., Asked], bucket: Bucket) -> Callable[..., Asked]:
    """Opens stores that archive to the bucket."""
    return partial(open_store, archive=bucket.uri)
