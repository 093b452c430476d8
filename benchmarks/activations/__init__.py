"""Benchmarks of the activation store: writing, reading, its catalogue, collecting, and rates at large sizes."""
