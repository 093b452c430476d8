"""The processor time of each of a server's processes."""

from __future__ import annotations

import os
from collections import Counter

import psutil

from benchmarks.common.servers import Server

KNOWN = (
    *("ModelReplica", "Ingress", "ProxyActor", "HAProxy", "ServeController", "haproxy"),
    *("ActivationStore", "ActivationReader"),
)


def seconds(server: Server) -> Counter[str]:
    """Seconds of processor time so far, by the name of the server's process."""
    spent = Counter[str]()
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == server.session:
                times = process.cpu_times()
                spent[_name(process)] += times.user + times.system
        except (ProcessLookupError, psutil.Error):
            continue  # it has ended
    return spent


def _name(process: psutil.Process) -> str:
    title = process.cmdline()[:1] or [""]
    return next((known for known in KNOWN if known in title[0] or known == process.name()), "other")
