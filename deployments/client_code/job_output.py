"""What a job's process sends to its replica: frames, and printed lines."""

from __future__ import annotations

import io
import socket
import threading

from deployments.client_code.frames import Kind, send

LINE_BYTES = 100  # that a printed line counts besides its text: each is a message
LONGEST_LINE = 1 << 14  # characters that wait for a line's end


class ReplicaSocket:
    """The socket to the replica, for any of the job's threads."""

    def __init__(self, to: socket.socket) -> None:
        self._to = to
        self._lock = threading.Lock()

    @property
    def sending(self) -> bool:
        """Whether a message is being sent."""
        return self._lock.locked()

    def send(self, kind: Kind, body: bytes) -> None:
        """Send a frame whole."""
        with self._lock:
            send(self._to, kind, body)


class JobLog(io.TextIOBase):
    """Sends what is printed, line by line, as long as that is not too much."""

    encoding = "utf-8"

    def __init__(self, to: ReplicaSocket, most: int) -> None:
        self._to = to
        self._left = most
        self._begun: dict[int, str] = {}  # each thread's line that has no end yet
        self._lock = threading.RLock()

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, text: str) -> int:
        """Take text; whole lines go out, and long ones as they are."""
        me = threading.get_ident()
        with self._lock:
            *lines, last = (self._begun.pop(me, "") + text).split("\n")
            for line in lines:
                self._send(line)
            if last:
                self._begun[me] = last
            if len(last) > LONGEST_LINE:
                self.flush()
        return len(text)

    def flush(self) -> None:
        """Send this thread's line that has no end yet."""
        with self._lock:
            if line := self._begun.pop(threading.get_ident(), ""):
                self._send(line)

    def flush_all(self) -> None:
        """Send every thread's."""
        with self._lock:
            while self._begun:
                self._send(self._begun.popitem()[1])

    def _send(self, line: str) -> None:
        if self._left <= 0:
            return
        said = line.encode(errors="replace")
        self._left -= len(said) + LINE_BYTES
        self._to.send(Kind.LOG, said if self._left > 0 else b"(output limit reached; the rest is dropped)")
