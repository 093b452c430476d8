"""Shared parts of benchmarks: child processes, servers, load, measuring in turn, tables and pictures.

Each command beside this package is one benchmark.
"""
