"""nnsight code of clients, run on the served weights in processes that can be killed.

`board.py` keeps every job with its status. `runner.py` runs in the replica and starts a host
(`processes.py`), which has the libraries loaded and forks a process for each job. That process runs `execution.py` on
the engine's weights, which it maps.
"""
