"""Benchmarks of a server over HTTP: its speed, and the client's experiments."""
