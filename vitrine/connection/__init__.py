"""HTTP to one server: retries, bytes of files, and blocking calls; requests are in `experiments/` and `runs/`."""
