"""The process that forks jobs: it has the libraries and the tokenizer loaded, and runs no job itself.

It has one thread, because other threads, such as OpenMP's, do not exist after a fork. The replica sends it one socket
per job; it answers each with the id of the forked process.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
from struct import Struct

PID = Struct("<i")


def main(control: socket.socket, weights_fd: int) -> None:
    """Fork a process for each received socket, until the replica closes its end."""
    import nnsight  # noqa: F401 - so that no job waits for it
    import torch
    import transformers.pipelines.text_generation  # noqa: F401 - the pipeline that nnsight wraps a model in

    from deployments.client_code import execution
    from deployments.client_code.frames import Kind, receive, send

    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended children are reaped by the kernel
    _, body = receive(control)
    model = pickle.loads(body)  # noqa: S301 - sent by the replica
    send(control, Kind.RUNNING, b"")
    while True:
        _, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not fds:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            execution.run(socket.socket(fileno=fds[0]), model, weights_fd)  # does not return
        os.close(fds[0])
        control.sendall(PID.pack(pid))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
