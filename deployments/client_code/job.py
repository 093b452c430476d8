"""A client's job, its limits and updates, and the frames between the replica and the job's process over a socket.

The process is not trusted: no frame is unpickled.
"""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, dataclass, field
from enum import Enum
from struct import Struct
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deployments.errors import RequestError

Status = Literal["RECEIVED", "QUEUED", "DISPATCHED", "RUNNING", "COMPLETED", "ERROR", "LOG"]  # nnsight's words
LAST = ("COMPLETED", "ERROR")


HEAD = Struct("<cQ")  # of a frame: its kind, and the length of what follows, bytes
CHUNK = 1 << 20
CLASS = "nnsight.modeling.transformers.TransformersModel"  # the one under which LanguageModel goes, too


class ModelKey(BaseModel):
    """How nnsight names a model to a server.

    Attributes:
        repo_id: A repository's id, or a directory.
        revision: Its branch, tag or commit; None where the client names none.
        task: transformers' word for what it does.
        trust_remote_code: Whether the client's is made by the repository's own code.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    repo_id: str = Field(min_length=1, max_length=4096)
    revision: str | None = Field(default=None, max_length=256)
    task: Literal["text-generation"] = "text-generation"
    trust_remote_code: bool = False

    @classmethod
    def parse(cls, key: str) -> ModelKey:
        """Read `import.path.Class:{"repo_id": ...}`.

        Raises:
            RequestError: It is none, or not that of a language model.
        """
        kind, _, rest = key.partition(":")
        if kind != CLASS:
            message = f"only {CLASS.rpartition('.')[2]} and LanguageModel are served, not {kind[:200]!r}"
            raise RequestError(message, "model_key", "model_not_served")
        try:
            return cls.model_validate(json.loads(rest))
        except ValidationError as error:
            worst = error.errors()[0]
            path = ".".join(map(str, ("model_key", *worst["loc"])))
            raise RequestError(f"{path}: {worst['msg']}", "model_key") from error
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the text after the class is not JSON: {error}", "model_key") from error

    def written(self) -> str:
        """The key, as nnsight writes it."""
        fields = self.model_dump(exclude={"trust_remote_code"} if not self.trust_remote_code else set())
        return f"{CLASS}:{json.dumps(fields)}"


@dataclass(frozen=True)
class CodeJob:
    """One `POST /request` of nnsight's remote protocol.

    Attributes:
        id: Its id, which cannot be guessed.
        blob: The pickled block, which nothing but the job's own process opens.
        compress: Whether block and result are compressed by zstd.
        env: Settings of the model: its attention implementation, a PEFT adapter.
        key: How the client names the model.
        stream: Whether a socket receives its updates.
        owner: The sender; None without API keys.
    """

    id: str
    blob: bytes = field(repr=False)
    compress: bool
    env: dict[str, Any]
    key: ModelKey
    stream: bool
    owner: str | None = None


@dataclass(frozen=True)
class Update:
    """One thing said of a job.

    Attributes:
        id: The job.
        status: Where it is, or `LOG` for what it prints.
        description: What there is to say: printed text, or a failure's traceback.
        frame: The whole message as bytes of nnsight's making, where it holds the result.
    """

    id: str
    status: Status
    description: str = ""
    frame: bytes | None = None

    @property
    def as_json(self) -> dict[str, Any]:
        """The update as a client gets it, as JSON values."""
        fields = asdict(self)
        del fields["frame"]
        return fields


@dataclass(frozen=True)
class Limits:
    """What one job may take.

    Attributes:
        seconds: From its start to its end.
        memory_bytes: Private memory beyond the mapped weights.
        result_bytes: What it gives back.
        log_bytes: What it prints.
        threads: torch's.
    """

    seconds: float
    memory_bytes: int
    result_bytes: int
    log_bytes: int
    threads: int


class Kind(Enum):
    """The content of a frame."""

    JOB = b"J"  # JSON: limits and settings of the model
    BLOCK = b"B"  # the client's pickled block
    LOG = b"L"  # text that the job printed
    RUNNING = b"R"  # nothing: the client's code starts
    DONE = b"D"  # the result for the client
    FAILED = b"F"  # a traceback


def send(to: socket.socket, kind: Kind, body: bytes) -> None:
    """Send a frame."""
    to.sendall(HEAD.pack(kind.value, len(body)) + body)


def receive(of: socket.socket) -> tuple[Kind, bytes]:
    """Receive a frame.

    Raises:
        EOFError: The other side has closed the socket.
    """
    kind, length = HEAD.unpack(_exactly(of, HEAD.size))
    return Kind(kind), _exactly(of, length)


def _exactly(of: socket.socket, length: int) -> bytes:
    body = bytearray()
    while len(body) < length:
        piece = of.recv(min(CHUNK, length - len(body)))
        if not piece:
            raise EOFError
        body += piece
    return bytes(body)
