"""Benchmarks of the activation store: writing, reading, its index, and collecting."""
