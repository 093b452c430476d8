"""Stored runs as numpy arrays, fetched from a server or read from files.

It only reads: `experiments/` records runs, and `deployments.activations` has them as tensors and tables.
"""
