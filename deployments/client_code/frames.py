"""Frames between the replica and a job's process over a socket. The process is not trusted: no frame is unpickled."""

from __future__ import annotations

import socket
from enum import Enum
from struct import Struct

HEAD = Struct("<cQ")  # a kind and the length of what follows, bytes
CHUNK = 1 << 20


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
