"""A program that forks hosts of jobs: `python forking_hosts.py SOCKET`, driven by the fixture `forked_hosts`.

It receives a host's umask with its two file descriptors, and answers with its process id.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

import torch
import transformers.pipelines.text_generation  # noqa: F401

from deployments.client_code.processes import PID, run_host


def main(control: socket.socket) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended hosts are reaped by the kernel
    while True:
        mask, fds, _, _ = socket.recv_fds(control, PID.size, 2)
        if not fds:
            return
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            os.umask(*PID.unpack(mask))
            run_host(socket.socket(fileno=fds[0]), fds[1])
            os._exit(0)
        for fd in fds:
            os.close(fd)
        control.sendall(PID.pack(pid))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
