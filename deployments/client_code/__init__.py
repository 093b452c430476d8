"""Clients' own nnsight code, run over the served weights in processes that can be stopped.

`board.py` keeps every job and its status; `runner.py` stands in the replica and starts `host.py`, a process that
holds the libraries and forks one for each job; that one runs `execution.py` over the engine's weights, which it maps.
"""
