"""Stored runs, fetched from a server or read from files; `experiments/` records them."""
