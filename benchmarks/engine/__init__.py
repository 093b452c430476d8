"""Benchmarks of the engine in one process, without a server: speed, memory, readouts, and a GPU."""
