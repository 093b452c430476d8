"""Shared parts of benchmarks: child processes, servers, load, measuring in turn, tables and pictures.

The other packages are the benchmarks.
"""
