"""nnsight code of clients, run on the served weights in processes that can be killed.

`board.py` keeps every job with its status. `runner.py` runs in the replica and starts `host.py`, a process that has the
libraries loaded and forks a process for each job. That process runs `execution.py` on the engine's weights, which it
maps.
"""
