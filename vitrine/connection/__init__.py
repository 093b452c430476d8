"""HTTP to one server: retries, downloads in pages, progress, and blocking calls.

It knows no route: the requests are in `experiments/` and `runs/`.
"""
