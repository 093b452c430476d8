"""HTTP to one server: retries, bytes of files, progress, and blocking calls.

It knows no route: the requests are in `experiments/` and `runs/`.
"""
