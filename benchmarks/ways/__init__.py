"""The ways of doing the same work that benchmarks compare: this project's engine and its peers.

Each gives a `Way` to measure.
"""
