"""Benchmarks of the engine in one process, without a server: speed, memory and readouts."""
