"""Benchmarks of recorded activations: collecting them, and writing and reading the store."""
