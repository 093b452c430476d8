"""Benchmarks of a server over HTTP: its speed, attacks on it, and the client's experiments."""
