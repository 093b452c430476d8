"""Benchmarks of the activation store: writing, reading, its catalogue, and collecting."""
